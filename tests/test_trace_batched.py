"""Loops under vmap whose examples end in iterations of their own: each becomes a loop with one answer."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trace_cases import X, agrees

from shardwright.ir.errors import TraceError
from shardwright.ir.graph import Equation, Graph
from shardwright.ir.jaxpr import source_line
from shardwright.ir.trace import trace

ROWS = np.abs(X[:, 0]) + np.float32(0.1)


def root(a: jax.Array) -> jax.Array:
    """Newton's method: body and condition close over what differs from example to example."""
    return jax.lax.while_loop(lambda s: jnp.abs(s * s - a) > 1e-4 * a, lambda s: (s + a / s) / 2, a)


def walk(key: jax.Array, until: jax.Array) -> jax.Array:
    """Carries a key and, beside what changes, what does not."""

    def further(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        key, place, until, steps = state
        key, now = jax.random.split(key)
        return key, place + jax.random.uniform(now, (2,)), until, steps + 1

    start = key, jnp.zeros(2), until, jnp.int32(0)
    return jax.lax.while_loop(lambda s: s[1].sum() < s[2], further, start)[3]


def tabulated(a: jax.Array) -> jax.Array:
    """Condition and body close over one table, which is the same for all."""
    table = jnp.asarray(X)
    return jax.lax.while_loop(
        lambda s: (s * table[:, 0] ** 2).sum() < a, lambda s: s + jnp.abs(table).sum(1), jnp.zeros(4) + a
    ).sum()


def twice(a: jax.Array) -> jax.Array:
    """A loop in a loop, each with an end of its own."""

    def outer(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        count, y = state
        return count + 1, jax.lax.while_loop(lambda z: z < count + a, lambda z: z + 0.3, y)

    return jax.lax.while_loop(lambda s: s[0] < 3 * a, outer, (jnp.float32(0), jnp.float32(0)))[1]


def row_by_row(rows: jax.Array) -> jax.Array:
    """As many rows as there are entries in each: what an answer belongs to is its leading dimension."""
    return jax.vmap(lambda row: jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y * 2 + 1, row))(rows)


def for_each(times: jax.Array) -> jax.Array:
    return jax.vmap(lambda n: jax.lax.fori_loop(0, n, lambda i, total: total + i, 0))(times)


def in_scan(x: jax.Array) -> Any:
    return jax.lax.scan(lambda c, by: (jax.vmap(root)(c + by), c.sum()), x, jnp.arange(1.0, 4.0))


def in_cond(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, jax.vmap(root), lambda y: y * 2, x)


def gradient(x: jax.Array) -> jax.Array:
    return jax.grad(lambda y: (y * jax.vmap(root)(jax.lax.stop_gradient(y))).sum())(x)


def solved(x: jax.Array) -> jax.Array:
    scales = jnp.array([2.0, 3.0, 5.0])
    return jax.vmap(lambda b: jax.scipy.sparse.linalg.cg(lambda v: scales * v, b)[0])(x)


KEYS = jax.random.split(jax.random.key(0), 4)

BATCHED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "closed over": (jax.vmap(root), (ROWS,)),
    "of two batches": (jax.vmap(jax.vmap(root)), (np.abs(X) + 1,)),
    "a batch of rows": (row_by_row, (np.abs(X[:3]),)),
    "a table": (jax.vmap(tabulated), (ROWS,)),
    "keys": (jax.vmap(walk), (KEYS, 9 * ROWS)),
    "nested": (jax.vmap(twice), (ROWS,)),
    "fori_loop": (for_each, (np.arange(4, dtype=np.int32),)),
    "in scan": (in_scan, (ROWS,)),
    "in cond": (in_cond, (ROWS,)),
    "gradient": (gradient, (ROWS,)),
    "poisson": (jax.vmap(lambda key: jax.random.poisson(key, 2.0)), (KEYS,)),
    "gradient of gamma": (jax.vmap(jax.grad(lambda a: jax.random.gamma(KEYS[0], a))), (ROWS,)),
    "cg": (solved, (X,)),
}


def whiles(graph: Graph) -> Iterator[Equation]:
    return (equation for equation in graph.all_equations() if equation.primitive == "while")


@pytest.mark.parametrize("name", BATCHED)
def test_a_loop_of_a_batch_has_one_answer(name: str) -> None:
    step, args = BATCHED[name]
    loops = list(whiles(agrees(step, *args).graph))
    assert loops
    for loop in loops:
        (answer,) = loop.regions[0].outputs
        assert (answer.type.shape, answer.type.dtype) == ((), "bool")


def test_what_is_added_stands_in_the_line_of_the_loop() -> None:
    (loop,) = whiles(trace(jax.vmap(root), ROWS).graph)
    added = {e.primitive: e for region in loop.regions for e in region.equations}
    for primitive in ("reduce_or", "select_n", "and"):
        assert source_line(added[primitive]) == source_line(loop)
    assert Path(__file__).name in source_line(loop) and "(root)" in source_line(loop)


def test_the_condition_is_asked_for_once_a_turn() -> None:
    """Else an answer that two compiled programs round differently could keep a loop from ending."""
    (loop,) = whiles(trace(jax.vmap(root), ROWS).graph)
    asked, turn = ([e.primitive for e in region.equations] for region in loop.regions)
    assert asked == ["reduce_or"]
    assert turn.count("gt") == 1


def test_what_the_body_hands_on_is_not_chosen() -> None:
    (loop,) = whiles(trace(jax.vmap(walk), KEYS, ROWS).graph)
    changing = ["key", "place", "steps"]
    assert [e.primitive for e in loop.regions[1].equations].count("select_n") == len(changing)


def test_equal_loops_stay_equal() -> None:
    """What repeats is found by its form: a function that is called twice has one loop."""
    drawn = jax.vmap(lambda key: jax.random.poisson(key, 2.0))
    loops = list(whiles(trace(lambda a, b: drawn(a) + drawn(b), KEYS, KEYS).graph))
    assert len({id(loop.form) for loop in loops}) == len(loops) // 2


def test_effects_in_a_loop_of_a_batch_are_refused() -> None:
    def told(y: jax.Array) -> jax.Array:
        jax.debug.print("y = {}", y)
        return y * 2

    with pytest.raises(TraceError, match=r"debug_print .*told\)"):
        trace(jax.vmap(lambda a: jax.lax.while_loop(lambda y: y < 5, told, a)), ROWS)
