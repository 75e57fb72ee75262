"""Plans with several ratios: stretches of a program that are cut by ratios of their own.

What a program computes on shards that are tied to each other is a *stretch* (`ir/ties.py`); between stretches
stand collectives that make any cut from a Partial or a whole tensor, so that ratios of its own cost a stretch
nothing. Three kinds of stretches may want different ones:

    compute   what contracts sharded tensors, and the plan's ratios
    state     parameters and optimizer state that no contraction reads in stretches: gathered before it is
              used, updated where it lies. Memory, and its bandwidth, say how much of it a device should hold
    the rest  elementwise work beside both

A line of the bill is cut by the ratios of one stretch, so that cost is a sum over kinds, and only memory ties
their ratios: `solve_several` has a row of shares for each kind. A kind whose own ratios save nothing, and
no memory that is short, keeps the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.cost.bill import Item, Shares, Tally, charges
from shardwright.cost.memory.liveness import Footprint, Footprints, Peaks, footprints
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph
from shardwright.ir.placement import OwnRatios
from shardwright.ir.program import Program, verify
from shardwright.ir.registry import is_contraction
from shardwright.ir.ties import Stretches, cut_by, stretches
from shardwright.synth.programs.judge import Judge
from shardwright.synth.shares.ratios import SeveralSolution, solve_several
from shardwright.synth.shares.rounding import round_ratios
from shardwright.synth.shares.turns import Billed, Candidate

#: Part of the cost that ratios of their own have to save: programs with several are searched less well.
WORTH = 0.02

#: A program with one vector that costs more than so many times a plan is not made to beat it by several: they
#: were seen to save 3.2 %.
SEVERAL = 1.05

#: How often budgets are corrected by what a look at the program says, by how much more each time, and which
#: difference does not matter; the model takes programs for so much larger than they are at most, see `Fear`.
_LOOKS = 3
FEARED = 1.5
_STRICTER = 0.98
_NEAR = 0.05


@dataclass(frozen=True, slots=True)
class Segmented:
    """A program with several ratios.

    Attributes:
        program: verified; it holds all ratios but the plan's.
        ratios: the plan's, by device.
        cost_s: exact cost at the rounded shares.
        items: its bill.
        memory: peak bytes of every device.
        fits: whether the devices have these.
    """

    program: Program
    ratios: tuple[float, ...]
    cost_s: float
    items: tuple[Item, ...]
    memory: Peaks
    fits: bool


class Fear:
    """For how much larger than they are the model takes the programs of a step, at most.

    What looks say of some of them goes for the others, too: at tighter budgets fewer are worth a look.

    Attributes:
        times: by class of devices.
    """

    def __init__(self, classes: int) -> None:
        self.times: Floats = np.full(classes, FEARED)
        self._seen: Floats = np.zeros(classes)
        self._looked_at: set[tuple[float, ...]] = set()

    def known(self, solved: SeveralSolution, memory: Footprints, model: CostModel) -> bool:
        """Whether one much like a program, with the same shares, was looked at before.

        One that costs as much, and takes as much memory everywhere: rents find such programs at more than one
        vector of ratios. What was found the first time is what had to be beaten from then on.
        """
        every = np.array([shares[model.class_of] for shares in solved.shares])
        said = (solved.seconds, *np.unique(memory.peak(every)).tolist())
        key = tuple(float(f"{number:.9g}") for number in said)
        known, _ = key in self._looked_at, self._looked_at.add(key)
        return known

    def learn(self, part: Floats) -> None:
        """Of a program, by class, what the model has of each byte that a device is found to need."""
        self._seen = np.maximum(self._seen, part)
        self.times = np.minimum(self._seen * (1 + _NEAR), FEARED)


def apart_s(
    graph: Graph, model: CostModel, program: Program, ratios: tuple[float, ...], items: Sequence[Item]
) -> float:
    """Seconds of a program with the best ratios of their own for the kinds of its stretches, memory aside.

    Shares are not rounded, and products of shares linearised: about what it costs at least.

    Args:
        graph: the step.
        model: prices.
        program: cut by the plan's ratios alone, on one mesh axis.
        ratios: share of every device.
        items: the program's bill.
    """
    found = stretches(program, graph)
    parts = _parts(found, kinds_of(found, program, graph, items), program, graph, items)
    solved = solve_several(parts, model, [_of_classes(ratios, model)] * len(parts))
    return solved.seconds if solved.ok else 0.0


def segmented(
    graph: Graph,
    model: CostModel,
    judge: Judge,
    start: Billed | Candidate,
    *,
    short: bool,
    worth_s: float,
    feared: Fear | None = None,
) -> Segmented | None:
    """The program with ratios of their own for the kinds of its stretches, where that pays; else None.

    Args:
        graph: the step.
        model: prices.
        judge: of what fits.
        start: the program, cut by the plan's ratios alone, on one mesh axis.
        short: whether memory is short: then all kinds get their own.
        worth_s: what a program must cost less than.
        feared: for how much too large the model may take the program, until a look at it.
    """
    budgets = judge.budgets if feared is None else judge.limits * feared.times
    if len(model.counts) == 1 or _too_large(start.memory, model, judge, budgets):
        return None
    program, ratios, items = start.program, start.ratios, start.items
    found = stretches(program, graph)
    kinds = kinds_of(found, program, graph, items)
    parts = _parts(found, kinds, program, graph, items)
    if not short:
        kinds = _worthwhile(parts, kinds, model, ratios)
        parts = _parts(found, kinds, program, graph, items)
    if len(parts) == 1:
        return None
    attempt = _Attempt(graph, model, judge, program, found, kinds, parts, ratios)
    best: Segmented | None = None
    for rounds in range(_LOOKS):
        tried = attempt.within(budgets, worth_s, None if rounds else feared)
        if tried is None:
            break
        here, part = tried
        if feared is not None:
            feared.learn(part)
        if here.fits and (best is None or here.cost_s < best.cost_s):
            best = here
        if judge.roomy or (here.fits and bool((budgets >= judge.limits * part * (1 - _NEAR)).all())):
            break
        # What the model takes for full is what is found full; every round is stricter.
        budgets = judge.limits * part * _STRICTER ** (rounds + 1)
    return best


def _too_large(memory: Footprint, model: CostModel, judge: Judge, budgets: Floats) -> bool:
    """Whether all devices together take more than their budgets, whatever ratios they have.

    Shares of all devices sum to one, for every kind of stretches: at any moment a tensor that is cut takes
    its bytes once, and one that is not, on every device.
    """
    together = float((memory.fixed * model.counts.sum() + memory.shared).max())
    return not judge.roomy and together > float(budgets @ model.counts) * (1 + 1e-6)


@dataclass(frozen=True)
class _Attempt:
    """One program, whose kinds of stretches are to have ratios of their own; `ratios` to start from."""

    graph: Graph
    model: CostModel
    judge: Judge
    program: Program
    found: Stretches
    kinds: Sequence[int]
    parts: Sequence[Sequence[Item]]
    ratios: tuple[float, ...]

    @cached_property
    def memory(self) -> Footprints | None:
        """What a device takes at any ratios of the kinds; None where that is no matter."""
        if self.judge.roomy:
            return None
        return footprints(self.cut([self.ratios] * len(self.parts)), self.graph)

    def within(self, budgets: Floats, worth_s: float, feared: Fear | None) -> tuple[Segmented, Floats] | None:
        """With the best ratios within budgets of the classes; None where they cost more than it is worth.

        Beside it, by class, what the model has of each byte that a device is found to need.

        Args:
            budgets: bytes of a device of every class.
            worth_s: what the program must cost less than.
            feared: if the budgets are for how much too large the model may take it: what was looked at so.
        """
        model, judge, memory = self.model, self.judge, self.memory
        at = _of_classes(self.ratios, model)
        solved: SeveralSolution = solve_several(self.parts, model, [at] * len(self.parts), memory, budgets)
        if not solved.ok or solved.seconds >= worth_s:
            return None
        if feared is not None and memory is not None and feared.known(solved, memory, model):
            return None
        every = [tuple(float(shares[c]) for c in model.class_of) for shares in solved.shares]
        every = self.rounded(every, solved.shares, memory, budgets)
        program = self.cut(every)
        verify(program, self.graph)
        items = charges(program, self.graph, model)
        cost_s = Tally(items, model).seconds(every[0])
        if feared is not None and cost_s >= worth_s:
            return None  # once rounded; budgets that a look corrects are smaller than what is feared
        if memory is None:
            said = peaks = Peaks(tuple(int(b) for b in judge.footprint(program).peak(np.asarray(every[0]))))
        else:
            said = Peaks(tuple(int(b) for b in memory.peak(np.array(every))))
            peaks = judge.peaks(program, every[0], said)
        of_device = np.array(said.bytes) / np.maximum(np.array(peaks.bytes, dtype=np.float64), 1.0)
        part = np.array([of_device[model.class_of == c].min() for c in range(len(model.counts))])
        here = Segmented(program, every[0], cost_s, tuple(items), peaks, judge.excess(peaks) <= 1)
        return here, part

    def cut(self, every: Sequence[tuple[float, ...]]) -> Program:
        """The program with these ratios for its kinds."""
        own = {number: OwnRatios(number, shares) for number, shares in enumerate(every) if number}
        by = {c: own[self.kinds[s]] for c, s in self.found.of.items() if self.kinds[s]}
        return cut_by(self.program, self.graph, by)

    def rounded(
        self,
        every: Sequence[tuple[float, ...]],
        shares: Sequence[Floats],
        memory: Footprints | None,
        budgets: Floats,
    ) -> list[tuple[float, ...]]:
        """The ratios of one kind after the other, rounded so that they cost least; what fits comes first."""
        found = list(every)
        limits = budgets[self.model.class_of]
        for number, items in enumerate(self.parts):
            tally = Tally(items, self.model)

            def price(
                ratios: tuple[float, ...], number: int = number, tally: Tally = tally
            ) -> tuple[bool, float]:
                tried = np.array([*found[:number], ratios, *found[number + 1 :]])
                over = memory is not None and bool((memory.peak(tried) > limits * (1 + 1e-6)).any())
                return over, tally.seconds(ratios)

            found[number] = round_ratios(items, self.model, shares[number], price)
        return found


def kinds_of(found: Stretches, program: Program, graph: Graph, items: Sequence[Item]) -> list[int]:
    """The kind of every stretch: 0 for compute, 1 for state, 2 for the rest.

    What `is_tied` says of lines of a price list is what makes a stretch compute here.
    """
    kinds = [1 if number < found.with_state else 2 for number in range(found.count)]
    for stretch, item in zip(found.along(program, graph), items, strict=True):
        if stretch is None:
            continue
        if is_contraction(item.label) or (item.move is not None and item.move.kind == "all_to_all"):
            kinds[stretch] = 0
    return _numbered([0, *kinds])[1:]


def _of_classes(ratios: tuple[float, ...], model: CostModel) -> Floats:
    """The share of a device of every class."""
    return np.array([ratios[each.members[0]] for each in model.classes])


def _numbered(kinds: Sequence[int]) -> list[int]:
    """The same kinds, numbered without a gap from 0 on."""
    names = {kind: number for number, kind in enumerate(sorted(set(kinds)))}
    return [names[kind] for kind in kinds]


def _parts(
    found: Stretches, kinds: Sequence[int], program: Program, graph: Graph, items: Sequence[Item]
) -> list[list[Item]]:
    """The items of every kind; what is not cut counts as compute."""
    parts: list[list[Item]] = [[] for _ in range(max(kinds, default=0) + 1)]
    for stretch, item in zip(found.along(program, graph), items, strict=True):
        parts[0 if stretch is None else kinds[stretch]].append(item)
    return parts


def _worthwhile(
    parts: Sequence[Sequence[Item]],
    kinds: Sequence[int],
    model: CostModel,
    ratios: tuple[float, ...],
) -> list[int]:
    """The kinds, those that would save next to nothing being compute."""
    shares = Shares(ratios, model.class_of)
    now = [sum(item.weight * shares.seconds(item.cost, item.cut) for item in items) for items in parts]
    keeps = [0]
    for number in range(1, len(parts)):
        solved = solve_several((parts[number],), model, (_of_classes(ratios, model),))
        if solved.ok and solved.seconds < now[number] - WORTH * sum(now):
            keeps.append(number)
    return _numbered([kind if kind in keeps else 0 for kind in kinds])
