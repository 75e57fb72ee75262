"""Every example planned and verified; on MPI ranks; and at full size on the testbed.

Tiny tensors are cheapest replicated, so the fleets here have devices slow enough, and links fast enough, that
cutting even these pays: the plans must shard and exchange.
"""

import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from shardwright import Fleet, Plan, ReplicatedWarning, baselines, synthesize
from shardwright.backends.launch import find_mpiexec, rank_environment
from shardwright.backends.verify import verify_program
from shardwright.cost.model import CostModel
from shardwright.ir.placement import Shard
from shardwright.ir.program import Move
from shardwright.ir.trace import trace
from shardwright.synth.baselines import Workshop
from shardwright.synth.recipes import RECIPES
from shardwright.synth.space.space import Space

EXAMPLES = Path(__file__).parents[1] / "examples"

TINY = (
    "gpt2:tiny", "gpt2:tiny_scan", "vit:tiny", "bert:tiny", "bert_moe:tiny", "vgg19:tiny", "resnet50:tiny",
)  # fmt: skip
FULL_SIZE = (
    "gpt2:small", "gpt2:small_scan", "vit:base", "bert:base", "bert_moe:base", "vgg19:base", "resnet50:base",
)  # fmt: skip

#: MFLOP/s of the devices, by their number.
SPEEDS = {
    2: (50, 20),
    3: (50, 30, 10),
    4: (50, 30, 20, 10),
    5: (50, 30, 30, 20, 5),
    7: (80, 50, 50, 30, 20, 10, 5),
}


@pytest.fixture(scope="module", autouse=True)
def examples_importable() -> Iterator[None]:
    """Only here: modules with names as common as `bert` stay out of the other tests' way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)


def made(example: str) -> tuple[Any, tuple[Any, ...]]:
    """The step and arguments of an example."""
    module, factory = example.split(":")
    return getattr(importlib.import_module(module), factory)()


def resnet_of_two_blocks() -> tuple[Any, tuple[Any, ...]]:
    """All that `resnet50:tiny` is, in half the time."""
    resnet50 = importlib.import_module("resnet50")
    return resnet50.train_step, resnet50.arguments(**resnet50.TINY | {"blocks": (1, 1)})


def fleet(devices: int) -> Fleet:
    """Unequal devices, very slow, on very fast links."""
    types = [
        {
            "name": f"slow-{speed}",
            "flops": f"{speed} MFLOP/s",
            "memory_bandwidth": f"{2 * speed} MB/s",
            "memory": "16 GB",
        }
        for speed in SPEEDS[devices]
    ]
    link = {"bandwidth": "400 GB/s", "latency": "100 ns"}
    nodes = [{"devices": [{"type": kind} for kind in types], "link": link}]
    return Fleet.from_dict({"name": "slow", "nodes": nodes})


def plan_of(step: Any, args: tuple[Any, ...], devices: int) -> Plan:
    """A plan for a tiny step, which needs no primitive that has no rule."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicatedWarning)
        return synthesize(step, *args, fleet=fleet(devices), devices="all")


@cache
def planned(example: str, devices: int) -> Plan:
    return plan_of(*made(example), devices)


def check(step: Any, args: tuple[Any, ...], plan: Plan) -> None:
    """Verifies a plan, which must be a distributed one."""
    assert len(set(plan.ratios)) > 1
    assert list(plan.ratios) == sorted(plan.ratios, reverse=True), "the faster, the more"
    sharded = sum(isinstance(placement, Shard) for placement in plan.program.inputs)
    assert sharded > len(plan.program.inputs) // 2
    assert sum(isinstance(i, Move) and i.strategy != "" for i in plan.program.all_instructions()) >= 10
    assert 0 <= plan.gap < 0.2
    assert list(plan.state)[:2] == ["params", "opt_state"]
    result = plan.verify(step, *args)
    assert result.ok, result
    assert result.max_rel_error <= 1e-5
    assert result.loss_rel_error <= 1e-5


#: Whose kind another example, or the test on ranks, stands for, or what is smaller.
ALIKE = "gpt2:tiny", "gpt2:tiny_scan", "bert:tiny", "vit:tiny", "vgg19:tiny", "resnet50:tiny"


@pytest.mark.parametrize(
    "example", [pytest.param(e, marks=pytest.mark.full) if e in ALIKE else e for e in TINY]
)
def test_tiny_steps_verify(example: str) -> None:
    check(*made(example), planned(example, 3 if example in ALIKE else 2))


def test_a_resnet_of_two_blocks_verifies() -> None:
    step, args = resnet_of_two_blocks()
    check(step, args, plan_of(step, args, 2))


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 3, 5, 7])
@pytest.mark.parametrize("example", TINY)
def test_tiny_steps_verify_on_fleets_of_all_sizes(example: str, devices: int) -> None:
    check(*made(example), planned(example, devices))


def check_baseline(example: str, recipe: str) -> None:
    """One baseline of an example on three unequal devices computes the step."""
    step, args = made(example)
    traced = trace(step, *args)
    workshop = Workshop(traced.graph, Space(traced.graph), CostModel(fleet(3)))
    found = workshop.whole_fleet([each for each in RECIPES if each.name == recipe])
    if recipe in found.left_out:
        assert recipe == "expert parallelism" and example != "bert_moe:tiny", found.left_out
        return
    (baseline,) = found
    result = verify_program(traced, baseline.program, baseline.ratios, jax.tree.leaves(args))
    assert result.ok, result


@pytest.mark.full
@pytest.mark.parametrize("recipe", [recipe.name for recipe in RECIPES])
@pytest.mark.parametrize("example", TINY)
def test_all_baselines_of_tiny_steps_verify(example: str, recipe: str) -> None:
    check_baseline(example, recipe)


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("example", TINY)
def test_no_plan_is_worse_than_a_baseline(example: str, devices: int) -> None:
    step, args = made(example)
    plan = planned(example, devices)
    found = baselines(step, *args, fleet=fleet(devices), plan=plan)
    best = min((b for b in found if b.fits and len(b.devices) == devices), key=lambda b: b.cost_s)
    assert plan.fits
    assert plan.cost_s <= best.cost_s * (1 + 1e-9), (best.name, plan.cost_s / best.cost_s)


def some_ratios(devices: int, seed: int) -> tuple[float, ...]:
    """Random shares, of which one at least is nothing."""
    random = np.random.default_rng(seed)
    weights = random.exponential(size=devices)
    weights[random.permutation(devices)[: random.integers(1, devices)]] = 0
    return tuple(float(w) for w in weights / weights.sum())


def check_ratios(example: str, devices: int, seed: int) -> None:
    step, args = made(example)
    plan = replace(planned(example, devices), ratios=some_ratios(devices, seed))
    assert 0 in plan.ratios
    result = plan.verify(step, *args)
    assert result.ok, (plan.ratios, result)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("example", TINY)
def test_devices_without_a_share(example: str, seed: int) -> None:
    check_ratios(example, (3, 5, 4)[seed], seed)


# ---------------------------------------------------------------------------------------------------
# MPI

RANK = """
import json, sys
from pathlib import Path
import jax, numpy as np
from mpi4py import MPI
from shardwright import Plan
from shardwright.backends.mpi.executable import abort_on_error
from shardwright.factory import load_factory

def data(leaf):
    key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if key else leaf)

with abort_on_error():
    target, folder = sys.argv[1], Path(sys.argv[2])
    step, args = load_factory(target)
    run = Plan.load(folder / "plan.json").compile(step, backend="mpi")
    outputs = [data(leaf.gather()) for leaf in jax.tree.leaves(run(*args))]
    if MPI.COMM_WORLD.rank == 0:
        np.savez(folder / "mpi.npz", *outputs)
"""


def check_mpi(example: str, ranks: int, folder: Path) -> None:
    """One step on real ranks: the loss is one device's, all results are those of `reference`."""
    step, args = made(example)
    plan = planned(example, ranks)
    plan.save(folder / "plan.json")
    (folder / "rank.py").write_text(RANK)
    module, factory = example.split(":")
    target = f"{EXAMPLES / module}.py:{factory}"
    done = subprocess.run(
        [find_mpiexec(), "-n", str(ranks), sys.executable, str(folder / "rank.py"), target, str(folder)],
        capture_output=True, text=True, check=False, timeout=900, env=rank_environment(ranks),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with np.load(folder / "mpi.npz") as file:
        got = [file[f"arr_{i}"] for i in range(len(file.files))]
    single = jax.jit(step)(*args)
    reference = plan.compile(step)(*args)
    assert plan.traced is not None
    graph, whole = plan.traced.graph, jax.tree.leaves(single)
    loss = next(i for i, a in enumerate(graph.outputs) if i not in graph.state and a.type.rank == 0)
    assert got[loss] == pytest.approx(float(whole[loss]), rel=1e-5)
    results = [np.asarray(leaf) for leaf in jax.tree.leaves(reference)]
    apart = [np.abs(b - np.asarray(c)).max(initial=0.0) for b, c in zip(results, whole, strict=True)]
    # An optimizer that divides by a gradient's size makes rounding of all parameters alike large.
    of_parameters = max(
        d for d, name in zip(apart, graph.output_names, strict=True) if name.startswith("[0]")
    )
    for a, b, d, name in zip(got, results, apart, graph.output_names, strict=True):
        allowed = 1e-5 * np.abs(b).max() + 4 * (of_parameters if name.startswith("[0]") else d)
        assert np.abs(a - b).max() <= allowed, name


def test_a_tiny_step_on_two_ranks(tmp_path: Path) -> None:
    check_mpi("gpt2:tiny", 2, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("example", TINY)
def test_tiny_steps_on_ranks(example: str, ranks: int, tmp_path: Path) -> None:
    check_mpi(example, ranks, tmp_path)


# ---------------------------------------------------------------------------------------------------
# Full size


def check_full_size(example: str) -> None:
    step, args = made(example)
    testbed = Fleet.load(EXAMPLES / "fleets" / "hap_testbed.yaml")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicatedWarning)
        plan = synthesize(step, *args, fleet=testbed, axes=1)
    assert len(plan.ratios) == 64
    assert sum(plan.ratios) == pytest.approx(1)
    assert 0 <= plan.gap < 1
    assert plan.exchanges
    assert list(plan.state)[:2] == ["params", "opt_state"]
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_full_size_step_plans_on_the_testbed() -> None:
    check_full_size("gpt2:small_scan")


@pytest.mark.full
@pytest.mark.parametrize("example", FULL_SIZE)
def test_full_size_steps_plan_on_the_testbed(example: str) -> None:
    check_full_size(example)
