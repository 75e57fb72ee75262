"""Stages on two mesh axes: every node has its layers, and its devices share out the pieces of the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting_cases import layered
from stages_cases import apart, on_nodes, staged

from shardwright import Plan, synthesize
from shardwright.backends.reference import ReferenceExecutable
from shardwright.backends.relay import Course, spread_out
from shardwright.backends.verify import verify_program
from shardwright.cost.grid.model import GridModel
from shardwright.cost.grid.prices import GridShares, GridStack
from shardwright.cost.lines import beats_of
from shardwright.cost.model import CostModel
from shardwright.cost.stages import Crews, layer_s, relays_s
from shardwright.cost.subfleet import subfleet
from shardwright.cost.traffic import traffic
from shardwright.ir.pairs import paired
from shardwright.ir.placement import Partial, R, Shard
from shardwright.ir.registry import rule_of
from shardwright.ir.rewrites.pieces import NotInPiecesError
from shardwright.ir.rewrites.rewriting import rewriting_of
from shardwright.ir.rules import Signature, allows, letter_signature, on_axes
from shardwright.ir.segments import Relay, schedule
from shardwright.ir.stages import layers_of, relays
from shardwright.ir.trace import Traced, trace
from shardwright.memory import staging
from shardwright.synth.space.space import Space

NODES = (1, 3)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return on_nodes()


def shares(parts: list[int]) -> list[float]:
    return [part / sum(parts) for part in parts]


# -- programs ------------------------------------------------------------------------------------------


def test_layers_are_cut_over_nodes_and_pieces_in_them() -> None:
    """Both or neither; what is summed over the batch is then a sum over the devices of a node."""
    step, args = layered(scan=True)
    graph = staged(trace(step, *args), 8).graph
    _, backward = (e for e in graph.equations if layers_of(e))
    rule, layers = rule_of(backward), layers_of(backward)
    assert layers is not None
    whole, cut = Space(graph, NODES).signatures(backward)
    assert {*whole.ins, *whole.outs} == {R}
    across, within = on_axes(cut)
    assert across == letter_signature(rule, backward, "l")
    assert within.outs == (Shard(0, 8), Partial("sum"), Partial("sum"))
    assert allows(rule, backward, whole) and allows(rule, backward, cut)
    same = Signature((R,) * len(cut.ins), (R,) * len(cut.outs))
    for one, other in ((across, same), (same, within), (across, across), (within, across)):
        wrong = paired(one, other, NODES)
        assert wrong is None or not allows(rule, backward, wrong)
    # On one axis pieces are not cut, and the batch is not dealt out in pieces.
    assert not allows(rule, backward, within)
    assert Space(graph).units.of(backward.outputs[0])[0] == 1


@settings(max_examples=3 if settings().max_examples <= 100 else 20)
@given(st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any))
def test_programs_compute_what_the_step_does(plan: Plan, parts: list[int]) -> None:
    """At any ratios: nodes without layers, and devices without pieces."""
    step, args = layered(scan=True, layers=5, width=128)
    assert plan.traced is not None
    run = ReferenceExecutable(plan.traced, plan.program, shares(parts))
    wanted = jax.tree.leaves(jax.jit(step)(*args))
    for got, right in zip(run(*jax.tree.leaves(args)), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(right), rtol=2e-4, atol=2e-5)


def test_what_all_pieces_have_in_common_is_on_devices_without_any() -> None:
    """Such as the scales of norms, which the backward pass reads; a key for every row of the batch is not."""

    def step(w: Any, x: Any, keys: Any) -> Any:
        def layer(x: Any, row: Any) -> Any:
            w, number = row
            kept = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, (8,)))
            return jnp.tanh(x @ w["w"]) * jnp.exp(w["scale"]) * kept(keys), None

        def loss_of(w: Any) -> Any:
            return jnp.mean(jax.lax.scan(layer, x, (w, jnp.arange(4)))[0] ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss_of)(w))

    rng = np.random.default_rng(0)
    w = {"w": rng.normal(size=(4, 8, 8)), "scale": rng.normal(size=(4, 8))}
    w, x = jax.tree.map(np.float32, (w, rng.normal(size=(16, 8))))
    args = w, x, jax.random.split(jax.random.key(0), 16)
    slow = apart(((1e-4, 1e-4), (1e-4, 1e-4)), "10 Mbit/s")
    plan = synthesize(step, *args, fleet=slow, stages=4, axes=2, devices="all", recompute="off")
    assert plan.traced is not None
    graph = plan.traced.graph
    found = [layers_of(graph.equations[i.equation]) for i in plan.program.instructions if relays(i, graph)]
    assert any(layers is not None and None in layers.outs for layers in found)
    for ratios in ((0.5, 0.0, 0.25, 0.25), (0.25, 0.25, 0.0, 0.5)):
        assert verify_program(plan.traced, plan.program, ratios, jax.tree.leaves(args)).ok


# -- who has which piece when --------------------------------------------------------------------------


def goes_through(course: Course) -> bool:
    """Whether all pieces get there, if a device hands on one only when the one before it was taken."""
    place = {device: course.place(device) for device in course.turns}
    at, sent = dict.fromkeys(course.turns, 0), dict[int, int]()
    moved = True
    while moved:
        moved = False
        for device, turns in course.turns.items():
            if at[device] == len(turns) or device in sent:
                continue
            piece, stage = turns[at[device]], place[device]
            if stage:
                before = course.owners[stage - 1][piece]
                if sent.get(before) != piece:
                    continue
                del sent[before]
            at[device], moved = at[device] + 1, True
            if stage < len(course.owners) - 1:
                sent[device] = piece
    return all(at[device] == len(turns) for device, turns in course.turns.items())


@settings(max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=4, max_size=4).filter(any))
def test_no_device_waits_for_ever(plan: Plan, parts: list[int]) -> None:
    assert plan.traced is not None
    graph = plan.traced.graph
    for step in schedule(plan.program, graph).steps:
        if isinstance(step, Relay):
            equation, signature = graph.equations[step.compute.equation], step.compute.signature
            course = Course.of(equation, signature, shares(parts))
            assert all(sorted(owners) == list(owners) and -1 not in owners for owners in course.owners)
            assert sum(map(len, course.turns.values())) == 8 * len(course.owners)
            assert goes_through(course)


@pytest.mark.parametrize("count", [1, 2, 6, 8, 13, 64])
def test_the_first_few_pieces_are_spread_out(count: int) -> None:
    """In twice as many turns as there are devices that share the pieces out, each has one to work on."""
    order = spread_out(count)
    assert sorted(order) == list(range(count))
    for devices in range(1, count // 2 + 1):
        owners = {piece * devices // count for piece in order[: 2 * devices]}
        assert owners == set(range(devices))


# -- prices and plans ----------------------------------------------------------------------------------


def test_a_device_has_a_beat_for_each_of_its_pieces() -> None:
    """And one more for every other stage; its node's part of the layers is done in each of them."""
    step, args = layered(scan=True, layers=6)
    graph = staged(trace(step, *args), 8).graph
    fleet = apart((2, (1, 0.5)))
    model = CostModel(fleet)
    grid, crews = GridModel(model), Crews.of(model, (0, 1, 2), model, nodes=True)
    assert crews.sizes.tolist() == [1, 2]
    least = 0.0
    for equation in graph.equations:
        layers = layers_of(equation)
        if layers is None:
            continue
        (cut,) = Space(graph, (1, 2)).signatures(equation)[1:]
        kernels = grid.kernels(equation, rule_of(equation), (cut,), traffic(graph)[equation])
        shares = GridShares((4 / 6, 2 / 6 * 5 / 8, 2 / 6 * 3 / 8), grid.mesh)
        (found,) = shares.stack(GridStack(kernels.terms), kernels.cuts)
        line = beats_of(layers, sharded=True)
        each, piece_bytes = layer_s(model, line), 64 // 8 * 16 * 4
        assert line.handed_bytes == piece_bytes
        # All devices of a node hand on at once, over one link.
        handed = [10e-6 + count * piece_bytes / (100e6 / 8) for count in (1, 2)]
        beats = (8 + 1, 5 + 1, 3 + 1)
        layered_s = (4 * each[0], 2 * each[1], 2 * each[2])
        wanted = [n * (s + handed[k > 0]) for k, (n, s) in enumerate(zip(beats, layered_s, strict=True))]
        assert found == pytest.approx(max(wanted))
        least += found
    assert relays_s(graph, model, [crews]) <= least * (1 + 1e-9)


def test_nodes_are_stages_where_the_network_between_them_is_slow() -> None:
    """With fewer layers than devices, too; what is planned on two axes is bounded as ever."""
    step, args = layered(scan=True, layers=4, width=256, batch=256)
    mesh = apart(((20,) * 4,) * 4, "1 Gbit/s")
    one, two = (synthesize(step, *args, fleet=mesh, axes=axes) for axes in (1, "auto"))
    assert two.rewriting.stages > 1 and two.axes == 2
    assert two.cost_s < 0.9 * one.cost_s
    assert two.bound_s <= two.cost_s and two.gap < 0.01
    assert set(two.ratios) == {1 / 16}


@pytest.mark.parametrize("axes", [1, 2])
def test_nodes_with_fewer_layers_than_others_are_left_out(axes: Any) -> None:
    """Of four layers on three nodes two have one: so that each has two, two nodes do, in fewer beats."""
    step, args = layered(scan=True, layers=4, width=128)
    node: Any = 1 if axes == 1 else (1, 1)
    three, two = apart((node,) * 3), apart((node,) * 2)
    wanted: dict[str, Any] = {"stages": 4, "axes": axes}
    found = synthesize(step, *args, fleet=three, **wanted)
    assert found.cost_s == pytest.approx(synthesize(step, *args, fleet=two, **wanted).cost_s)
    everything = synthesize(step, *args, fleet=three, devices="all", **wanted)
    assert found.cost_s < everything.cost_s and found.bound_s <= found.cost_s
    assert len(found.used) == len(two.devices) < len(everything.used)
    assert "no plan" in found.unused[0].why
    leaves = jax.tree.leaves(args)
    assert verify_program(found.step(), found.program, found.used_ratios, leaves).ok


class Bounds:
    """A planner that has no plan of a step below a rival, and says what it was asked for."""

    def __init__(self, content: bool, thorough: bool = False) -> None:
        self.content, self.thorough, self.rivals = content, thorough, list[float]()

    def plan(self, traced: Traced, rival_s: float, **how: Any) -> None:
        self.rivals.append(rival_s)

    def outside_s(self, traced: Traced, wanted_s: float) -> float:
        return 0.0


@pytest.mark.parametrize(("speeds", "content"), [((1, 1), False), (((1, 1), (1, 1)), True)])
def test_a_bound_on_one_axis_rules_out_nothing_on_two(speeds: Any, content: bool) -> None:
    """Stages come first by a bound only where it is of all programs that are to be searched."""
    step, args = layered(scan=True, layers=4)
    planner: Any = Bounds(content)
    made = staging.Staging(trace(step, *args), apart(speeds), (), False, planner, lambda: False)
    assert made._plainly() is None and len(planner.rivals) == 1
    both: Any = Bounds(content=False)
    nodes = apart(((1, 1), (1, 1)))
    made = staging.Staging(trace(step, *args), nodes, (), False, both, lambda: False)
    assert made._plainly() is None and not both.rivals
    two: Any = Bounds(content=False, thorough=True)
    made = staging.Staging(trace(step, *args), nodes, (), False, two, lambda: False)
    assert made._plainly() is None and len(two.rivals) == 1


@pytest.mark.parametrize("staged_s", [1.0, 2.0])
def test_stages_that_hardly_fit_come_first_where_they_are_far_cheaper(
    staged_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step as it is costs 2 s at least; what makes its stages fit may take long."""
    step, args = layered(scan=True, layers=4)
    made = synthesize(step, *args, fleet=apart(((1, 1), (1, 1))), axes=2)
    lacking = made.but(cost_s=staged_s, bound_s=staged_s, free_s=staged_s, fits=False)
    assert not lacking.fits

    class Above(Bounds):
        def plan(self, traced: Traced, rival_s: float = np.inf, **how: Any) -> Any:
            if rewriting_of(traced).stages > 1:
                return lacking
            return None if rival_s < 2.0 else made.but(cost_s=2.0, bound_s=2.0, free_s=2.0)

        def outside_s(self, traced: Traced, wanted_s: float) -> float:
            return np.inf

    planner: Any = Above(content=False, thorough=True)
    monkeypatch.setattr(staging.Staging, "plan", lambda self, pieces: made.but(cost_s=1.1, free_s=1.1))
    nodes = apart(((1, 1), (1, 1)))
    found = staging.Staging(trace(step, *args), nodes, (), False, planner, lambda: False)._plainly()
    assert (found is not None) == (staged_s < 1.8)


def test_a_mesh_whose_batch_has_too_few_pieces_is_told_so() -> None:
    step, args = layered(scan=True)
    with pytest.raises(NotInPiecesError, match="a batch of 64 has no 128 equal pieces"):
        synthesize(step, *args, fleet=apart(((1, 1), (1, 1))), stages=128, axes=2)


def test_saved_plans_are_the_same(plan: Plan, tmp_path: Path) -> None:
    step, args = layered(scan=True, layers=5, width=128)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.rewriting.stages == 8 and loaded.program == plan.program
    assert loaded.verify(step, *args).ok


@pytest.mark.parametrize("axes", [1, 2])
def test_layers_of_equal_types_have_prices_of_their_own(axes: Any) -> None:
    """Scans over the same parameters, of which one computes far more: no program costs less than the plan."""

    def cheap(h: Any, w: Any) -> Any:
        return h * jnp.sum(w), None

    def dear(h: Any, w: Any) -> Any:
        for _ in range(20):
            h = jnp.tanh(h @ w)
        return h, None

    def step(weights: Any, x: Any) -> Any:
        for layer, w in zip((cheap, dear, cheap, cheap), weights, strict=True):
            x, _ = jax.lax.scan(layer, x, w)
        return weights, jnp.sum(x)

    args = [jax.ShapeDtypeStruct((6, 64, 64), "float32")] * 4, jax.ShapeDtypeStruct((32, 64), "float32")
    mesh = apart((1, 1) if axes == 1 else ((1, 1), (1, 1)), "10 Mbit/s")
    plan = synthesize(step, *args, fleet=mesh, stages=8, axes=axes, devices="all")
    assert plan.traced is not None
    graph = plan.traced.graph
    (costly,) = [e for e in graph.equations if (each := layers_of(e)) and "tanh" in str(each.body)]
    found = [i for i in plan.program.instructions if relays(i, graph)]
    # That one alone is worth handing pieces on.
    assert [i.equation for i in found] == [costly.index]
    assert plan.search_gap == pytest.approx(0.0, abs=1e-6)


def test_a_part_of_the_fleet_has_links_of_its_own() -> None:
    """What its stages take at least is by the links within it, not by the slow ones of the whole fleet."""
    step, args = layered(scan=True, layers=6)
    graph = staged(trace(step, *args), 8).graph
    fleet = apart(((1, 1), (1,)), "1 Mbit/s")
    whole, part = CostModel(fleet), CostModel(subfleet(fleet, (0, 1), "n0"))
    own = Crews.of(whole, (0, 1), part, nodes=False)
    alone = Crews.of(part, (0, 1), part, nodes=False)
    assert relays_s(graph, whole, [own]) == pytest.approx(relays_s(graph, part, [alone]))
    assert relays_s(graph, whole, [own]) < 0.1 * relays_s(
        graph, whole, [Crews.of(whole, (0, 1, 2), whole, nodes=False)]
    )


def test_without_time_to_search_it_is_a_baseline() -> None:
    """Of a step whose layers may be stages, too: it runs, and the bound is of all that was not searched."""
    step, args = layered(scan=True)
    mesh = apart(((1, 1), (1, 1)))
    plan = synthesize(step, *args, fleet=mesh, stages=8, axes=2, time_limit_s=0, recompute="off")
    assert plan.bound_s <= plan.cost_s
    assert synthesize(step, *args, fleet=mesh, stages=8, axes=2).cost_s <= plan.cost_s * (1 + 1e-9)
    assert verify_program(plan.step(), plan.program, plan.used_ratios, jax.tree.leaves(args)).ok


@pytest.mark.parametrize("rows", ["count", "largest"])
def test_what_is_not_of_the_batch_leaves_nodes_out(rows: str) -> None:
    """A number that is carried on, or a maximum over the batch: layers may be cut, pieces not in a node."""

    def layer(carry: Any, w: Any) -> Any:
        x, count = carry
        x = jnp.tanh(x @ w)
        return (x, count + 1), x.max(0) if rows == "largest" else None

    def step(w: Any, x: Any) -> Any:
        begin = (x, 0) if rows == "count" else (x, x)
        (last, _), seen = jax.lax.scan(layer, begin, w)
        return w, last.sum(1), seen

    args = np.ones((4, 8, 8), np.float32), np.ones((16, 8), np.float32)
    graph = staged(trace(step, *args), 4).graph
    (found,) = (equation for equation in graph.equations if layers_of(equation))
    (whole,) = Space(graph, NODES).signatures(found)
    assert {*whole.ins, *whole.outs} == {R}
    assert len(Space(graph).signatures(found)) == 2


def test_a_node_hands_on_over_all_of_its_links() -> None:
    step, args = layered(scan=True, layers=6)
    graph = staged(trace(step, *args), 8).graph
    one = apart(((1, 1), (1, 1)), "1 Mbit/s")
    two = replace(one, nodes=tuple(replace(node, rails=2) for node in one.nodes))
    least: list[float] = []
    for fleet in (one, two):
        model = CostModel(fleet)
        least.append(relays_s(graph, model, [Crews.of(model, (0, 1, 2, 3), model, nodes=True)]))
    assert least[1] == pytest.approx(least[0] / 2, rel=0.05)
