"""A plan: everything a synthesis found, in a form that can be read, saved, verified and run.

The file form is versioned JSON, checked against `plan.schema.json` when it is loaded.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jsonschema

from shardwright.backends.verify import VerifyResult, verify_program
from shardwright.cost.bill import bill
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.subfleet import subfleet
from shardwright.cost.timeline import Timeline, timeline
from shardwright.cost.topology import Topology
from shardwright.execute import CompiledStep, concrete
from shardwright.ir.errors import PlanError, ProgramError
from shardwright.ir.program import Move, Program
from shardwright.ir.program import verify as check_program
from shardwright.ir.serialize import program_from_json, program_to_json
from shardwright.ir.text import format_program
from shardwright.ir.trace import StateMap, Traced, trace
from shardwright.ir.wiring import Seats
from shardwright.partition import PartitionSpecs, partition_specs
from shardwright.report import describe

FORMAT = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stats:
    """Where planning time went and how large the search was.

    Attributes:
        trace_s: seconds in jax.make_jaxpr.
        space_s: seconds to build the choice graph.
        search_s: seconds of elimination and A*, all searches together.
        ratio_s: seconds of LP, rounding and re-costing.
        expanded: nodes expanded by A*.
        searches: searches run.
        equations: equations of the flattened step, regions included.
        choices: choices of the fused choice graph.
        replicated: primitives that run replicated on every device, and why.
    """

    trace_s: float
    space_s: float
    search_s: float
    ratio_s: float
    expanded: int
    searches: int
    equations: int
    choices: int
    replicated: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One kind of exchange of a plan, added up.

    Attributes:
        name: collective and strategy, such as "all_gather.exact".
        count: how often it runs in a step.
        seconds: what all of them are priced at.
        pattern: what the program does with it, if that has a name: see `shardwright.ir.patterns`.
    """

    name: str
    count: float
    seconds: float
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class PinPrice:
    """A pin and its price: seconds by which the plan is dearer than the best program without it."""

    name: str
    placement: str
    price_s: float


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the predicted seconds of a device's step go.

    Attributes:
        compute_s: it computes.
        exchange_s: it does not, while an exchange is under way.
        idle_s: it waits for other devices.
    """

    compute_s: float
    exchange_s: float
    idle_s: float

    @staticmethod
    def of(found: Timeline) -> tuple[Spent, ...]:
        """Of every device."""
        return tuple(map(Spent, found.compute_s, found.exposed_s, found.idle_s))


@dataclass(frozen=True, slots=True)
class Unused:
    """Devices that a plan leaves out, by name, and why."""

    devices: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Plan:
    """A distributed program for a fleet, with its ratios, costs and certificate.

    Attributes:
        program: the distributed program.
        ratios: share of every device, in fleet order; 0 for those that the plan does not use.
        iteration_s: predicted seconds of a step (the timeline's).
        cost_s: sum over instructions of the slowest device's seconds, which search and bound speak of.
        bound_s: no program of the space with any ratios costs less than this, on the fleet or any part of it
            that was considered.
        memory_bytes: predicted peak per device.
        fits: whether that is within every device's memory.
        exchanges: exchanges by strategy.
        held: where state and the other inputs lie, by name.
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
        traced: the step, where the plan was made in this process; not saved.
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
    traced: Traced | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.used:
            object.__setattr__(self, "used", tuple(range(len(self.ratios))))

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

    def __str__(self) -> str:
        return describe(self)

    def text(self, traced: Traced | None = None) -> str:
        """The program in its readable form; a loaded plan needs the step it was made for (see `attach`).

        Raises:
            PlanError: the plan was loaded from a file and no step is given.
        """
        return format_program(self.program, self._step(traced).graph)

    def timeline(
        self, traced: Traced | None = None, *, overlap: bool = False, bucket_bytes: int = 0
    ) -> Timeline:
        """The predicted step in time; a loaded plan needs the step it was made for (see `attach`).

        Args:
            traced: the step of a plan that was loaded from a file.
            overlap: as if exchanges ran beside computation, which no backend does.
            bucket_bytes: as if exchanges of one kind were gathered into messages of so many bytes at most.

        Raises:
            PlanError: the plan was loaded from a file and no step is given.
        """
        graph = self._step(traced).graph
        model = CostModel(self.part)
        items = bill(self.program, graph, model)
        return timeline(items, model, self.used_ratios, overlap=overlap, bucket_bytes=bucket_bytes)

    def _step(self, traced: Traced | None) -> Traced:
        step = traced or self.traced
        if step is None:
            raise PlanError(
                place="plan",
                reason="was loaded without its step",
                remedy="Pass plan.attach(train_step, *args)",
            )
        return step

    # -- files -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what `save` writes, in the form of `plan.schema.json`."""
        return {
            "format": FORMAT,
            "versions": dict(self.versions),
            "fleet": self.fleet.to_dict(),
            "fleet_fingerprint": self.fleet.fingerprint(),
            "fingerprint": self.fingerprint,
            "devices": list(self.devices),
            "ratios": list(self.ratios),
            "iteration_s": self.iteration_s,
            "cost_s": self.cost_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "search_gap": self.search_gap,
            "axes": self.axes,
            "pins": [{"name": p.name, "placement": p.placement, "price_s": p.price_s} for p in self.pins],
            "used": list(self.used),
            "unused": [{"devices": list(u.devices), "why": u.why} for u in self.unused],
            "memory_bytes": list(self.memory_bytes),
            "fits": self.fits,
            "exchanges": [_exchange(e) for e in self.exchanges],
            "held": dict(self.held),
            "state": dict(self.state),
            "state_override": None if self.state_override is None else _entries(self.state_override),
            "assumptions": list(self.assumptions),
            "stats": {name: _plain(getattr(self.stats, name)) for name in Stats.__slots__},
            "spent": [{name: getattr(one, name) for name in Spent.__slots__} for one in self.spent],
            "program": program_to_json(self.program),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. The file appears whole or not at all."""
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: the file is missing, no JSON, of another format version, or does not follow the schema.
        """
        place = str(path)
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_not_finite)
        except OSError as error:
            raise PlanError(
                place=place,
                reason=f"cannot be read: {error.strerror}",
                remedy="Name a file written by plan.save",
            ) from error
        except (ValueError, RecursionError) as error:
            raise PlanError(
                place=place, reason=f"is no JSON ({error})", remedy="Write it again with plan.save"
            ) from error
        return Plan.from_dict(data, place=place)

    @staticmethod
    def from_dict(data: Any, *, place: str = "plan") -> Plan:
        """Inverse of `to_dict`.

        Raises:
            PlanError: the data is of another format version, or does not follow the schema.
        """
        version = cast(dict[str, Any], data).get("format") if isinstance(data, dict) else None
        if version != FORMAT:
            raise PlanError(
                place=f"{place}: format",
                reason=f"is {version!r}, this version of Shardwright reads {FORMAT}",
                remedy="Make the plan again with `shardwright plan`",
            )
        problem = next(
            iter(sorted(_validator().iter_errors(data), key=lambda e: list(map(str, e.path)))), None
        )
        if problem is not None:
            where = ".".join(str(part) for part in problem.path) or "top level"
            message = problem.message if len(problem.message) < 200 else problem.message[:200] + "…"
            raise PlanError(
                place=f"{place}: {where}",
                reason=message,
                remedy="Make the plan again with `shardwright plan`",
            )
        fleet = Fleet.from_dict(data["fleet"])
        program = program_from_json(data["program"])
        if wrong := _mismatch(data, fleet, program):
            where, reason = wrong
            raise PlanError(
                place=f"{place}: {where}", reason=reason, remedy="Make the plan again with `shardwright plan`"
            )
        override = data["state_override"]
        return Plan(
            program=program,
            ratios=tuple(data["ratios"]),
            iteration_s=data["iteration_s"],
            cost_s=data["cost_s"],
            bound_s=data["bound_s"],
            memory_bytes=tuple(data["memory_bytes"]),
            fits=data["fits"],
            exchanges=tuple(Exchanged(**e) for e in data["exchanges"]),
            held=data["held"],
            state=data["state"],
            state_override=None if override is None else {key: _path(value) for key, value in override},
            assumptions=tuple(data["assumptions"]),
            fleet=fleet,
            fingerprint=data["fingerprint"],
            versions=data["versions"],
            stats=Stats(**data["stats"]),
            spent=tuple(Spent(**one) for one in data["spent"]),
            search_gap=data.get("search_gap", 0.0),
            axes=data.get("axes", 1),
            pins=tuple(PinPrice(**entry) for entry in data.get("pins", ())),
            used=tuple(data.get("used", ())),
            unused=tuple(Unused(tuple(entry["devices"]), entry["why"]) for entry in data.get("unused", ())),
        )

    # -- the step ----------------------------------------------------------------------------------

    def attach(self, train_step: Callable[..., Any], *args: Any) -> Traced:
        """Trace the step and check that this plan was made for it.

        Raises:
            PlanError: the step is another one, or its arguments have other shapes.
        """
        traced = trace(train_step, *args, state=self.state_override)
        if traced.fingerprint != self.fingerprint:
            mine, theirs = self.fingerprint[:12], traced.fingerprint[:12]
            made_with = ", ".join(f"{name} {version}" for name, version in self.versions.items())
            raise PlanError(
                place="plan",
                reason=f"was made for another step (plan {mine}, step {theirs})",
                remedy=f"Use the step, shapes and versions it was made with ({made_with}), or plan again",
            )
        try:
            check_program(self.program, traced.graph)
        except ProgramError as error:
            raise PlanError(
                place=f"plan: {error.place}",
                reason=error.reason,
                remedy="The plan was changed by hand: plan again",
            ) from error
        return traced

    def verify(self, train_step: Callable[..., Any], *args: Any) -> VerifyResult:
        """Run the program on the reference backend with concrete arguments and compare with one device.

        Args:
            train_step: the step the plan was made for.
            args: its arguments, as concrete arrays.

        Raises:
            PlanError: the plan was made for another step.
            InputError: an argument is a shape without values.
        """
        traced = self.attach(train_step, *args)
        leaves = concrete(args)

        def flat_step(*flat: Any) -> list[Any]:
            return jax.tree.leaves(train_step(*jax.tree.unflatten(traced.in_tree, flat)))

        return verify_program(traced, self.program, self.used_ratios, leaves, flat_step)

    def compile(
        self, train_step: Callable[..., Any], backend: str = "reference", *, donate: bool = False
    ) -> Callable[..., Any]:
        """A callable with the signature of `train_step` that runs this plan.

        Args:
            train_step: the step the plan was made for.
            backend: "reference" (all devices in this process, global arrays), "mpi" (one process per
                device under mpiexec, or one per device that the plan uses; leaves are `ShardedArray`, with
                `gather()`) or "spmd" (one jitted program on JAX's own devices; leaves are global arrays, or
                `PaddedArray`, with `gather()`, where the plan cuts unevenly).
            donate: results may take over the memory of the state that is passed in, which must not be used
                again. "spmd" does so; the others have no use for it.

        Raises:
            PlanError: there is no such backend; on the first call, the plan was made for another step.
        """
        seats = Seats(self.used, len(self.ratios), Topology.of(self.part).wiring)
        attach = partial(self.attach, train_step)
        return CompiledStep(attach, self.program, self.used_ratios, backend, seats, donate=donate)

    def partition_specs(self, traced: Traced | None = None) -> PartitionSpecs:
        """How arguments and results of the step lie, in JAX's own terms, for `jax.jit`.

        Args:
            traced: the step of a plan that was loaded from a file (see `attach`).

        Returns:
            PartitionSpecs over one mesh axis, "devices", which has the devices that the plan uses in the
            plan's order.

        Raises:
            PlanError: the plan cuts unevenly, which PartitionSpecs cannot say.
        """
        return partition_specs(self._step(traced), self.program, self.used_ratios)


def spread(values: Sequence[T], used: Sequence[int], count: int, rest: T) -> tuple[T, ...]:
    """Values of used devices among those of all `count` devices; the others have `rest`."""
    found = [rest] * count
    for device, value in zip(used, values, strict=True):
        found[device] = value
    return tuple(found)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file that appears whole or not at all.

    Raises:
        PlanError: it cannot be written.
    """
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise PlanError(
            place=str(path), reason=f"cannot be written: {error.strerror}", remedy="Choose another path"
        ) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise PlanError(
            place=str(path), reason=f"cannot be written: {error.strerror}", remedy="Choose another path"
        ) from error


def _mismatch(data: Mapping[str, Any], fleet: Fleet, program: Program) -> tuple[str, str] | None:
    """Where the parts of a plan file contradict each other, and how; None if they do not."""
    count = len(fleet.devices)
    if data["devices"] != [device.name for device in fleet.devices]:
        return "devices", f"are not the {count} of the fleet in it"
    if data["fleet_fingerprint"] != fleet.fingerprint():
        return "fleet_fingerprint", "is that of another fleet"
    for name in ("ratios", "memory_bytes", "spent"):
        if len(data[name]) != count:
            return name, f"there are {len(data[name])} for {count} devices"
    used = data.get("used", range(count))
    if not all(a < b for a, b in pairwise((-1, *used, count))):
        return "used", f"are no devices of {count} in ascending order"
    if any(ratio for d, ratio in enumerate(data["ratios"]) if d not in set(used)):
        return "ratios", "give a share to a device that is not used"
    if abs(sum(data["ratios"]) - 1) > 1e-6:
        return "ratios", f"add up to {sum(data['ratios']):g}, not to 1"
    named = {
        d for i in program.all_instructions() if isinstance(i, Move) for d in (*(i.group or ()), i.root or 0)
    }
    if max(named, default=0) >= len(used):
        return "program", f"names device {max(named)}, the last one is {len(used) - 1}"
    return None


def _exchange(exchanged: Exchanged) -> dict[str, Any]:
    data = {"name": exchanged.name, "count": exchanged.count, "seconds": exchanged.seconds}
    return data | ({"pattern": exchanged.pattern} if exchanged.pattern else {})


def _not_finite(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def _entries(override: StateMap) -> list[list[Any]]:
    return [[key, list(value) if isinstance(value, tuple) else value] for key, value in override.items()]


def _path(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    return dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else value


@cache
def _validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(
        resources.files("shardwright").joinpath("plan.schema.json").read_text(encoding="utf-8")
    )
    return jsonschema.Draft202012Validator(schema)
