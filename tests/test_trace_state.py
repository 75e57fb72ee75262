"""Which outputs of a step are its state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trace_cases import Pair, TrainState, X

from shardwright.ir.errors import InputError
from shardwright.ir.trace import trace


def params_like() -> dict[str, Any]:
    return {"w": X, "b": X[0]}


def sgd(params: Any, x: Any) -> tuple[Any, Any]:
    return jax.tree.map(lambda p: p * 0.9, params), x.sum()


def test_leading_outputs_that_match_are_state() -> None:
    def step(params: Any, opt_state: Any, count: Any, x: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return params, opt_state, count + 1, x.sum(), {"accuracy": x.mean()}

    opt_state = optax.adam(0.1).init(params_like())
    traced = trace(step, params_like(), opt_state, np.int32(0), X)
    assert traced.state_names == {"params": "output[0]", "opt_state": "output[1]", "count": "output[2]"}
    leaves = len(jax.tree.leaves((params_like(), opt_state))) + 1
    assert traced.graph.state == {i: i for i in range(leaves)}


def test_state_ends_at_the_first_output_that_does_not_match() -> None:
    def step(params: Any, x: Any, count: Any) -> tuple[Any, Any, Any]:
        return params, x.sum(), count + 1  # count matches, but the loss before it does not

    assert trace(step, params_like(), X, np.int32(0)).state_names == {"params": "output[0]"}


@pytest.mark.parametrize("wrong", ["shape", "dtype", "structure"])
def test_a_match_is_of_structure_shape_and_dtype(wrong: str) -> None:
    def step(params: Any, x: Any) -> tuple[Any, Any]:
        if wrong == "shape":
            params = {**params, "b": params["b"][:2]}
        if wrong == "dtype":
            params = {**params, "b": params["b"].astype(jnp.bfloat16)}
        if wrong == "structure":
            params = [params["b"], params["w"]]
        return params, x.sum()

    traced = trace(step, params_like(), X)
    assert traced.state_names == {}
    assert traced.graph.state == {}


def test_a_single_container_is_state() -> None:
    """Alone, or as the first of several results; a NamedTuple is one container, not several outputs."""
    states: list[Any] = [Pair(X, X[0]), TrainState(X, X[0], np.int32(0)), (X, X[0]), [X, X[0]], {"p": X}]
    for state in states:
        names = trace(lambda state, x: jax.tree.map(lambda s: s + 1, state), state, X).state_names
        assert names == {"state": "output"}
        names = trace(lambda state, x: (state, x.sum()), state, X).state_names
        assert names == {"state": "output[0]"}


def test_a_result_that_is_no_tuple() -> None:
    assert trace(lambda params, x: {"loss": x.sum()}, params_like(), X).state_names == {}
    assert trace(lambda x, y: x + y, X, X).state_names == {"x": "output"}
    assert trace(lambda x, y: [x + y, y], X, X).state_names == {"x": "output[0]", "y": "output[1]"}


def test_float64_arguments_match_what_jax_makes_of_them() -> None:
    assert trace(lambda x: (x * 2,), X.astype(np.float64)).state_names == {"x": "output[0]"}


def test_numbers_match_what_jax_makes_of_them_whatever_its_precision() -> None:
    for wide in (False, True):
        with jax.enable_x64(wide):
            assert trace(lambda s, x: ([s[0] * 0.9, s[1] + 1], x.sum()), [0.1, 3], X).state_names == {
                "s": "output[0]"
            }


def loss_first(params: Any, opt_state: Any, x: Any) -> tuple[Any, dict[str, Any]]:
    return x.sum(), {"params": params, "params_ema": params, "opt": (opt_state, opt_state)}


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ({0: "[1]['params']"}, {"params": "output[1]['params']"}),
        ({"params": (1, "params_ema")}, {"params": "output[1]['params_ema']"}),
        ({"opt_state": (1, "opt", 1)}, {"opt_state": "output[1]['opt'][1]"}),
        (
            {0: (1, "params"), 1: "[1]['opt'][0]"},
            {"params": "output[1]['params']", "opt_state": "output[1]['opt'][0]"},
        ),
        ({}, {}),
    ],
)
def test_state_may_be_given(override: Any, names: dict[str, str]) -> None:
    traced = trace(loss_first, params_like(), X, X, state=override)
    assert traced.state_names == names
    inputs, outputs = traced.graph.input_names, traced.graph.output_names
    for argument, path in names.items():
        pairs = {
            inputs[i]: outputs[o] for o, i in traced.graph.state.items() if inputs[i].startswith(argument)
        }
        assert pairs == {i: path.removeprefix("output") + i.removeprefix(argument) for i in pairs}
        assert pairs


def test_an_override_replaces_the_match() -> None:
    def step(a: Any, b: Any) -> tuple[Any, Any]:
        return a + 1, b + 1

    assert trace(step, X, X).graph.state == {0: 0, 1: 1}
    assert trace(step, X, X, state={"a": 1, "b": 0}).graph.state == {1: 0, 0: 1}
    assert trace(step, X, X, state={}).graph.state == {}


def test_paths_do_not_match_by_prefix() -> None:
    def step(params: Any, x: Any) -> TrainState:
        return TrainState(params, params, x.sum())

    traced = trace(step, params_like(), X, state={"params": ".params"})
    assert set(traced.graph.state) == {0, 1}


@pytest.mark.parametrize(
    ("override", "place", "reason"),
    [
        ({7: 0}, "state[7]", "is no argument"),
        ({-1: 0}, "state[-1]", "is no argument"),
        ({"weights": 0}, "state['weights']", "is no argument"),
        ({None: 0}, "state[None]", "is no argument"),
        ({"params": 0}, "state[params]", "output [0] does not match"),
        ({"params": 9}, "state[params]", "output [9] does not match"),
        ({"params": "[1]['opt']"}, "state[params]", "does not match"),
        ({"params": ""}, "state[params]", "output of the step does not match"),
        ({"params": None}, "state: None", "a NoneType is no output path"),
        ({"params": (1, "params"), 0: (1, "params_ema")}, "state[params]", "matched twice"),
        ({"opt_state": (1, "opt", 0), 2: (1, "opt", 0)}, "state[x]", "matched twice"),
    ],
)
def test_a_bad_override_is_named(override: Any, place: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        trace(loss_first, params_like(), X, X, state=override)
    assert caught.value.place == place
    assert reason in caught.value.reason
    assert caught.value.remedy
