"""Steps whose layers are found and scanned compute what they computed, whatever layers and optimizers do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import layered_steps as steps
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_steps import same, step_of

from shardwright import InputError, scan_layers
from shardwright.ir.graph import Graph
from shardwright.ir.rolling.layers import in_layers
from shardwright.ir.rolling.parts import Joined
from shardwright.ir.trace import trace

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
    "two nearly alike": (step_of(steps.nearly_alike, layers=4), (2,), 12),
    "no residual": (step_of(steps.plain, optax.sgd(0.1, momentum=0.9)), (3,), 4),
    "again": (step_of(jax.checkpoint(steps.residual, static_argnums=(2,))), (3,), 6),
    "aside": (step_of(aside=True), (3,), 6),
    "lamb": (step_of(optimizer=optax.lamb(1e-2)), (3,), 6),
    "if finite": (step_of(optimizer=optax.apply_if_finite(optax.adam(1e-2), 3)), (3,), 2),
}


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


@settings(max_examples=4, deadline=None)
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


def test_pieces_of_the_batch_in_a_loop_are_no_layers() -> None:
    """They repeat more than the layers that each of them goes through."""
    params, _, x, y = step_of(layers=4)[1]

    def loss_of(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        h = x @ params["in"]
        for number, block in enumerate(params["blocks"]):
            h = steps.residual(h, block, number)
        return jnp.mean((h @ params["out"] - y) ** 2)

    def step(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> object:
        total = jax.tree.map(jnp.zeros_like, params)
        for at in range(0, steps.ROWS, 2):
            gradients = jax.grad(loss_of)(params, x[at : at + 2], y[at : at + 2])
            total = jax.tree.map(jnp.add, total, gradients)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)

    scanned = scan_layers(step, params, x, y)
    assert scanned.layers == (4,)
    found = jax.jit(scanned.step)(*scanned.stack(params, x, y))
    same(scanned.unstack(found)[0], jax.jit(step)(params, x, y))


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_every_leaf_draws_what_it_drew(generator: str) -> None:
    """Of some keys JAX draws other numbers where it draws of several at once."""

    def noise(params: object) -> object:
        leaves, structure = jax.tree.flatten(params)
        key = jax.random.key(0, impl=generator)
        keys = [jax.random.fold_in(key, n) for n in range(len(leaves))]
        drawn = [jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, drawn)

    noisy = optax.GradientTransformation(
        lambda params: (), lambda g, state, params=None: (jax.tree.map(jnp.add, g, noise(g)), state)
    )
    step, args = step_of(optimizer=optax.chain(noisy, optax.sgd(0.1)), layers=4)
    scanned = scan_layers(step, *args)
    assert scanned.layers == (4,)
    found, wanted = jax.jit(scanned.step)(*scanned.stack(*args)), jax.jit(step)(*args)
    same(scanned.unstack(found[0])[0], wanted[0])


def test_numbers_per_layer_are_stacked_as_planned_and_nothing_is_kept() -> None:
    def step(params: list[dict[str, object]], x: jax.Array) -> object:
        def loss_of(params: list[dict[str, jax.Array]]) -> jax.Array:
            h = x
            for p in params:
                h = h + p["scale"] * jnp.tanh(h @ p["up"])
            return jnp.sum(h**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))

    x = np.ones((2, 4), np.float32)
    for scale in (1.0, jnp.asarray(1.0), np.float32(1.0)):
        params = [{"up": np.eye(4, dtype=np.float32), "scale": scale} for _ in range(4)]
        scanned = scan_layers(step, params, x)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(scanned.args))
        types = [(a.shape, a.dtype, a.weak_type) for a in jax.tree.leaves(scanned.args)]
        given = jax.tree.map(jnp.asarray, scanned.stack(params, x))
        assert types == [(a.shape, a.dtype, a.weak_type) for a in jax.tree.leaves(given)]
        same(scanned.results(jax.jit(scanned.step)(*given)), jax.jit(step)(params, x))


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
    assert scanned.layers == (3,)
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
    assert scanned.layers == (3,)
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
    assert scanned.layers == (3,)
    same(scanned.results(jax.jit(scanned.step)(*scanned.stack(*args))), jax.jit(step)(*args))
