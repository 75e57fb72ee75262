"""Nodes on which nothing costs less than on others: they are left out, and nothing else changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from test_subfleets import FAST, SLOW, fleet, node, problem

from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.subfleet import subfleet
from shardwright.synth import bounding
from shardwright.synth.alternate import synthesize as search
from shardwright.synth.part import Part, Promising
from shardwright.synth.parts import candidates
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.subfleets import Choosing
from shardwright.synth.timer import Timer

BETWEEN = {"bandwidth": "1 MB/s", "latency": "1 us"}
LATE = {"bandwidth": "1 MB/s", "latency": "1 ms"}
#: The strong node costs least, or the whole fleet; or the nodes cost less but have no room for the step.
FLEETS = {
    "strong": lambda: fleet(node(5, 5), node(1, 1), network=SLOW),
    "whole": lambda: fleet(node(5, 5), node(4, 4), network=FAST),
    "between": lambda: fleet(node(5, 5), node(4, 4), node(3, 3), network=BETWEEN),
    "full": lambda: fleet(node(5, 5, memory="2.4 kB"), node(4, 4, memory="2.4 kB"), network=LATE),
}


def none(*_: Any) -> None:
    """No part is compared with others."""


def weaker(where: Fleet, like: Promising | None = None) -> list[tuple[Part, Part]]:
    """Parts that are left out, and the parts that are better."""
    parts = Choosing(*problem(), where, Timer(), like=like).parts
    return [(part, part.stronger) for part in parts if part.stronger is not None]


@pytest.mark.parametrize("where", FLEETS)
def test_plans_and_bounds_are_those_with_all_parts(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FLEETS[where]()
    choosing = Choosing(*problem(), whole, Timer())
    found = choosing.below(math.inf)
    monkeypatch.setattr(bounding, "find_weaker", none)
    other = Choosing(*problem(), whole, Timer())
    wanted = other.below(math.inf)
    assert found is not None and wanted is not None
    assert weaker(whole) == []
    assert found.members == wanted.members and found.found.program == wanted.found.program
    assert found.found.cost_s == wanted.found.cost_s
    assert found.found.bound_s == pytest.approx(wanted.found.bound_s, rel=1e-9)
    assert [some for some, _ in found.unused(whole)] == [some for some, _ in wanted.unused(whole)]
    cost_s = found.found.cost_s
    assert choosing.sharpened(cost_s) == pytest.approx(other.sharpened(cost_s), rel=1e-9)


@pytest.mark.parametrize("where", FLEETS)
def test_every_program_costs_no_less(where: str) -> None:
    whole = FLEETS[where]()
    pairs = weaker(whole)
    assert len(pairs) == len(whole.nodes) - 1
    for part, strong in pairs:
        assert len(part.members) == len(strong.members) == 2 and strong.stronger is None
        costs = [
            search(*problem(), CostModel(subfleet(whole, each.members, "part")), Timer()).cost_s
            for each in (part, strong)
        ]
        assert costs[0] >= costs[1] * (1 - 1e-9)
        assert part.bound_s >= strong.bound_s > 0 and costs[0] >= part.bound_s * (1 - 1e-9)


def test_a_part_without_room_has_a_bound_once_somebody_asks() -> None:
    """Beside a plan that fits nobody does; then, or before all else, the bounds are the same."""
    whole = FLEETS["full"]()
    choosing, eager = Choosing(*problem(), whole, Timer()), Choosing(*problem(), whole, Timer())
    assert eager.outgrown, "its nodes would be cheaper"
    wanted = eager.below(math.inf)
    found = choosing.below(math.inf)
    assert found is not None and wanted is not None
    outside = [part for part in choosing.parts if part.outside]
    assert len(outside) == 2 and all(part.impossible and part.bound_s == 0 for part in outside)
    assert found.found.program == wanted.found.program
    assert found.found.bound_s == wanted.found.bound_s > 0
    assert found.unused(whole) == wanted.unused(whole)
    assert choosing.promising == eager.promising, "which asks"
    assert [part.bound_s for part in outside] == [part.bound_s for part in eager.parts if part.outside]
    assert all(0 < part.bound_s < found.found.cost_s for part in outside)


def test_a_node_that_is_better_at_something_is_a_part_of_its_own() -> None:
    assert weaker(fleet(node(5, 5), node(1, 1)))
    quick = node(1, 1) | {"link": {"bandwidth": "800 GB/s", "latency": "50 ns"}}
    assert not weaker(fleet(node(5, 5), quick)), "its link is"
    assert not weaker(fleet(node(5, 5, memory="1 GB"), node(1, 1, memory="2 GB"))), "its memory is larger"
    assert not weaker(fleet(node(5, 5), node(1, 1, 1))), "it has more devices"
    pairs = weaker(fleet(node(5, 5), node(1, 2)))
    assert all(len(part.members) == 1 for part, _ in pairs), "its devices are not alike"
    streams = node(1, 1)
    streams["devices"][0]["type"]["memory_bandwidth"] = "20 MB/s"
    streams["devices"][1]["type"]["memory_bandwidth"] = "20 MB/s"
    assert not weaker(fleet(node(5, 5), streams)), "its memory is quicker"


def test_kernels_that_cost_more_make_up_for_one_that_costs_less() -> None:
    """A launch is quicker there, which is felt by no program on the whole."""
    slow = node(1, 1)
    for device in slow["devices"]:
        device["type"]["launch"] = "1 ns"
    assert weaker(fleet(node(5, 5), slow))
    # As quick otherwise, it is the better one.
    alike = node(5, 5)
    for device in alike["devices"]:
        device["type"] |= {"launch": "1 ns", "name": "quicker"}
    assert not [part for part, _ in weaker(fleet(node(5, 5), alike)) if part.members == (2, 3)]


def test_the_favourite_is_compared_with_none() -> None:
    whole = FLEETS["strong"]()
    like = Promising(candidates(whole), (2, 3), {})
    assert [part.members for part, _ in weaker(whole)] == [(2, 3)]
    assert weaker(whole, like) == []


@pytest.mark.parametrize("above", [1.0 + 1e-6, 1.02, 1.2])
@pytest.mark.parametrize("where", ["strong", "whole", "between"])
def test_a_part_that_turns_out_to_be_ruled_out_ends_no_search_for_others(
    where: str, above: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of a weaker node rises with that of the strong one, beyond the rival, before its turn."""
    whole, bounds = FLEETS[where](), SpaceSolver.bounds
    nodes = [members for members in candidates(whole) if len(members) == 2]
    wanted = Choosing(*problem(), whole, Timer(), parts=nodes).below(math.inf)
    assert len(nodes) > 1 and wanted is not None
    # First bounds are rough where tables are large.
    monkeypatch.setattr(SpaceSolver, "bounds", lambda *these: 0.1 * bounds(*these))
    found = Choosing(*problem(), whole, Timer(), parts=nodes).below(wanted.found.cost_s * above)
    assert found is not None and found.members == wanted.members
    assert found.found.cost_s == pytest.approx(wanted.found.cost_s, rel=1e-9)
