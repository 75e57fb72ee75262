"""What people do without a planner, priced by the same model as programs of the same IR.

On the whole fleet a baseline is the best program that keeps to a recipe (`shardwright.synth.recipes`), so
that none is a straw man; a node or a class of devices by itself is planned like any fleet. Where a baseline
does not apply to a step or a fleet, it is left out, with the reason.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from shardwright.cost.bill import Item, charges, seconds
from shardwright.cost.drift import with_comparisons
from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.liveness import peak_bytes
from shardwright.cost.model import CostModel
from shardwright.cost.subfleet import subfleet
from shardwright.cost.timeline import predict, timed_bill
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import Graph
from shardwright.ir.program import Program, verify
from shardwright.synth.alternate import synthesize
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.programs.judge import Look, bound
from shardwright.synth.programs.just_in_time import just_in_time
from shardwright.synth.recipes import RECIPES, Along, Recipe, leanings, obstacle, pins, restricted
from shardwright.synth.search.priced import SpaceSolver, solve
from shardwright.synth.search.solution import Solution
from shardwright.synth.space.factors import Use
from shardwright.synth.space.roles import roles
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

#: What outweighs the cost of any program, as a multiple of the cheapest one's.
_LARGE = 1e6


@dataclass(frozen=True, slots=True)
class Baseline:
    """A baseline's program and price.

    Attributes:
        name: what people call it.
        program: its program.
        ratios: share of every device of the whole fleet; zero for those it does not use.
        devices: names of the devices it uses.
        fleet: these devices alone, for which it is priced.
        cost_s: its price by the plan's own model.
        iteration_s: predicted seconds of a step (the timeline's).
        memory_bytes: predicted peak of every device of the whole fleet; zero for those it does not use.
        fits: whether every peak is within its device's memory.
        relative: `cost_s` over the plan's, where a plan was given.
    """

    name: str
    program: Program
    ratios: tuple[float, ...]
    devices: tuple[str, ...]
    fleet: Fleet
    cost_s: float
    iteration_s: float
    memory_bytes: tuple[int, ...]
    fits: bool
    relative: float | None = None


class Baselines(list[Baseline]):
    """Baselines, and `left_out`: the names of others and why there is none of them."""

    def __init__(self, found: Sequence[Baseline] = (), left_out: Mapping[str, str] | None = None) -> None:
        super().__init__(found)
        self.left_out: dict[str, str] = dict(left_out or {})

    def best_fitting(self) -> Baseline | None:
        """The cheapest one that fits into memory, None if none does."""
        return min((b for b in self if b.fits), key=lambda b: b.cost_s, default=None)


@dataclass(frozen=True, slots=True)
class Draft:
    """A baseline's verified program, its bill, and what it costs."""

    name: str
    program: Program
    ratios: tuple[float, ...]
    items: list[Item]
    cost_s: float


@dataclass(frozen=True, slots=True)
class _Outline:
    """The best program that keeps to a recipe, as it was found; it costs `least_s` or more."""

    recipe: Recipe
    space: Space
    prices: Prices
    ratios: tuple[float, ...]
    extra: tuple[Use, ...]
    solution: Solution
    least_s: float


class Workshop:
    """Makes the baselines of one step for one fleet; restricted spaces are built once each."""

    def __init__(
        self,
        graph: Graph,
        space: Space,
        model: CostModel,
        tick: Callable[[str], None] = lambda what: None,
        look: Look | None = None,
    ) -> None:
        self._look = look
        self.graph = graph
        self.space = space
        self.model = model
        self._tick = tick
        self._roles = roles(graph, space.units)
        self._spaces: dict[tuple[Along, bool], Space] = {}
        #: By where tensors lie.
        self._solvers: dict[tuple[str, ...], tuple[Space, tuple[Use, ...], SpaceSolver]] = {}

    def all(self) -> Baselines:
        """Every baseline that applies."""
        found = self.whole_fleet()
        for name, members in self.parts(found.left_out):
            self._tick(f"planning {name}")
            found.append(self.alone(name, members))
        return found

    def on(self, model: CostModel) -> Workshop:
        """Makes those of the same step for other devices, by the same restricted spaces."""
        other = copy(self)
        other.model = model
        return other

    def whole_fleet(self, recipes: Sequence[Recipe] = RECIPES) -> Baselines:
        """Those of `recipes` that apply, on all devices."""
        found = Baselines()
        for recipe in recipes:
            outline = self._outline_of(recipe, found.left_out)
            if outline is not None:
                draft = self._written(outline)
                found.append(self._finished(draft, self.model, range(len(draft.ratios))))
        return found

    def cheaper(self, rival_s: float) -> Iterator[Draft]:
        """What costs less than a rival, on all devices, the cheapest first; nobody asked whether it fits.

        A program is written only when none that is left may be cheaper: as written it costs no less than as
        it was found, since exchanges are put elsewhere or made once more.
        """
        waiting: list[tuple[float, int, _Outline | Draft]] = []
        for number, recipe in enumerate(RECIPES):
            outline = self._outline_of(recipe, {})
            if outline is not None:
                waiting.append((outline.least_s, number, outline))
        heapq.heapify(waiting)
        while waiting and waiting[0][0] < rival_s:
            _, number, found = heapq.heappop(waiting)
            if isinstance(found, Draft):
                yield found
            else:
                draft = self._written(found)
                heapq.heappush(waiting, (draft.cost_s, number, draft))

    def _outline_of(self, recipe: Recipe, left_out: dict[str, str]) -> _Outline | None:
        """The best program of a recipe as it was found, or why there is none."""
        self._tick(f"pricing {recipe.name}")
        reason = obstacle(recipe, self.graph, self.space, self._roles)
        if not reason:
            try:
                return self._outline(recipe)
            except PlanError:
                reason = "no program keeps to it: something in the step cannot be computed so"
        left_out[recipe.name] = reason
        return None

    def make(self, recipe: Recipe) -> Baseline:
        """The best program of a recipe.

        Raises:
            PlanError: no program keeps to it.
        """
        draft = self._written(self._outline(recipe))
        return self._finished(draft, self.model, range(len(draft.ratios)))

    def _outline(self, recipe: Recipe) -> _Outline:
        space, extra, solver = self._solver_of(recipe)
        types, counts = self.model.types, self.model.counts
        speed = np.array([device.flop_rate("float32", None)[0] for device in types])
        per_class = speed if recipe.proportional else np.ones_like(speed)
        per_class = per_class / float(counts @ per_class)
        ratios = tuple(float(per_class[c]) for c in self.model.class_of)
        prices = Prices.at(self.model, ratios, allowed=recipe.exchanges)
        solution = solver.solve(prices)
        least_s = solution.seconds
        if leaning := leanings(recipe, space, self._roles, _LARGE * least_s):
            solution = solve(space, prices, extra=(*extra, *leaning))
        return _Outline(recipe, space, prices, ratios, extra, solution, least_s)

    def _solver_of(self, recipe: Recipe) -> tuple[Space, tuple[Use, ...], SpaceSolver]:
        """The programs that keep to a recipe, what they are pinned to, and what solves for them."""
        lies = recipe.along, recipe.parameters, recipe.contracted, recipe.optimizer
        if lies not in self._solvers:
            key = (recipe.along, recipe.parameters == "whole")
            if key not in self._spaces:
                self._spaces[key] = restricted(*key, self.graph, self.space.units, self._roles)
            space = self._spaces[key]
            extra = tuple(pins(recipe, self.graph, space, self._roles))
            self._solvers[lies] = space, extra, SpaceSolver(space, extra)
        return self._solvers[lies]

    def _written(self, outline: _Outline) -> Draft:
        recipe = outline.recipe
        program = emit(outline.space, outline.solution.assignment, outline.prices, outline.extra)
        if recipe.placed:
            program = just_in_time(program, self.graph, self._roles.weights, again=recipe.again)
        return self._drafted(recipe.name, program, outline.ratios, self.model)

    def alone(self, name: str, members: Sequence[int]) -> Baseline:
        """The plan of some devices by themselves."""
        fleet = self.model.fleet
        model = CostModel(subfleet(fleet, members, f"{fleet.name}, {name}"))
        found = synthesize(self.graph, self.space, model, Timer(), look=self._look)
        return self._finished(self._drafted(name, found.program, found.ratios, model), model, members)

    def _drafted(self, name: str, program: Program, ratios: tuple[float, ...], model: CostModel) -> Draft:
        verify(program, self.graph)
        items = charges(program, self.graph, model)
        return Draft(name, program, ratios, items, seconds(items, model, ratios))

    def _finished(self, draft: Draft, model: CostModel, members: Sequence[int]) -> Baseline:
        program, ratios, items = draft.program, draft.ratios, draft.items
        devices = self.model.fleet.devices
        shares, memory = [0.0] * len(devices), [0] * len(devices)
        look = None if self._look is None else bound(self._look, model.fleet)
        peaks = peak_bytes(program, self.graph, ratios) if look is None else look(program, ratios)
        for member, ratio, peak in zip(members, ratios, peaks, strict=True):
            shares[member], memory[member] = ratio, peak
        in_time = predict(timed_bill(program, self.graph, model, model, items), model, ratios)
        return Baseline(
            name=draft.name,
            program=program,
            ratios=tuple(shares),
            devices=tuple(devices[i].name for i in members),
            fleet=model.fleet,
            cost_s=draft.cost_s,
            iteration_s=with_comparisons(in_time, program, self.graph, model).iteration_s,
            memory_bytes=tuple(memory),
            fits=all(memory[device.index] <= device.type.memory_bytes for device in devices),
        )

    def parts(self, left_out: dict[str, str]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and devices of every node and class that differs from the whole fleet and from each other.

        Args:
            left_out: is told the names of the others, and why.
        """
        fleet = self.model.fleet
        seen: dict[tuple[int, ...], str] = {tuple(range(len(fleet.devices))): "the whole fleet"}
        kinds: dict[object, str] = {}
        for number, node in enumerate(fleet.nodes):
            name = f"node {node.name} alone"
            members = tuple(d.index for d in fleet.devices if d.node == number)
            kind = (tuple(sorted(Counter(t.name for t in node.devices).items())), node.link)
            if members in seen:
                left_out[name] = f"is {seen[members]}"
            elif kind in kinds:
                left_out[name] = f"is like {kinds[kind]}"
            else:
                seen[members] = kinds[kind] = name
                yield name, members
        count = Counter(c.type.name for c in fleet.classes)
        for each in fleet.classes:
            name = f"{each.type.name} alone"
            if count[each.type.name] > 1:
                name = f"{each.type.name} of {fleet.devices[each.members[0]].name} alone"
            if each.members in seen:
                left_out[name] = f"is {seen[each.members]}"
            else:
                seen[each.members] = name
                yield name, each.members
