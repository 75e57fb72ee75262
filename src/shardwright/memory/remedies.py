"""An answer where nothing fits: which device binds, what fills it, and what would help at which price."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from shardwright.api import check_tick
from shardwright.constraints import Constraints
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.quantity import at_least, size
from shardwright.fleet_questions import changed
from shardwright.ir.errors import ShardwrightError
from shardwright.ir.graph import Graph
from shardwright.ir.rewrites.batch import batch_of
from shardwright.ir.rewrites.pieces import INVARIANT, NotInPiecesError
from shardwright.ir.rewrites.rewriting import Rewriting, differentiated, original, rewritten
from shardwright.ir.trace import Traced, marked, trace
from shardwright.memory.device_memory import Held, fullest
from shardwright.memory.rewritings import Microbatches, Offload, Recompute, Stages, check_rewriting
from shardwright.memory.rivals import existing, overfill
from shardwright.memory.trials import Trial, Wanted, planner_for
from shardwright.plan import Plan
from shardwright.request import Spaces
from shardwright.synth.memory.rent import too_small
from shardwright.synth.stretches import RECOMPUTING, rungs_of

#: Memory at which nothing binds any more, as a multiple of what there is.
_PLENTY = 1 << 20

#: Relative error of a product with a quotient of floats.
_ROUNDED = 1e-15

#: The least memory is found to within this factor, unless that takes more probes; the first of them lies by
#: so much below what is known to do.
_NARROW, _PROBES, _STEP = 1.05, 4, 1.05

#: Changes under which nothing fits at once that are searched for smaller programs; as many with which
#: something fits, but something cheaper may.
_IN_FULL = 2

#: Batches are halved so often at most.
_MOST_HALVES = 4


@dataclass(frozen=True)
class Remedy:
    """A change under which a plan fits.

    Attributes:
        what: the change, in words.
        iteration_s: of the plan found with it.
        price: by what part of itself the work of one step takes longer than it would if memory were no limit;
            of a smaller batch, the seconds of as many steps as make up the batch.
        steps: how many steps do the work of one.
    """

    what: str
    iteration_s: float
    price: float
    steps: int = 1


@dataclass(frozen=True)
class Shortage:
    """Why a step does not fit on a fleet, and what would help.

    Attributes:
        device: the device that lacks most, of the smallest program found.
        needs_bytes, has_bytes: there.
        held: what fills it at that moment, the largest first.
        factor: with so many times the memory on every device a plan was found that fits.
        tried: the largest multiple at which none was found.
        remedies: the cheapest first.
    """

    device: str
    needs_bytes: int
    has_bytes: int
    held: tuple[Held, ...]
    factor: float
    tried: float
    remedies: tuple[Remedy, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "device": self.device,
            "needs_bytes": self.needs_bytes,
            "has_bytes": self.has_bytes,
            "held": [{"what": each.what, "bytes": each.nbytes} for each in self.held],
            "factor": self.factor,
            "tried": self.tried,
            "remedies": [vars(remedy) for remedy in self.remedies],
        }

    def text(self) -> str:
        """For people."""
        lines = [
            f"does not fit: {self.device} would need {size(self.needs_bytes)}, and has {size(self.has_bytes)}"
        ]
        lines += [f"  {size(each.nbytes)}  {each.what}" for each in self.held]
        enough, none = (size(times * self.has_bytes) for times in (self.factor, self.tried))
        lines.append(
            f"it fits with {at_least(self.factor)} times the memory on every device, {enough} there; "
            f"with {none} no plan was found"
        )
        for remedy in self.remedies:
            lines.append(f"  {remedy.price:+.1%}  {remedy.what}: {1e3 * remedy.iteration_s:.4g} ms")
        return "\n".join(lines)


def _times(nbytes: int, factor: float) -> int:
    """So many times as many bytes; a factor that is a quotient of bytes gives back its dividend."""
    exact = nbytes * factor
    return round(exact) if abs(exact - round(exact)) < _ROUNDED * exact else int(exact)


def with_memory(fleet: Fleet, factor: float, only: str | None = None) -> Fleet:
    """The fleet with so many times the memory, on devices of one type alone or on all."""
    nodes = tuple(
        replace(
            node,
            devices=tuple(
                kind
                if only is not None and kind.name != only
                else replace(kind, memory_bytes=max(_times(kind.memory_bytes, factor), 1))
                for kind in node.devices
            ),
        )
        for node in fleet.nodes
    )
    return replace(fleet, nodes=nodes)


def shortage(
    plan: Plan,
    train_step: Callable[..., Any],
    *args: Any,
    constraints: Constraints | None = None,
    recompute: Recompute = "auto",
    microbatches: Microbatches = "auto",
    offload: Offload = "auto",
    stages: Stages = "auto",
    tick: Callable[[str], None] = lambda what: None,
) -> Shortage | None:
    """Why a plan does not fit and what would help; None if it fits. Every remedy has been planned.

    The step is taken as the plan has it: with what it computes again and keeps elsewhere, in its pieces, on
    as many mesh axes, on all devices; and with no more of that than was asked for, or in fewer pieces, where
    it fits so: the plan may have been driven to what it does because nothing fits. What fits without a search
    for smaller programs is found quickly; of what does not, or of a small step may be cheaper, the cheapest
    by their bounds are planned in full.

    Args:
        plan: it does not fit.
        train_step: its step.
        args: see `shardwright.synthesize`.
        constraints: what the plan was made with; remedies keep to it.
        recompute: the same.
        microbatches: the same.
        offload: the same.
        stages: the same.
        tick: told what begins.

    Raises:
        PlanError: the plan is of another step.
        InputError: that is no way to say what may be computed again, waits in host memory or is cut.
    """
    check_tick(tick)
    check_rewriting(recompute, microbatches, offload, plan.fleet, stages)
    if plan.fits:
        return None
    own = plan.traced or plan.attach(train_step, *args)
    traced = original(own)
    devices = plan.fleet.devices
    worst = max(plan.used, key=lambda d: plan.memory_bytes[d] / devices[d].type.memory_bytes)
    wanted = Wanted(
        plan.state_override,
        2 if plan.axes == 2 else 1,
        constraints,
        plan.rewriting,
        recompute,
        microbatches,
        offload,
        stages not in ("auto", "off", 1),
    )
    tick("planning as if memory were no limit")
    free = existing(
        planner_for(wanted, with_memory(plan.fleet, _PLENTY), "auto", {}).plan(traced, briefly=True)
    )
    spaces: Spaces = {}
    found, tried = _least_memory(plan, traced, wanted, spaces, tick)
    factor = overfill(found, plan.fleet)
    least_s = free.iteration_s

    def priced(what: str, made: Plan, steps: int = 1) -> Remedy:
        return Remedy(what, made.iteration_s, steps * made.iteration_s / least_s - 1, steps)

    remedies = [priced(f"{at_least(factor)} times the memory on every device", found)]
    made: dict[Trial, Plan] = {}
    for trial in _trials(plan, traced, wanted, devices[worst].type.name, train_step, args, spaces):
        tick(f"planning for {trial.what}")
        if (brief := trial.briefly()) is not None:
            made[trial] = brief
    promising = [trial for trial in made if trial.promising]
    lacking = sorted((each for each in promising if not made[each].fits), key=lambda each: each.least_s)
    dear = sorted((each for each in promising if made[each].fits), key=lambda each: each.least_part)
    for trial in (*lacking[:_IN_FULL], *dear[:_IN_FULL]):
        tick(f"searching within memory for {trial.what}")
        made[trial] = trial.in_full()
    remedies += [priced(trial.what, each, trial.steps) for trial, each in made.items() if each.fits]
    types = [devices[d].type for d in plan.used]
    return Shortage(
        device=f"{devices[worst].name} ({devices[worst].type.name})",
        needs_bytes=plan.memory_bytes[worst],
        has_bytes=devices[worst].type.memory_bytes,
        held=fullest(plan.program, own.graph, plan.used_ratios, plan.used.index(worst), types),
        factor=factor,
        tried=tried,
        remedies=tuple(sorted(remedies, key=lambda remedy: remedy.price)),
    )


def _least_memory(
    plan: Plan, traced: Traced, wanted: Wanted, spaces: Spaces, tick: Callable[[str], None]
) -> tuple[Plan, float]:
    """The plan found that fits with the least multiple of the memory, and one at which none was found.

    Whatever was planned fits into as much as it needs, and a search in vain has looked for the smallest
    program: a little less than that is tried, and ever less as long as something fits; then the range down to
    where nothing did is cut in two until it is narrow. Nothing is tried below what no program fits into. What
    was found with other memory need not be the best for as much as it needs: that is planned last.
    """
    fleet = plan.fleet
    found, high = plan, overfill(plan, fleet)
    low, most = 1.0, high
    graph = rewritten(traced, plan.rewriting).graph
    while most > low * _NARROW:  # whether any program can fit takes no search
        middle = (low * most) ** 0.5
        limits = [middle * device.type.memory_bytes for device in fleet.devices]
        low, most = (middle, most) if too_small(graph, limits) else (low, middle)
    impossible = low
    failed, step = False, _STEP
    as_planned = replace(wanted, recompute=plan.rewriting)
    for _ in range(_PROBES):
        if high <= low * _NARROW:
            break
        middle = max((low * high) ** 0.5, 0.0 if failed else high / step)
        tick(f"planning for {middle:.3g} times the memory")
        trial = Trial("", as_planned, with_memory(fleet, middle), traced, spaces)
        made = trial.briefly()
        if made is not None and not made.fits:
            made = trial.in_full()
        if made is None or not made.fits:
            low, failed = middle, True
        if made is not None and overfill(made, fleet) < high:
            found, high = made, max(overfill(made, fleet), low)
        step *= step
    tick(f"planning for {high:.3g} times the memory")
    trial = Trial("", wanted, with_memory(fleet, high), traced, spaces)
    made = trial.briefly()
    if trial.promising or (found is plan and trial.unfinished):
        made = trial.in_full()
    found = made if made is not None and made.fits and made.cost_s < found.cost_s else found
    return found, low if low < overfill(found, fleet) else impossible


def _trials(
    plan: Plan,
    traced: Traced,
    wanted: Wanted,
    binding: str,
    train_step: Callable[..., Any],
    args: tuple[Any, ...],
    spaces: Spaces,
) -> Iterator[Trial]:
    """What might help, with the step as it is then; those of the step as planned share `spaces`."""
    rungs = () if plan.rewriting else rungs_of(differentiated(traced), CostModel(plan.fleet), RECOMPUTING)
    if rungs:
        again = Rewriting(rungs[-1].stretches)
        changing = replace(wanted, rewriting=again, recompute=again)
        yield Trial("layers computed again in the backward pass", changing, plan.fleet, traced, {})
    for times in (2, 4):
        what = f"{times} times the memory on every {binding}"
        yield Trial(what, wanted, with_memory(plan.fleet, times, binding), traced, spaces)
    for kind in dict.fromkeys(device.type.name for device in plan.fleet.devices):
        try:
            more = changed(plan.fleet, f"add={kind}")
        except ShardwrightError:
            continue  # nothing says how it would be joined
        yield Trial(f"one more {kind}", wanted, more, traced, spaces)
    for parts in (2**n for n in range(1, _MOST_HALVES + 1)):
        less = halved(args, traced.graph, parts)
        if less is None:
            return
        batch, smaller = less
        try:
            step = trace(train_step, *smaller, state=plan.state_override)
            step = marked(step, donated=plan.donate, compiler=plan.fleet.compiler)
            what = f"a batch of {batch}, {parts} steps for one"
            trial = Trial(what, wanted, plan.fleet, step, {}, parts)
        except ShardwrightError:
            return  # the step is written for one size of batch, or does not come in as many pieces as asked
        yield trial


def halved(args: tuple[Any, ...], graph: Graph, parts: int) -> tuple[int, tuple[Any, ...]] | None:
    """Shapes of the arguments with a part of the batch: its size, and the arguments.

    The batch is that of micro-batches. None if it has no such number of equal parts.
    """
    try:
        kinds = batch_of(graph, parts)
    except NotInPiecesError:
        return None
    leaves, tree = jax.tree.flatten(args)
    shapes: list[jax.ShapeDtypeStruct] = []
    size = 0
    for value, kind in zip(graph.inputs, kinds, strict=True):
        leaf, shape = leaves[len(shapes)], value.type.shape
        if kind != INVARIANT:
            size = shape[0] // parts
            shape = (size, *shape[1:])
        shapes.append(leaf if kind == INVARIANT else jax.ShapeDtypeStruct(shape, leaf.dtype))
    return size, tuple(jax.tree.unflatten(tree, shapes))
