"""Which rungs of a ladder of rewritings are planned, and which are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from rewriting_cases import fleet, layered, traced_layers

from shardwright import Plan
from shardwright.api import synthesize_traced
from shardwright.ir.rewrites.rewriting import rewriting_of
from shardwright.ir.trace import Traced, trace
from shardwright.memory.every_way import EveryWay
from shardwright.memory.in_pieces import InPieces
from shardwright.memory.ladder import Ladder
from shardwright.memory.microbatches import Pieces
from shardwright.memory.rivals import WORTH
from shardwright.planning import Planner
from shardwright.synth.stretches import RECOMPUTING


class Dearer:
    """Plans every step a tenth dearer than the rival that it was asked to beat."""

    thorough = False

    def __init__(self, plan: Plan) -> None:
        self.made = plan

    def plan(self, traced: Traced, rival_s: float = np.inf, **options: Any) -> Plan:
        changed: Any = traced.rewriting
        return replace(self.made, cost_s=1.1 * rival_s, rewriting=changed)


def test_layers_are_left_out_of_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = traced_layers(False)
    best = synthesize_traced(traced, fleet=fleet(), recompute="all")
    rungs = Ladder(traced, fleet(), RECOMPUTING, 1, cast(Any, Dearer(best)), lambda: False)
    assert 1 < len(rungs.rungs) <= 8 and best.fits
    started: list[Plan] = []
    monkeypatch.setattr(Ladder, "_without_one", lambda self, plan: started.append(plan))
    rungs.below(best, free_s=0.0)
    assert rungs.known and started == [best]


class Costing:
    """Plans that fit, at what they cost without a limit and as much more as memory takes."""

    def __init__(self, plan: Plan, memory_s: float) -> None:
        self.made, self.memory_s = plan, memory_s
        self.asked: list[int] = []

    def plan(self, traced: Traced, rival_s: float = np.inf, **options: Any) -> Plan:
        again = len(rewriting_of(traced).recompute)
        self.asked.append(again)
        return self.made.but(cost_s=again + self.memory_s, free_s=float(again))

    def unfinished(self, traced: Traced) -> bool:
        return self.memory_s > 0


@pytest.mark.parametrize("memory_s", [0.0, 0.5])
def test_rungs_above_one_that_memory_makes_no_dearer_are_not_planned(memory_s: float) -> None:
    traced = traced_layers(False)
    best = synthesize_traced(traced, fleet=fleet(), recompute="all")
    planner = Costing(best, memory_s)
    step, args = layered(False, layers=6)
    rungs = Ladder(trace(step, *args), fleet(), RECOMPUTING, 1, cast(Any, planner), lambda: False)
    assert len(rungs.rungs) > 8
    found = rungs.freely(np.inf)
    assert found is not None and found.cost_s == min(planner.asked) + memory_s
    # What is left out counts as dearer.
    assert len(planner.asked) == (1 if not memory_s else 3) and len(rungs.free_s) == 3


class Refusing(Costing):
    """Plans what costs no more than a rival; what that was is kept."""

    rivals: list[float]
    full: bool

    def plan(self, traced: Traced, rival_s: float = np.inf, **options: Any) -> Any:
        self.rivals.append(rival_s)
        plan = super().plan(traced, rival_s, **options)
        return plan if plan.cost_s < rival_s else None

    @property
    def content(self) -> bool:
        return False

    def outside_s(self, traced: Traced, wanted_s: float) -> float:
        return float("inf")

    def outgrown(self, traced: Traced) -> bool:
        return self.full


@pytest.mark.parametrize("full", [False, True])
def test_rungs_above_one_that_is_no_rival_are_not_planned(full: bool) -> None:
    """But where a part of the fleet has no room for that one: it may have room for those."""
    best = synthesize_traced(traced_layers(False), fleet=fleet(), recompute="all")
    step, args = layered(False, layers=6)
    traced = trace(step, *args)
    planner = Refusing(best, 0.5)
    planner.rivals, planner.full = [], full
    rungs = Ladder(traced, fleet(), RECOMPUTING, 1, cast(Any, planner), lambda: False)
    rungs.worth = WORTH
    assert rungs.freely(1.0) is None
    # Beside another plan a rung should save what makes it worth while.
    assert planner.rivals == [pytest.approx(1 - WORTH)] * (3 if full else 1)
    assert list(rungs.free_s.values()) == [np.inf] * 3


class Saving:
    """Plans that fit, each at a tenth less than the one before."""

    thorough = False

    def __init__(self, plan: Plan, room: float) -> None:
        self.made, self.cost_s, self.bytes = plan, 1.0, room
        self.asked: list[str] = []

    def outgrown(self, traced: Traced) -> bool:
        return False

    def room(self, traced: Traced, below_s: float) -> float:
        return self.bytes

    def plan(self, traced: Traced, rival_s: float = np.inf, **options: Any) -> Plan:
        rewriting: Any = traced.rewriting
        self.asked += [stretch.keep for stretch in rewriting.recompute]
        self.cost_s *= 0.9
        return self.made.but(cost_s=self.cost_s, free_s=self.cost_s)


@pytest.mark.parametrize(
    ("width", "room", "memory_s", "asked"),
    [
        pytest.param(2, 1e9, 0.0, ["products", "nothing"], id="products are cheap"),
        pytest.param(64, 1e9, 0.0, ["products"], id="products are dear"),
        pytest.param(64, 1e9, 0.2, ["products", "nothing"], id="memory made it dearer"),
        pytest.param(64, 5e5, 0.0, ["products", "nothing"], id="memory is scarce where it may be cheaper"),
    ],
)
def test_a_scan_keeps_no_products_only_where_that_may_save_time(
    width: int, room: float, memory_s: float, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or where memory made what fits dearer: what fits is wanted then, too."""
    step, args = layered(True, width=width)
    traced = trace(step, *args)
    planner = Saving(synthesize_traced(traced_layers(True), fleet=fleet(), recompute="off"), room)
    monkeypatch.setattr(Ladder, "every", ())
    found = Ladder(traced, fleet(), RECOMPUTING, 1, cast(Any, planner), lambda: False)
    found.worth = WORTH
    base = planner.made.but(cost_s=1.0 + memory_s, free_s=1.0)
    if memory_s:
        planner.plan = lambda traced, rival_s=np.inf, **options: Saving.plan(planner, traced).but(fits=False)
    found.in_scans(base)
    assert planner.asked == asked


class Seen:
    """What it plans was looked at."""

    def unfinished(self, traced: Traced) -> bool:
        return False


def test_a_ladder_falls_short_of_what_lacks_more_than_its_last_rung_frees() -> None:
    traced = _six_layers()
    made = synthesize_traced(traced, fleet=fleet(speeds=(3,)), recompute="off", microbatches=1)
    rungs = Ladder(traced, fleet(speeds=(3,)), RECOMPUTING, 1, cast(Any, Seen()), lambda: False)
    (limit,), freed = rungs.limits, rungs.rungs[-1].freed_bytes
    assert freed > 0 and not rungs.falls_short(None) and not rungs.falls_short(made)
    for beyond in (-1, 1):
        lacking = made.but(memory_bytes=(int(limit + freed + beyond),), fits=False)
        assert rungs.falls_short(lacking) == (beyond > 0)


@pytest.mark.parametrize("short", [False, True])
def test_where_keeping_less_will_not_do_pieces_come_first(
    short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for where in ("rewritings", "in_pieces"):
        monkeypatch.setattr(f"shardwright.memory.{where}.SMALL", 0)
    monkeypatch.setattr(Planner, "outgrown", _says(False))
    monkeypatch.setattr(Ladder, "every", ())
    monkeypatch.setattr(Ladder, "falls_short", _says(short))
    for name, owner in (("freely", Ladder), ("briefly", Pieces)):
        monkeypatch.setattr(owner, name, _noted(getattr(owner, name), name, order))
    plan = synthesize_traced(_six_layers(), fleet=fleet("60 kB"))
    assert plan.fits and sorted(order) == ["briefly", "freely"]
    assert order[0] == ("briefly" if short else "freely")


class Cut:
    """Plans by number of pieces: on so many devices, of which each takes so large a part of its memory."""

    def __init__(self, plan: Plan, taken: dict[int, tuple[float, int]], outside_s: float = np.inf) -> None:
        self.made, self.taken, self.elsewhere_s = plan, taken, outside_s
        self.asked: list[int] = []

    def plan(self, traced: Traced, rival_s: float = np.inf, **options: Any) -> Plan | None:
        rewriting = rewriting_of(traced)
        self.asked.append(rewriting.microbatches)
        if rewriting.microbatches not in self.taken:
            return None
        fits = self.taken[rewriting.microbatches][0] <= 1
        return self.made.but(cost_s=1.0, bound_s=1.0, fits=fits, rewriting=rewriting)

    def crowded(self, traced: Traced) -> tuple[float, int]:
        return self.taken.get(rewriting_of(traced).microbatches, (0.0, 1))

    def unfinished(self, traced: Traced) -> bool:
        return False

    def outside_s(self, traced: Traced, wanted_s: float) -> float:
        return self.elsewhere_s

    def settled(self, plan: Plan) -> Plan:
        return plan


@pytest.mark.parametrize(
    ("devices", "more", "asked", "fits"),
    [
        pytest.param(1, {8: 0.9}, [2, 4, 8], True, id="not on the same devices"),
        pytest.param(2, {8: 0.9}, [2, 4, 64, 32, 16, 8], True, id="the most are too dear"),
        # In the most pieces the best program may be quite another one; fewer of them are cheaper.
        pytest.param(2, {32: 1.1, 64: 0.9}, [2, 4, 64, 32], True, id="less in the most pieces"),
    ],
)
def test_how_much_stays_in_however_many_pieces_is_told_on_the_same_devices(
    devices: int, more: dict[int, float], asked: list[int], fits: bool
) -> None:
    """In a quarter of the batch each takes nearly as much as before: most of it stays, or less than fits."""
    traced = _six_layers()
    made = synthesize_traced(traced, fleet=fleet(), recompute="off", microbatches=1)
    taken = {2: 1.9, 4: 1.4} | more
    planner = Cut(made, {pieces: (part, devices) for pieces, part in taken.items()})
    found = Pieces(traced, fleet(), cast(Any, planner), lambda: False).briefly(np.inf, (1.9, 2))
    assert planner.asked == asked and (found is not None) == fits


@pytest.mark.parametrize("outside_s", [0.5, 2.5])
def test_pieces_that_have_no_room_where_they_may_be_cheapest_are_followed_by_more(outside_s: float) -> None:
    traced = _six_layers()
    made = synthesize_traced(traced, fleet=fleet(), recompute="off", microbatches=1)
    planner = Cut(made, {8: (0.9, 1)}, outside_s)
    found = Pieces(traced, fleet(), cast(Any, planner), lambda: False).briefly(2.0, (0.5, 2))
    assert planner.asked == ([2, 4, 8] if outside_s < 2 else [2])
    assert (found is not None) == (outside_s < 2)


class Elsewhere(Cut):
    """Plans that cost 2 s in one piece and 1 s in several."""

    thorough = False

    def __init__(self, plan: Plan, outside_s: float, content: bool) -> None:
        super().__init__(plan, {1: (0.9, 2), 2: (0.9, 1)}, outside_s)
        self.content = content

    def plan(self, traced: Traced, rival_s: float = np.inf, **options: Any) -> Plan | None:
        plan = super().plan(traced, rival_s, **options)
        cost_s = 2.0 if rewriting_of(traced).microbatches == 1 else 1.0
        if plan is None or rewriting_of(traced).recompute or cost_s >= rival_s:
            return None
        return plan.but(cost_s=cost_s, bound_s=cost_s, free_s=cost_s)

    def outgrown(self, traced: Traced) -> bool:
        return False


@pytest.mark.parametrize(
    ("outside_s", "content", "pieces"),
    [
        pytest.param(1.0, False, 2, id="half as much"),
        pytest.param(1.9, False, 1, id="hardly less"),
        pytest.param(1.0, True, 1, id="half as much, and nobody asks"),
    ],
)
def test_what_fits_is_changed_where_it_costs_far_less_on_devices_without_room_for_it(
    outside_s: float, content: bool, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.memory.in_pieces.SMALL", 0)
    monkeypatch.setattr(Ladder, "every", ())
    monkeypatch.setattr(EveryWay, "that_saves", lambda self, plan: None)
    traced = _six_layers()
    made = synthesize_traced(traced, fleet=fleet(), recompute="off", microbatches=1)
    planner = cast(Any, Elsewhere(made, outside_s, content))
    rungs = Ladder(traced, fleet(), RECOMPUTING, 1, planner, lambda: False)
    rungs.worth = WORTH
    cut = Pieces(traced, fleet(), planner, lambda: False)
    found = InPieces(rungs, cut, np.inf).best()
    assert found.rewriting.microbatches == pieces
    assert any("axes='auto' does that" in note for note in found.assumptions) == content


def _six_layers() -> Traced:
    step, args = layered(False, layers=6)
    return trace(step, *args)


def _says(what: bool) -> Any:
    def said(*args: Any) -> bool:
        return what

    return said


def _noted(method: Any, name: str, order: list[str]) -> Any:
    def noted(*args: Any) -> Any:
        order.append(name)
        return method(*args)

    return noted
