"""What a plan is made of, and what follows from that alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar, cast

from shardwright.backends.schedule.document import Planned
from shardwright.cost.fleet import Fleet
from shardwright.cost.subfleet import subfleet
from shardwright.cost.topology import Topology
from shardwright.ir.program import Program
from shardwright.ir.redundant import RESYNC_EVERY
from shardwright.ir.rewrites.rewriting import AS_TRACED, Rewriting
from shardwright.ir.state import StateMap
from shardwright.ir.trace import Traced
from shardwright.ir.wiring import Seats
from shardwright.plans.parts import Exchanged, PinPrice, Spent, Stats, Unused

T = TypeVar("T")

#: What only printing, saving and running need: not worked out while planning.
WHEN_ASKED = (
    "iteration_s", "spent", "again_s", "host_s", "comparing_s", "memory_bytes", "bucket_bytes", "exchanges",
    "fingerprint",
)  # fmt: skip


@dataclass(frozen=True)
class PlanRecord:
    """What is known of a plan: program, ratios, costs and certificate.

    Attributes:
        program: the distributed program.
        ratios: share of every device, in fleet order; 0 for those that the plan does not use.
        iteration_s: predicted seconds of a step (the timeline's).
        cost_s: sum over instructions of the slowest device's seconds, which search and bound speak of.
        bound_s: no program of the space with any ratios costs less than this, on the fleet or any part of it
            that was considered.
        memory_bytes: predicted peak per device; where there is ample memory, worked out when it is asked for.
        fits: whether that is within every device's memory.
        exchanges: exchanges by strategy.
        held: where state and the other inputs lie, by name.
        arguments: their types, such as "float32[64,512]" or "weak float32[]" (weak type of JAX), by name and
            in order; {} in files of earlier versions.
        state: argument -> output that continues it.
        state_override: what the user said about state, None if it was inferred.
        assumptions: what was assumed rather than measured or known, in words.
        fleet: the fleet.
        fingerprint: of the traced step.
        versions: shardwright and jax versions the plan was made with.
        stats: where planning time went.
        spent: where the predicted step goes, by device.
        search_gap: how much cheaper a program could be at ratios that were searched; 0 if no search stopped
            early.
        axes: mesh axes of the space.
        pins: placements that the user fixed, and what each costs.
        used: indices of the devices that the program is for, ascending: its device i is `used[i]`; by default
            all of them.
        unused: the other devices, and why the plan leaves them out.
        bucket_bytes: exchanges of one kind travel together up to so many bytes, as early as they can, on
            backends that can do so; None: one by one, where the program has them. Of a new plan it is chosen
            when it is asked for (`shardwright.buckets.suggested`); `iteration_s` does not count on it.
        resync_every: K: replicated state that devices compute for themselves is compared every K steps, and
            sent anew by its owner where it differs; 0: never.
        rewriting: how the step is changed before it is distributed: what is computed again.
        donate: whether state is given away at every step, so that what continues it may take its memory;
            `memory_bytes` counts on it.
        again_s: seconds of `cost_s` that computing it again takes.
        host_s: seconds of `cost_s` that trips to host memory and back take.
        comparing_s: what a comparison of replicated state takes; `iteration_s` has its part of it.
        messages: what travels together, where the plan was loaded (otherwise see `schedule`).
        traced: the step, where the plan was made in this process; not saved.
        free_s: what the best program found costs if memory were no limit, where one was searched for; not
            saved.
        ample: whether every device has memory to spare, by the search's model; not saved.
    """

    program: Program
    ratios: tuple[float, ...]
    iteration_s: float
    cost_s: float
    bound_s: float
    memory_bytes: tuple[int, ...]
    fits: bool
    exchanges: tuple[Exchanged, ...]
    held: Mapping[str, str]
    state: Mapping[str, str]
    state_override: StateMap | None
    assumptions: tuple[str, ...]
    fleet: Fleet
    fingerprint: str
    versions: Mapping[str, str]
    stats: Stats
    spent: tuple[Spent, ...]
    search_gap: float = 0.0
    axes: int = 1
    pins: tuple[PinPrice, ...] = ()
    used: tuple[int, ...] = ()
    unused: tuple[Unused, ...] = ()
    bucket_bytes: int | None = None
    resync_every: int = RESYNC_EVERY
    rewriting: Rewriting = AS_TRACED
    donate: bool = False
    again_s: float = 0.0
    host_s: float = 0.0
    comparing_s: float = 0.0
    arguments: Mapping[str, str] = field(default_factory=dict[str, str])
    messages: tuple[Planned, ...] = field(default=(), compare=False, repr=False)
    traced: Traced | None = field(default=None, compare=False, repr=False)
    free_s: float | None = field(default=None, compare=False, repr=False)
    ample: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.used:
            object.__setattr__(self, "used", tuple(range(len(self.ratios))))

    def finished(self, stats: Stats, bucket_bytes: Callable[[Self], int | None]) -> Self:
        """The same plan with other `stats`, and messages as large as a function says when somebody asks."""
        return self.but(stats=stats, bucket_bytes=when_asked(lambda: bucket_bytes(self)))

    def but(self, **fields: Any) -> Self:
        """The same plan with other fields; what nobody has asked for yet still waits (`WHEN_ASKED`)."""
        waiting = {name: vars(self)[f"_{name}"] for name in WHEN_ASKED}
        return replace(self, **(waiting | fields))

    @property
    def gap(self) -> float:
        """How much cheaper another plan could be at most: (cost_s - bound_s) / cost_s."""
        return (self.cost_s - self.bound_s) / self.cost_s if self.cost_s > 0 else 0.0

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices, in fleet order."""
        return tuple(device.name for device in self.fleet.devices)

    @property
    def used_devices(self) -> tuple[str, ...]:
        """Names of the devices that the plan uses."""
        names = self.devices
        return tuple(names[d] for d in self.used)

    @property
    def used_ratios(self) -> tuple[float, ...]:
        """Shares of the devices that the plan uses: those of the program's devices."""
        return tuple(self.ratios[d] for d in self.used)

    @property
    def part(self) -> Fleet:
        """The fleet of the devices that the plan uses, for which it is priced."""
        if len(self.used) == len(self.ratios):
            return self.fleet
        return subfleet(self.fleet, self.used, self.fleet.name)

    @property
    def near(self) -> bool:
        """Whether all devices that the plan uses share a node."""
        return len(self.part.nodes) == 1

    @property
    def seats(self) -> Seats:
        """Which devices of the fleet the program is for, and how they are joined."""
        return Seats(self.used, len(self.ratios), Topology.of(self.part).wiring)


def when_asked(work_out: Callable[[], T]) -> T:
    """A field of a new plan (one of `WHEN_ASKED`) that is worked out when somebody reads it."""
    return cast(T, work_out)


class _WhenAsked:
    """A field that may be given as what works it out."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __get__(self, plan: object, owner: type | None = None) -> object:
        if plan is None:
            return self
        found = vars(plan)[self._key]
        if callable(found):
            found = vars(plan)[self._key] = found()
        return found

    def __set__(self, plan: object, value: object) -> None:
        vars(plan)[self._key] = value


# Set here, where neither `dataclass` nor a type checker takes it for a default.
for _name in WHEN_ASKED:
    setattr(PlanRecord, _name, _WhenAsked(f"_{_name}"))
