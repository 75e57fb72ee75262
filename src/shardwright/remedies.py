"""An answer where nothing fits: which device binds, what fills it, and what would help at which price."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax

from shardwright.api import synthesize_traced
from shardwright.cost.fleet import Fleet
from shardwright.device_memory import Held, fullest
from shardwright.ir.errors import ShardwrightError
from shardwright.ir.rewriting import AS_TRACED, original
from shardwright.ir.trace import Traced, trace
from shardwright.plan import Plan
from shardwright.rewritings import Recompute
from shardwright.what_if import changed

#: Memory at which nothing binds any more, as a multiple of what there is.
_PLENTY = 1 << 20

#: Times that the range of budgets around the least one that fits is cut in two.
_HALVINGS = 3

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
            f"does not fit: {self.device} would need {self.needs_bytes / 1e9:.4g} GB, "
            f"and has {self.has_bytes / 1e9:.4g} GB"
        ]
        lines += [f"  {each.nbytes / 1e9:.4g} GB  {each.what}" for each in self.held]
        enough, none = (times * self.has_bytes / 1e9 for times in (self.factor, self.tried))
        lines.append(
            f"it fits with {self.factor:.3g} times the memory on every device, {enough:.4g} GB there; "
            f"with {none:.4g} GB no plan was found"
        )
        for remedy in self.remedies:
            lines.append(f"  {remedy.price:+.1%}  {remedy.what}: {1e3 * remedy.iteration_s:.4g} ms")
        return "\n".join(lines)


#: More remedies for a plan that does not fit, each a change in words, and a plan with it and steps it takes.
Offer: TypeAlias = tuple[str, Plan, int]
Source: TypeAlias = Callable[[Plan, Callable[..., Any], tuple[Any, ...]], Iterable[Offer]]

#: Who else knows remedies (transformations of the step); functions that yield offers.
SOURCES: list[Source] = []


def with_memory(fleet: Fleet, factor: float, only: str | None = None) -> Fleet:
    """The fleet with so many times the memory, on devices of one type alone or on all."""
    nodes = tuple(
        replace(
            node,
            devices=tuple(
                kind
                if only is not None and kind.name != only
                else replace(kind, memory_bytes=max(int(kind.memory_bytes * factor), 1))
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
    tick: Callable[[str], None] = lambda what: None,
) -> Shortage | None:
    """Why a plan does not fit and what would help; None if it fits. Every remedy has been planned.

    The step is taken as the plan has it: with what it computes again and keeps elsewhere, in its pieces.

    Args:
        plan: it does not fit.
        train_step: its step.
        args: see `shardwright.synthesize`.
        tick: told what begins.

    Raises:
        PlanError: the plan is of another step.
    """
    if plan.fits:
        return None
    own = plan.traced or plan.attach(train_step, *args)
    traced = original(own)
    devices = plan.fleet.devices
    worst = max(plan.used, key=lambda d: plan.memory_bytes[d] / devices[d].type.memory_bytes)

    def planned(fleet: Fleet, step: Traced = traced, how: Recompute = plan.rewriting) -> Plan:
        tick(f"planning for {fleet.name}")
        return synthesize_traced(step, fleet=fleet, state=plan.state_override, recompute=how)

    free = planned(with_memory(plan.fleet, _PLENTY), how=AS_TRACED)
    low = 1.0
    high = max(n / devices[d].type.memory_bytes for d, n in enumerate(plan.memory_bytes)) * 1.02
    found = planned(with_memory(plan.fleet, high))
    while not found.fits:
        low, high = high, 1.5 * high
        found = planned(with_memory(plan.fleet, high))
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        tried = planned(with_memory(plan.fleet, middle))
        if tried.fits:
            high, found = middle, tried
        else:
            low = middle
    offers: list[Offer] = [(f"{high:.3g} times the memory on every device", found, 1)]
    offers += _again(plan, planned)
    offers += _more(plan, planned, devices[worst].type.name)
    offers += _smaller(plan, planned, train_step, args)
    for source in SOURCES:
        offers += source(plan, train_step, args)
    least_s = free.iteration_s
    remedies = [
        Remedy(what, made.iteration_s, steps * made.iteration_s / least_s - 1, steps)
        for what, made, steps in offers
        if made.fits
    ]
    return Shortage(
        device=f"{devices[worst].name} ({devices[worst].type.name})",
        needs_bytes=plan.memory_bytes[worst],
        has_bytes=devices[worst].type.memory_bytes,
        held=fullest(plan.program, own.graph, plan.used_ratios, plan.used.index(worst)),
        factor=high,
        tried=low,
        remedies=tuple(sorted(remedies, key=lambda remedy: remedy.price)),
    )


def _again(plan: Plan, planned: Callable[..., Plan]) -> Iterator[Offer]:
    """Everything computed again, where the plan does nothing of the kind."""
    if not plan.rewriting:
        yield "layers computed again in the backward pass", planned(plan.fleet, how="all"), 1


def _more(plan: Plan, planned: Callable[[Fleet], Plan], binding: str) -> Iterator[Offer]:
    """More memory where it binds, or one more device of a type that there is."""
    for times in (2, 4):
        made = planned(with_memory(plan.fleet, times, binding))
        if made.fits:
            yield f"{times} times the memory on every {binding}", made, 1
            break
    for kind in dict.fromkeys(device.type.name for device in plan.fleet.devices):
        try:
            more = changed(plan.fleet, f"add={kind}")
        except ShardwrightError:
            continue  # nothing says how it would be joined
        yield f"one more {kind}", planned(more), 1


def _smaller(
    plan: Plan,
    planned: Callable[[Fleet, Traced], Plan],
    train_step: Callable[..., Any],
    args: tuple[Any, ...],
) -> Iterator[Offer]:
    """Half the batch, again and again: the step is traced anew for it."""
    for times in range(1, _MOST_HALVES + 1):
        less = halved(args, plan.state, 2**times)
        if less is None:
            return
        size, smaller = less
        try:
            step = trace(train_step, *smaller, state=plan.state_override)
            made = planned(plan.fleet, step)
        except ShardwrightError:
            return  # the step is written for one size of batch, or does not come in so many pieces
        if made.fits:
            yield f"a batch of {size}, {2**times} steps for one", made, 2**times
            return


def halved(args: tuple[Any, ...], state: Mapping[str, str], parts: int) -> tuple[int, tuple[Any, ...]] | None:
    """Shapes of the arguments with a part of the batch: its size, and the arguments.

    The batch is the leading dimension that the arguments beside the state share; None if there is none that
    can be cut so.
    """
    leaves, tree = jax.tree.flatten(args)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    data = range(len(state), len(leaves))
    sizes = {shapes[i].shape[0] for i in data if shapes[i].shape}
    if len(sizes) != 1:
        return None
    (size,) = sizes
    if size % parts:
        return None
    for i in data:
        if shapes[i].shape:
            shapes[i] = jax.ShapeDtypeStruct((size // parts, *shapes[i].shape[1:]), shapes[i].dtype)
    return size // parts, tuple(jax.tree.unflatten(tree, shapes))
