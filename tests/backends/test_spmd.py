"""The SPMD backend: collectives and programs in processes with several devices, the rest on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from shardwright.backends.spmd.executable import check_program
from shardwright.backends.spmd.layout import mesh_of
from shardwright.backends.spmd.moves import lowerings
from shardwright.ir import collectives
from shardwright.ir.errors import PlanError
from shardwright.ir.placement import Partial, R
from shardwright.ir.program import Move, Program

HERE = Path(__file__).parent


def on_devices(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python arguments…` where JAX has so many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout)
    return done


# What two devices, and three, do four do as well; for what is left out without `every` see `cases.py`.
@pytest.mark.parametrize(
    ("devices", "every"),
    [(1, True), (4, False), *(pytest.param(n, True, marks=pytest.mark.full) for n in (2, 3, 4))],
)
def test_devices_conform(devices: int, every: bool, tmp_path: Path) -> None:
    done = on_devices(devices, str(HERE / "spmd_checks.py"), str(tmp_path), *["every"] * every)
    assert (tmp_path / "summary.json").exists(), done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    print(summary)
    assert summary["failures"] == []
    assert done.returncode == 0
    assert summary["checked"] > 100 * devices


@pytest.mark.parametrize("checks", ["spmd_plans", "spmd_state"])
def test_plans_in_a_loop(checks: str) -> None:
    done = on_devices(4, "-W", "error", str(HERE / f"{checks}.py"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_strategy_is_lowered_and_nothing_else() -> None:
    moves = {k: c for k, c in collectives.registry().items() if not c.local}
    assert set(lowerings()) == {(kind, strategy) for kind, c in moves.items() for strategy in c.strategies}


def test_a_strategy_without_a_lowering_is_refused_before_the_first_step() -> None:
    move = Move("all_reduce", 0, Partial("sum"), R, strategy="gathered")
    with pytest.raises(PlanError, match=r"all_reduce\.gathered, which this backend cannot run.*spmd="):
        check_program(Program((), (move,), ()))


def test_too_few_devices_are_one_error_with_its_remedy() -> None:
    remedy = r"uses 4 devices, JAX has 1 \(cpu\)\. Set XLA_FLAGS=--xla_force_host_platform_device_count=4"
    with pytest.raises(PlanError, match=remedy):
        mesh_of(4, devices=jax.devices("cpu")[:1])
