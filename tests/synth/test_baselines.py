"""Baselines: what they are, and that they compute the step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from baseline_cases import STEPS, arguments, draw, mlp, slow, trained

from shardwright import Baseline, Baselines, Fleet, InputError, PlanError, baselines, synthesize
from shardwright.backends.verify import verify_program
from shardwright.cost.bill import bill, seconds
from shardwright.cost.drift import comparing_s
from shardwright.cost.memory.liveness import peak_bytes
from shardwright.cost.model import CostModel
from shardwright.cost.subfleet import subfleet
from shardwright.ir.graph import Value
from shardwright.ir.placement import R, Shard
from shardwright.ir.program import Compute, Move, Program
from shardwright.ir.redundant import RESYNC_EVERY
from shardwright.ir.rules import Signature
from shardwright.ir.trace import Traced, trace
from shardwright.synth.baselines import Workshop
from shardwright.synth.programs.just_in_time import just_in_time
from shardwright.synth.recipes import RECIPES
from shardwright.synth.space.roles import Roles, roles
from shardwright.synth.space.space import Space


@cache
def traced(name: str) -> Traced:
    step, args = STEPS[name]()
    return trace(step, *args)


@cache
def made(name: str) -> Baselines:
    """All baselines of a step on three unequal devices."""
    graph = traced(name).graph
    return Workshop(graph, Space(graph), CostModel(slow(30, 20, 10))).all()


def named(name: str, baseline: str) -> Baseline:
    return next(b for b in made(name) if b.name == baseline)


def held(name: str, baseline: str) -> dict[str, Any]:
    """Placements of the arguments by name."""
    return dict(zip(traced(name).graph.input_names, named(name, baseline).program.inputs, strict=True))


def exchanged(program: Program) -> Counter[str]:
    return Counter(i.kind for i in program.all_instructions() if isinstance(i, Move) and i.strategy)


def found_roles(name: str) -> tuple[Roles, dict[Value, str]]:
    graph = traced(name).graph
    return roles(graph, Space(graph).units), dict(zip(graph.inputs, graph.input_names, strict=True))


# ---------------------------------------------------------------------------------------------------
# They compute the step


@pytest.mark.parametrize("recipe", [recipe.name for recipe in RECIPES])
@pytest.mark.parametrize("name", STEPS)
def test_baselines_compute_the_step(name: str, recipe: str) -> None:
    if recipe in made(name).left_out:
        assert recipe == "expert parallelism" and name != "mixture"
        return
    baseline = named(name, recipe)
    _, args = STEPS[name]()
    result = verify_program(traced(name), baseline.program, baseline.ratios, jax.tree.leaves(args))
    assert result.ok, result


@pytest.mark.parametrize("name", STEPS)
def test_parts_of_the_fleet_compute_the_step(name: str) -> None:
    _, args = STEPS[name]()
    alone = [b for b in made(name) if b.name.endswith("alone")]
    assert [b.name for b in alone] == ["slow-30 alone", "slow-20 alone", "slow-10 alone"]
    baseline = alone[1]
    assert baseline.ratios == (0.0, 1.0, 0.0) and baseline.devices == ("n0.d1",)
    assert verify_program(traced(name), baseline.program, baseline.ratios, jax.tree.leaves(args)).ok
    assert baseline.memory_bytes[0] == baseline.memory_bytes[2] == 0 < baseline.memory_bytes[1]


@pytest.mark.parametrize("name", STEPS)
def test_prices_are_those_of_the_model(name: str) -> None:
    graph = traced(name).graph
    for baseline in made(name):
        model = CostModel(baseline.fleet)
        shares = [r for r, b in zip(baseline.ratios, baseline.memory_bytes, strict=True) if b]
        assert baseline.cost_s == seconds(bill(baseline.program, graph, model), model, shares)
        checksums_s, exchange_s = comparing_s(baseline.program, graph, model)
        compared_s = (checksums_s.max() + exchange_s) / RESYNC_EVERY
        assert compared_s < baseline.iteration_s <= baseline.cost_s * (1 + 1e-9) + compared_s
        assert baseline.fits and len(baseline.memory_bytes) == 3
        assert sum(baseline.ratios) == pytest.approx(1)


# ---------------------------------------------------------------------------------------------------
# They are what their names say


def test_roles_are_found_from_use() -> None:
    found, names = found_roles("mixture")
    assert [names[v] for v in found.inputs] == ["arg2"]
    assert [names[v] for v in found.parameters] == [
        f"params['{n}']" for n in ("bias", "down", "router", "up")
    ]
    assert [names[v] for v in found.optimizer] == [
        f"momentum['{n}']" for n in ("bias", "down", "router", "up")
    ]
    assert [names[v] for v in found.expert_parameters] == ["params['down']", "params['up']"]
    assert [names[v] for v in found.contracted] == ["params['down']", "params['router']", "params['up']"]
    found, names = found_roles("layers")
    assert len(found.stacked) >= 4, "two layers' weights each, in the forward and the backward loop"
    assert found.expert_parameters == ()


def test_a_mask_for_the_batch_has_the_batch() -> None:
    found, _ = found_roles("layers")
    (mask,) = [e for e in traced("layers").graph.equations if e.primitive == "lt"]
    assert found.batch[mask.outputs[0]] == 0
    assert mask.outputs[0] not in found.weights


def test_frozen_arguments_and_scalars_are_no_batch() -> None:
    def step(w: Any, table: Any, rate: Any, x: Any, y: Any) -> Any:
        loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ table @ w - y) ** 2))(w)
        return w - rate * g, loss

    graph = trace(step, draw(8, 4), draw(6, 8), np.float32(0.1), draw(10, 6), draw(10, 4)).graph
    found = roles(graph, Space(graph).units)
    assert found.inputs == graph.inputs[3:]
    assert found.parameters == graph.inputs[:2]
    assert found.optimizer == ()


@pytest.mark.parametrize("name", STEPS)
def test_data_parallelism_sums_gradients_and_nothing_else(name: str) -> None:
    for kind in ("even", "proportional"):
        baseline = named(name, f"{kind} data parallelism")
        assert exchanged(baseline.program).keys() == {"all_reduce"}
        for argument, placement in held(name, baseline.name).items():
            assert placement == (R if argument.startswith(("params", "momentum")) else Shard(0))
    assert len(set(named(name, "even data parallelism").ratios)) == 1
    assert named(name, "proportional data parallelism").ratios == pytest.approx((1 / 2, 1 / 3, 1 / 6))


@pytest.mark.parametrize(
    ("baseline", "params", "exchanges"),
    [
        ("ZeRO-1", "whole", {"all_reduce", "all_gather"}),
        ("ZeRO-2", "whole", {"all_reduce", "all_gather", "reduce_scatter"}),
        ("ZeRO-3", "cut", {"all_reduce", "all_gather", "reduce_scatter"}),
        ("fully sharded", "cut", {"all_reduce", "all_gather", "reduce_scatter"}),
    ],
)
def test_state_is_cut_as_far_as_it_should_be(baseline: str, params: str, exchanges: set[str]) -> None:
    for argument, placement in held("mlp", baseline).items():
        if argument.startswith("params"):
            assert isinstance(placement, Shard) == (params == "cut")
        else:
            assert isinstance(placement, Shard)
    program = named("mlp", baseline).program
    assert exchanged(program).keys() == exchanges
    if params == "whole":
        assert exchanged(program)["all_gather"] == 3, "each new parameter once"
    if "reduce_scatter" in exchanges:
        assert exchanged(program)["reduce_scatter"] == 3, "each gradient once"


def test_sharded_layers_are_gathered_one_at_a_time() -> None:
    program = named("layers", "fully sharded").program
    assert exchanged(program)["all_gather"] >= 4
    outside = [i for i in program.instructions if isinstance(i, Move) and i.kind == "all_gather"]
    names = traced("layers").graph.input_names
    assert not any(i.value < len(names) for i in outside), "no stack of layers is gathered whole"


def test_parameters_are_gathered_anew_for_the_backward_pass() -> None:
    def deep(p: Any, x: Any) -> Any:
        for w in p:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    step, params = trained(deep), [draw(64, 64, seed=i) for i in range(6)]
    graph = trace(step, *arguments(params, draw(12, 64))).graph
    workshop = Workshop(graph, Space(graph), CostModel(slow(10, 10, 10)))
    zero3, kept = (
        workshop.make(next(r for r in RECIPES if r.name == n)) for n in ("ZeRO-3", "fully sharded")
    )
    assert exchanged(kept.program)["all_gather"] == 6
    assert 10 <= exchanged(zero3.program)["all_gather"] <= 11, "the first needs none, the last is there still"
    assert max(zero3.memory_bytes) < max(kept.memory_bytes) - 64 * 64 * 4, "a whole matrix less at least"
    assert zero3.cost_s > kept.cost_s


@pytest.mark.parametrize("name", STEPS)
def test_tensor_parallelism_cuts_weights_and_no_batch(name: str) -> None:
    baseline = named(name, "tensor parallelism")
    assert exchanged(baseline.program).keys() == {"all_reduce"}
    found, names = found_roles(name)
    places = held(name, baseline.name)
    assert all(places[names[v]] == R for v in found.inputs)
    cut = {names[v] for v in found.contracted if isinstance(places[names[v]], Shard)}
    assert cut >= {names[v] for v in found.contracted} - {"params['router']"}


def test_experts_are_cut_and_tokens_travel() -> None:
    baseline = named("mixture", "expert parallelism")
    places = held("mixture", baseline.name)
    for argument in ("params['up']", "params['down']", "momentum['up']", "momentum['down']"):
        assert places[argument] == Shard(0)
    assert places["arg2"] == Shard(0)
    assert exchanged(baseline.program).keys() == {"all_reduce", "all_to_all"}


def test_what_does_not_apply_is_left_out_with_a_reason() -> None:
    left_out = made("mlp").left_out
    assert left_out.keys() == {"expert parallelism", "node n0 alone"}
    assert left_out["node n0 alone"] == "is the whole fleet"
    nothing = baselines(lambda x: x.sum(), np.float32(1), fleet=slow(1, 2))
    assert "could be the batch" in nothing.left_out["ZeRO-3"]
    assert [b.name for b in nothing] == ["slow-1 alone", "slow-2 alone"]

    def sgd(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    plain = baselines(sgd, draw(8, 8), draw(12, 8), fleet=slow(2, 2))
    assert "no optimizer state" in plain.left_out["ZeRO-1"]
    assert "ZeRO-3" in [b.name for b in plain]


def test_equal_nodes_are_planned_once() -> None:
    step, args = mlp()
    found = baselines(step, *args, fleet=slow(3, 1, nodes=2))
    alone = {b.name: b for b in found if b.name.endswith("alone")}
    assert list(alone) == ["node n0 alone", "slow-3 alone", "slow-1 alone"]
    assert alone["slow-3 alone"].devices == ("n0.d0", "n1.d0")
    assert found.left_out["node n1 alone"] == "is like node n0 alone"


def test_parts_of_a_fleet() -> None:
    whole = slow(3, 2, 1, nodes=2)
    part = subfleet(whole, [1, 2, 4], "part")
    assert [d.type.name for d in part.devices] == ["slow-2", "slow-1", "slow-2"]
    assert [(n.name, n.link is None) for n in part.nodes] == [("n0", False), ("n1", True)]
    assert part.network == whole.network
    assert subfleet(whole, [3, 4], "node").network is None
    assert Fleet.from_dict(part.to_dict()) == part


def test_gathers_and_scatters_keep_their_meaning_when_they_move() -> None:
    graph = trace(lambda w, v, x: ((x @ w) @ v) @ w, draw(8, 8), draw(8, 8), draw(12, 8)).graph
    w, v, _ = graph.inputs
    cut, batch = Shard(0), Shard(0)
    whole = (Move("all_gather", w.index, cut, R, "exact"), Move("all_gather", v.index, cut, R, "exact"))
    rows_of = Signature((batch, R), (batch,))
    products = tuple(Compute(e.index, rows_of) for e in graph.equations)
    program = Program((cut, cut, batch), (*whole, *products), (batch,))
    once = just_in_time(program, graph, {w, v}, again=False)
    assert _order(once) == ["gather 0", "0", "gather 1", "1", "2"]
    again = just_in_time(program, graph, {w, v}, again=True)
    assert _order(again) == ["gather 0", "0", "gather 1", "1", "gather 0", "2"]
    third, matrix = 1 / 3, 4 * 8 * 8
    state = (2 * matrix + 4 * 12 * 8) * third
    rows = 4 * 12 * 8 * third
    # Both whole matrices at a time, or only one; and what the product before and after it has: two products
    # between exchanges are compiled together, and the last one's result has its place from the beginning.
    assert peak_bytes(once, graph, (third,) * 3)[0] == int(state + 2 * matrix + 3 * rows)
    assert peak_bytes(again, graph, (third,) * 3)[0] == int(state + matrix + 2 * rows)


def _order(program: Program) -> list[str]:
    return [
        f"gather {i.value}" if isinstance(i, Move) else str(i.equation) if isinstance(i, Compute) else "?"
        for i in program.instructions
    ]


# ---------------------------------------------------------------------------------------------------
# The interface


def test_the_function_relates_them_to_a_plan() -> None:
    step, args = mlp()
    fleet = slow(3, 1)
    plan = synthesize(step, *args, fleet=fleet, axes=1)
    found = baselines(step, *args, fleet=fleet, plan=plan, axes=1)
    assert isinstance(found, list)
    for baseline in found:
        assert baseline.relative == baseline.cost_s / plan.cost_s
    best = found.best_fitting()
    assert best is not None and best.cost_s == min(b.cost_s for b in found)
    none_fits = Baselines([replace(b, fits=False) for b in found])
    assert none_fits.best_fitting() is None
    with pytest.raises(InputError, match="axes: is 3"):
        baselines(step, *args, fleet=fleet, axes=3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="another fleet"):
        baselines(step, *args, fleet=slow(3, 2), plan=plan)


def test_memory_limits_decide_what_fits() -> None:
    step, args = mlp()
    roomy = {b.name: b for b in baselines(step, *args, fleet=slow(3, 1))}
    limit = max(roomy["ZeRO-3"].memory_bytes)
    assert limit < max(roomy["slow-3 alone"].memory_bytes)
    tight = baselines(step, *args, fleet=slow(3, 1, memory=f"{limit} B"))
    assert {b.name: b.fits for b in tight} == {
        name: max(b.memory_bytes) <= limit for name, b in roomy.items()
    }
    best = tight.best_fitting()
    assert best is not None and best.fits
