"""Stages: layers on different devices that hand pieces of the batch on; what cannot be done so is refused."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting_cases import evaluated, fleet, layered
from stages_cases import apart, on_nodes, on_three, staged

from shardwright import Fleet, Plan, one_step, parallelize, synthesize
from shardwright.api import synthesize_traced
from shardwright.backends.launch import find_mpiexec, rank_environment
from shardwright.backends.reference import ReferenceExecutable
from shardwright.backends.relay import Course
from shardwright.backends.verify import verify_program
from shardwright.cli import main
from shardwright.factory import load_factory
from shardwright.ir.errors import InputError, PlanError
from shardwright.ir.flow import is_local
from shardwright.ir.placement import Partial, R, Shard
from shardwright.ir.registry import rule_of
from shardwright.ir.rewrites.pieces import NotInPiecesError
from shardwright.ir.rewrites.rewriting import Rewriting, rewriting_of
from shardwright.ir.rules import signatures
from shardwright.ir.segments import Relay, schedule
from shardwright.ir.stages import layers_of, relays
from shardwright.ir.trace import Traced, trace
from shardwright.memory import in_pieces, staging
from shardwright.planning import Planner
from shardwright.synth import subfleets

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"


def large() -> tuple[Any, Any]:
    """More bytes in its weights than a batch has in all pieces."""
    return layered(scan=True, layers=8, width=128, batch=256)


def close(got: Any, wanted: Any) -> bool:
    return all(
        np.allclose(a, b, rtol=2e-4, atol=2e-5) for a, b in zip(map(np.asarray, got), wanted, strict=True)
    )


def computed(step: Any, args: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(step)(*args))]


# -- the step ------------------------------------------------------------------------------------------


def masked() -> tuple[Any, Any]:
    """Layers with a mask of their own over rows, a counter, and a sum of what they see."""

    def step(w: Any, x: Any, mask: Any) -> Any:
        def loss_of(w: Any) -> Any:
            def layer(carry: Any, row: Any) -> Any:
                hidden, count = carry
                hidden = jnp.where(mask, jnp.tanh(hidden @ row["w"]) * row["scale"], hidden + count)
                return (hidden, count + 1), hidden.sum(0)

            (last, count), sums = jax.lax.scan(layer, (x, 0), w)
            return jnp.mean(last**2) + 1e-2 * sums.sum() + 0.0 * count

        loss, gradient = jax.value_and_grad(loss_of)(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient), loss

    rng = np.random.default_rng(1)
    w = {"w": rng.normal(size=(5, 6, 6)).astype(np.float32), "scale": np.ones(5, np.float32)}
    rows = rng.normal(size=(12, 6)).astype(np.float32)
    return step, (w, rows, rng.random((12, 1)) < 0.5)


def llama() -> tuple[Any, Any]:
    """In bfloat16, with masks and rotary positions that layers share."""
    return load_factory(f"{EXAMPLES / 'llama3.py'}:tiny_scan")


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("case", [partial(layered, True), llama, masked])
def test_the_step_stays_the_same(case: Any, pieces: int) -> None:
    step, args = case()
    traced = staged(trace(step, *args), pieces)
    found = [layers for e in traced.graph.equations if (layers := layers_of(e)) is not None]
    assert [layers.reverse for layers in found] == [False, True]
    rough = any("bfloat16" in str(v.type) for v in traced.graph.values())
    got, wanted = evaluated(traced, jax.tree.leaves(args)), computed(step, args)
    allowed = (2e-2, 2e-2) if rough else (2e-4, 2e-5)
    assert all(np.allclose(a, b, *allowed) for a, b in zip(got, wanted, strict=True))


def test_counters_of_64_bits() -> None:
    """What counts pieces and layers is as wide as what was traced, all together and device by device."""
    step, args = masked()
    with jax.enable_x64(True):
        found = synthesize(step, *args, fleet=apart((1, 1)), stages=2, devices="all")
        assert found.verify(step, *args).ok
        got, wanted = evaluated(found.step(), jax.tree.leaves(args)), computed(step, args)
    assert all(np.allclose(a, b, 2e-4, 2e-5) for a, b in zip(got, wanted, strict=True))


def test_layers_may_be_cut_and_nothing_else() -> None:
    """The rule: rows of layers are cut; what is carried on is left with the last of them."""
    step, args = layered(scan=True)
    forward, _ = (e for e in staged(trace(step, *args), 2).graph.equations if layers_of(e))
    whole, cut = signatures(rule_of(forward), forward)
    assert {*whole.ins, *whole.outs} == {R}
    layers = layers_of(forward)
    assert layers is not None
    first = layers.consts + layers.carries
    assert cut.ins == (R,) * first + (Shard(0),) * (len(cut.ins) - first)
    assert cut.outs == (Partial("sum"),) * layers.carries + (Shard(0),) * (len(cut.outs) - layers.carries)


def walks_over_the_batch() -> tuple[Any, Any]:
    def step(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            last, _ = jax.lax.scan(lambda c, row: (jnp.tanh(c @ w + row), None), jnp.zeros(4), x)
            return last.sum()

        return w - jax.grad(loss_of)(w)

    return step, (np.ones((4, 4), np.float32), np.ones((6, 4), np.float32))


def reads_no_batch() -> tuple[Any, Any]:
    """A scan that walks over the batch's rows, and does without them."""

    def step(w: Any, x: Any) -> Any:
        w = w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        last, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c), None), w[0], jnp.stack([x, x]))
        return w, last

    return step, (np.ones((4, 4), np.float32), np.ones((6, 4), np.float32))


def unrolled() -> tuple[Any, Any]:
    return layered(scan=False)


@pytest.mark.parametrize("case", [walks_over_the_batch, reads_no_batch, unrolled])
def test_what_has_no_layers_to_cut_is_refused(case: Any) -> None:
    step, args = case()
    with pytest.raises(NotInPiecesError, match="Plan with"):
        synthesize(step, *args, fleet=fleet(), stages=2)
    assert synthesize(step, *args, fleet=apart((1, 1))).rewriting.stages == 1


# -- programs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> Plan:
    return on_three()


@cache
def five_layers() -> tuple[list[Any], list[np.ndarray[Any, Any]]]:
    """Arguments of the step of `plan`, and what one device makes of them."""
    step, args = layered(scan=True, layers=5, width=128)
    return jax.tree.leaves(args), computed(step, args)


@settings(max_examples=8)
@given(st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any))
def test_programs_compute_what_the_step_does(plan: Plan, parts: list[int]) -> None:
    """At any ratios: uneven ones, and devices without layers, among them the first and the last."""
    flat, wanted = five_layers()
    ratios = [part / sum(parts) for part in parts]
    assert plan.traced is not None
    run = ReferenceExecutable(plan.traced, plan.program, ratios)
    assert close(run(*flat), wanted)


@pytest.mark.parametrize("ratios", [(0.5, 0.0, 0.5), (0.0, 1.0, 0.0), (0.2, 0.2, 0.6)])
def test_verification_compares_every_piece(plan: Plan, ratios: tuple[float, ...]) -> None:
    _, args = layered(scan=True, layers=5, width=128)
    assert plan.traced is not None
    report = verify_program(plan.traced, plan.program, ratios, jax.tree.leaves(args))
    assert report.ok


def test_stages_are_in_order_of_the_layers(plan: Plan) -> None:
    assert plan.traced is not None
    graph = plan.traced.graph
    found = [i for i in plan.program.instructions if relays(i, graph)]
    assert not any(is_local(i, graph) for i in found)
    steps = [step for step in schedule(plan.program, graph).steps if isinstance(step, Relay)]
    forward, backward = (
        Course.of(graph.equations[s.compute.equation], s.compute.signature, (0.4, 0.0, 0.6)).turns
        for s in steps
    )
    assert list(forward) == [0, 2]
    assert list(backward) == [2, 0]


@pytest.mark.parametrize(("made", "ranks"), [(on_three, 3), (on_nodes, 4)])
def test_ranks_hand_pieces_on(made: Any, ranks: int, tmp_path: Path) -> None:
    """The MPI backend, with devices that have few layers or pieces and such that have none."""
    path = tmp_path / "plan.json"
    made().save(path)
    done = subprocess.run(
        [find_mpiexec(), "-n", str(ranks), sys.executable, str(HERE / "stages_checks.py"), str(path)],
        env=rank_environment(ranks),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"checked": ranks + 1}


# -- plans ---------------------------------------------------------------------------------------------


def test_stages_where_the_network_is_slow() -> None:
    step, args = large()
    slow, fast = apart((2, 2, 1)), apart((2, 2, 1), "100 Gbit/s")
    without = synthesize(step, *args, fleet=slow, stages="off")
    found = synthesize(step, *args, fleet=slow)
    assert without.rewriting.stages == 1
    assert found.rewriting.stages > 1
    assert found.cost_s < 0.9 * without.cost_s
    assert found.bound_s <= found.cost_s
    assert "layers of scans may lie on different devices" in str(found)
    assert synthesize(step, *args, fleet=fast).rewriting.stages == 1


@pytest.mark.parametrize("far", [0.1, 0.9])
def test_stages_come_first_where_the_step_does_not_fit(far: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large step: a plan with stages takes a moment. Where it is far cheaper, nothing else is tried."""
    monkeypatch.setattr(staging, "_FAR", far)
    step, args = load_factory(f"{EXAMPLES / 'llama3.py'}:llama2_scan")
    link = {"bandwidth": "12 GB/s", "latency": "10 us"}
    kinds = ("A100-PCIE-40GB", "V100-SXM2-32GB")
    nodes = [{"devices": {"type": kind, "count": 4}, "link": link} for kind in kinds]
    network = {"bandwidth": "10 Gbit/s", "latency": "30 us"}
    tight = Fleet.from_dict({"name": "two nodes", "nodes": nodes, "network": network})
    tried: list[Traced] = []
    plan_of = Planner.plan

    def watched(self: Planner, traced: Traced, rival_s: float = np.inf, **how: Any) -> Plan | None:
        if rewriting_of(traced).stages == 1 and rewriting_of(traced):
            tried.append(traced)
        return plan_of(self, traced, rival_s, **how)

    monkeypatch.setattr(Planner, "plan", watched)
    found = synthesize(step, *args, fleet=tight)
    assert found.fits
    assert found.rewriting.stages > 1
    assert bool(tried) == (far == 0.9)
    assert any("no other change was searched" in note for note in found.assumptions) == (far == 0.1)


def test_memory_joins_stages_and_what_is_computed_again() -> None:
    """What layers keep is on their stage; where it has no room, they compute it again."""
    step, args = layered(scan=True, layers=8, width=64, batch=512)
    slow = apart((1, 1), "10 Mbit/s")
    roomy = synthesize(step, *args, fleet=slow, recompute=Rewriting(stages=8))
    tight = apart((1, 1), "10 Mbit/s", f"{int(0.7 * max(roomy.memory_bytes))} B")
    found = synthesize(step, *args, fleet=tight, stages=8)
    assert found.fits
    assert found.rewriting.recompute
    assert found.rewriting.stages == 8
    assert found.again_s > 0
    assert verify_program(found.step(), found.program, found.used_ratios, jax.tree.leaves(args)).ok


def test_what_stages_take_while_they_run_is_looked_at() -> None:
    """Scratch of a piece is in no tensor of the program: what seems to have ample room may not have it."""

    def step(w: Any, momentum: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            last, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, w["layers"])
            return jnp.mean((last @ w["head"]) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(w)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        return jax.tree.map(lambda p, m: p - 0.1 * m, w, momentum), momentum, loss

    layers = {"up": np.ones((4, 8, 16), np.float32), "down": np.ones((4, 16, 8), np.float32)}
    w = {"layers": layers, "head": np.ones((8, 3), np.float32)}
    nodes = apart((0.002, 0.002, 0.002), "1 Mbit/s", "12 kB")
    found = synthesize(step, w, w, np.ones((24, 8), np.float32), fleet=nodes, stages=4)
    assert found.fits == all(nbytes <= 12_000 for nbytes in found.memory_bytes)


def test_plans_with_stages_are_saved_and_run(plan: Plan, tmp_path: Path) -> None:
    step, args = layered(scan=True, layers=5, width=128)
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded.rewriting == plan.rewriting
    assert loaded.verify(step, *args).ok
    with pytest.raises(PlanError, match="backend spmd: this plan has layers on different devices"):
        loaded.compile(step, backend="spmd")(*args)
    with pytest.raises(PlanError, match="hand on pieces while they compute"):
        loaded.schedule()


@pytest.mark.parametrize(
    ("planning", "reason"),
    [
        ({"stages": 0}, "stages: is 0"),
        ({"stages": True}, "stages: is True"),
        ({"stages": "some"}, "stages: is 'some'"),
        ({"stages": 2, "microbatches": 4}, "stages: hand on 2 pieces of the batch, of which there are 4"),
        ({"stages": 2, "recompute": Rewriting(stages=4)}, "stages: is 2, and the Rewriting"),
        ({"recompute": Rewriting(microbatches=2, stages=2)}, "stages: hand on 2 pieces"),
        ({"stages": 7}, r"stages: a batch of 64 has no 7 equal pieces\. Plan with stages=4 or 8$"),
    ],
)
def test_what_is_no_way_to_ask_for_stages(planning: dict[str, Any], reason: str) -> None:
    step, args = layered(scan=True)
    two = {"devices": {"type": "V100-16GB", "count": 2}, "link": {"bandwidth": "1 GB/s", "latency": "10 us"}}
    nodes = Fleet.from_dict(
        {"name": "two", "nodes": [two, two], "network": {"bandwidth": "1 Gbit/s", "latency": "30 us"}}
    )
    with pytest.raises(InputError, match=reason):
        synthesize(step, *args, fleet=nodes, **planning)


def test_the_command_line(tmp_path: Path) -> None:
    target = f"{EXAMPLES / 'gpt2.py'}:tiny_scan"
    path = tmp_path / "fleet.yaml"
    path.write_text(json.dumps(apart((1, 1)).to_dict()))  # JSON is YAML
    run = CliRunner().invoke(main, ["plan", target, "--fleet", str(path), "--stages", "4", "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["rewriting"]["stages"] == 4
    run = CliRunner().invoke(main, ["plan", target, "--fleet", str(path), "--stages", "few"])
    assert run.exit_code == 2
    assert "--stages: is 'few'" in run.output


def test_one_program_for_all_is_planned_without_stages() -> None:
    """Whoever runs a step on `spmd` gets a plan that it runs."""
    step, args = large()
    run = parallelize(step, fleet=apart((1, 1)), backend="spmd", cache=False)
    assert run.plan(*args).rewriting.stages == 1
    assert synthesize(step, *args, fleet=apart((1, 1))).rewriting.stages > 1


@pytest.mark.parametrize("axes", [1, 2])
def test_a_step_whose_bound_is_far_above_its_stages_is_not_planned_without(
    axes: Literal[1, 2], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    gpt2 = importlib.import_module("gpt2")
    sizes = gpt2.SMALL | {"layers": 12, "scan": True, "batch": 16, "sequence": 256}
    traced = trace(gpt2.train_step, *jax.eval_shape(partial(gpt2.arguments, **sizes)))
    testbed = Fleet.load(EXAMPLES / "fleets" / "hap_testbed.yaml")
    made: list[Plan] = []
    plan_of = Planner.plan

    def watched(self: Planner, traced: Traced, rival_s: float = np.inf, **how: Any) -> Plan | None:
        plan = plan_of(self, traced, rival_s, **how)
        made.extend([plan] if plan is not None and rewriting_of(traced).stages == 1 else [])
        return plan

    monkeypatch.setattr(Planner, "plan", watched)
    found = synthesize_traced(traced, fleet=testbed, axes=axes)
    assert not made
    assert any("no other change was searched" in note for note in found.assumptions)
    monkeypatch.setattr(staging.Staging, "_plainly", lambda self: None)
    usual = synthesize_traced(traced, fleet=testbed, axes=axes)
    assert made and min(plan.cost_s for plan in made) > usual.cost_s / 0.9
    assert (found.cost_s, found.rewriting, found.fits) == (usual.cost_s, usual.rewriting, True)
    assert found.assumptions == usual.assumptions


def test_stages_are_no_plan_where_a_part_without_room_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As traced the step does not fit on one node, where it costs least; changed a little it does."""
    for module in (staging, in_pieces, one_step, subfleets):
        monkeypatch.setattr(module, "SMALL", 0)
    step, args = layered(scan=True, layers=4, width=64, batch=4096)
    nodes = apart((100, (100, 100), (100, 100)), "20 Mbit/s", "14 MB")
    without, found = (synthesize(step, *args, fleet=nodes, axes=1, stages=each) for each in ("off", "auto"))
    assert found.fits and found.cost_s <= without.cost_s * (1 + 1e-9)
    assert not any("no other change was searched" in note for note in found.assumptions)
