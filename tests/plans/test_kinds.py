"""Steps of all kinds: loops, branches, random numbers, and primitives that have no rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from plan_cases import STEPS, array, assert_same, fleet, mlp, while_

from shardwright import (
    Fleet,
    ReplicatedWarning,
    execute,
    synthesize,
)


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_all_kinds(name: str) -> None:
    step, args = STEPS[name]()
    plan = synthesize(step, *args, fleet=fleet(30, 20, 10))
    assert plan.exchanges
    result = plan.verify(step, *args)
    assert result.ok, result
    got, wanted = plan.compile(step)(*args), jax.jit(step)(*args)
    keys = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key), (got, wanted))
    plain = jax.tree.map(lambda x, key: jax.random.key_data(x) if key else x, (got, wanted), keys)
    assert_same(*plain, rtol=1e-4)


def test_a_loop_is_said_to_be_priced_as_one_iteration() -> None:
    step, args = while_()
    assert any("while" in note for note in synthesize(step, *args, fleet=fleet(2, 1)).assumptions)


doubled = Primitive("double_of_my_own")
doubled.def_impl(lambda x: x * 2)
doubled.def_abstract_eval(lambda x: x)


def _lower() -> None:
    from jax.interpreters import mlir

    mlir.register_lowering(doubled, mlir.lower_fun(lambda x: x * 2, multiple_results=False))


_lower()

UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "tridiagonal_solve": lambda x: jax.lax.linalg.tridiagonal_solve(x[0], x[1] + 40, x[2], x),
    "double_of_my_own": lambda x: doubled.bind(x),
    "pure_callback": lambda x: jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
}


@pytest.mark.parametrize("primitive", UNKNOWN)
def test_unknown_primitives_run_replicated_visibly(primitive: str) -> None:
    unknown = UNKNOWN[primitive]

    def step(w: Any, x: Any) -> Any:
        y = unknown(jnp.tanh(x @ w))  # the line that is named
        return w * 0.9, jnp.mean(y @ w)

    args = (array(16, 16), array(16, 16, seed=1))
    with pytest.warns(ReplicatedWarning, match=primitive) as caught:
        plan = synthesize(step, *args, fleet=fleet(30, 20, 10))
    (warning,) = [w for w in caught if primitive in str(w.message)]
    assert Path(__file__).name in str(warning.message)
    assert warning.filename == __file__
    assert primitive in plan.stats.replicated
    assert primitive in str(plan)
    result = plan.verify(step, *args)
    assert result.ok, result


def test_unknown_primitives_are_found_in_regions() -> None:
    def step(x: Any) -> Any:
        return jax.lax.scan(lambda c, row: (c + doubled.bind(row), None), x[0], x)[0]

    with pytest.warns(ReplicatedWarning, match="double_of_my_own"):
        plan = synthesize(step, array(12, 16), fleet=fleet(2, 1))
    assert plan.verify(step, array(12, 16)).ok


def test_known_primitives_are_not_warned_of() -> None:
    step, args = mlp()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        synthesize(step, *args, fleet=fleet(2, 1))
    assert [str(each.message) for each in told if each.category is ReplicatedWarning] == []


def test_scalars_are_not_warned_of() -> None:
    """No rule could have them cut. (A diagonal asks for its platform, a number, by its own primitive.)"""

    def step(x: Any) -> Any:
        return jnp.diagonal(x * doubled.bind(x[0, 0])).sum()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan = synthesize(step, array(12, 12), fleet=fleet(2, 1))
    assert [str(each.message) for each in told if each.category is ReplicatedWarning] == []
    assert "double_of_my_own" in plan.text() and not plan.stats.replicated
    assert plan.verify(step, array(12, 12)).ok


def test_closed_over_arrays_are_held_whole() -> None:
    table = jnp.asarray(array(16, 16, seed=5))

    def step(x: Any) -> Any:
        return x + jnp.tanh(x @ table)

    plan = synthesize(step, array(12, 16), fleet=fleet(3, 2, 1))
    assert len(plan.program.inputs) == 1
    assert plan.verify(step, array(12, 16)).ok


def test_the_backend_is_told_who_shares_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hierarchical strategies run among the nodes of the plan's fleet, whatever machine they run on."""
    told: list[Any] = []

    def spy(traced: Any, program: Any, ratios: Any, seats: Any) -> Any:
        told.append(seats.wiring)
        return execute.BACKENDS["reference"](traced, program, ratios, seats)

    monkeypatch.setitem(execute.BACKENDS, "spy", spy)
    node = fleet(30, 20).to_dict()["nodes"][0]  # type: ignore[index]
    network = {"bandwidth": "400 GB/s", "latency": "100 ns"}
    step, args = mlp()
    two = Fleet.from_dict({"name": "two", "nodes": [{**node, "count": 2}], "network": network})
    plan = synthesize(step, *args, fleet=two, devices="all", axes=1)
    assert_same(plan.compile(step, backend="spy")(*args), step(*args))
    assert [wiring.groups(range(4)) for wiring in told] == [((0, 1), (2, 3))]
