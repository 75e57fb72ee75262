"""`profile`: work, traffic and memory of a step by equation and layer, and of each device under a plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from shardwright.api import check_tick, synthesize
from shardwright.cost.fleet import FleetLike
from shardwright.cost.memory.compilers import COMPILERS, compilers
from shardwright.cost.profile import ROLES, EquationRow, LayerRow, StepProfile, profile_step
from shardwright.ir.errors import InputError
from shardwright.ir.graph import Graph
from shardwright.ir.jaxpr import source_text
from shardwright.ir.program import own_ratios
from shardwright.ir.state import StateMap
from shardwright.ir.trace import marked, trace
from shardwright.memory.device_memory import DeviceMemory, device_memory
from shardwright.plan import Plan


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Memory of a device under a plan.

    Attributes:
        devices: names of the devices that are alike: of one type, with one share.
        type: their type's name.
        share: of every sharded axis.
        memory: over the step.
        limit_bytes: what the type has.
    """

    devices: tuple[str, ...]
    type: str
    share: float
    memory: DeviceMemory
    limit_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "devices": list(self.devices),
            "type": self.type,
            "share": self.share,
            "limit_bytes": self.limit_bytes,
            "arguments_bytes": self.memory.arguments_bytes,
            "peak_bytes": self.memory.peak_bytes,
            "over_time": [moment.nbytes for moment in self.memory.moments],
        }


@dataclass(frozen=True, slots=True)
class Profile:
    """A profiled step.

    Attributes:
        step: on one device.
        devices: under a plan; empty without a fleet.
        plan: that plan.
        trace_s: seconds that JAX took to trace the step.
        profile_s: seconds that profiling it on one device took.
    """

    step: StepProfile
    devices: tuple[DeviceProfile, ...]
    plan: Plan | None
    trace_s: float
    profile_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        step = self.step
        numbers = (
            "flop", "parameter_bytes", "optimizer_bytes", "gradient_bytes", "data_bytes", "saved_bytes",
            "unread_bytes", "arguments_bytes", "scratch_bytes", "peak_bytes",
        )  # fmt: skip
        return {
            **{name: getattr(step, name) for name in numbers},
            "compiler": step.compiler,
            "trace_s": self.trace_s,
            "profile_s": self.profile_s,
            "layers": [_plain(row) for row in step.layers],
            "equations": [_plain(row) | {"source": source_text(row.source)} for row in step.equations],
            "over_time": {role: step.over_time[:, i].tolist() for i, role in enumerate(ROLES)},
            "devices": [device.to_dict() for device in self.devices],
        }


def _plain(row: EquationRow | LayerRow) -> dict[str, Any]:
    return {each.name: getattr(row, each.name) for each in fields(row) if each.name != "source"}


def profile(
    train_step: Callable[..., Any],
    *args: Any,
    fleet: FleetLike | None = None,
    plan: Plan | None = None,
    state: StateMap | None = None,
    compiler: str | None = None,
    tick: Callable[[str], None] = lambda what: None,
    **planning: Any,
) -> Profile:
    """Profile a training step; nothing is compiled or executed.

    Args:
        train_step: see `synthesize`.
        args: its positional arguments, as arrays or `jax.ShapeDtypeStruct`.
        fleet: devices to plan the step for, or the path of a fleet file; their memory is profiled, too.
        plan: a plan of this step, in place of a fleet.
        state: see `synthesize`.
        compiler: whose memory is profiled without fleet and plan: XLA's for "cpu", the default, for "gpu", or
            for "gpu-float32", cards that lack bfloat16. Of a fleet it is the GPU's where all devices are
            cards (`Fleet.compiler`): each one's own.
        tick: told what begins (for progress displays).
        planning: further arguments of `synthesize`, such as `axes`, for the plan.

    Raises:
        InputError: an argument is no array, a state entry does not match, fleet and plan are both given, or
            neither is and there are arguments about planning; there is no such compiler, or the fleet says.
        PlanError: the plan is of another step.
        TraceError: the step cannot be traced or has side effects.
    """
    if fleet is not None and plan is not None:
        raise InputError(place="profile", reason="has a fleet and a plan", remedy="Pass one of them")
    _check_compiler(compiler, fleet is not None or plan is not None)
    if fleet is not None:
        plan = synthesize(train_step, *args, fleet=fleet, state=state, tick=tick, **planning)
    elif planning:
        raise InputError(
            place=next(iter(planning)), reason="is about making a plan", remedy="Pass a fleet to plan for"
        )
    check_tick(tick)
    tick("tracing the step")
    if plan is None:
        traced = marked(trace(train_step, *args, state=state), compiler=compiler or "cpu")
    else:
        traced = plan.traced or plan.attach(train_step, *args)
    tick("laying out memory")
    start = time.perf_counter()
    step = profile_step(traced.graph if plan is None else _as_on(plan, traced.graph))
    profile_s = time.perf_counter() - start
    devices = () if plan is None else _devices(plan, traced.graph)
    return Profile(step, devices, plan, traced.trace_s, profile_s)


def _as_on(plan: Plan, graph: Graph) -> Graph:
    """The step as the cards of a plan have it, where all of them have one compiler."""
    (first, *others) = dict.fromkeys(compilers(graph, plan.part.types))
    return graph if others or first == graph.compiler else replace(graph, compiler=first, memo={})


def _check_compiler(compiler: str | None, given: bool) -> None:
    if compiler is None:
        return
    if compiler not in COMPILERS:
        names = " or ".join(map(repr, COMPILERS))
        raise InputError(place="compiler", reason=f"is {compiler!r}", remedy=f"Pass {names}")
    if given:
        raise InputError(
            place="compiler",
            reason="is what a fleet or a plan says",
            remedy="Leave it out: where all devices are cards it is the GPU's, for each card its own",
        )


def _devices(plan: Plan, graph: Any) -> tuple[DeviceProfile, ...]:
    alike: dict[tuple[str, tuple[float, ...]], list[int]] = {}
    devices = plan.part.devices
    types = plan.part.types
    every = (plan.used_ratios, *(own.shares for own in own_ratios(plan.program).values()))
    for number, shares in enumerate(zip(*every, strict=True)):
        alike.setdefault((devices[number].type.name, shares), []).append(number)
    names = plan.used_devices
    return tuple(
        DeviceProfile(
            tuple(names[number] for number in members),
            kind,
            shares[0],
            device_memory(plan.program, graph, plan.used_ratios, members[0], types),
            devices[members[0]].type.memory_bytes,
        )
        for (kind, shares), members in alike.items()
    )
