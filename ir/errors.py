"""The error family: every error names the place, the reason and the remedy, and carries them as data."""

from __future__ import annotations


class ShardwrightError(Exception):
    """Base of all errors a user can meet.

    Attributes:
        place: where it went wrong (a file and key, an equation and source line, an instruction).
        reason: what is wrong there.
        remedy: what the user can do about it.
    """

    def __init__(self, *, place: str, reason: str, remedy: str) -> None:
        super().__init__(place, reason, remedy)
        self.place = place
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.place or repr('')}: {self.reason}. {self.remedy}"


class InputError(ShardwrightError):
    """A file, argument or option that cannot be used as given."""


class TraceError(ShardwrightError):
    """The training step cannot be traced or contains something that cannot be planned."""


class ProgramError(ShardwrightError):
    """A distributed program breaks a pre- or postcondition, or its text does not parse."""


class PlanError(ShardwrightError):
    """A plan does not belong to this model, fleet or version, or cannot be carried out here."""


class ReplicatedWarning(UserWarning):
    """Part of the step runs on every device alike, because no rule says how to shard it."""


class OtherDeviceWarning(UserWarning):
    """A rank runs on another card than the one that its part of the plan is for."""
