"""Options that commands share, and the values of options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from re import fullmatch
from typing import Any, Literal

import click

from shardwright.cost.quantity import DURATION, parse_quantity
from shardwright.ir.errors import InputError

factory_argument = click.argument("target", metavar="FILE_OR_MODULE:FACTORY")
fleet_option = click.option(
    "--fleet", "fleet_path", required=True, metavar="FLEET.yaml", help="The fleet file."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
_PLANNING = (
    click.option(
        "--pin", "pins", multiple=True, metavar="PATTERN=PLACEMENT", help="Fix where arguments lie."
    ),
    click.option(
        "--time-limit", metavar="DURATION", help="Begin no search after this, such as 10s; 0: none."
    ),
    click.option(
        "--objective",
        type=click.Choice(["time", "cost"]),
        default="time",
        help="The fastest steps, or those that cost least, by the fleet's price_per_hour.",
    ),
    click.option("--all-devices", is_flag=True, help="Use every device, even where fewer are faster."),
    click.option(
        "--axes",
        type=click.Choice(["1", "2", "auto"]),
        default="auto",
        help="Mesh axes: all devices alike, or nodes and the devices in each.",
    ),
    click.option(
        "--recompute",
        type=click.Choice(["auto", "off", "all"]),
        default="auto",
        help="Compute parts of the forward pass again in the backward: where memory is short, never, all.",
    ),
    click.option(
        "--microbatches",
        default="auto",
        metavar="auto|NUMBER",
        help="Run forward and backward pass on so many equal pieces of the batch, one after another.",
    ),
    click.option(
        "--offload",
        type=click.Choice(["auto", "off", "all"]),
        default="auto",
        help="Let what the backward pass needs wait in host memory: where memory is short, never, all of it.",
    ),
    click.option(
        "--stages",
        default="auto",
        metavar="auto|off|NUMBER",
        help="Have layers of scans on different devices: where that is faster, never, with so many pieces.",
    ),
    click.option(
        "--donate", is_flag=True, help="State is given away at every step: new state may take its memory."
    ),
)


def planning_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options about how to plan.

    It gets `planning`, the arguments of `shardwright.synthesize` that they stand for: what was asked for
    otherwise than by default.
    """

    @wraps(command)
    def planned(
        pins: tuple[str, ...],
        time_limit: str | None,
        objective: str,
        all_devices: bool,
        axes: str,
        recompute: str,
        microbatches: str,
        offload: str,
        stages: str,
        donate: bool,
        **others: Any,
    ) -> None:
        chosen = {
            "constraints": parse_pins(pins),
            "time_limit_s": parse_time_limit(time_limit),
            "objective": objective,
            "devices": "all" if all_devices else "auto",
            "axes": parse_axes(axes),
            "recompute": recompute,
            "microbatches": parse_pieces(microbatches, "--microbatches"),
            "offload": offload,
            "stages": stages if stages == "off" else parse_pieces(stages, "--stages"),
            "donate": donate or None,
        }
        usual = (None, "auto", "time")
        command(planning={name: value for name, value in chosen.items() if value not in usual}, **others)

    for option in reversed(_PLANNING):
        option(planned)
    return planned


#: How the options are written that stand for arguments of `shardwright.synthesize`.
_WRITTEN = {"constraints": "--pin", "time_limit_s": "--time-limit", "devices": "--all-devices"}


def check_made(planning: Mapping[str, Any]) -> None:
    """Refuse options about how to plan where a plan is made already.

    Raises:
        InputError: there are some.
    """
    for name in planning:
        raise InputError(
            place=_WRITTEN.get(name, f"--{name}"),
            reason="is about making a plan, and there is none to be made",
            remedy="Pass --fleet to make one, or leave it out",
        )


def parse_axes(given: str) -> Literal[1, 2, "auto"]:
    """The value of `--axes` as `shardwright.synthesize` takes it."""
    return 1 if given == "1" else 2 if given == "2" else "auto"


def parse_pins(given: Sequence[str]) -> Mapping[str, str] | None:
    """`PATTERN=PLACEMENT` options as constraints; None without any.

    Raises:
        InputError: an option has no `=`, or two fix the same pattern.
    """
    found: dict[str, str] = {}
    for text in given:
        pattern, equals, placement = text.rpartition("=")
        if not equals or not pattern:
            raise InputError(
                place=f"--pin {text}",
                reason="has no pattern and placement",
                remedy="Write --pin 'params/*/kernel=S(0)'",
            )
        if found.setdefault(pattern, placement) != placement:
            raise InputError(
                place=f"--pin {text}",
                reason=f"{pattern} is pinned to {found[pattern]} already",
                remedy="Leave one of them out",
            )
    return found or None


def parse_pieces(given: str, option: str) -> Literal["auto"] | int:
    """The value of an option such as `--microbatches` as `shardwright.synthesize` takes it.

    Raises:
        InputError: it is neither `auto` nor a number.
    """
    if given == "auto":
        return "auto"
    # Python reads no number of any length.
    if not given.isdecimal() or len(given) > 18 or int(given) < 1:
        raise InputError(place=option, reason=f"is {given!r}", remedy="Write auto, or a number from 1 on")
    return int(given)


def parse_time_limit(given: str | None) -> float | None:
    """Seconds of a duration such as `10s`; a plain 0 is allowed.

    Raises:
        InputError: `given` is no duration, or negative.
    """
    if given is None:
        return None
    if given.strip().startswith("-"):
        raise InputError(place="--time-limit", reason=f"{given!r} is negative", remedy="Write 10s, or 0")
    if fullmatch(r"0+(\.0*)?\s*(s|ms|us|µs|ns)?", given.strip()):
        return 0.0
    return parse_quantity(given, DURATION, place="--time-limit")
