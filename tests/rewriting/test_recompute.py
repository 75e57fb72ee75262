"""Recomputation: the same results, less kept, and chosen where memory is short."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rewriting_cases import compiled_bytes, evaluated, fleet, layered, on_reference, traced_layers

from shardwright import Fleet, Plan, synthesize
from shardwright.api import synthesize_traced
from shardwright.cost.model import CostModel
from shardwright.ir.errors import InputError, PlanError
from shardwright.ir.graph import Graph
from shardwright.ir.rewrites.graphs import saved
from shardwright.ir.rewrites.recompute import Stretch, gains, recomputing
from shardwright.ir.rewrites.rewriting import Rewriting, differentiated, original, rewritten
from shardwright.ir.segments import Segment, schedule
from shardwright.ir.trace import Traced, trace
from shardwright.synth.stretches import RECOMPUTING, alike, in_scans, ladder, stretches


def kept(graph: Graph) -> int:
    return sum(value.type.nbytes for value in saved(graph))


@pytest.mark.parametrize("keep", ["products", "nothing"])
@pytest.mark.parametrize("scan", [False, True])
def test_less_is_kept_and_results_are_the_same(scan: bool, keep: Any) -> None:
    step, args = layered(scan)
    traced = traced_layers(scan)
    every = tuple(replace(each, keep=keep) for each in stretches(traced.graph))
    again = rewritten(traced, Rewriting(every))
    freed = kept(traced.graph) - kept(again.graph)
    assert freed > 0.4 * kept(traced.graph)
    # Layers are handed on by one tensor each, so what each frees adds up.
    assert sum(max(gain.freed_bytes, 0) for gain in gains(traced.graph, every)) >= freed
    plan = synthesize_traced(traced, fleet=fleet(), recompute="all")
    wanted = [np.asarray(x) for x in jax.tree.leaves(jax.jit(step)(*args))]
    for got, expected in zip(on_reference(plan, args), wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("scan", [False, True])
def test_a_scan_that_keeps_less_is_found_again_in_pieces(scan: bool) -> None:
    whole = traced_layers(scan)
    pieces = differentiated(rewritten(whole, Rewriting(microbatches=4)))
    found = in_scans(whole.graph, RECOMPUTING)
    assert bool(found) == scan
    for stretch in found:
        again = alike(stretch, whole.graph, pieces)
        assert again is not None and again in in_scans(pieces, RECOMPUTING)
        assert (again.name, again.keep) == (stretch.name, stretch.keep)
        assert rewritten(whole, Rewriting((again,), microbatches=4)).graph is not whole.graph
        assert alike(stretch, whole.graph, traced_layers(False).graph) is None


def test_copies_wait_and_run_in_executables_of_their_own() -> None:
    step, args = layered(False)
    plan = synthesize(step, *args, fleet=fleet(), recompute="all")
    assert plan.traced is not None and plan.verify(step, *args).ok
    graph = plan.traced.graph
    first: dict[tuple[str, int], int] = {}
    for number, part in enumerate(schedule(plan.program, graph).steps):
        for instruction in part.instructions if isinstance(part, Segment) else ():
            equation = getattr(instruction, "equation", None)
            if equation is not None:
                e = graph.equations[equation]
                first.setdefault(("copy" if e.copy else e.part, e.copy), number)
    copies = [where for (kind, _), where in first.items() if kind == "copy"]
    assert len(copies) == len(set(copies)) == len(plan.rewriting.recompute)
    assert min(copies) > first["forward", 0]
    # One layer is there at a time: the memory of what is compiled falls.
    plain = synthesize(step, *args, fleet=fleet(), recompute="off")
    assert compiled_bytes(plan) < 0.8 * compiled_bytes(plain)


def test_everything_is_computed_again_in_one_piece_where_that_fits() -> None:
    """Cheaper pieces, in which nothing is left to be computed again, are not what was asked for."""
    policies = jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.nothing_saveable

    def step(params: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            h = x
            for w, policy in zip(params, (*policies, *policies), strict=True):
                h = jax.checkpoint(lambda h, w: h + jax.numpy.tanh(h @ w), policy=policy)(h, w)
            return (h * h).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    shape = jax.ShapeDtypeStruct
    args = [shape((64, 64), "float32")] * 4, shape((64, 64), "float32")
    slow = {"name": "slow", "flops": "50 MFLOP/s", "memory_bandwidth": "100 MB/s", "memory": "1 GB"}
    node = {"devices": {"type": slow, "count": 2}, "link": {"bandwidth": "400 GB/s", "latency": "10 ns"}}
    on: dict[str, Any] = {"fleet": Fleet.from_dict({"name": "slow", "nodes": [node]}), "recompute": "all"}
    one, two, plan = (synthesize(step, *args, **on, microbatches=n) for n in (1, 2, "auto"))
    assert two.fits and two.cost_s < one.cost_s
    assert plan.rewriting == one.rewriting and plan.rewriting.recompute


def test_the_ladder_keeps_less_and_less() -> None:
    graph = traced_layers(False).graph
    rungs = ladder(graph, CostModel(fleet()))
    sizes = [kept(recomputing(graph, rung)) for rung in rungs]
    assert len(rungs) >= 4 and sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)


def test_layers_begin_where_weights_are_applied() -> None:
    """Mixed precision casts all parameters before the first layer; each is computed again by itself still."""
    step, args = layered(False, half=True)
    graph = trace(step, *args).graph
    names = [stretch.name for stretch in stretches(graph)]
    assert [name for name in names if name[-1].isdigit()] == ["0", "1", "2"]
    sizes = [kept(recomputing(graph, rung)) for rung in ladder(graph, CostModel(fleet()))]
    assert len(sizes) >= 3 and sizes == sorted(sizes, reverse=True)


def test_what_is_seen_from_outside_of_a_stretch_is_kept() -> None:
    """A tensor that a later layer reads too is no one's to drop, wherever stretches are cut."""
    _, args = layered(False)
    traced = traced_layers(False)
    flat = jax.tree.leaves(args)
    end = min(e.index for e in traced.graph.equations if e.part == "backward")
    chance = random.Random(0)
    wanted = evaluated(traced, flat)
    for _ in range(20):
        cuts = sorted(chance.sample(range(end + 1), chance.choice((2, 3, 4))))
        some = [
            Stretch(f"{a}", a, b, chance.choice(("nothing", "products"))) for a, b in itertools.pairwise(cuts)
        ]
        graph = recomputing(traced.graph, some)
        assert graph.state == traced.graph.state and kept(graph) <= kept(traced.graph) * 2
        for got, expected in zip(evaluated(replace(traced, graph=graph), flat), wanted, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_a_plan_file_has_the_rewriting_and_other_steps_are_refused(tmp_path: Path) -> None:
    step, args = layered(False)
    plan = synthesize(step, *args, fleet=fleet(), recompute="all")
    assert plan.again_s > 0 and "computed again in the backward pass" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.rewriting == plan.rewriting and loaded.again_s == plan.again_s
    attached = loaded.attach(step, *args)
    assert original(attached).fingerprint == plan.fingerprint
    assert loaded.text(attached) == plan.text() == loaded.text(original(attached))
    result = loaded.compile(step, "reference")(*args)
    for got, expected in zip(jax.tree.leaves(result), on_reference(plan, args), strict=True):
        np.testing.assert_array_equal(np.asarray(got), expected)
    with pytest.raises(PlanError, match="or overlaps another stretch"):
        recomputing(attached.graph, [Stretch("a", 0, 9), Stretch("b", 5, 12)])
    with pytest.raises(InputError, match="Pass 'auto', 'off' or 'all'"):
        synthesize(step, *args, fleet=fleet(), recompute="some")  # type: ignore[arg-type]


def every_way(traced: Traced, hosts: tuple[bool, ...]) -> list[tuple[Stretch, ...]]:
    """Everything that may be done with layers: of each, what is kept and where, or all as ever."""
    each = [
        [replace(s, keep=keep, host=host) for keep in ("products", "nothing") for host in hosts]
        + [replace(s, keep="all", host=True) for host in hosts if host]
        for s in stretches(traced.graph)
    ]
    return [
        tuple(s for s in some if s is not None) for some in itertools.product(*([None, *e] for e in each))
    ]


@pytest.mark.parametrize(
    ("part", "host", "layers"),
    [
        (0.75, "", 1),
        pytest.param(0.75, "4 GB/s", 1, marks=pytest.mark.full),  # all ways of the one before, and more
        *(pytest.param(part, "", 2, marks=pytest.mark.full) for part in (1.0, 0.9, 0.75, 0.65, 0.55)),
        *(pytest.param(part, "4 GB/s", 2, marks=pytest.mark.full) for part in (0.9, 0.75, 0.65)),
    ],
)
def test_under_budgets_the_choice_is_that_of_brute_force(part: float, host: str, layers: int) -> None:
    """Of all ways to deal with the layers of a small step, each planned by itself, the cheapest that fits."""
    step, args = layered(False, layers=layers)
    traced = trace(step, *args)
    ways = every_way(traced, (False, True) if host else (False,))
    assert len(ways) == (6 if host else 3) ** layers
    free = synthesize_traced(traced, fleet=fleet(), recompute="off", devices="all")
    small = fleet(f"{int(max(free.memory_bytes) * part)} B", host=host)
    found = synthesize_traced(traced, fleet=small, devices="all", microbatches=1)
    every = [synthesize_traced(traced, fleet=small, devices="all", recompute=Rewriting(way)) for way in ways]
    fitting = [plan.cost_s for plan in every if plan.fits]
    assert found.fits == bool(fitting) and (fitting or part < 0.6)
    if fitting:
        assert found.cost_s == pytest.approx(min(fitting), rel=1e-9)


#: Layers under a scan or not, speeds of the devices, micro-batches, options of the backend.
CASES: dict[str, list[tuple[bool, tuple[int, ...], int, dict[str, int]]]] = {
    "mpi": [
        (False, (3, 1), 1, {}),
        (False, (3, 1), 1, {"bucket_bytes": 1 << 16}),
        (True, (3, 1), 1, {}),
        (False, (3, 1), 2, {}),
    ],
    "spmd": [(False, (3, 1), 1, {}), (False, (1, 1), 1, {}), (True, (1, 1), 1, {}), (False, (3, 1), 2, {})],
}


@cache
def again(scan: bool, speeds: tuple[int, ...], pieces: int) -> tuple[Plan, list[np.ndarray[Any, Any]]]:
    """A plan that computes all layers again, and what `reference` makes of it."""
    step, args = layered(scan)
    plan = synthesize(
        step, *args, fleet=fleet(speeds=speeds), devices="all", recompute="all", microbatches=pieces
    )
    return plan, on_reference(plan, args)


@pytest.mark.parametrize("backend", CASES)
def test_backends_run_what_is_computed_again(backend: str, tmp_path: Path) -> None:
    for number, (scan, speeds, pieces, _) in enumerate(CASES[backend]):
        plan, wanted = again(scan, speeds, pieces)
        plan.save(tmp_path / f"{number}.json")
        np.savez(tmp_path / f"{number}.npz", *wanted)
    script = tmp_path / "run.py"
    script.write_text(_SCRIPT.format(tests=str(Path(__file__).parent), backend=backend, cases=CASES[backend]))
    command = [sys.executable, str(script)]
    if backend == "mpi":
        from shardwright.backends.launch import find_mpiexec

        command = [str(find_mpiexec()), "-n", "2", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


_SCRIPT = """
import os, sys
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
sys.path.insert(0, {tests!r})
import jax
import numpy as np
from rewriting_cases import layered
from shardwright import Plan
for number, (scan, _, _, options) in enumerate({cases!r}):
    step, args = layered(scan)
    run = Plan.load(f"{{number}}.json").compile(step, {backend!r}, **options)
    leaves = jax.tree.leaves(run(*args), is_leaf=lambda x: hasattr(x, "gather"))
    got = [np.asarray(x.gather() if hasattr(x, "gather") else x) for x in leaves]
    with np.load(f"{{number}}.npz") as wanted:
        for a, b in zip(got, wanted.values(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
"""
