"""Programs that rents find: the same list whatever the memory, from the cheapest to smaller ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from synth_cases import attention, fleet

from shardwright.cost.bill import bill, seconds
from shardwright.cost.memory.liveness import Peaks, footprint, peak_bytes
from shardwright.cost.model import CostModel
from shardwright.ir.program import Program, verify
from shardwright.ir.trace import trace
from shardwright.synth import segments
from shardwright.synth.apart import apart
from shardwright.synth.freely import freely
from shardwright.synth.memory.budgets import Limits
from shardwright.synth.memory.rented import rented
from shardwright.synth.programs.judge import Judge
from shardwright.synth.segments import Fear, Segmented
from shardwright.synth.shares.turns import Billed
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

SPEEDS = (4, 2, 1)


def test_the_list_does_not_depend_on_the_memory_and_reaches_from_cheap_to_small() -> None:
    function, args = attention()
    graph = trace(function, *args).graph
    space = Space(graph)

    def listed(memory: str) -> tuple[list[Billed], float]:
        model = CostModel(fleet(SPEEDS, memory=memory))
        free = freely(graph, space, model, Timer())
        return list(rented(free.turns, free.found, free.renting(Limits.of(model)))), free.found.cost_s

    # The best program takes 150 kB on its fullest device: memory is short, more and more.
    some, free_s = listed("120 kB")
    for memory in ("80 kB", "60 kB"):
        assert [(r.program, r.ratios) for r in listed(memory)[0]] == [(r.program, r.ratios) for r in some]
    model = CostModel(fleet(SPEEDS))
    costs = [seconds(bill(each.program, graph, model), model, each.ratios) for each in some]
    taken = [float(footprint(r.program, graph).peak(np.array(r.ratios)).sum()) for r in some]
    for each in some:
        verify(each.program, graph)
    assert min(costs) == pytest.approx(free_s, rel=1e-2)
    assert min(taken) < 0.95 * taken[int(np.argmin(costs))]


def test_once_memory_makes_a_plan_no_dearer_no_further_programs_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, args = attention()
    graph = trace(function, *args).graph
    model = CostModel(fleet(SPEEDS, memory="80 kB"))
    free = freely(graph, Space(graph), model, Timer())
    assert free.best.cost_s > 1.1 * free.found.cost_s
    listed = list(rented(free.turns, free.found, free.renting(Limits.of(model))))
    assert len(listed) > 2

    def tried(dearer: float) -> int:
        """Programs of the list that are given ratios of their own, if each then costs so much more."""
        costs: list[float] = []

        def costing(*given: Any, feared: Fear | None, **options: Any) -> Segmented | None:
            if not feared:
                return None
            costs.append(free.found.cost_s * (1 + dearer) * 0.998 ** len(costs))
            start = given[3]
            return Segmented(start.program, start.ratios, costs[-1], (), Peaks((0, 0, 0)), fits=True)

        monkeypatch.setattr("shardwright.synth.apart.segmented", costing)
        renting = free.renting(Limits.of(model))
        best = apart(free.turns, free.best, free.found, lambda: renting, larger=True)
        assert best is not None and best[0].cost_s == costs[-1]
        return len(costs)

    assert tried(5e-4) == 1
    assert tried(0.05) == len(listed)


def test_what_is_too_dear_once_its_ratios_are_rounded_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "_LOOKS", 1)
    function, args = attention()
    graph = trace(function, *args).graph
    looks: list[Program] = []

    def look(program: Program, ratios: Sequence[float]) -> tuple[int, ...]:
        looks.append(program)
        return (1,) * len(ratios)

    model = CostModel(fleet(SPEEDS, memory="80 kB"))
    free = freely(graph, Space(graph), model, Timer(), look=look)
    judge = free.turns.judge
    some = [*rented(free.turns, free.found, free.renting(Limits.of(model)))]

    def cut_apart(each: Billed, worth_s: float) -> Segmented | None:
        looks.clear()
        given = graph, model, judge, each
        return segments.segmented(*given, short=True, worth_s=worth_s, feared=Fear(len(model.counts)))

    each, found = next((each, found) for each in some if (found := cut_apart(each, math.inf)) is not None)
    assert looks
    assert cut_apart(each, found.cost_s * (1 - 1e-9)) is None and not looks


def watched(memory: str, times: float) -> tuple[list[Billed], Callable[[Billed, Fear], int], int]:
    """Programs that rents find, how often one is looked at beside what is feared, and classes of devices.

    A program is worth `times` what the best costs without a limit of memory.
    """
    function, args = attention()
    graph = trace(function, *args).graph
    looks: list[Program] = []

    def look(program: Program, ratios: Sequence[float]) -> tuple[int, ...]:
        looks.append(program)
        return peak_bytes(program, graph, ratios)

    model = CostModel(fleet(SPEEDS, memory=memory))
    free = freely(graph, Space(graph), model, Timer(), look=look)

    def looked_at(each: Billed, fear: Fear) -> int:
        looks.clear()
        judge = Judge(graph, model, look)  # which has looked at nothing
        given = graph, model, judge, each
        segments.segmented(*given, short=True, worth_s=free.found.cost_s * times, feared=fear)
        return len(looks)

    some = [*rented(free.turns, free.found, free.renting(Limits.of(model)))]
    return some, looked_at, len(model.counts)


def test_what_one_look_says_of_the_model_goes_for_the_next_program() -> None:
    some, looked_at, classes = watched("60 kB", 1.5)
    fear = Fear(classes)
    first, *others = [each for each in some if looked_at(each, Fear(classes))]
    assert others
    assert looked_at(first, fear) == 1
    # The model is right about it to the byte: what does not fit by the model is not looked at any more.
    assert all(1 <= times <= 1.05 for times in fear.times)
    assert not any(looked_at(each, fear) for each in others)


def test_what_costs_and_takes_as_much_as_what_was_looked_at_is_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Fear, "learn", lambda self, part: None)  # nor does any other reason speak against it
    some, looked_at, classes = watched("45 kB", math.inf)
    fears = [Fear(classes) for _ in some]
    first = [looked_at(each, fear) for each, fear in zip(some, fears, strict=True)]
    assert any(first)
    assert not any(looked_at(each, fear) for each, fear in zip(some, fears, strict=True))
    for fear in fears:
        fear._looked_at.clear()
    assert any(looked_at(each, fear) for each, fear in zip(some, fears, strict=True))
