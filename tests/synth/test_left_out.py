"""Parts of a fleet on which nothing is made to fit: the plan, its bound and its reasons all the same."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from synth_cases import traced
from test_subfleets import fleet, node, problem

from shardwright.cost.fleet import Fleet
from shardwright.ir.graph import Graph
from shardwright.ir.rewrites.recompute import Stretch
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.memory import rivals
from shardwright.synth import freely, subfleets
from shardwright.synth.freely import Free
from shardwright.synth.part import Promising
from shardwright.synth.parts import candidates, unused
from shardwright.synth.space.space import Space
from shardwright.synth.subfleets import Choosing
from shardwright.synth.timer import Timer

#: Between nodes, so quick that the whole fleet and two of its nodes cost about the same.
BETWEEN = {"bandwidth": "1 MB/s", "latency": "1 us"}


def no(graph: Graph) -> bool:
    """Whether a graph has few equations: none has."""
    return False


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are planned as large ones are."""
    monkeypatch.setattr(freely, "FEW_CHOICES", 0)
    monkeypatch.setattr(subfleets, "few_equations", no)


def three_nodes(memory: str = "1 GB") -> Fleet:
    nodes = (node(5, 5, memory=memory), node(3, 3, 3, memory=memory), node(1, 1, memory=memory))
    return fleet(*nodes, network=BETWEEN)


def choosing(where: Fleet, like: Promising | None = None, timer: Timer | None = None) -> Choosing:
    return Choosing(*problem(), where, timer or Timer(), like=like)


def test_a_part_that_costs_far_more_than_a_rival_memory_aside_is_not_made_to_fit() -> None:
    plain = choosing(three_nodes()).below(math.inf)
    assert plain is not None and plain.found.bound_s < (1 - 1e-3) * plain.found.cost_s
    # No bound rules the whole fleet out, but several ratios save less than that.
    rival_s = plain.found.bound_s * (1 + 1e-6)
    search = choosing(three_nodes())
    assert search.below(rival_s) is None
    whole = search.parts[0]
    assert whole.free_s > subfleets.SEVERAL * rival_s and whole.found is None
    assert whole.bound_s < rival_s, "the bound is that of its programs all the same"


def test_what_may_be_changed_is_made_to_fit_where_it_costs_least() -> None:
    usual, search = choosing(three_nodes()), choosing(three_nodes())
    plain = usual.below(math.inf)
    brief = search.below(math.inf, briefly=True, glance=True)
    assert plain is not None and brief is not None
    planned = [part for part in search.parts if part.found is not None]
    assert [part.members for part in planned] == [min(usual.parts, key=lambda part: part.free_s).members]
    assert brief.found.bound_s <= plain.found.cost_s
    # Taken up again, it is as good as if it had been planned at once.
    again = search.below(math.inf)
    assert again is not None and again.found.cost_s == pytest.approx(plain.found.cost_s, rel=1e-9)
    assert again.found.bound_s == pytest.approx(plain.found.bound_s, rel=1e-9)


def test_with_a_time_limit_nothing_is_put_off() -> None:
    plain = choosing(three_nodes()).below(math.inf)
    search = choosing(three_nodes(), timer=Timer(limit_s=1000.0))
    brief = search.below(math.inf, briefly=True, glance=True)
    assert plain is not None and brief is not None
    # The whole fleet comes first then, and what is better on a part of it all the same.
    assert search.parts[0].fits and len(brief.members) < len(three_nodes().devices)
    assert brief.found.cost_s == pytest.approx(plain.found.cost_s, rel=1e-9)


def test_where_less_to_do_was_no_cheaper_nothing_is_looked_for() -> None:
    where = three_nodes()
    plain = choosing(where).below(math.inf)
    assert plain is not None
    free_s = {part.members: part.free_s for part in choosing_done(where) if part.free_s < math.inf}
    like = Promising(candidates(where), plain.members, free_s)
    search = choosing(where, like)
    assert search.below(min(free_s.values()) * (1 - 1e-6)) is None
    assert all(part.free_s == math.inf for part in search.parts)
    assert search.bound_s <= plain.found.cost_s
    # Beside a dearer rival the best part is planned.
    found = search.below(1.01 * plain.found.cost_s)
    assert found is not None and found.found.cost_s == pytest.approx(plain.found.cost_s, rel=1e-9)


def choosing_done(where: Fleet) -> list[subfleets.Tried]:
    search = choosing(where)
    search.below(math.inf)
    return list(search.parts)


def test_why_devices_are_left_out_on_which_nothing_was_made_to_fit() -> None:
    where = three_nodes()
    search = choosing(where)
    found = search.below(math.inf, briefly=True, glance=True)
    assert found is not None and len(found.members) < len(where.devices)
    assert any("memory aside" in why for _, why in found.unused(where))


@pytest.mark.parametrize(
    ("found", "impossible", "bound_s", "why"),
    [
        (None, False, 0.9, "no plan that uses them costs less than 900 ms: none was searched for"),
        (None, False, 1.1, "no plan that uses them costs less than 1100 ms"),
        ("a plan", False, 0.9, "no plan found that uses them fits into memory"),
        (None, True, 0.9, "no plan found that uses them fits into memory"),
    ],
)
def test_why_devices_are_left_out_of_which_no_plan_was_made(
    found: str | None, impossible: bool, bound_s: float, why: str
) -> None:
    """A bound may be too near to the plan's cost to be worth a search; the best plan does not fit here."""
    where, part = three_nodes(), partial(SimpleNamespace, fits=False, free_s=math.inf)
    left, *_ = (each.members for each in where.classes)
    members = tuple(d for d in range(len(where.devices)) if d not in left)
    best = part(members=members, bound_s=1.0, cost_s=1.0, found="it", impossible=False)
    whole = part(
        members=(*members, *left), bound_s=bound_s, cost_s=math.inf, found=found, impossible=impossible
    )
    assert dict(unused(where, best, [whole, best])) == {left: why}


def test_only_computing_again_does_more_of_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "few_equations", no)
    step, scan = traced("mlp"), traced("scanned")
    assert rivals.does_more(step, step)
    assert not rivals.does_more(rewritten(step, Rewriting(microbatches=2)), step)
    again = rewritten(step, Rewriting((Stretch("-", 0, 2, "nothing"),)))
    assert rivals.does_more(again, step)
    assert not rivals.does_more(step, again), "it does less than what computes some again"
    assert not rivals.does_more(scan, scan), "what a scan keeps may take longer than to compute it again"
    monkeypatch.undo()
    assert not rivals.does_more(step, step)


def test_what_is_changed_is_planned_first_where_the_step_would_cost_least() -> None:
    """Although it does not fit there as it is, and is planned elsewhere: what keeps less may fit."""
    where = fleet(node(50, memory="5 kB"), node(1, 1, memory="10 kB"), network=BETWEEN)
    search = choosing(where)
    found = search.below(math.inf, briefly=True, glance=True)
    assert found is not None and len(found.members) == 3
    quick = next(part for part in search.parts if part.members == (0,))
    assert quick.impossible and quick.bound_s < min(part.free_s for part in search.parts)
    assert search.outgrown and search.promising.favourite == (0,)
    # With room for it there, it is no other part's turn.
    roomy = choosing(three_nodes())
    assert roomy.below(math.inf) is not None and not roomy.outgrown
    assert roomy.promising.favourite == min(roomy.parts, key=lambda part: part.cost_s).members


def test_where_all_starts_agreed_a_similar_step_starts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subfleets, "SMALL", 0)
    where = three_nodes()

    def searches(made: Choosing) -> int:
        return sum(part.free.turns.searches for part in made.parts if part.free is not None)

    def search(case: str, like: Promising | None = None) -> tuple[Choosing, float]:
        graph = traced(case).graph
        made = Choosing(graph, Space(graph), where, Timer(), parts=[candidates(where)[0]], like=like)
        found = made.below(math.inf, briefly=True)
        assert found is not None
        return made, found.found.cost_s

    first, usual_s = search("scanned")
    assert first.promising.agreed == {candidates(where)[0]}
    again, cost_s = search("scanned", first.promising)
    assert searches(again) < searches(first) and cost_s == pytest.approx(usual_s, rel=1e-9)
    # Here they lead to programs that cost 5 % more or less.
    apart, least_s = search("attention")
    assert not apart.promising.agreed
    alike, cost_s = search("attention", apart.promising)
    assert searches(alike) == searches(apart) and cost_s == pytest.approx(least_s, rel=1e-9)
    _, dearer_s = search("attention", replace(apart.promising, agreed=first.promising.agreed))
    assert dearer_s > 1.01 * least_s


@pytest.mark.parametrize("saves", [True, False])
def test_a_part_that_is_dearer_is_made_to_fit_only_where_several_ratios_save_enough(
    saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = choosing(three_nodes())
    assert search.below(math.inf) is not None
    free_s = search.parts[0].free_s
    rival_s = free_s / (1 + (subfleets.SEVERAL - 1) / 2)
    enough_s = rival_s * (1 - subfleets.WORTH)
    monkeypatch.setattr(Free, "apart_s", enough_s * (1 - 1e-6 if saves else 1 + 1e-6))
    whole = [candidates(three_nodes())[0]]
    again = Choosing(*problem(), three_nodes(), Timer(), parts=whole)
    again.below(rival_s)
    assert (again.parts[0].found is not None) == saves


@pytest.mark.parametrize("agree", [True, False])
def test_where_all_starts_agreed_another_part_starts_once(
    agree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subfleets, "SMALL", 0)
    began: list[bool] = []

    def noted(*given: Any, starts_agree: bool, **options: Any) -> Free:
        began.append(starts_agree)
        return replace(freely.freely(*given, starts_agree=starts_agree, **options), agree=agree)

    monkeypatch.setattr(subfleets, "freely", noted)
    graph = traced("mlp").graph
    search = Choosing(graph, Space(graph), three_nodes(), Timer())
    assert search.below(math.inf) is not None
    assert len(began) > 1 and began == [False] + [agree] * (len(began) - 1)
