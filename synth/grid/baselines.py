"""What people do on two mesh axes without a planner: one habit across the nodes, one within them.

As on one axis (`shardwright.synth.baselines`), a baseline is the best program that keeps to a recipe. Its
shares are even; what is cut "within" lies whole on every node, and what is cut "across" on no single one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardwright.cost.bill import bill, seconds
from shardwright.cost.drift import with_comparisons
from shardwright.cost.grid.model import GridModel
from shardwright.cost.grid.prices import GridShares
from shardwright.cost.grid.settled import Settled
from shardwright.cost.memory.liveness import Footprint, Peaks, peaks_by_device
from shardwright.cost.model import CostModel
from shardwright.cost.timeline import predict, timed_bill
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import Equation, Graph, Value
from shardwright.ir.pairs import Paired
from shardwright.ir.placement import Placement, R, Shard, components
from shardwright.ir.program import verify
from shardwright.ir.rules import Signature
from shardwright.synth.baselines import Baseline, Baselines, Draft
from shardwright.synth.grid.pricing import GridPriceList
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.programs.judge import Judge, Look, bound
from shardwright.synth.recipes import Along
from shardwright.synth.space.factors import Choice, Use
from shardwright.synth.space.frame import Frame
from shardwright.synth.space.pins import pin
from shardwright.synth.space.restrict import Keep
from shardwright.synth.space.roles import Roles, roles
from shardwright.synth.space.space import Space

#: Where a kind of state is cut, if it can be: nowhere, on one of the axes, or on both.
Cut: TypeAlias = Literal["whole", "within", "across", "both", "free"]


@dataclass(frozen=True, slots=True)
class GridRecipe:
    """What programs of a baseline keep to.

    Attributes:
        name: what people call it.
        within: along what forward and backward pass are cut in a node; across the nodes it is the batch.
        parameters, optimizer: where they are cut between steps.
        exchanges: collectives that may be used.
    """

    name: str
    within: Along
    parameters: Cut
    optimizer: Cut
    exchanges: frozenset[str]


_SUM = frozenset({"all_reduce"})
_ALL = _SUM | {"all_gather", "reduce_scatter"}

GRID_RECIPES = (
    GridRecipe("data parallelism over all devices", "batch", "whole", "whole", _SUM),
    GridRecipe("tensor parallelism in nodes, data across", "anything but the batch", "free", "free", _SUM),
    GridRecipe("ZeRO-1 in nodes", "batch", "whole", "within", _ALL),
    GridRecipe("ZeRO-1 across nodes", "batch", "whole", "across", _ALL),
    GridRecipe("ZeRO-1 over both", "batch", "whole", "both", _ALL),
    GridRecipe("ZeRO-3 in nodes", "batch", "within", "within", _ALL),
    GridRecipe("ZeRO-3 across nodes", "batch", "across", "across", _ALL),
    GridRecipe("ZeRO-3 over both", "batch", "both", "both", _ALL),
)


class _Restricted(Space):
    """The programs whose equations keep to some signatures across the nodes, and to some within them.

    On an axis on which an equation has none of these, it keeps all of its signatures.
    """

    def __init__(self, graph: Graph, nodes: tuple[int, ...], across: Keep, within: Keep) -> None:
        self._keep = across, within
        self._kept: dict[tuple[object, ...], tuple[Signature, ...]] = {}
        super().__init__(graph, nodes)

    def signatures(self, equation: Equation) -> tuple[Signature, ...]:
        """The signatures kept on one of the axes at least; one object for equal equations of equal ones."""
        found, words = super().signatures(equation), self._made.words
        if isinstance(found, Paired):
            return found
        sides = zip(words.sides_of(found), self._keep, strict=True)
        kept = [_kept(side, [keep(equation, signature) for signature in side]) for side, keep in sides]
        key = (id(found), *kept)
        if key not in self._kept:
            self._kept[key] = words.apart(*kept)
        return self._kept[key]


def _kept(side: Sequence[Signature], flags: Sequence[bool]) -> tuple[Signature, ...]:
    """Those of one axis that are kept, or all if none is."""
    return tuple([s for s, stays in zip(side, flags, strict=True) if stays or not any(flags)])


def grid_baselines(graph: Graph, model: CostModel, tick: Callable[[str], None], look: Look) -> Baselines:
    """Every baseline on two mesh axes that applies, on all devices of the model's fleet.

    Args:
        graph: the step.
        model: prices of the fleet.
        tick: is told what begins.
        look: says how much memory a program takes.
    """
    found, grid = Baselines(), GridModel(model)
    look = bound(look, model.fleet)
    for name, made in _drafts(graph, grid, tick):
        if isinstance(made, str):
            found.left_out[name] = made
        else:
            found.append(_told(made, graph, grid, look))
    return found


def cheapest_baseline(
    graph: Graph, model: CostModel, tick: Callable[[str], None], look: Look
) -> tuple[Draft, Footprint | Peaks] | None:
    """The cheapest baseline on two mesh axes, first those that fit; None if none applies."""
    judge = Judge(graph, model, look)
    best: tuple[bool, float, Draft, Footprint | Peaks] | None = None
    for _, made in _drafts(graph, GridModel(model), tick):
        if not isinstance(made, str):
            by_model = peaks_by_device(made.program, graph, made.ratios)
            memory = judge.closely(made.program, made.ratios, by_model)
            over = judge.feared(memory, made.ratios) > 1
            if best is None or (over, made.cost_s) < best[:2]:
                best = over, made.cost_s, made, memory
    return best and best[2:]


def _drafts(graph: Graph, grid: GridModel, tick: Callable[[str], None]) -> Iterator[tuple[str, Draft | str]]:
    """By name, every baseline, or why it does not apply."""
    spaces: dict[tuple[Along, bool], Space] = {}
    for recipe in GRID_RECIPES:
        tick(f"pricing {recipe.name}")
        try:
            yield recipe.name, _made(recipe, graph, grid, spaces)
        except PlanError:
            yield recipe.name, "no program keeps to it: something in the step cannot be computed so"


def _made(
    recipe: GridRecipe, graph: Graph, grid: GridModel, spaces: dict[tuple[Along, bool], Space]
) -> Draft | str:
    """The best program of a recipe, or why it does not apply."""
    mesh, model = grid.mesh, grid.model
    key = (recipe.within, recipe.parameters == "whole")
    if key not in spaces:
        spaces[key] = _space(graph, mesh.nodes, *key)
    space = spaces[key]
    known = roles(graph, space.units)
    if not known.inputs:
        return "no argument besides the state has a leading dimension that could be the batch"
    state: tuple[tuple[Cut, tuple[Value, ...]], ...] = (
        (recipe.parameters, known.parameters),
        (recipe.optimizer, known.optimizer),
    )
    for cut, values in state:
        if cut not in ("whole", "free") and not any(_can(space.root.choice[value], cut) for value in values):
            return f"there is no state that could be cut: {cut}"
    if recipe.within != "batch" and not known.contracted:
        return "no contraction reads a parameter"
    listed = GridPriceList(grid)
    ratios = mesh.ratios(*mesh.even())
    prices = Prices(listed, GridShares(ratios, mesh).stack, recipe.exchanges)
    solution = GridSolver(space, tuple(_pins(recipe, graph, space, known))).solve(prices)
    program = emit(space, solution.assignment, prices)
    verify(program, graph)
    items = bill(program, graph, Settled(grid, ratios))
    return Draft(recipe.name, program, ratios, items, seconds(items, model, ratios))


def _told(draft: Draft, graph: Graph, grid: GridModel, look: Look) -> Baseline:
    """A baseline with all that is said of it."""
    program, ratios, model = draft.program, draft.ratios, grid.model
    settled = Settled(grid, ratios)
    in_time = predict(timed_bill(program, graph, settled, model, draft.items), model, ratios)
    peaks = tuple(look(program, ratios))
    devices = model.fleet.devices
    return Baseline(
        name=draft.name,
        program=program,
        ratios=ratios,
        devices=tuple(device.name for device in devices),
        fleet=model.fleet,
        cost_s=draft.cost_s,
        iteration_s=with_comparisons(in_time, program, graph, model).iteration_s,
        memory_bytes=peaks,
        fits=all(peak <= d.type.memory_bytes for peak, d in zip(peaks, devices, strict=True)),
    )


def _space(graph: Graph, nodes: tuple[int, ...], within: Along, whole: bool) -> Space:
    known = roles(graph, Space(graph).units)

    def by_batch(equation: Equation, signature: Signature) -> bool:
        if known.batched(equation):
            return known.splits_batch(equation, signature)
        alone = whole and known.prepares(equation)
        return not alone or all(p == R for p in (*signature.ins, *signature.outs))

    def by_tensor(equation: Equation, signature: Signature) -> bool:
        return not (known.batched(equation) and known.splits_batch(equation, signature))

    return _Restricted(graph, nodes, by_batch, by_batch if within == "batch" else by_tensor)


def _pins(recipe: GridRecipe, graph: Graph, space: Space, known: Roles) -> Iterator[Use]:
    """Where the arguments lie, and layers of stacked parameters inside of loops."""
    for value in graph.inputs:
        choice = space.root.choice[value]
        if value in known.inputs:
            yield pin(choice, _batch if recipe.within == "batch" else _batch_across)
        elif value in known.parameters:
            yield from _lie(choice, recipe.parameters)
        elif value in known.optimizer:
            yield from _lie(choice, recipe.optimizer)
        else:
            yield from _lie(choice, "whole")
    if recipe.parameters not in ("whole", "free"):
        for choice in _inside(space.root, known):
            yield from _lie(choice, recipe.parameters)


def _inside(frame: Frame, known: Roles) -> Iterator[Choice]:
    for children in frame.children.values():
        for child in children:
            yield from (child.choice[value] for value in child.graph.inputs if value in known.stacked)
            yield from _inside(child, known)


def _lie(choice: Choice, cut: Cut) -> Iterator[Use]:
    if cut == "free":
        return
    if cut == "whole" or _can(choice, cut):
        yield pin(choice, lambda placement: _is_cut(placement, cut))


def _can(choice: Choice, cut: Cut) -> bool:
    return any(_is_cut(holding.base, cut) for holding in choice.domain.holdings)


def _is_cut(placement: Placement, cut: Cut) -> bool:
    across, within = components(placement)
    wanted = (cut in ("across", "both"), cut in ("within", "both"))
    return all(
        isinstance(p, Shard) if yes else p == R for p, yes in zip((across, within), wanted, strict=True)
    )


def _batch(placement: Placement) -> bool:
    return all(isinstance(p, Shard) and p.dim == 0 for p in components(placement))


def _batch_across(placement: Placement) -> bool:
    across, within = components(placement)
    return isinstance(across, Shard) and across.dim == 0 and within == R
