"""From a training step to a graph: what is inlined, kept, dropped and refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trace_cases import Pair, TrainState, X, agrees, by_high, by_vjp, primitives

from shardwright.ir.errors import InputError, TraceError
from shardwright.ir.graph import Literal, Value
from shardwright.ir.jaxpr import CALLS, HIGH, REGIONS, SOLVE
from shardwright.ir.trace import trace

# ---------------------------------------------------------------------------------------------------
# Calls and regions


@jax.custom_jvp
def by_jvp(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


by_jvp.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 3.0 * tangents[0]))


def closed(x: jax.Array) -> jax.Array:
    from jax._src import api_util, core, linear_util

    def double(x: jax.Array) -> list[jax.Array]:
        return [x * 2]

    info = api_util.debug_info("closed", double, (x,), {})
    return core.closed_call_p.bind(x, subfuns=(linear_util.wrap_init(double, debug_info=info),))[0]


def solved(x: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.linalg.solve(x.T @ x + jnp.eye(x.shape[1]), right.T)


sine = jax.jit(jnp.sin)

CALLED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "jit": jax.jit(jnp.sin),
    "nested jit": jax.jit(lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) * 2)(x) + jax.jit(jnp.cos)(x)),
    "jit called twice": lambda x: sine(sine(x)),
    "jit that returns its input": lambda x: jax.jit(lambda y: (y, y))(x)[1] + 1,
    "jit that returns a literal": lambda x: jax.jit(lambda y: (1.5, y))(x)[0] + x,
    "custom_jvp": by_jvp,
    "custom_vjp": by_vjp,
    "gradient of custom_jvp": jax.grad(lambda x: by_jvp(x).sum()),
    "gradient of custom_vjp": jax.grad(lambda x: by_vjp(x).sum()),
    "relu, which is both": jax.grad(lambda x: jax.nn.relu(x).sum()),
    "remat": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    "gradient of remat": jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x).sum()),
    "traced": closed if jax.__version_info__ < (0, 11) else lambda x: jax.jit(jnp.sin).trace(x)(x),
    "high": by_high,
    "jit of custom_vjp of remat": jax.jit(lambda x: by_vjp(jax.checkpoint(jnp.sin)(x))),
    "linear solve": lambda x: solved(x, x),
    "gradient of linear solve": jax.grad(lambda x: (solved(x, x) ** 2).sum()),
    "linear solve of a batch": lambda x: jax.vmap(solved, (None, 0))(x, jnp.stack([x, 2 * x])),
}


@pytest.mark.parametrize("name", CALLED)
def test_calls_are_inlined(name: str) -> None:
    graph = agrees(CALLED[name], X).graph
    assert not set(primitives(graph)) & {*CALLS, HIGH, SOLVE}
    assert all(not equation.regions for equation in graph.equations)


@jax.custom_batching.custom_vmap
def batched(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


@batched.def_vmap
def _(size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return jnp.sin(x), True


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: jax.custom_derivatives.linear_call(lambda r, v: v * r, lambda r, v: v / r, x, x), ["mul"]),
        (
            jax.grad(
                lambda x: jax.custom_derivatives.linear_call(lambda _, v: v + v, lambda _, v: 3.0 * v, (), x)[
                    0, 0
                ]
            ),
            ["mul"],
        ),
        (batched, ["sin"]),
        (lambda x: jax.lax.composite(lambda v: jnp.sin(v) + 1.0, name="my.op")(x), ["sin", "add"]),
    ],
    ids=["linear", "gradient of linear", "custom_vmap", "composite"],
)
def test_calls_that_say_how_they_are_changed_are_inlined(
    function: Callable[[jax.Array], jax.Array], expected: list[str]
) -> None:
    """They ran replicated: a batch that goes through one of them was not shared out."""
    assert primitives(agrees(function, X).graph)[-len(expected) :] == expected


def test_a_linear_solve_is_a_call_of_what_solves() -> None:
    """Each of its functions has constants of its own; one is called, and for its gradient another."""

    def solve(scale: jax.Array, shift: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.custom_linear_solve(
            lambda x: x * scale,
            right + shift,
            solve=lambda _, b: b / scale,
            transpose_solve=lambda _, b: b / scale - 0.0 * shift,
        )

    there = agrees(solve, X + 3, X, X + 1).graph
    assert primitives(there) == ["add", "div"]
    agrees(jax.grad(lambda s, a, b: solve(s, a, b).sum(), (0, 1, 2)), X + 3, X, X + 1)


def test_custom_gradients_are_those_of_the_user() -> None:
    (weight,) = [
        e.inputs for e in trace(CALLED["gradient of custom_jvp"], X).graph.equations if e.primitive == "mul"
    ]
    assert any(isinstance(atom, Literal) and atom.value == 3.0 for atom in weight)
    assert "exp" in primitives(trace(CALLED["gradient of custom_vjp"], X).graph)


def scanned(x: jax.Array) -> jax.Array:
    carry, _ = jax.lax.scan(lambda c, row: (c + jnp.sin(row), c), x[0], x)
    return carry


def repeated(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda y: y.sum() < 50, lambda y: y * 1.5 + 1, x)


def chosen(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, lambda y: y * 2, lambda y: jax.jit(jnp.sin)(y), x)


def switched(x: jax.Array) -> jax.Array:
    return jax.lax.switch(jnp.int32(2), [jnp.sin, jnp.cos, lambda y: y + 1], x)


def nested(x: jax.Array) -> jax.Array:
    def body(c: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.cond(
            row.sum() > 0, lambda: c + row, lambda: jax.lax.fori_loop(0, 2, lambda _, y: y - 1.0, c)
        ), c

    return jax.lax.scan(body, x[0], x)[1]


REGIONED = {
    "scan": (scanned, {"scan": 1}),
    "gradient of scan": (jax.grad(lambda x: scanned(x).sum()), {"scan": 1}),
    "while": (repeated, {"while": 2}),
    "cond": (chosen, {"cond": 2}),
    "switch": (switched, {"cond": 3}),
    "scan of cond of fori_loop": (nested, {"scan": 1, "cond": 2}),
}


@pytest.mark.parametrize("name", REGIONED)
def test_control_flow_keeps_regions(name: str) -> None:
    step, wanted = REGIONED[name]
    graph = agrees(step, X).graph
    found = {e.primitive: len(e.regions) for e in graph.all_equations() if e.regions}
    for primitive, regions in wanted.items():
        assert found[primitive] >= regions
    assert found.keys() <= REGIONS.keys()
    assert not set(primitives(graph)) & set(CALLS), "calls inside regions are inlined, too"


def test_positional_psum_is_a_local_reduction() -> None:
    graph = trace(lambda x: jax.lax.psum(x, axis_name=0), X).graph
    assert [(e.primitive, e.params["axes"]) for e in graph.equations] == [("psum", (0,))]
    assert graph.outputs[0].type.shape == (3,)


def test_psum_of_a_vmapped_axis_is_a_local_reduction() -> None:
    step = jax.vmap(lambda row: row / jax.lax.psum(row, "rows"), axis_name="rows")
    assert "psum" in primitives(trace(step, X).graph)


# ---------------------------------------------------------------------------------------------------
# Constants, literals, keys, dead code


BIG = np.arange(600_000, dtype=np.float32).reshape(200_000, 3)


def test_large_constants_are_held_by_value() -> None:
    traced = agrees(lambda x: x @ jnp.asarray(BIG).T, X)
    ((value, array),) = traced.graph.constants.items()
    assert value.type.shape == BIG.shape
    np.testing.assert_array_equal(array, BIG)


def test_a_repeated_constant_is_one() -> None:
    table = jnp.asarray(X)
    step = jax.jit(lambda x: (x + table) * table + jax.jit(lambda y: y - table)(x))
    assert len(agrees(step, X).graph.constants) == 1


def test_equal_constants_of_different_arrays_stay_two() -> None:
    first, second = jnp.asarray(X), jnp.asarray(X.copy())
    assert len(agrees(lambda x: x + first - 2 * second, X).graph.constants) == 2


def test_constants_reach_regions() -> None:
    table = jnp.asarray(X)
    step = partial(jax.lax.scan, lambda c, row: (c + (table * row).sum(), row @ table.T))
    traced = agrees(lambda x: step(jnp.float32(0), x), X)
    (constant,), (loop,) = traced.graph.constants, [e for e in traced.graph.equations if e.regions]
    assert constant in loop.input_values and not loop.regions[0].constants


def test_unused_constants_are_dropped() -> None:
    table = jnp.asarray(BIG)

    def step(x: jax.Array) -> jax.Array:
        _ = jnp.sin(table)
        return x + 1

    assert trace(step, X).graph.constants == {}


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey, partial(jax.random.key, impl="rbg")])
def test_keys_are_arguments_and_state(make: Callable[[int], jax.Array]) -> None:
    def step(key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, use = jax.random.split(key)
        return key, x * jax.random.bernoulli(use, 0.5, x.shape)

    traced = trace(step, make(3), X)
    assert traced.state_names == {"key": "output[0]", "x": "output[1]"}
    assert traced.graph.inputs[0].type.dtype in ("key<fry>", "key<rbg>", "uint32")
    agrees(step, make(3), X)


def test_literals_stay_in_the_equations() -> None:
    (equation,) = trace(lambda x: x * 2.5, X).graph.equations
    literal = equation.inputs[1]
    assert isinstance(literal, Literal)
    assert (literal.value, literal.type.dtype, literal.type.shape) == (2.5, "float32", ())


def test_dead_code_is_pruned_and_numbers_stay_dense() -> None:
    def step(x: jax.Array, unused: jax.Array) -> jax.Array:
        _ = jnp.exp(x) + unused
        y = jnp.sin(x)
        _ = jax.jit(lambda z: jnp.cos(z))(y)
        return y * 2

    graph = trace(step, X, X).graph
    assert primitives(graph) == ["sin", "mul"]
    assert [e.index for e in graph.equations] == [0, 1]
    assert [v.index for v in graph.values()] == list(range(4))
    assert len(graph.inputs) == 2, "an unused argument is an argument all the same"


def test_outputs_may_be_inputs_literals_and_duplicates() -> None:
    def step(x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
        z = x + y
        return z, z, y, 1.5, 7, True, jnp.zeros((2,)), None

    traced = agrees(step, X, 2 * X)
    z, again, y, half, seven, true, zeros = traced.graph.outputs
    assert z is again
    assert y is traced.graph.inputs[1]
    assert [atom.value for atom in (half, seven, true) if isinstance(atom, Literal)] == [1.5, 7, True]
    assert [atom.type.dtype for atom in (half, seven, true)] == ["float32", "int32", "bool"]
    assert isinstance(zeros, Value)


def test_steps_without_arguments_or_equations() -> None:
    assert trace(lambda: jnp.ones(3)).graph.inputs == ()
    assert trace(lambda x: x, X).graph.equations == ()
    assert trace(lambda x: None, X).graph.outputs == ()


# ---------------------------------------------------------------------------------------------------
# Arguments


def test_pytrees_of_all_kinds() -> None:
    params = {"b": X, "a": [X, (X,)], "none": None}
    optimizer = optax.adamw(1e-3)
    state = TrainState(Pair(X, {"k": X}), optimizer.init({"w": X}), np.int32(0))

    def step(params: Any, state: TrainState, x: Any) -> tuple[Any, TrainState]:
        return jax.tree.map(lambda p: p * x, params), TrainState(
            state.params, state.params_ema, state.count + 1
        )

    traced = agrees(step, params, state, np.float32(2))
    names = traced.graph.input_names
    assert names[:3] == ("params['a'][0]", "params['a'][1][0]", "params['b']")
    assert {"state.params.first", "state.params.second['k']", "state.count", "x"} <= set(names)
    assert traced.graph.output_names[:2] == ("[0]['a'][0]", "[0]['a'][1][0]")
    assert traced.state_names == {"params": "output[0]", "state": "output[1]"}
    assert jax.tree.unflatten(traced.in_tree, range(len(names)))[1].count == names.index("state.count")


def test_python_scalars_are_weakly_typed_arguments() -> None:
    def step(x: jax.Array, rate: Any, count: Any, flag: Any) -> tuple[jax.Array, Any, Any]:
        return jnp.where(flag, x * rate, x), rate * 2, count + 1

    half = X.astype(jnp.bfloat16)
    traced = trace(step, half, 0.5, 3, True)
    assert [str(v.type) for v in traced.graph.inputs] == ["bfloat16[4,3]", "float32[]", "int32[]", "bool[]"]
    assert traced.graph.outputs[0].type.dtype == "bfloat16", "a weak type does not widen"
    assert traced.state_names == {"x": "output[0]", "rate": "output[1]", "count": "output[2]"}
    strong = trace(step, half, np.float32(0.5), 3, True)
    assert strong.graph.outputs[0].type.dtype == "float32"
    assert strong.fingerprint != traced.fingerprint


def test_shapes_will_do() -> None:
    shaped = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert trace(jnp.sin, shaped).fingerprint == trace(jnp.sin, X).fingerprint


def test_names_of_arguments() -> None:
    def step(a: Any, /, b: Any, *rest: Any, only: int = 3) -> Any:
        return a + b + rest[0] + only

    assert trace(step, X, X, X).graph.input_names == ("a", "b", "arg2")
    assert trace(jax.jit(step), X, X, X).graph.input_names == ("a", "b", "arg2")
    assert trace(partial(step, X), X, X).graph.input_names == ("b", "arg1")


class Opaque:
    """Nothing JAX knows."""


@pytest.mark.parametrize(
    ("leaf", "place"),
    [
        ({"name": "adam"}, "x['name']"),
        ([X, np.array(["a", "b"])], "x[1]"),
        (np.array([object()]), "x"),
        (Pair(Opaque(), X), "x.first"),
        (np.array(["2020-01-01"], "datetime64[D]"), "x"),
        ({"f": jnp.sin}, "x['f']"),
    ],
)
def test_leaves_that_are_no_numbers_are_named(leaf: Any, place: str) -> None:
    with pytest.raises(InputError) as caught:
        trace(lambda x: x, leaf)
    assert caught.value.place == place


def test_none_and_empty_containers_are_no_leaves() -> None:
    traced = agrees(lambda x, nothing, empty: (x + 1, nothing, empty), X, None, {})
    assert len(traced.graph.inputs) == 1


def raising(x: jax.Array) -> jax.Array:
    raise RuntimeError("out of\ncheese")


def refused(x: jax.Array) -> Any:
    return optax.apply_updates({"kernel": x}, {"bias": x})


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        # What a library refuses is where the step called it.
        (refused, f" ({__file__}:{refused.__code__.co_firstlineno + 1})"),
        (raising, "it raised RuntimeError: out of (" + __file__),
        (lambda x: float(x.sum()), "ConcretizationTypeError"),
        (lambda x: x @ x, "it raised TypeError: dot_general"),
        (lambda x, y: x, "missing 1 required positional argument"),
        (lambda x: "text", "it raised TypeError"),
        (lambda x: 1 // 0, "it raised ZeroDivisionError"),
    ],
)
def test_a_step_that_cannot_be_traced_says_why(step: Callable[..., Any], reason: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(step, X)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_derivatives_by_integers_are_no_results() -> None:
    def step(w: Any, n: Any) -> Any:
        return jax.grad(lambda w, n: w * n, argnums=(0, 1), allow_int=True)(w, n)

    with pytest.raises(TraceError, match=r"output \[1\]: is a derivative by integers .* Leave it out"):
        trace(step, 2.0, 3)
