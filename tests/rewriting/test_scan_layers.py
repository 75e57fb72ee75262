"""Steps whose layers are found and scanned compute what they computed, whatever layers and optimizers do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import layered_steps as steps
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_steps import step_of
from stages_cases import apart

from shardwright import Fleet, InputError, parallelize, scan_layers, synthesize
from shardwright.backends.launch import find_mpiexec, rank_environment
from shardwright.factory import load_factory
from shardwright.ir.graph import Graph
from shardwright.ir.rolling.layers import in_layers
from shardwright.ir.rolling.parts import Joined
from shardwright.ir.trace import trace

HERE = Path(__file__).resolve().parent

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))

#: What is done in a layer, how it is trained, and how many layers are scanned in how many stacks.
CASES = {
    "clipped": (step_of(optimizer=CLIPPED), (3,), 6),
    "by name": (step_of(optimizer=CLIPPED, layers=11, named=True), (11,), 6),
    "first apart": (step_of(steps.numbered, embedded=False, layers=4), (3,), 6),
    "drawn": (step_of(steps.dropping), (3,), 6),
    "cond": (step_of(steps.choosing, optax.sgd(0.1)), (3,), 2),
    "inner scan": (step_of(steps.looping), (3,), 6),
    "two kinds": (step_of(steps.in_turns, layers=4), (2,), 12),
    "no residual": (step_of(steps.plain, optax.sgd(0.1, momentum=0.9)), (3,), 4),
    "again": (step_of(jax.checkpoint(steps.residual, static_argnums=(2,))), (3,), 6),
    "aside": (step_of(aside=True), (3,), 6),
    "lamb": (step_of(optimizer=optax.lamb(1e-2)), (3,), 6),
    "if finite": (step_of(optimizer=optax.apply_if_finite(optax.adam(1e-2), 3)), (3,), 2),
}


def same(found: object, wanted: object) -> None:
    """Trees of one structure, up to the order in which numbers were added up."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_step_computes_the_same(name: str) -> None:
    (step, args), layers, stacks = CASES[name]
    scanned = scan_layers(step, *args)
    assert scanned.layers == layers
    assert len(scanned.stacks) == stacks
    stacked = scanned.stack(*args)
    same(scanned.unstack(*stacked), args)
    found, wanted = jax.jit(scanned.step)(*stacked), jax.jit(step)(*args)
    same(scanned.unstack(*found[:2]), wanted[:2])
    same(found[2:], wanted[2:])
    scans = [e for e in jax.make_jaxpr(scanned.step)(*stacked).eqns if e.primitive.name == "scan"]
    assert [e.params["length"] for e in scans] == [*layers, *layers]
    assert [e.params["reverse"] for e in scans] == [False, True]


@settings(max_examples=6, deadline=None)
@given(
    layer=st.sampled_from([steps.residual, steps.numbered, steps.plain, steps.in_turns]),
    layers=st.integers(4, 13),
    embedded=st.booleans(),
    named=st.booleans(),
    optimizer=st.sampled_from([CLIPPED, optax.sgd(0.1), optax.lion(1e-2), optax.adafactor(1e-2)]),
)
def test_whatever_the_layers(
    layer: steps.Layer, layers: int, embedded: bool, named: bool, optimizer: optax.GradientTransformation
) -> None:
    step, args = step_of(layer, optimizer, layers, embedded=embedded, named=named)
    scanned = scan_layers(step, *args)
    at_once = 2 if layer is steps.in_turns else 1
    assert scanned.layers[0] * at_once in range(layers - 2 * at_once, layers + 1)
    found, wanted = jax.jit(scanned.step)(*scanned.stack(*args)), jax.jit(step)(*args)
    same(scanned.unstack(*found[:2]), wanted[:2])
    same(found[2], wanted[2])


def test_two_towers_are_two_sequences_of_layers() -> None:
    one, two = (step_of(optimizer=optax.sgd(0.1), layers=n)[1][0] for n in (3, 4))

    def loss_of(towers: list[dict[str, object]], x: jax.Array, y: jax.Array) -> jax.Array:
        for tower in towers:
            x = x @ tower["in"]
            for number, block in enumerate(tower["blocks"]):
                x = steps.residual(x, block, number)
        return jnp.mean((x - y) ** 2)

    def step(towers: object, x: jax.Array, y: jax.Array) -> tuple[object, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(towers, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, towers, gradients), loss

    x = jnp.ones((steps.ROWS, steps.WIDTH))
    scanned = scan_layers(step, [one, two], x, -x)
    assert scanned.layers == (3, 4)
    assert dict(scanned.stacks) == {
        "towers/0/blocks/*/down": 3,
        "towers/0/blocks/*/up": 3,
        "towers/1/blocks/*/down": 4,
        "towers/1/blocks/*/up": 4,
    }
    found = jax.jit(scanned.step)(*scanned.stack([one, two], x, -x))
    wanted = jax.jit(step)([one, two], x, -x)
    same((*scanned.unstack(found[0]), found[1]), wanted)


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


def test_what_the_forward_part_keeps_is_put_together_from_nothing() -> None:
    for step, args in (step_of(steps.plain), step_of(steps.residual), step_of(steps.looping)):
        assert not joined(step, args)


def joined(step: object, args: tuple[object, ...]) -> list[Joined]:
    graph: Graph = trace(step, *args).graph
    stacks = in_layers(graph, [0] * len(graph.inputs))
    assert stacks is not None
    stacks.spread()
    return [stack.source for stack in stacks.all if isinstance(stack.source, Joined)]


def test_shapes_will_do() -> None:
    step, args = step_of()
    scanned = scan_layers(step, *jax.eval_shape(lambda: args))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), scanned.args) == jax.tree.map(
        lambda a: (a.shape, a.dtype), scanned.stack(*args)
    )
    assert "3 layers, 6 stacks" in str(scanned)
    assert "params/blocks/*/up" in str(scanned)


def test_a_step_of_one_container() -> None:
    step, (params, opt_state, x, y) = step_of()

    def of_one(state: dict[str, object], batch: tuple[jax.Array, jax.Array]) -> dict[str, object]:
        params, opt_state, _ = step(state["params"], state["opt"], *batch)
        return {"params": params, "opt": opt_state}

    state = {"params": params, "opt": opt_state}
    scanned = scan_layers(of_one, state, (x, y))
    found = jax.jit(scanned.step)(*scanned.stack(state, (x, y)))
    same(scanned.unstack(found)[0], jax.jit(of_one)(state, (x, y)))


def test_refusals() -> None:
    def one(params: jax.Array, x: jax.Array) -> jax.Array:
        return params - jax.grad(lambda p: jnp.sum((x @ p) ** 2))(params)

    matrix = jnp.eye(4)
    with pytest.raises(InputError, match="scan_layers: the step repeats no layers"):
        scan_layers(one, matrix, matrix)
    step, args = step_of()
    scanned = scan_layers(step, *args)
    with pytest.raises(InputError, match="params: is not the argument that layers were found in"):
        scanned.stack(args[1])
    with pytest.raises(InputError, match="the scanned step: takes 4 arguments, not 1"):
        scanned.step(args[0])
    with pytest.raises(InputError, match="params: is not what `stack` makes of the argument"):
        scanned.step(*args)
    with pytest.raises(InputError, match="params: has no such stacks"):
        scanned.unstack(args[0])
    with pytest.raises(InputError, match="arguments: 5 were passed, of 4"):
        scanned.stack(*args, args)

    def nested(params: object, opt_state: object, x: jax.Array, y: jax.Array) -> object:
        params, opt_state, loss = step(params, opt_state, x, y)
        return {"all": {"params": params, "opt": opt_state}, "loss": loss}

    state = {"params": ("all", "params"), "opt_state": ("all", "opt")}
    with pytest.raises(InputError, match="state: is part of a larger result"):
        scan_layers(nested, *args, state=state)


def test_what_is_called_in_regions_is_compared() -> None:
    """Also where no region says what it does: layers that are not alike are not taken for alike."""

    def of(factors: tuple[float, ...]) -> steps.Step:
        def step(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
            for block, factor in zip(params, factors, strict=True):
                added = lambda a, b, factor=factor: a + b * factor  # noqa: E731
                summed = lambda h, added=added: jax.lax.reduce(h, np.float32(0), added, (1,))[:, None] + h  # noqa: E731
                x = jax.lax.cond(jnp.sum(x) > 0, summed, jnp.tanh, x @ block["up"] @ block["down"])
            return x

        _, (params, _, x, _) = step_of(layers=3)
        return step, (params["blocks"], x)

    step, args = of((2.0, 2.0, 2.0))
    scanned = scan_layers(step, *args)
    assert scanned.layers == (3,)
    same(jax.jit(scanned.step)(*scanned.stack(*args)), jax.jit(step)(*args))
    step, args = of((2.0, 3.0, 4.0))
    with pytest.raises(InputError, match="repeats no layers"):
        scan_layers(step, *args)


def test_what_is_called_back_in_regions_is_compared() -> None:
    def step(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for number, block in enumerate(params):
            called = lambda h, number=number: np.asarray(h) * number  # noqa: E731
            back = lambda h, called=called: jax.pure_callback(called, jax.typeof(h), h)  # noqa: E731
            x = jax.lax.cond(jnp.sum(x) > 0, back, jnp.tanh, x @ block["up"] @ block["down"])
        return x

    _, (params, _, x, _) = step_of(layers=3)
    with pytest.raises(InputError, match="repeats no layers"):
        scan_layers(step, params["blocks"], x)


def test_generators_that_draw_otherwise_for_several_keys() -> None:
    """Beside the loops, JAX's rbg draws for one layer after the other."""

    def step(params: list[dict[str, jax.Array]], key: jax.Array, x: jax.Array) -> tuple[object, jax.Array]:
        for block in params:
            x = steps.residual(x, block, 0)
        keys = [jax.random.fold_in(key, n) for n in range(len(params))]
        drawn = [jax.random.bits(k, (2,)).astype(jnp.float32) / 2.0**32 for k in keys]
        blocks = [{**block, "up": block["up"] + d[0]} for block, d in zip(params, drawn, strict=True)]
        return blocks, x

    _, (params, _, x, _) = step_of(layers=3)
    args = params["blocks"], jax.random.key(0, impl="rbg"), x
    scanned = scan_layers(step, *args)
    same(scanned.results(jax.jit(scanned.step)(*scanned.stack(*args))), jax.jit(step)(*args))


def test_equations_that_wait_for_each_other_are_not_one() -> None:
    """What comes before the first layer is asked for by all, and again beside its likes of the others."""

    def step(params: dict[str, object], x: jax.Array) -> jax.Array:
        hidden = [x @ params["in"]]
        beside = [jnp.tanh(hidden[0])]
        for block in params["blocks"]:
            hidden.append(hidden[-1] + jnp.tanh((hidden[-1] + beside[0]) @ block["up"]) @ block["down"])
        beside += map(jnp.tanh, hidden[1:-1])
        h = hidden[-1]
        for block, other in zip(params["blocks"], beside, strict=True):
            h = h + jnp.sin((h * other) @ block["down"].T) @ block["up"].T
        return h

    _, (params, _, x, _) = step_of(layers=3)
    scanned = scan_layers(step, params, x)
    assert scanned.layers == (3,)
    same(jax.jit(scanned.step)(*scanned.stack(params, x)), jax.jit(step)(params, x))


def test_results_without_leaves_are_kept() -> None:
    step, (params, opt_state, x, y) = step_of(optimizer=optax.sgd(0.1), layers=3)

    def without_loss(params: object, opt_state: object, x: jax.Array, y: jax.Array) -> tuple[object, ...]:
        return *step(params, opt_state, x, y)[:2], {}, None

    args = params, opt_state, x, y
    scanned = scan_layers(without_loss, *args)
    found = jax.jit(scanned.step)(*scanned.stack(*args))
    same(scanned.results(found), jax.jit(without_loss)(*args))


def test_state_that_becomes_state_which_no_layer_reads() -> None:
    def step(params: list[dict[str, jax.Array]], others: object, x: jax.Array) -> tuple[object, object]:
        for block in params:
            x = steps.residual(x, block, 0)
        return others, jax.tree.map(lambda p: p + jnp.sum(x), params)

    _, (params, _, x, _) = step_of(layers=3)
    args = params["blocks"], jax.tree.map(jnp.negative, params["blocks"]), x
    scanned = scan_layers(step, *args)
    same(scanned.results(jax.jit(scanned.step)(*scanned.stack(*args))), jax.jit(step)(*args))


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
    assert json.loads(done.stdout.splitlines()[-1]) == {"ranks": 2, "gone": 2}


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


def test_a_scanned_step_is_the_same_in_every_process() -> None:
    """Also what is found in sets and by identity comes in one order."""
    code = (
        "from layered_steps import *; from shardwright import scan_layers; import shardwright.ir.trace as t;"
        "optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(0.1));"
        "step, args = step_of(in_turns, optimizer, layers=6);"
        "scanned = scan_layers(step, *args); print(t.trace(scanned.step, *scanned.args).fingerprint)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(HERE)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and len(found.pop().strip()) == 64


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
