"""Arguments of whatever type: one error that says what to pass, and layers without units."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from shardwright import (
    Fleet,
    InputError,
    Plan,
    PlanError,
    Shard,
    ShardwrightError,
    baselines,
    frontier,
    parallelize,
    synthesize,
    what_if,
)
from shardwright.cli import main
from shardwright.elastic import without

shape = jax.ShapeDtypeStruct


def step(w: Any, x: Any) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


ARGS = shape((8, 4), "float32"), shape((16, 8), "float32")


def fleet(memory: str = "1 MB", count: int = 3) -> Fleet:
    kind = {"name": "slow", "flops": "5 MFLOP/s", "memory_bandwidth": "10 MB/s", "memory": memory}
    node = {"devices": {"type": kind, "count": count}, "link": {"bandwidth": "1 GB/s", "latency": "1 us"}}
    return Fleet.from_dict({"name": "slow", "nodes": [node]})


def planned(**how: Any) -> Plan:
    return synthesize(step, *ARGS, fleet=fleet(), **how)


@cache
def plan() -> Plan:
    return planned(devices="all")


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "devices": (lambda: planned(devices=np.array(["auto", "all"])), "devices: is array"),
    "objective": (lambda: planned(objective=np.array([1, 2])), "objective: is array"),
    "recompute": (lambda: planned(recompute=3), "recompute: is 3. Pass 'auto', 'off' or 'all'"),
    "offload": (lambda: planned(offload=np.array([1, 2])), "offload: is array"),
    "limit": (lambda: planned(time_limit_s="3"), "time limit: is '3'. Pass a number of seconds, from 0 on"),
    "true": (lambda: planned(time_limit_s=True), "time limit: is True"),
    "long": (lambda: planned(time_limit_s=10**400), "time limit: is 1000"),
    "pin": (lambda: planned(constraints={"w": Shard(True)}), "pin 'w': Shard(dim=True"),
    "float pin": (lambda: planned(constraints={"w": Shard(0.0)}), "pin 'w': Shard(dim=0.0"),
    "plan": (
        lambda: baselines(step, *ARGS, fleet=fleet(), plan="plan.json"),
        "plan: is 'plan.json'. Pass a plan",
    ),
    "changes": (lambda: what_if(step, *ARGS, fleet=fleet(), changes=None), "changes: is None"),
    "memory": (lambda: frontier(step, *ARGS, fleet=fleet(), memory=0.5), "memory: is 0.5. Pass a list"),
    "parts": (lambda: frontier(step, *ARGS, fleet=fleet(), memory=[1, "x"]), "memory: has 'x'"),
    "lost": (lambda: without(fleet(), "n0.d2"), "devices: is 'n0.d2'. Pass a list, such as ['n0.d2']"),
    "lost number": (lambda: without(fleet(), 2), "devices: is 2. Pass a list"),
    "ranks": (lambda: plan().schedule(0), "ranks: is 0. Pass a list, such as [0]"),
    "rank": (lambda: plan().schedule(["0"]), "rank '0': does not exist"),
    "local": (lambda: plan().local_batch("0"), "rank '0': there is a rank for each"),
    "jit": (lambda: jax.eval_shape(plan().compile(step), *ARGS), "arguments: are traced, by jax.jit"),
    "vmap": (
        lambda: jax.vmap(parallelize(step, fleet=fleet(), backend="reference", cache=False))(
            np.zeros((2, 8, 4), np.float32), np.zeros((2, 16, 8), np.float32)
        ),
        "arguments: are traced, by jax.jit",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_one_error(what: str) -> None:
    ask, said = WRONG[what]
    with pytest.raises(ShardwrightError) as error:
        ask()
    assert isinstance(error.value, InputError | PlanError) and str(error.value).startswith(said)


def test_numbers_of_any_type_are_numbers() -> None:
    again = planned(devices="all", time_limit_s=np.float32(60), constraints={"w": Shard(np.int64(0))})
    assert again.fits and Plan.from_dict(json.loads(json.dumps(again.to_dict()))).pins == again.pins


def test_a_layer_may_have_no_units() -> None:
    """Its parameters take no bytes, of which tensor parallelism cuts most."""

    def empty(w: Any, v: Any, x: Any) -> Any:
        loss, (dw, dv) = jax.value_and_grad(lambda p: jnp.mean((x @ p[0] @ p[1]) ** 2))((w, v))
        return w - dw, v - dv, loss

    args = shape((4, 0), "float32"), shape((0, 2), "float32"), shape((6, 4), "float32")
    names = {each.name for each in baselines(empty, *args, fleet=fleet())}
    assert "tensor parallelism" in names
    found = synthesize(empty, *args, fleet=fleet(), devices="all", time_limit_s=0)
    assert found.fits and found.verify(empty, *(np.zeros(a.shape, a.dtype) for a in args)).ok


def test_a_changed_collective_is_one_error_for_every_command(tmp_path: Path) -> None:
    data = plan().to_dict()
    move = next(each for each in data["program"]["instructions"] if "move" in each)
    move["move"] = "swap"
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    for command in ("emit", "explain"):
        result = CliRunner().invoke(main, [command, str(path)])
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert "program: there is no collective swap" in result.stderr


def test_remedies_are_recommended_where_they_were_not_asked_for(tmp_path: Path) -> None:
    path, where = tmp_path / "step.py", tmp_path / "fleet.yaml"
    path.write_text(
        "import jax, jax.numpy as jnp\n"
        "def step(w, x):\n"
        "    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)\n"
        "def small():\n"
        "    return step, (jax.ShapeDtypeStruct((64, 64), 'float32'),) * 2\n",
        encoding="utf-8",
    )
    where.write_text(json.dumps(fleet("9 kB", 1).to_dict()), encoding="utf-8")
    asked, unasked = (
        CliRunner().invoke(main, ["plan", f"{path}:small", "--fleet", str(where), how])
        for how in ("--remedies", "--no-remedies")
    )
    assert asked.exit_code == unasked.exit_code == 3
    assert re.search("DOES NOT FIT", asked.stdout) and "--remedies" not in asked.stdout
    assert "shardwright plan … --remedies says what would help" in unasked.stdout
