"""Plans with several ratios: when they win, that they run, and that the bound covers them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from synth_cases import fleet, shape

import shardwright
from shardwright.backends.reference import ReferenceExecutable
from shardwright.cost.bill import bill, seconds
from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.liveness import peak_bytes
from shardwright.cost.model import CostModel
from shardwright.ir.errors import PlanError, ProgramError
from shardwright.ir.placement import OwnRatios, parse_placement
from shardwright.ir.program import Program, own_ratios, verify
from shardwright.ir.text import parse_program
from shardwright.ir.ties import cut_by, stretches
from shardwright.ir.trace import trace
from shardwright.synth import alternate, freely, segments
from shardwright.synth.memory import within
from shardwright.synth.memory.budgets import Limits
from shardwright.synth.memory.least import LeastRent
from shardwright.synth.memory.rented import rented
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.segments import apart_s, kinds_of
from shardwright.synth.shares.bounds import Certificate
from shardwright.synth.shares.turns import Candidate
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

WIDTH, LAYERS, BATCH = 64, 4, 128


def adam(params: list[Any], m: list[Any], v: list[Any], x: Any) -> tuple[Any, ...]:
    """A step of Adam on a chain of products."""

    def loss_of(params: list[Any]) -> Any:
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    m = [0.9 * a + 0.1 * g for a, g in zip(m, gradients, strict=True)]
    v = [0.99 * a + 0.01 * g * g for a, g in zip(v, gradients, strict=True)]
    params = [p - 1e-3 * a / (jnp.sqrt(b) + 1e-8) for p, a, b in zip(params, m, v, strict=True)]
    return params, m, v, loss


def arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(LAYERS)]
    zeros = [np.zeros_like(w) for w in weights]
    return weights, zeros, zeros, rng.normal(size=(BATCH, WIDTH)).astype(np.float32)


def odd_couple(fast_memory: str, big_memory: str, big_bandwidth: str = "98 MB/s") -> Fleet:
    """A fast device with little memory, and a slow one with much."""
    device = {"name": "fast", "flops": "0.152 GFLOP/s", "memory_bandwidth": "220 MB/s", "memory": fast_memory}
    big = {"name": "big", "flops": "0.030 GFLOP/s", "memory_bandwidth": big_bandwidth, "memory": big_memory}
    link = {"bandwidth": "12 MB/s", "latency": "10 us"}
    node = {"devices": [{"type": device}, {"type": big}], "link": link}
    return Fleet.from_dict({"name": "odd couple", "nodes": [node]})


@cache
def plan(several: bool) -> shardwright.Plan:
    made = odd_couple("430 kB", "3900 kB")
    with pytest.MonkeyPatch.context() as patch:
        if not several:
            patch.setattr(alternate, "apart", lambda *_, **__: None)
            patch.setattr(freely.Free, "at_no_cost", None)
        return shardwright.synthesize(
            adam, *arguments(), fleet=made, devices="all", axes=1, recompute="off", microbatches=1
        )


def test_a_slow_device_with_much_memory_holds_more_state_than_it_computes() -> None:
    one, two = plan(False), plan(True)
    (own,) = own_ratios(two.program).values()
    assert one.fits and not own_ratios(one.program)
    assert two.fits and two.cost_s < 0.9 * one.cost_s
    assert own.shares[1] > 2 * two.ratios[1], "the big one has more of the state than it computes"
    assert 0.9 * two.cost_s < two.bound_s <= two.cost_s


def test_memory_bandwidth_says_who_updates() -> None:
    """Where nothing is short: an update takes as long as its bytes, a product as its operations."""
    made = odd_couple("1 GB", "1 GB", "2 GB/s")
    found = shardwright.synthesize(adam, *arguments(), fleet=made, devices="all", axes=1)
    (own,) = own_ratios(found.program).values()
    assert found.ratios[0] > 0.8 and own.shares == (0.5, 0.5)
    assert found.search_gap <= found.gap < 0.05


@pytest.mark.parametrize("briefly", [True, False])
def test_what_fits_with_several_ratios_at_no_cost_is_found_before_anything_dearer(
    briefly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, model = trace(adam, *arguments()).graph, CostModel(odd_couple("500 kB", "3900 kB"))
    free, again = [freely.freely(graph, Space(graph), model, Timer()) for _ in range(2)]
    rents: list[LeastRent] = []
    monkeypatch.setattr(LeastRent, "search", lambda self: rents.append(self) or self.best)
    # A rival that costs no more than the step does without a limit ends the search before that.
    alternate.within_memory(free, 0.99 * free.found.cost_s, briefly=briefly)
    assert "at_no_cost" not in vars(free)
    rents.clear()
    found = alternate.within_memory(free, briefly=briefly)
    assert own_ratios(found.program) and not rents and not found.dearer
    assert found.memory.peak(np.array(found.ratios))[0] <= 500e3
    assert found.bound_s <= found.cost_s <= 1.001 * free.found.cost_s
    monkeypatch.setattr(freely.Free, "at_no_cost", None)
    other = alternate.within_memory(again, briefly=briefly)
    assert other.cost_s > 1.1 * found.cost_s if briefly else bool(rents)


def test_what_rents_make_far_dearer_than_a_rival_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, model = trace(adam, *arguments()).graph, CostModel(fleet((4, 1), memory="400 kB"))
    space = Space(graph)

    def looks(rival_s: float) -> tuple[int, float]:
        """At programs; and what the rents' first one costs."""
        looked, costs = list[Program](), list[float]()

        def look(program: Program, ratios: Sequence[float]) -> tuple[int, ...]:
            looked.append(program)
            return peak_bytes(program, graph, ratios)

        class Noted(LeastRent):
            def search(self) -> Candidate:
                found = super().search()
                costs.append(found.cost_s)
                return found

        monkeypatch.setattr(within, "LeastRent", Noted)
        free = freely.freely(graph, space, model, Timer(), look=look)
        renting = free.renting(Limits.of(model))
        within.judged(free.turns, free.best, free.found, lambda: renting, rival_s)
        return len(looked), costs[0]

    several, cost_s = looks(math.inf)
    far_s = cost_s / within.FAR_DEARER
    assert looks(0.99 * far_s)[0] == 1 < looks(1.01 * far_s)[0] <= several


def test_what_all_devices_together_have_no_room_for_is_given_no_ratios_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which a linear program would say as well, of every program and within any memory."""
    traced = trace(adam, *arguments())
    graph, space, large = traced.graph, Space(traced.graph), set[bool]()
    for memory in range(100, 401, 20):
        model = CostModel(fleet((4, 1), memory=f"{memory} kB"))
        free = freely.freely(graph, space, model, Timer())
        judge = free.turns.judge
        for each in (free.best, *islice(rented(free.turns, free.found, free.renting(Limits.of(model))), 4)):
            given = graph, model, judge, each

            def best(given: Any = given) -> tuple[Any, ...] | None:
                made = segments.segmented(*given, short=True, worth_s=math.inf)
                return None if made is None else (made.program, made.ratios, made.cost_s)

            said = segments._too_large(each.memory, model, judge, judge.budgets)
            large.add(said)
            with monkeypatch.context() as patch:
                found = best()
                patch.setattr(segments, "_too_large", lambda *_: False)
                assert best() == found and not (said and found)
    assert large == {True, False}


def test_it_runs_and_comes_back_from_its_file(tmp_path: Path) -> None:
    two, args = plan(True), arguments()
    two.verify(adam, *args)
    got = jax.tree.leaves(two.compile(adam, backend="reference")(*args))
    for a, b in zip(got, jax.tree.leaves(jax.jit(adam)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    path = tmp_path / "plan.json"
    two.save(path)
    again = shardwright.Plan.load(path)
    assert again == two and own_ratios(again.program) == own_ratios(two.program)
    assert parse_program(two.text()) == two.program
    told = json.loads(path.read_text())
    told["program"]["own_ratios"]["1"].append(0.25)
    path.write_text(json.dumps(told))
    with pytest.raises(PlanError, match="ratios 1 are not 2 that add up to 1"):
        shardwright.Plan.load(path)
    with pytest.raises(ProgramError, match="which nothing says"):
        parse_placement("S(0)@2")


def test_no_pair_of_ratios_is_cheaper_than_the_bound() -> None:
    """Every program of a small step, its state cut by ratios of its own, on a grid of pairs of ratios."""
    graph = trace(
        lambda w, m, x: (w - 0.1 * (0.9 * m + x.T @ (x @ w)), 0.9 * m + x.T @ (x @ w)),
        *(shape(48, 48), shape(48, 48), shape(64, 48)),
    ).graph
    space, model = Space(graph), CostModel(fleet((4, 1)))
    listed, solver = PriceList(model), SpaceSolver(space)
    bound_s = Certificate(solver, listed, solver.bound(Prices.floors(listed))).reach(np.inf)
    least, tried = np.inf, 0
    for ratios in ((0.5, 0.5), (0.8, 0.2), (1.0, 0.0)):
        prices = Prices.at(model, ratios)
        for assignment, _ in itertools.islice(SpaceSolver(space, stages=()).in_order(prices), 80):
            program = emit(space, assignment, prices)
            found = stretches(program, graph)
            items = bill(program, graph, model)
            kinds = kinds_of(found, program, graph, items)
            alone_s = apart_s(graph, model, program, ratios, items)
            for other in ((0.5, 0.5), (0.3, 0.7), (0.0, 1.0)):
                own = {cut: OwnRatios(1, other) for cut, number in found.of.items() if kinds[number]}
                split = cut_by(program, graph, own)
                verify(split, graph)
                cost_s = seconds(bill(split, graph, model), model, ratios)
                assert alone_s <= cost_s * (1 + 1e-9)
                least = min(least, cost_s)
                tried += bool(own)
    assert tried > 20
    assert bound_s <= least < np.inf
    assert bound_s > 0.5 * least, "it says something"


def test_from_stretches_by_some_ratios_to_stretches_by_others() -> None:
    text = """
        program {{
          ratios @1: 0.0 1.0
          in  0 %0 S(0)
          0: %0 S({}){} = all_to_all.exact %0 S(0)
          1: %0 R = all_gather.exact %0 S({}){}
          out 0 %0 R
        }}
        """
    x = np.arange(24.0, dtype=np.float32).reshape(6, 4)
    traced, model = trace(lambda x: x, x, state={}), CostModel(fleet((4, 1)))
    recut, turned = (parse_program(text.format(d, by, d, by)) for d, by in ((0, "@1"), (1, "")))
    for program in (recut, turned):
        verify(program, traced.graph)
    (got,) = ReferenceExecutable(traced, recut, (1.0, 0.0))(x)
    assert np.array_equal(got, x)
    # All on one device: nothing is sent from dimension to dimension, and everything from cut to cut.
    costs = [seconds(bill(p, traced.graph, model)[:1], model, (1.0, 0.0)) for p in (recut, turned)]
    assert costs[0] > costs[1] > 0
