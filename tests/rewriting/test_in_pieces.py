"""In which order a step that does not fit is changed: what is quick comes first, as a rival for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import pytest
from rewriting_cases import fleet, layered

from shardwright import Plan
from shardwright.api import synthesize_traced
from shardwright.ir.rewrites.rewriting import Rewriting, rewriting_of
from shardwright.ir.trace import Traced, trace
from shardwright.memory.in_pieces import InPieces
from shardwright.memory.ladder import Ladder
from shardwright.memory.microbatches import Pieces
from shardwright.memory.rivals import SAME, WORTH
from shardwright.synth.stretches import RECOMPUTING

_P = TypeVar("_P")


class Squeezed:
    """Four pieces fit at once, two after a search, one with less kept; they cost 3, 2 and 1.5 s."""

    thorough = content = False

    def __init__(self, plan: Plan) -> None:
        self.made = plan
        #: What was searched around, or keeps less, and beside which rival.
        self.asked: list[tuple[str, float]] = []
        #: Everything that was planned.
        self.order: list[Rewriting] = []

    def plan(
        self, traced: Traced, rival_s: float = math.inf, *, briefly: bool = False, **options: Any
    ) -> Plan | None:
        return self.of(traced, rewriting_of(traced), rival_s, briefly=briefly)

    def of(self, traced: Traced, changed: Rewriting, rival_s: float, *, briefly: bool) -> Plan | None:
        """The plan of the step as it was changed."""
        pieces, less = changed.microbatches, bool(changed.recompute)
        self.order.append(changed)
        cost_s = {1: 1.5 if less else 1.0, 2: 2.0, 4: 3.0}.get(pieces, math.inf)
        if less or not briefly:
            self.asked.append(("less" if less else f"{pieces}", rival_s))
        if cost_s >= rival_s or (pieces > 1 and less):
            return None
        fits = less or pieces == 4 or (pieces == 2 and not briefly)
        return self.made.but(cost_s=cost_s, bound_s=1.0, free_s=1.0, fits=fits, rewriting=changed)

    def unfinished(self, traced: Traced) -> bool:
        return rewriting_of(traced).microbatches < 4

    def crowded(self, traced: Traced) -> tuple[float, int]:
        return {1: 1.9, 2: 1.2}.get(rewriting_of(traced).microbatches, 0.8), 2

    def outgrown(self, traced: Traced) -> bool:
        return False

    def outside_s(self, traced: Traced, wanted_s: float) -> float:
        return math.inf

    def settled(self, plan: Plan) -> Plan:
        return plan


class Lacking(Squeezed):
    """Four pieces fit and cost 3 s; two with less kept cost 2 s, once that is searched around."""

    def __init__(self, plan: Plan, free_s: float) -> None:
        super().__init__(plan)
        self.free_s = free_s

    def of(self, traced: Traced, changed: Rewriting, rival_s: float, *, briefly: bool) -> Plan | None:
        pieces, less = changed.microbatches, bool(changed.recompute)
        if (pieces == 2 and less) or (pieces < 4 and briefly):
            self.asked += [] if briefly else [("less", rival_s)]
            cost_s, free_s = (self.free_s if briefly else 2.0), (self.free_s if less else 1.0)
            step = replace(traced, rewriting=changed)
            made = self.made.but(cost_s=cost_s, bound_s=1.0, free_s=free_s, fits=not briefly, traced=step)
            return made.but(rewriting=changed) if cost_s < rival_s else None
        fits = pieces == 4 and rival_s > 3.0 and not less
        return self.made.but(cost_s=3.0, bound_s=1.0, free_s=1.0, rewriting=changed) if fits else None


def squeezed(monkeypatch: pytest.MonkeyPatch, *, impossible: bool) -> tuple[Plan, Squeezed]:
    """The plan of six layers on devices that are alike; whether no program of the step as it is can fit."""
    return best_of(monkeypatch, Squeezed, impossible=impossible)


def best_of(
    monkeypatch: pytest.MonkeyPatch,
    planning: Callable[[Plan], _P],
    *,
    impossible: bool = False,
    worth: float = WORTH,
) -> tuple[Plan, _P]:
    monkeypatch.setattr("shardwright.memory.in_pieces.SMALL", 0)
    monkeypatch.setattr("shardwright.memory.in_pieces.candidates", lambda fleet: [fleet])
    monkeypatch.setattr("shardwright.memory.in_pieces._impossible", lambda *_: impossible)
    monkeypatch.setattr("shardwright.memory.in_pieces.few_equations", lambda graph: False)
    monkeypatch.setattr(Ladder, "every", ())
    step, args = layered(False, layers=6)
    traced = trace(step, *args)
    made = synthesize_traced(traced, fleet=fleet(), recompute="off", microbatches=1)
    planner = planning(made)
    known = traced, fleet(), cast(Any, planner), lambda: False
    ladder = Ladder(traced, fleet(), RECOMPUTING, 1, *known[2:])
    ladder.mixed, ladder.worth = False, worth
    return InPieces(ladder, Pieces(*known), math.inf).best(), planner


def test_what_keeps_less_is_a_rival_for_pieces_where_no_program_of_the_step_can_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, planner = squeezed(monkeypatch, impossible=True)
    assert found.cost_s == 1.5 and found.rewriting == planner.order[0] and found.rewriting.recompute
    assert {2, 4} & {each.microbatches for each in planner.order[1:]}, "pieces may be cheaper"


def test_what_keeps_less_is_a_rival_for_pieces_that_are_searched_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, planner = squeezed(monkeypatch, impossible=False)
    assert found.cost_s == 1.5 and found.rewriting.recompute
    names = [name for name, _ in planner.asked]
    assert names.index("less") < names.index("2")
    assert all(rival_s <= 1.5 for name, rival_s in planner.asked if name == "2")


@pytest.mark.parametrize(("free_s", "cost_s"), [(1.5, 2.0), (2.4, 2.0), (2.6, 3.0)])
def test_fewer_pieces_that_keep_less_are_made_to_fit_where_they_save_much_memory_aside(
    free_s: float, cost_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, planner = best_of(monkeypatch, lambda plan: Lacking(plan, free_s))
    assert found.cost_s == cost_s
    assert planner.asked == ([("less", 3.0)] if cost_s < 3.0 else [])
    assert found.rewriting.microbatches == (2 if cost_s < 3.0 else 4)


class Keeping(Lacking):
    """The same; what two pieces cost once they are searched around depends on how much is computed again.

    Whether memory has a part in that is `dear`.
    """

    def __init__(self, plan: Plan, *, dear: bool) -> None:
        super().__init__(plan, 1.5)
        self.dear = dear

    def of(self, traced: Traced, changed: Rewriting, rival_s: float, *, briefly: bool) -> Plan | None:
        if briefly or changed.microbatches != 2 or not changed.recompute:
            return super().of(traced, changed, rival_s, briefly=briefly)
        found = super().of(traced, changed, math.inf, briefly=False)
        self.asked[-1] = "less", rival_s
        cost_s = 1.6 + 0.05 * len(changed.recompute)
        free_s = 1.5 if self.dear else cost_s
        return found.but(cost_s=cost_s, bound_s=cost_s, free_s=free_s) if found and cost_s < rival_s else None


@pytest.mark.parametrize(
    ("worth", "dear", "further"), [(SAME, False, True), (SAME, True, False), (WORTH, False, False)]
)
def test_fewer_pieces_keep_no_less_than_need_be_where_plans_take_a_moment(
    worth: float, dear: bool, further: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what takes longer the first plan that fits is taken, and where memory makes that dearer."""
    found, planner = best_of(monkeypatch, lambda plan: Keeping(plan, dear=dear), worth=worth)
    again = [rival_s for what, rival_s in planner.asked if what == "less"]
    assert found.rewriting.microbatches == 2
    assert found.cost_s == 1.6 + 0.05 * len(found.rewriting.recompute)
    assert (len(again) > 1) == further
    if further:  # beside the first one
        assert found.cost_s < again[1] < again[0]


class Scarce(Squeezed):
    """The step fits after a search, four pieces cost more than anything; two with less kept cost 2 s."""

    def __init__(self, plan: Plan, whole_s: float) -> None:
        super().__init__(plan)
        self.whole_s = whole_s

    def of(self, traced: Traced, changed: Rewriting, rival_s: float, *, briefly: bool) -> Plan | None:
        pieces, less = changed.microbatches, bool(changed.recompute)
        self.order.append(changed)
        cost_s, fits = {
            (1, False): (1.0 if briefly else self.whole_s, not briefly),
            (2, False): (1.5, False),
            (2, True): (2.0, True),
        }.get((pieces, less), (math.inf, False))
        if cost_s >= rival_s or (pieces == 2 and not less and not briefly):
            return None
        free_s = min(cost_s, 1.0 if pieces == 1 else 1.5)
        return self.made.but(cost_s=cost_s, bound_s=free_s, free_s=free_s, fits=fits, rewriting=changed)

    def crowded(self, traced: Traced) -> tuple[float, int]:
        return 3.9 / rewriting_of(traced).microbatches, 2


@pytest.mark.parametrize("whole_s", [5.0, 1.15])
def test_pieces_of_few_rows_are_tried_where_the_best_plan_is_far_dearer_than_without_a_limit(
    whole_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where as many pieces as should fit are no rival, fewer may be, with less kept of each."""
    monkeypatch.setattr(Pieces, "scarce", lambda *_: True)
    found, planner = best_of(monkeypatch, lambda plan: Scarce(plan, whole_s))
    tried = [changed.microbatches for changed in planner.order if changed.microbatches > 1]
    note = "micro-batches of fewer rows than there are devices were not searched"
    if whole_s > 2.0:
        assert (found.cost_s, found.rewriting.microbatches) == (2.0, 2) and found.rewriting.recompute
        assert tried[:2] == [4, 2] and note not in found.assumptions
    else:
        assert found.cost_s == whole_s and not tried and note in found.assumptions


class Descending(Squeezed):
    """Sixteen pieces fit and cost 5 s; fewer do where less is kept, once that is searched around."""

    def __init__(self, plan: Plan, costs: dict[int, float]) -> None:
        super().__init__(plan)
        self.costs = costs

    def of(self, traced: Traced, changed: Rewriting, rival_s: float, *, briefly: bool) -> Plan | None:
        pieces, less = changed.microbatches, bool(changed.recompute)
        if pieces == 1 and less:
            return None
        self.asked += [(str(pieces), rival_s)] if less and not briefly else []
        cost_s = 1.0 if briefly and pieces < 16 else self.costs.get(pieces, 5.0)
        fits = pieces >= 16 or (less and not briefly)
        step = replace(traced, rewriting=changed)
        made = self.made.but(cost_s=cost_s, bound_s=1.0, free_s=1.0, fits=fits, traced=step)
        return made.but(rewriting=changed) if cost_s < rival_s else None

    def unfinished(self, traced: Traced) -> bool:
        return True

    def crowded(self, traced: Traced) -> tuple[float, int]:
        return 1 + 8 / rewriting_of(traced).microbatches, 2


@pytest.mark.parametrize(
    ("costs", "pieces"), [({8: 6.0, 4: 3.0, 2: 4.0}, 4), ({8: 4.0, 4: 3.0, 2: 2.0}, 2), ({2: 1.0}, 16)]
)
def test_fewer_pieces_than_were_tried_are_until_two_are_no_cheaper(
    costs: dict[int, float], pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, planner = best_of(monkeypatch, lambda plan: Descending(plan, costs))
    assert (found.rewriting.microbatches, found.cost_s) == (pieces, costs.get(pieces, 5.0))
    tried = [name for name, _ in planner.asked]
    assert tried[:2] == ["8", "4"] and ("2" in tried) == (pieces < 16)


class Searching:
    """Finds what fits in some numbers of pieces, at a cost; others cost more than any rival."""

    def __init__(self, made: Plan, costs: dict[int, float]) -> None:
        self.made, self.costs = made, costs
        self.asked: list[int] = []

    def plan(self, traced: Traced, rival_s: float = math.inf, **options: Any) -> Plan | None:
        pieces = rewriting_of(traced).microbatches
        self.asked.append(pieces)
        cost_s = self.costs.get(pieces, math.inf)
        return None if cost_s >= rival_s else self.made.but(cost_s=cost_s, fits=True)


@pytest.mark.parametrize(
    ("lacks", "costs", "asked"),
    [
        # What lacks little first, and of that the fewest pieces; what lacks much is then not searched.
        ({2: 1.6, 4: 1.05, 8: 1.02}, {4: 3.0}, [4, 8]),
        ({2: 1.6, 4: 1.3, 8: 1.05}, {4: 2.5, 8: 3.0}, [8, 4]),
        # Where fewer pieces are no cheaper, those that lack even more are not either.
        ({2: 1.4, 4: 1.3, 8: 1.05}, {8: 3.0}, [8, 4]),
        # Where nothing fits yet, all are searched.
        ({2: 1.9, 4: 1.7, 8: 1.6}, {2: 3.0}, [8, 4, 2]),
        # So are fewer that lack as much, while they are made to fit, and are cheaper.
        ({2: 1.9, 4: 1.63, 8: 1.6}, {4: 2.5, 8: 3.0}, [8, 4, 2]),
        ({2: 1.63, 4: 1.62, 8: 1.6}, {8: 3.0}, [8, 4]),
        # A program without a limit says that these are no cheaper.
        ({2: 1.2, 4: 1.15, 8: 1.05}, {8: 0.9}, [8]),
    ],
)
def test_pieces_that_lack_least_are_searched_first(
    lacks: dict[int, float], costs: dict[int, float], asked: list[int]
) -> None:
    step, args = layered(False)
    traced = trace(step, *args)
    made = synthesize_traced(traced, fleet=fleet(), recompute="off", microbatches=1)
    planner = Searching(made, costs)
    cut = Pieces(traced, fleet(), cast(Any, planner), lambda: False)
    limits = [device.type.memory_bytes for device in made.fleet.devices]
    for pieces, over in lacks.items():
        changed = replace(traced, rewriting=Rewriting(microbatches=pieces))
        taken = tuple([int(over * limit) for limit in limits])
        brief = made.but(bound_s=1 + pieces / 100, memory_bytes=taken, rewriting=changed.rewriting)
        cut.open.append((changed, brief))
    found = cut.within(math.inf)
    assert found is not None and found.cost_s == min(costs.values())
    assert cut.within(math.inf) is None, "none is searched for twice"
    assert planner.asked == asked


@pytest.mark.parametrize(
    ("rival_s", "over", "costs", "asked"),
    [
        # The most pieces first; fewer lack more, and may be cheaper yet.
        (3.0, 1.9, {2: 2.5, 4: 2.8, 8: 3.0}, [8, 4, 2]),
        # Where so many are no rival, fewer are not either; nor is what needs more than twice the memory.
        (3.0, 1.9, {2: 2.5, 8: 3.0}, [8, 4]),
        (3.0, 2.1, {2: 2.5, 4: 2.8, 8: 3.0}, [8, 4]),
        # What would hardly be cheaper with more memory is not made to fit into what there is.
        (1.7, 1.9, {2: 1.6, 4: 1.65, 8: 3.0}, [8, 2]),
    ],
)
def test_pieces_that_lack_much_are_searched_last_where_the_best_plan_is_far_dearer(
    rival_s: float, over: float, costs: dict[int, float], asked: list[int]
) -> None:
    step, args = layered(False)
    traced = trace(step, *args)
    made = synthesize_traced(traced, fleet=fleet(), recompute="off", microbatches=1)
    planner = Searching(made, costs)
    cut = Pieces(traced, fleet(), cast(Any, planner), lambda: False)
    limits = [device.type.memory_bytes for device in made.fleet.devices]
    for pieces, lacks, free_s in ((2, over, 1.0), (4, 1.7, 1.5), (8, 1.05, 2.0)):
        changed = replace(traced, rewriting=Rewriting(microbatches=pieces))
        taken = tuple([int(lacks * limit) for limit in limits])
        brief = made.but(
            cost_s=free_s, bound_s=free_s, free_s=free_s, memory_bytes=taken, rewriting=changed.rewriting
        )
        cut.open.append((changed, brief))
    assert cut.within(math.inf) is not None and planner.asked == [8]
    found = cut.passed(rival_s)
    assert planner.asked == asked
    assert (None if found is None else found.cost_s) == costs.get(asked[-1])
    assert cut.passed(rival_s) is None, "none is searched for twice"


@pytest.mark.parametrize("over", [1.05, 1.3])
def test_pieces_that_nearly_fit_are_a_rival_for_what_keeps_less(
    over: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing fits yet; those that lack more are searched for after that."""
    step, args = layered(False)
    traced = trace(step, *args)
    made = synthesize_traced(traced, fleet=fleet(), recompute="off", microbatches=1)
    rivals: list[float] = []
    monkeypatch.setattr(Ladder, "every", ())
    monkeypatch.setattr(Ladder, "that_fits", lambda self, base, rival_s: rivals.append(rival_s))
    monkeypatch.setattr(Pieces, "briefly", lambda *_: None)
    planner = Searching(made, {4: 2.0})
    known = traced, fleet(), cast(Any, planner), lambda: False
    ladder, cut = Ladder(traced, fleet(), RECOMPUTING, 1, *known[2:]), Pieces(*known)
    limits = [device.type.memory_bytes for device in made.fleet.devices]
    lacking = made.but(fits=False, memory_bytes=tuple(int(over * limit) for limit in limits))
    cut.open.append((replace(traced, rewriting=Rewriting(microbatches=4)), lacking))
    asked = InPieces(ladder, cut, math.inf)
    found = asked._changed()
    assert found.cost_s == 2.0 and planner.asked.count(4) == 1
    assert rivals[0] == (2.0 if over < 1.1 else math.inf)
