"""What the tests of tracing share: an array, and the comparison of a graph with its step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import hijax

from shardwright.backends.single import evaluate_graph
from shardwright.ir.graph import Graph
from shardwright.ir.trace import Traced, trace

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def primitives(graph: Graph) -> list[str]:
    return [equation.primitive for equation in graph.all_equations()]


def agrees(step: Callable[..., Any], *args: Any) -> Traced:
    """The trace of a step, after comparing what its graph computes with what the step computes."""
    traced = trace(step, *args)
    flat = [jnp.asarray(leaf) for leaf in jax.tree.leaves(args)]
    wanted = jax.tree.leaves(jax.jit(step)(*args))
    got = evaluate_graph(traced.graph, traced.primitives, flat)
    assert len(got) == len(wanted) == len(traced.graph.outputs)
    for a, b, atom in zip(got, wanted, traced.graph.outputs, strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        assert atom.type.shape == tuple(np.shape(b)) or atom.type.dtype.startswith("key<")
    return traced


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    params: Any
    params_ema: Any
    count: Any


@jax.custom_vjp
def by_vjp(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


by_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (cotangent * jnp.exp(x),))


def by_high(x: jax.Array) -> jax.Array:
    """By a primitive that says what it is made of: a user's; in later versions of JAX, one of its own."""
    if not hasattr(hijax, "VJPHiPrimitive"):
        return x[jnp.triu_indices(3)] * 2

    class Twice(hijax.VJPHiPrimitive):
        def __init__(self, aval: Any) -> None:
            self.in_avals, self.out_aval, self.params = (aval,), aval, {}
            super().__init__()

        def expand(self, x: jax.Array) -> jax.Array:
            return jnp.sin(x) * 2

    return Twice(jax.typeof(x))(x)
