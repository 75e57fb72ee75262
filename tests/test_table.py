"""A graph as arrays: the same as asking its equations one by one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.cost.traffic import through_memory, traffic
from shardwright.ir.graph import Graph, Literal, Value
from shardwright.ir.table import codes, stretches, table
from shardwright.ir.trace import trace
from shardwright.synth.space.fuse import fuse

X = jax.ShapeDtypeStruct((4, 8), np.float32)


def scanned(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, row: (carry, carry), x[0], x)[1]


STEPS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: x,
    "literals": lambda x: 2.0 * x + 1.0 - x * x,
    "several results": lambda x: jax.lax.top_k(x, 2),
    "one tensor twice": lambda x: jnp.dot(x, x.T),
    "a loop, whose body does nothing": scanned,
}


def graph_of(step: Callable[[Any], Any]) -> Graph:
    return trace(step, X).graph


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_it_says_what_the_equations_say(step: Callable[[Any], Any]) -> None:
    graph = graph_of(step)
    for each in (graph, *(region for equation in graph.all_equations() for region in equation.regions)):
        found = table(each)
        for number, equation in enumerate(each.equations):
            mine = found.operands[found.begin[number] : found.begin[number + 1]].tolist()
            assert mine == [-1 if isinstance(a, Literal) else a.index for a in equation.inputs]
            made = found.results[found.made[number] : found.made[number + 1]].tolist()
            assert made == [value.index for value in equation.outputs]
            assert found.examples[found.form[number]].form is equation.form
            assert set(found.reader[found.begin[number] : found.begin[number + 1]].tolist()) <= {number}
            assert set(found.maker[found.made[number] : found.made[number + 1]].tolist()) <= {number}
        outputs = {atom.index for atom in each.outputs if isinstance(atom, Value)}
        assert set(np.flatnonzero(found.handed_out).tolist()) == outputs
        assert len(found.handed_out) == len(list(each.values()))


def test_every_reader_of_a_value_is_named_once() -> None:
    graph = graph_of(lambda x: jnp.sin(x * x) + x)
    found = table(graph)
    values, readers = found.readers(found.operands >= 0)
    pairs = {(a.index, e.index) for e in graph.equations for a in e.input_values}
    assert list(zip(values.tolist(), readers.tolist(), strict=True)) == sorted(pairs)


def test_places_of_some_equations_only() -> None:
    places, of = stretches(np.array([0, 2, 2, 5]), np.array([2, 0]))
    assert places.tolist() == [2, 3, 4, 0, 1]
    assert of.tolist() == [0, 0, 0, 1, 1]


def test_what_is_compiled_apart_goes_through_memory() -> None:
    graph = graph_of(lambda x: jnp.sin(jnp.exp(jnp.tanh(x))))
    tanh, exp, sin = graph.equations
    assert [traffic(graph)[e].outs for e in (tanh, exp, sin)] == [(False,), (False,), (True,)]
    first = through_memory(graph, [0, 1], [exp.outputs[0].index])
    assert list(first) == [tanh, exp]
    assert first[exp].outs == (True,)
    assert through_memory(graph, [2], [])[sin].ins == (True,)


def test_a_chain_is_one_class_and_a_residual_stream_ends_it() -> None:
    graph = graph_of(lambda x: (jnp.tanh(x) + jnp.sin(jnp.cos(x))) * 2.0)
    none = np.zeros(len(list(graph.values())), dtype=np.bool_)
    found = fuse(graph, none, none)
    primitives = [equation.primitive for equation in graph.equations]
    assert len(set(found.of_equation.tolist())) == 1, primitives
    assert found.outside.tolist()[0] == 0, "all that read the argument are in the class"
    assert found.of_value[0] == found.of_equation[0]
    hub = none.copy()
    hub[0] = True
    assert fuse(graph, none, hub).of_value[0] == -1, "a hub is in nobody's class"
    stream = graph_of(lambda x: (jnp.sin(y := x @ x.T) + y) @ x)
    none = np.zeros(len(list(stream.values())), dtype=np.bool_)
    classes = fuse(stream, none, none)
    of = dict(zip([e.primitive for e in stream.equations], classes.of_equation.tolist(), strict=True))
    assert of["add"] == -1
    assert of["sin"] >= 0


@pytest.mark.parametrize("most", [3, 1 << 30])
def test_rows_have_one_code_where_they_are_equal(most: int) -> None:
    rows = np.random.default_rng(0).choice([0, 1, most], (200, 5))
    found, known = codes(rows).tolist(), dict[int, tuple[int, ...]]()
    assert all(
        known.setdefault(code, tuple(row)) == tuple(row) for code, row in zip(found, rows, strict=True)
    )
    assert len(known) == len({tuple(row) for row in rows}) < 200
