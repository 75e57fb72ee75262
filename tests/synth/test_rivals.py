"""What is found does not depend on how often a search is taken up, nor on what else there is to beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
import pytest
from synth_cases import attention, fleet

from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.liveness import Peaks, peak_bytes
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.ir.program import Program
from shardwright.ir.trace import trace
from shardwright.synth import alternate, freely
from shardwright.synth.alternate import synthesize
from shardwright.synth.memory import lean
from shardwright.synth.programs.judge import AMPLE
from shardwright.synth.shares.turns import Candidate
from shardwright.synth.space.space import Space
from shardwright.synth.subfleets import Choosing
from shardwright.synth.timer import Timer


@cache
def step() -> tuple[Graph, Space, float]:
    """A step, its space, and the peak of the largest device with room to spare."""
    function, args = attention()
    graph = trace(function, *args).graph
    space = Space(graph)
    found = synthesize(graph, space, CostModel(fleet((4, 2, 1))), Timer())
    return graph, space, float(max(peak_bytes(found.program, graph, found.ratios)))


def limited(nbytes: float) -> Fleet:
    """Three unlike devices with so much memory each."""
    return with_memory(fleet((4, 2, 1)), nbytes)


def with_memory(whole: Fleet, nbytes: float) -> Fleet:
    (node,) = whole.nodes
    kinds = tuple(replace(kind, memory_bytes=int(nbytes)) for kind in node.devices)
    return replace(whole, nodes=(replace(node, devices=kinds),))


def choosing(part: float) -> Choosing:
    graph, space, most = step()
    return Choosing(graph, space, limited(part * most), Timer())


@pytest.mark.parametrize("part", [pytest.param(0.8, marks=pytest.mark.full), 0.55])
def test_a_search_may_be_taken_up_again_and_rivals_lose_nothing(part: float) -> None:
    once = choosing(part).below(math.inf)
    search = choosing(part)
    brief = search.below(math.inf, briefly=True)
    again = search.below(math.inf)
    assert once is not None and brief is not None and again is not None
    assert once.found.memory.peak(np.array(once.found.ratios)).max() <= part * step()[2] * (1 + 1e-9)
    assert again.found.cost_s == pytest.approx(once.found.cost_s, rel=1e-9)
    assert again.found.bound_s == pytest.approx(once.found.bound_s, rel=1e-9)
    assert brief.found.bound_s <= once.found.cost_s and search.crowded[0] > 1
    # What is cheaper than a rival is found all the same; a rival below the bound ends the search.
    rivalled = choosing(part).below(1.1 * once.found.cost_s)
    assert rivalled is not None and rivalled.found.cost_s == pytest.approx(once.found.cost_s, rel=1e-9)
    assert choosing(part).below(0.99 * once.found.bound_s) is None


@pytest.mark.parametrize("full", [AMPLE - 0.02, AMPLE + 0.05])
def test_only_what_fits_amply_is_not_looked_at(full: float) -> None:
    graph, space, most = step()
    looked: list[Program] = []

    def look(program: Program, ratios: Sequence[float]) -> tuple[int, ...]:
        looked.append(program)
        return peak_bytes(program, graph, ratios)

    found = synthesize(graph, space, CostModel(limited(most / full)), Timer(), look=look)
    assert [program is found.program for program in looked] == ([True] if full > AMPLE else [])


@pytest.mark.parametrize("part", [0.45, 0.62])
def test_what_hardly_fits_is_looked_at_only_where_that_is_all_there_is(
    part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freely, "FEW_CHOICES", 0)
    graph, space, most = step()
    looked: list[Program] = []

    def look(program: Program, ratios: Sequence[float]) -> tuple[int, ...]:
        looked.append(program)
        return peak_bytes(program, graph, ratios)

    def search() -> Choosing:
        return Choosing(graph, space, limited(part * most), Timer(), look=look)

    glanced = search()
    brief = glanced.below(math.inf, briefly=True, glance=True)
    assert brief is not None and glanced.unfinished
    assert bool(looked) == (part > 0.5)
    # Beside a rival that is nearly as good as what there is without a limit, nothing is made to fit either.
    assert glanced.below(1.02 * glanced.free_s) is None
    assert bool(looked) == (part > 0.5)
    once, again = search().below(math.inf), glanced.below(math.inf)
    assert once is not None and again is not None and looked
    assert again.found.cost_s == pytest.approx(once.found.cost_s, rel=1e-9)


@pytest.mark.parametrize(
    ("large", "times", "briefly"), [(False, 1.25, True), (True, 1.25, False), (True, 1.05, True)]
)
def test_briefly_a_large_step_hands_on_less_only_where_it_nearly_fits(
    large: bool, times: float, briefly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, space, most = step()
    tried: list[Candidate] = []

    def noted(several: object, found: Candidate, peaks: Peaks) -> tuple[Candidate, Peaks]:
        tried.append(found)
        return found, peaks

    monkeypatch.setattr(alternate, "SMALL", 0 if large else len(graph.equations))
    monkeypatch.setattr(lean, "_handing_on", noted)

    def look(program: Program, ratios: Sequence[float]) -> tuple[int, ...]:
        return (int(times * most),) * len(ratios)

    search = Choosing(graph, space, limited(most), Timer(), look=look)
    assert search.below(math.inf, briefly=True) is not None and search.unfinished
    assert bool(tried) == briefly
    if not briefly:
        assert search.below(math.inf) is not None and tried


@pytest.mark.parametrize("over", [1.45, 1.6])
def test_briefly_what_the_model_has_need_far_too_much_is_not_looked_at(over: float) -> None:
    graph, space, _ = step()
    alike = fleet((2, 2))
    most = max(peak_bytes(synthesize(graph, space, CostModel(alike), Timer()).program, graph, (0.5, 0.5)))
    looked: list[Program] = []

    def look(program: Program, ratios: Sequence[float]) -> tuple[int, ...]:
        looked.append(program)
        return (2 * int(most),) * 2

    with mock.patch.object(freely, "FEW_CHOICES", 0):
        search = Choosing(graph, space, with_memory(alike, most / over), Timer(), look=look)
        assert search.below(math.inf, briefly=True) is not None and search.unfinished
        assert bool(looked) == (over < 1.5)
        assert search.below(math.inf) is not None and looked
