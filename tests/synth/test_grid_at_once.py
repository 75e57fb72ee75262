"""What two mesh axes do not search for: what cannot be made to fit, or cannot beat a rival."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_grid_memory import fleet, planned

from shardwright.cost.grid.model import GridModel
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.memory.device_memory import Looking
from shardwright.synth.grid.alternate import GridSearch
from shardwright.synth.grid.choice import GridChoosing
from shardwright.synth.grid.pricing import GridPriceList
from shardwright.synth.grid.turns import GridTurns
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

MODULE = "shardwright.synth.grid.alternate."


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ...]]:
    """The ratios from which the best program memory aside was searched for; all steps are large."""
    noted: list[tuple[float, ...]] = []
    take = GridTurns.take

    def noting(self: GridTurns, ratios: tuple[float, ...], **rest: Any) -> Any:
        noted.append(ratios)
        return take(self, ratios, **rest)

    monkeypatch.setattr(GridTurns, "take", noting)
    for name, value in (("SMALL", 0), ("_SCARCE", 0.0), ("_SCARCE_ALIKE", 0.0), ("_FAR_TOO_LARGE", 1.0)):
        monkeypatch.setattr(MODULE + name, value)
    return noted


def search_in(graph: Graph, memory_bytes: float, **shape: Any) -> GridSearch:
    where = fleet(memory_bytes, **shape)
    listed = GridPriceList(GridModel(CostModel(where)))
    nodes = tuple(len(node.devices) for node in where.nodes)
    return GridSearch(graph, Space(graph, nodes), listed, Timer(), look=Looking(graph))


@pytest.mark.parametrize("speeds", [None, (50, 25)])
def test_what_is_far_too_large_is_made_to_fit_at_once(
    taken: list[tuple[float, ...]], monkeypatch: pytest.MonkeyPatch, speeds: tuple[int, ...] | None
) -> None:
    free = planned(1 << 30)
    graph, memory_bytes = free.step().graph, 0.9 * max(free.memory_bytes)
    taken.clear()
    found = search_in(graph, memory_bytes, speeds=speeds).plan()
    assert taken and max(found.memory.bytes) <= memory_bytes  # it is of use, and so is more effort
    monkeypatch.setattr(MODULE + "_FAR_TOO_LARGE", np.inf)
    usual = search_in(graph, memory_bytes, speeds=speeds).plan()
    assert max(usual.memory.bytes) <= memory_bytes
    assert found.cost_s <= usual.cost_s * (1 + 1e-9) and found.bound_s <= usual.cost_s
    assert found.bound_s == pytest.approx(usual.bound_s, rel=0.02)


def test_what_cannot_beat_a_rival_within_memory_is_not_searched_for_without(
    taken: list[tuple[float, ...]],
) -> None:
    free = planned(1 << 30)
    graph, memory_bytes = free.step().graph, 0.84 * max(free.memory_bytes)
    fitting_s = search_in(graph, memory_bytes).plan().cost_s
    taken.clear()
    search = search_in(graph, memory_bytes)
    briefly = search.plan(briefly=True)
    assert briefly.dearer and max(briefly.memory.bytes) > memory_bytes
    beside = search.plan(0.999 * fitting_s)
    assert not taken
    # Nothing was proven that is not so, and what was found is no better than it is.
    assert max(briefly.bound_s, beside.bound_s) <= fitting_s
    assert max(beside.memory.bytes) > memory_bytes or beside.cost_s >= 0.999 * fitting_s
    assert search.free_s == pytest.approx(briefly.cost_s) and search.crowded > 1


def test_a_part_is_not_planned_where_a_step_that_does_less_costs_as_much_as_a_rival() -> None:
    free = planned(1 << 30)
    graph, where = free.step().graph, fleet(1 << 30)
    members = tuple(range(len(where.devices)))
    rival_s = 1.5 * free.cost_s
    for least_s, rules_out in ((rival_s, True), (0.9 * rival_s, False)):
        choosing = GridChoosing(graph, where, Timer(), [members], least_s={members: least_s})
        found = choosing.below(rival_s)
        assert (found is None) == rules_out
        assert found is None or found.found.cost_s == pytest.approx(free.cost_s)
        assert choosing.bound_s <= free.cost_s  # what another step costs bounds nothing here


def test_a_bound_is_sharpened_where_that_may_halve_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    free = planned(1 << 30)
    graph, where = free.step().graph, fleet(1 << 30, speeds=(50, 25))
    members = tuple(range(len(where.devices)))
    asked: list[float] = []
    sharpened = GridSearch.sharpened

    def noted(self: GridSearch, wanted_s: float) -> float:
        asked.append(wanted_s)
        return sharpened(self, wanted_s)

    monkeypatch.setattr(GridSearch, "sharpened", noted)
    choosing = GridChoosing(graph, where, Timer(), [members])
    found = choosing.below()
    assert found is not None and choosing.free_s == pytest.approx(found.found.cost_s)
    # A plan that memory makes ten times as dearer keeps nine tenths of it as a gap, whatever the bound.
    assert choosing.sharpened(10 * choosing.free_s) == choosing.bound_s and not asked
    monkeypatch.setattr(choosing.parts[0], "bound_s", 0.1 * choosing.free_s)
    assert choosing.bound_s <= choosing.sharpened(choosing.free_s) <= choosing.free_s and asked
