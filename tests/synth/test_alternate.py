"""Program, ratios, cost and bound belong together; the bound is below everything; equal runs are equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from seeded import printed
from synth_cases import FLEETS, STEPS, fleet, model, ratios, sgd, shape, space, traced

from shardwright.cost.bill import bill, seconds
from shardwright.cost.memory.liveness import peak_bytes
from shardwright.cost.model import CostModel
from shardwright.ir.program import Move, Program, verify
from shardwright.ir.trace import trace
from shardwright.synth import alternate
from shardwright.synth.alternate import Synthesis, synthesize
from shardwright.synth.fallback import fitting, fullest
from shardwright.synth.freely import freely
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.search.priced import SpaceSolver, bound, solve
from shardwright.synth.shares.bounds import certify
from shardwright.synth.shares.turns import Candidate, starts
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer


@cache
def synthesis(step: str, name: str) -> Synthesis:
    return synthesize(traced(step).graph, space(step), model(name), Timer())


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("step", STEPS)
def test_what_is_returned_belongs_together(step: str, name: str) -> None:
    graph, costs, found = traced(step).graph, model(name), synthesis(step, name)
    verify(found.program, graph)
    assert seconds(bill(found.program, graph, costs), costs, found.ratios) == found.cost_s
    assert 0 < found.bound_s <= found.cost_s
    assert sum(found.ratios) == pytest.approx(1.0) and min(found.ratios) >= 0
    assert found.searches > 0 and found.expanded > 0 and found.search_gap == 0
    assert found.notes == ()


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("step", STEPS)
def test_no_start_is_better(step: str, name: str) -> None:
    costs, found = model(name), synthesis(step, name)
    for shares in starts(costs):
        at = tuple(float(shares[c]) for c in costs.class_of)
        assert found.cost_s <= solve(space(step), Prices.at(costs, at)).seconds * (1 + 1e-9)


@pytest.mark.parametrize("step", STEPS)
@settings(max_examples=25)
@given(data=st.data(), name=st.sampled_from(sorted(FLEETS)))
def test_certificate(step: str, data: st.DataObject, name: str) -> None:
    """No program of the space, at any ratios, those with idle devices included, is cheaper than the bound."""
    graph, costs = traced(step).graph, model(name)
    at = data.draw(ratios(len(costs.class_of)))
    prices = Prices.at(costs, at)
    program = emit(space(step), solve(space(step), prices).assignment, prices)
    paid = seconds(bill(program, graph, costs), costs, at)
    assert synthesis(step, name).bound_s <= paid * (1 + 1e-9)
    assert tightest(step, name) <= paid * (1 + 1e-9)


@cache
def tightest(step: str, name: str) -> float:
    """The bound of a certificate that is never content."""
    listed, solver = PriceList(model(name)), SpaceSolver(space(step))
    loose = solver.bound(Prices.floors(listed))
    return certify(solver, listed, loose, synthesis(step, name).cost_s, enough=0.0, most=6)


def test_the_certificate_is_tight_where_an_all_to_all_cannot_be_avoided() -> None:
    """Experts: tokens lie with the batch, weights with the expert, and both are too large to be sent."""

    def loss(p: Any, x: Any) -> Any:
        # A running sum over experts keeps tokens with the batch until here.
        tokens = lax.cumsum(jnp.tanh(x @ p["wide"]), 1)
        return (jnp.einsum("becd,edf->becf", tokens, p["experts"]) ** 2).mean()

    params = {"wide": shape(32, 32), "experts": shape(8, 32, 1024)}
    graph = trace(sgd(loss), params, shape(32, 8, 16, 32)).graph
    costs = CostModel(fleet((2,) * 8, bandwidth="100 MB/s", latency="1 us"))
    found = synthesize(graph, Space(graph), costs, Timer())
    loose = bound(Space(graph), Prices.floors(costs))
    assert any(isinstance(i, Move) and i.kind == "all_to_all" for i in found.program.instructions)
    assert loose < 0.9 * found.cost_s
    assert found.bound_s >= 0.95 * found.cost_s


def test_certificates_are_never_looser_than_the_first_bound() -> None:
    for step in STEPS:
        found, costs = synthesis(step, "three"), model("three")
        loose = min(bound(space(step), Prices.floors(costs)), found.cost_s)
        assert loose <= tightest(step, "three") <= found.cost_s
        assert found.bound_s >= loose


def test_starts_are_shares() -> None:
    for name in FLEETS:
        costs = model(name)
        for shares in starts(costs):
            assert costs.counts @ shares == pytest.approx(1.0) and (shares > 0).all()
    assert len(starts(model("alike"))) == 1


def test_faster_devices_get_more() -> None:
    found = synthesis("mlp", "three")
    assert found.ratios[0] > found.ratios[1] > found.ratios[2] > 0


def test_slow_links_leave_slow_devices_out() -> None:
    speeds, slow = (8.0, 1.0), {"bandwidth": "1 MB/s", "latency": "10 ms"}
    costs = CostModel(fleet(speeds, **slow))
    found = synthesize(traced("mlp").graph, space("mlp"), costs, Timer())
    # At this distance nothing is worth sending: the step costs what the slowest replica takes, or less.
    assert found.cost_s < 10e-3


def test_a_plan_that_fits_is_preferred_and_its_absence_is_said() -> None:
    graph = traced("mlp").graph
    ample = synthesis("mlp", "three")
    assert max(peak_bytes(ample.program, graph, ample.ratios)) < 4e9
    tight = CostModel(fleet((4, 2, 1), memory="10 kB"))
    found = synthesize(graph, space("mlp"), tight, Timer())
    assert any("memory" in note for note in found.notes)
    # Less memory than the plan takes on its fullest device in any order of its instructions.
    least = int(max(peak_bytes(ample.program, graph, ample.ratios)) * 0.9)
    snug = CostModel(fleet((4, 2, 1), memory=f"{least} B"))
    fitting = synthesize(graph, space("mlp"), snug, Timer())
    assert not fitting.notes
    assert max(peak_bytes(fitting.program, graph, fitting.ratios)) <= least
    assert fitting.cost_s > ample.cost_s


@pytest.mark.parametrize(("rival", "tried"), [(1.15, False), (1.3, True)])
def test_what_does_not_fit_gets_several_ratios_beside_a_plan_that_leaves_room(
    rival: float, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Candidate] = []
    monkeypatch.setattr(alternate, "apart", lambda turns, best, *given, **how: asked.append(best))
    rivals: list[float] = []
    judged = alternate.judged

    def watched(turns: Any, best: Any, found: Any, renting: Any, rival_s: float, **how: Any) -> Any:
        rivals.append(rival_s)
        return judged(turns, best, found, renting, rival_s, **how)

    monkeypatch.setattr(alternate, "judged", watched)
    tight = CostModel(fleet((4, 2, 1), memory="10 kB"))
    free = freely(traced("mlp").graph, space("mlp"), tight, Timer())
    found = alternate.within_memory(free, rival * free.found.cost_s)
    assert fullest(found, tight) > 1
    assert bool(asked) == tried and not any(each.fits for each in asked)
    # What fits at more than the rival may be cheaper cut apart: it is searched for as if there were none.
    assert rivals == [math.inf if tried else rival * free.found.cost_s]


@pytest.mark.parametrize("step", ["mlp", "attention", "normed", "labelled"])
def test_the_bound_is_the_optimum_where_shares_do_not_matter(step: str) -> None:
    """On one device there is one program price, and the bound is it."""
    costs = CostModel(fleet((2.0,)))
    found = synthesize(traced(step).graph, space(step), costs, Timer())
    assert found.ratios == (1.0,)
    assert found.bound_s == pytest.approx(found.cost_s, rel=1e-9)


def test_floors_are_below_prices_everywhere() -> None:
    costs, steps = model("slow-links"), space("attention")
    floors = Prices.floors(costs)
    for at in ((1 / 3, 1 / 3, 1 / 3), (0.0, 0.5, 0.5), (1.0, 0.0, 0.0)):
        prices = Prices.at(costs, at)
        for use in steps.uses:
            low, high = floors.table(use.factor), prices.table(use.factor)
            assert (low <= np.where(np.isinf(high), np.inf, high * (1 + 1e-12) + 1e-15)).all()
    assert bound(steps, floors) > 0


@pytest.mark.parametrize("step", ["mlp", "attention", "normed"])
def test_alike_devices_are_planned_by_one_search(step: str) -> None:
    """What is best at the floors costs no more at even ratios: nothing else need be searched for."""
    found, costs = synthesis(step, "alike"), model("alike")
    assert found.searches == 1 and found.search_gap == 0.0
    even = solve(space(step), Prices.at(costs, found.ratios))
    assert found.cost_s == pytest.approx(even.seconds, rel=1e-9)
    assert found.bound_s == pytest.approx(found.cost_s, rel=1e-9)


_SCRIPT = """
import jax, jax.numpy as jnp
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.ir.text import format_program
from shardwright.ir.trace import trace
from shardwright.synth.alternate import synthesize
from shardwright.synth.timer import Timer
from shardwright.synth.space.space import Space
from synth_cases import FLEETS, attention, normed, sgd

(_, (a, x)), (_, (n, _)) = attention(), normed()

def loss(p, x):
    for layer in p["layers"]:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in layer["qkv"])
        w = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
        x = x + jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", w, v), layer["out"])
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["up"].T
    return (x ** 2).mean()

layer = {**a, "up": jax.ShapeDtypeStruct((16, 64), jnp.float32)}
graph = trace(sgd(loss), {"layers": [layer, layer]}, x).graph
for name in ("three", "slow-links"):
    found = synthesize(graph, Space(graph), CostModel(FLEETS[name]()), Timer())
    print(format_program(found.program, graph))
    print(found.ratios, found.cost_s, found.bound_s, found.expanded, found.searches)
"""


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    first = printed(_SCRIPT, "0")
    assert first.count("program {") == 2
    assert first == printed(_SCRIPT, "4242")


def test_on_one_device_no_program_is_looked_at_twice() -> None:
    """Its only program, in any order of its instructions, is looked at; then baselines."""
    graph, small = traced("mlp").graph, CostModel(fleet((2.0,), memory="130 kB"))
    looks: list[Program] = []

    def look(program: Program, ratios: Sequence[float]) -> tuple[int, ...]:
        looks.append(program)
        return (131_000,)

    found = synthesize(graph, space("mlp"), small, Timer(), look=look)
    assert found.program in looks and found.notes
    searched = list(looks)
    assert fitting(graph, space("mlp"), small, found, Timer(), look) is found
    assert len(looks) > len(searched), "baselines were looked at"
    assert all(looks.count(program) == 1 for program in looks)
