"""On two axes what keeps less comes first where hardly any program of the step as it is would fit."""

from __future__ import annotations

import pytest
from rewriting_cases import layered

from shardwright import Fleet, Plan, synthesize
from shardwright.ir.rewrites.rewriting import rewriting_of
from shardwright.ir.trace import Traced, trace
from shardwright.memory import in_pieces
from shardwright.memory.ladder import Ladder
from shardwright.planning import Planner
from shardwright.synth.memory.alive import most_alive


def fleet(memory_bytes: float) -> Fleet:
    kind = {
        "name": "k",
        "flops": "5 GFLOP/s",
        "memory_bandwidth": "5 GB/s",
        "memory": f"{memory_bytes:.0f} B",
    }
    node = {"devices": {"type": kind, "count": 2}, "link": {"bandwidth": "2 GB/s", "latency": "1 us"}}
    network = {"bandwidth": "100 MB/s", "latency": "30 us"}
    return Fleet.from_dict({"name": "mesh", "nodes": [node, node], "network": network})


def planned(monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, list[bool]]:
    """A plan where what is alive fills nearly all memory; of all that was planned, whether it keeps less."""
    step, arguments = layered(False, layers=16, width=8, batch=256)
    graph = trace(step, *arguments).graph
    assert len(graph.equations) > in_pieces.SMALL
    asked: list[bool] = []
    plan = Planner.plan

    def noted(self: Planner, traced: Traced, *args: float, **known: bool) -> Plan | None:
        asked.append(bool(rewriting_of(traced).recompute))
        return plan(self, traced, *args, **known)

    monkeypatch.setattr(Planner, "plan", noted)
    where = fleet(most_alive(graph) / 4 / 0.9)
    found = synthesize(step, *arguments, fleet=where, axes=2, microbatches=1, offload="off")
    return found, asked


def test_the_step_as_it_is_is_not_planned_where_hardly_any_program_would_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_pieces, "tolerance", lambda *_: 1e9)
    plan, asked = planned(monkeypatch)
    assert plan.fits and plan.rewriting.recompute and asked and all(asked)
    assert any("no program was searched" in note for note in plan.assumptions)


def test_what_takes_longer_is_planned_as_if_it_had_not_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_pieces, "tolerance", lambda *_: 0.0)
    plan, asked = planned(monkeypatch)
    assert asked[0] and not all(asked)
    monkeypatch.setattr(in_pieces, "_TAKEN", 1e-3)
    later, asked = planned(monkeypatch)
    assert not asked[0] and plan.fits and later.fits
    assert plan.cost_s == pytest.approx(later.cost_s, rel=1e-3)


def test_what_came_first_is_the_plan_where_nothing_later_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was forgotten once, and what the step as it is led to was the plan: a quarter dearer."""
    monkeypatch.setattr(in_pieces, "tolerance", lambda *_: 0.0)
    dearer, _ = planned(monkeypatch)
    briefly, first = Ladder.briefly, list[Plan]()

    def cheap(self: Ladder, base: Plan | None, *rival: float) -> Plan | None:
        plan = briefly(self, base, *rival)
        if base is not None or plan is None:
            return plan
        # Takes far longer than it should for what is computed again, and yet less than all that comes later.
        first.append(plan.but(cost_s=dearer.cost_s / 2, bound_s=0.0, again_s=dearer.cost_s))
        return first[-1]

    monkeypatch.setattr(Ladder, "briefly", cheap)
    plan, asked = planned(monkeypatch)
    assert first and not all(asked) and plan.cost_s == first[0].cost_s < dearer.cost_s
    assert plan.rewriting == first[0].rewriting
