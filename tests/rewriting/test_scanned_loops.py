"""Steps whose layers are scanned: their plans, loops of them on ranks and in one process, and factories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import jax
import jax.numpy as jnp
import layered_steps as steps
import numpy as np
import optax
import pytest
from layered_steps import same, step_of
from stages_cases import apart

from shardwright import Fleet, InputError, parallelize, scan_layers, synthesize
from shardwright.backends.launch import find_mpiexec, rank_environment
from shardwright.factory import load_factory
from shardwright.layer_leaf import LayerLeaf

HERE = Path(__file__).resolve().parent


def test_the_plan_is_that_of_a_step_that_scans() -> None:
    step, args = step_of(layers=6)
    scanned = scan_layers(step, *args)

    def by_hand(params: dict[str, object], opt_state: object, x: jax.Array, y: jax.Array) -> object:
        def loss_of(params: dict[str, jax.Array]) -> jax.Array:
            layer = lambda h, p: (steps.residual(h, p, 0), None)  # noqa: E731
            h, _ = jax.lax.scan(layer, x @ params["in"], params["blocks"])
            return jnp.mean((h @ params["out"] - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optax.adam(1e-2).update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    shapes = {name: jnp.zeros((steps.WIDTH, steps.WIDTH)) for name in ("in", "out")}
    up, down = ((6, *shape) for shape in ((steps.WIDTH, 2 * steps.WIDTH), (2 * steps.WIDTH, steps.WIDTH)))
    params = {**shapes, "blocks": {"up": jnp.zeros(up), "down": jnp.zeros(down)}}
    stacked = params, optax.adam(1e-2).init(params), *args[2:]
    fleet = apart((3, 2))
    for stages in ("off", 2):
        found = synthesize(scanned.step, *scanned.args, fleet=fleet, stages=stages)
        wanted = synthesize(by_hand, *stacked, fleet=fleet, stages=stages)
        assert found.cost_s == pytest.approx(wanted.cost_s, rel=0.02)
        assert found.verify(scanned.step, *scanned.stack(*args)).ok


def test_a_plan_says_that_layers_are_not_scanned() -> None:
    step, args = step_of(layers=12)
    scanned = scan_layers(step, *args)
    fleet: Fleet = apart((3, 2))
    notes = [
        [note for note in synthesize(each, *given, fleet=fleet).assumptions if "scan_layers" in note]
        for each, given in ((step, args), (scanned.step, scanned.args))
    ]
    assert list(map(len, notes)) == [1, 0]


def test_a_loop_on_ranks_keeps_state_in_stacks(tmp_path: Path) -> None:
    done = subprocess.run(
        [find_mpiexec(), "-n", "2", sys.executable, str(HERE / "scan_layers_checks.py"), str(tmp_path)],
        env=rank_environment(2),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"ranks": 2, "gone": 4}


def test_one_process_has_arrays() -> None:
    step, args = step_of(layers=4)
    train = parallelize(step, fleet=apart((3, 2)), backend="reference", scan_layers=True, cache=False)
    state, wanted = args[:2], args[:2]
    for _ in range(2):
        *state, loss = train(*state, *args[2:])
        *wanted, expected = jax.jit(step)(*wanted, *args[2:])
        assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    same(state, wanted)


def test_a_layer_of_a_stack_is_an_array_where_the_stack_is() -> None:
    stack = jnp.arange(6.0).reshape(3, 2)
    leaf = LayerLeaf(stack, 1, weak_type=True)
    assert (leaf.shape, leaf.dtype, leaf.ndim) == ((2,), jnp.float32, 1)
    np.testing.assert_array_equal(np.asarray(leaf), stack[1])
    whole = leaf.of(stack)
    assert whole.weak_type and whole.tolist() == [2.0, 3.0]


def test_a_scanned_step_is_the_same_in_every_process() -> None:
    """Also what is found in sets and by identity comes in one order."""
    code = (
        "from layered_steps import *; from shardwright import scan_layers; import shardwright.ir.trace as t;"
        "optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(0.1));"
        "step, args = step_of(in_turns, optimizer, layers=6);"
        "scanned = scan_layers(step, *args); print(t.trace(scanned.step, *scanned.args).fingerprint)"
    )
    # Another seed than that of this process, which is random unless it is given.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=True,
    )
    with redirect_stdout(StringIO()) as here:
        exec(code, {})
    assert done.stdout == here.getvalue() and len(done.stdout.strip()) == 64


def test_a_factory_with_its_layers_scanned(tmp_path: Path) -> None:
    file = tmp_path / "factory.py"
    file.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\nfrom layered_steps import step_of as small\n"
    )
    step, args = load_factory(f"{file}:small+scan_layers")
    assert args[0]["blocks/*/up"].shape == (3, steps.WIDTH, 2 * steps.WIDTH)
    found = jax.jit(step)(*args)
    wanted = jax.jit(step_of()[0])(*step_of()[1])
    assert float(found[2]) == pytest.approx(float(wanted[2]), rel=1e-5)
    with pytest.raises(InputError, match=r"there is no change 'scan'.*say small\+scan_layers"):
        load_factory(f"{file}:small+scan")
