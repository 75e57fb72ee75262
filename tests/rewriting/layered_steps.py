"""Training steps that repeat their layers in a Python loop, as people write them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, ROWS = 8, 6

#: That a step closes over.
KEY = jax.random.key(0)

Layer = Callable[[jax.Array, Any, int], jax.Array]
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def normed(h: jax.Array) -> jax.Array:
    return (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)


def residual(h: jax.Array, p: Any, number: int) -> jax.Array:
    return h + jnp.tanh(normed(h) @ p["up"]) @ p["down"]


def numbered(h: jax.Array, p: Any, number: int) -> jax.Array:
    """A number is written into every layer that no other has."""
    return h + jnp.tanh(h @ p["up"]) @ p["down"] / (number + 2.0)


def dropping(h: jax.Array, p: Any, number: int) -> jax.Array:
    """Every layer draws with a key of its own."""
    key = jax.random.fold_in(KEY, number)
    return h + jnp.where(jax.random.bernoulli(key, 0.8, h.shape), jnp.tanh(h @ p["up"]) @ p["down"], 0.0)


def choosing(h: jax.Array, p: Any, number: int) -> jax.Array:
    """A cond in every layer."""
    changed = lambda h: h + jnp.tanh(h @ p["up"]) @ p["down"]  # noqa: E731
    return jax.lax.cond(jnp.sum(h) > 0, changed, lambda h: 2 * h, h)


def looping(h: jax.Array, p: Any, number: int) -> jax.Array:
    """A scan in every layer."""
    again = lambda h, _: (h + 0.1 * jnp.tanh(h @ p["up"]) @ p["down"], None)  # noqa: E731
    return jax.lax.scan(again, h, None, length=3)[0]


def in_turns(h: jax.Array, p: Any, number: int) -> jax.Array:
    """Every other layer is of another kind."""
    if number % 2:
        return h * (jax.nn.sigmoid(h @ p["up"]) @ p["down"])
    return h + jnp.tanh(h @ p["up"]) @ p["down"]


def nearly_alike(h: jax.Array, p: Any, number: int) -> jax.Array:
    """In turns, too; but whatever the gradient of one kind of layer does, that of the other does as well."""
    made = jnp.sin(h @ p["up"]) @ p["down"]
    return h * made if number % 2 else h + made


def plain(h: jax.Array, p: Any, number: int) -> jax.Array:
    """Nothing goes around a layer: its result is the relu that the next one's gradient asks for."""
    return jax.nn.relu(jax.nn.relu(h @ p["up"]) @ p["down"])


def step_of(
    layer: Layer = residual,
    optimizer: Any = None,
    layers: int = 3,
    *,
    embedded: bool = True,
    named: bool = False,
    aside: bool = False,
) -> Step:
    """A training step and concrete arguments.

    Args:
        layer: of a hidden state, its parameters and its number.
        optimizer: adam if it is None.
        layers: how many.
        embedded: whether a product of parameters comes before the first layer, which then has a gradient to
            hand back.
        named: whether layers are entries of a dictionary, whose order is that of their names.
        aside: whether the step also returns a number of each layer.
    """
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    keys = jax.random.split(jax.random.key(layers), 2 * layers + 3)

    def drawn(k: int, *shape: int) -> jax.Array:
        return 0.3 * jax.random.normal(keys[k], shape)

    blocks = [
        {"up": drawn(2 * n, WIDTH, 2 * WIDTH), "down": drawn(2 * n + 1, 2 * WIDTH, WIDTH)}
        for n in range(layers)
    ]
    params: dict[str, Any] = {"out": jnp.eye(WIDTH)}
    params["blocks"] = {f"layer{n}": block for n, block in enumerate(blocks)} if named else blocks
    if embedded:
        params["in"] = jnp.eye(WIDTH)

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        h, means = x @ params["in"] if embedded else x, list[jax.Array]()
        for n in range(layers):
            h = layer(h, params["blocks"][f"layer{n}" if named else n], n)
            means.append(jnp.mean(h))
        return jnp.mean((h @ params["out"] - y) ** 2), means

    def train_step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        (loss, means), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, x, y)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        found = optax.apply_updates(params, updates), opt_state, loss
        return (*found, means) if aside else found

    x, y = (jax.random.normal(keys[k], (ROWS, WIDTH)) for k in (-1, -2))
    return train_step, (params, optimizer.init(params), x, y)


def same(found: object, wanted: object) -> None:
    """Trees of one structure, up to the order in which numbers were added up."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
