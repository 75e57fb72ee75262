"""Two mesh axes beside the parts of a fleet on which these are one: single nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from grid_cases import arguments, fleet, train_step

import shardwright
from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet
from shardwright.cost.subfleet import subfleet
from shardwright.plan import Plan
from shardwright.synth.grid import choice
from shardwright.synth.grid.alternate import GridSearch
from shardwright.synth.grid.choice import GridChoosing
from shardwright.synth.grid.part import on_grid, on_one_axis
from shardwright.synth.grid.single import BesideSingle
from shardwright.synth.parts import candidates

#: Two nodes that have next to nothing to say to each other, one of them mixed.
APART = fleet(((40, 2),), ((20, 2), (10, 1)), network="20 kbit/s")

SAID = "two mesh axes are one"


def planned(where: Fleet, **options: Any) -> Plan:
    return shardwright.synthesize(train_step, *arguments(480, 64), fleet=where, axes=2, **options)


def with_memory(where: Fleet, *nbytes: int) -> Fleet:
    """With so many bytes on every device of each node."""

    def limited(kind: DeviceType, memory: int) -> DeviceType:
        return replace(kind, memory_bytes=memory, name=f"{kind.name}-{memory}")

    nodes = [
        replace(node, devices=tuple(limited(device, memory) for device in node.devices))
        for node, memory in zip(where.nodes, nbytes, strict=True)
    ]
    return replace(where, nodes=tuple(nodes))


def test_every_part_has_two_axes_or_one() -> None:
    parts = candidates(APART)
    two, one = on_grid(APART, parts), on_one_axis(APART, parts)
    assert two[0] == (0, 1, 2, 3, 4) and (0, 1) in one and (2, 3, 4) in one
    assert not set(two) & set(one) and set(two) | set(one) == set(parts)


def test_nodes_that_hardly_reach_each_other_are_planned_one_by_one() -> None:
    plan, both = planned(APART), planned(APART, devices="all")
    alone = [planned(subfleet(APART, some, "alone")) for some in ((0, 1), (2, 3, 4))]
    assert plan.used == (0, 1) and plan.unused
    assert plan.bound_s <= plan.cost_s == pytest.approx(min(each.cost_s for each in alone), rel=1e-9)
    assert plan.cost_s < both.cost_s and plan.gap <= 0.05
    assert plan.bound_s <= min(each.cost_s for each in (both, *alone))
    assert any(SAID in said for said in plan.assumptions)
    assert plan.verify(train_step, *arguments(480, 64)).ok


def test_a_node_that_has_the_memory_is_found() -> None:
    """What fits on both nodes has to cross the network between them; on the larger one it does not."""
    needed = max(planned(subfleet(APART, (0, 1), "alone")).memory_bytes)
    where = with_memory(APART, needed, needed // 3)
    plan = planned(where)
    assert plan.fits and plan.used == (0, 1)
    assert plan.cost_s == pytest.approx(planned(subfleet(where, (0, 1), "alone")).cost_s, rel=1e-9)
    assert plan.bound_s <= plan.cost_s and plan.gap <= 0.05


def test_without_time_for_single_nodes_the_bound_covers_them() -> None:
    """A plan on two axes is made first; what a node alone might do is then known by its products at least."""
    plan, alone = planned(APART, time_limit_s=1e-9), planned(subfleet(APART, (0, 1), "alone"))
    (said,) = [said for said in plan.assumptions if SAID in said]
    assert said.endswith("were not searched: the time limit came first")
    assert 0 < plan.bound_s <= alone.cost_s <= plan.cost_s


@pytest.mark.parametrize("part", [0.02, 0.5])
def test_where_nothing_fits_the_bound_is_of_single_nodes_too(part: float) -> None:
    """It is then about programs whatever their memory; some of the nodes are not even searched."""
    options: dict[str, Any] = {"recompute": "off", "microbatches": 1, "offload": "off"}
    alone = planned(subfleet(APART, (0, 1), "alone"), **options)
    taken = sum(planned(APART, devices="all").memory_bytes) / 5
    plan = planned(with_memory(APART, *[int(part * taken)] * 2), **options)
    assert not plan.fits
    assert plan.bound_s <= alone.cost_s * (1 + 1e-9)


def test_single_nodes_are_not_searched_where_two_axes_do_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.one_step.SMALL", 0)  # of small steps they are, whatever two axes do
    near = fleet(((40, 2),), ((20, 2), (10, 1)), network="400 Gbit/s")
    plan = shardwright.synthesize(train_step, *arguments(48_000), fleet=near, axes=2)
    assert plan.axes == 2 and plan.gap <= 0.1
    assert not any(SAID in said for said in plan.assumptions)


@pytest.mark.parametrize("rows", [6, 24, 48, 4_800])
def test_a_device_may_be_best_alone_where_little_is_to_be_done(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What starting kernels takes is no less on many devices: arithmetic by speed does not rule one out."""
    monkeypatch.setattr("shardwright.one_step.SMALL", 0)
    where = fleet(((20, 1),), ((10, 3),), ((10, 3),), network="100 Gbit/s")
    one, two = (
        shardwright.synthesize(train_step, *arguments(rows), fleet=where, axes=axes) for axes in (1, 2)
    )
    assert two.cost_s <= one.cost_s * (1 + 1e-9) and two.bound_s <= one.cost_s
    assert rows > 48 or one.used == two.used == (0,)


def test_alike_nodes_do_what_one_of_them_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node alone is not searched for, and costs no less, however quick its arithmetic might be."""
    monkeypatch.setattr(GridChoosing, "products_s", lambda self, members: 0.0)
    where = fleet(((40, 2),), ((40, 2),), network="20 kbit/s")
    plan = planned(where)
    assert not any(SAID in said for said in plan.assumptions)
    monkeypatch.setattr(BesideSingle, "_apart", property(lambda self: self._parts))
    searched = planned(where)
    assert any(SAID in said for said in searched.assumptions)
    assert searched.cost_s == pytest.approx(plan.cost_s, rel=1e-9)
    assert plan.bound_s <= planned(subfleet(where, (0, 1), "alone")).cost_s


def test_parts_without_room_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a plan that fits, a part of the fleet that is too small for any program says nothing."""
    bounded: set[tuple[int, int]] = set()
    bound = GridSearch.bound

    def noted(self: GridSearch, *args: Any, **options: Any) -> float:
        model = self._listed.model
        bounded.add((len(model.class_of), len(model.types)))
        return bound(self, *args, **options)

    monkeypatch.setattr(GridSearch, "bound", noted)
    # What arithmetic takes would rule out most parts; the one of equal nodes is planned first.
    monkeypatch.setattr(GridSearch, "arithmetic_s", lambda self: 1e-9)
    monkeypatch.setattr(choice, "products_s", lambda space, model, parts: [0.0] * len(parts))
    where = fleet(((40, 2),), ((20, 2),), ((20, 2),), network="400 Gbit/s")
    as_it_is: dict[str, Any] = {"axes": 2, "recompute": "off", "microbatches": 1}
    free = shardwright.synthesize(train_step, *arguments(48_000), fleet=where, **as_it_is)
    assert bounded == {(6, 2), (4, 2), (4, 1)}
    alike = subfleet(where, (2, 3, 4, 5), "alike")
    needed = max(shardwright.synthesize(train_step, *arguments(48_000), fleet=alike, **as_it_is).memory_bytes)
    bounded.clear()
    tight = with_memory(where, needed // 50, needed, needed)
    plan = shardwright.synthesize(train_step, *arguments(48_000), fleet=tight, **as_it_is)
    assert plan.fits and bounded == {(6, 2), (4, 1)}
    assert free.bound_s * (1 - 1e-9) <= plan.bound_s <= plan.cost_s


def test_single_nodes_without_room_are_not_searched() -> None:
    where = fleet(((40, 2),), ((20, 2),), ((20, 2),), network="400 Gbit/s")
    free = shardwright.synthesize(train_step, *arguments(48_000), fleet=where, axes=2)
    assert any(SAID in said for said in free.assumptions)
    tight = with_memory(where, *[max(free.memory_bytes)] * 3)
    plan = shardwright.synthesize(train_step, *arguments(48_000), fleet=tight, axes=2)
    assert plan.fits and plan.cost_s == pytest.approx(free.cost_s, rel=1e-9)
    assert not any(SAID in said for said in plan.assumptions) and plan.bound_s <= plan.cost_s
