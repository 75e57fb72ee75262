"""`parallelize` behaves like `jax.jit` on plans of two unequal devices, for the libraries people use."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import shardwright
from shardwright import Fleet, InputError, SingleProcessWarning, TraceError, api
from shardwright.embed import PLANNING
from shardwright.ir.placement import Shard
from shardwright.plans import cache as plan_cache

optimizer = optax.sgd(0.1, momentum=0.9)


def fleet(*speeds: float) -> Fleet:
    """Devices slow enough, on links fast enough, that cutting small tensors pays."""
    kinds = [
        {"name": f"d{s:g}", "flops": f"{s} MFLOP/s", "memory_bandwidth": f"{2 * s} MB/s", "memory": "1 GB"}
        for s in speeds
    ]
    node: dict[str, Any] = {"devices": [{"type": kind} for kind in kinds]}
    if len(kinds) > 1:
        node["link"] = {"bandwidth": "400 GB/s", "latency": "100 ns"}
    return Fleet.from_dict({"name": "slow", "nodes": [node]})


TWO = fleet(50, 20)


@pytest.fixture
def on_two(tmp_path: Path) -> Callable[..., Any]:
    """Runs all devices of a plan in this process."""
    return partial(shardwright.parallelize, fleet=TWO, backend="reference", cache=tmp_path, devices="all")


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(y, (jax.Array, np.ndarray)):
            assert x.shape == y.shape and x.dtype == y.dtype
            np.testing.assert_allclose(
                np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=2e-5, atol=1e-6
            )
        else:
            assert x == y


def key_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


# -- arguments ----------------------------------------------------------------------------------------


def scaled(params: Any, x: jax.Array, power: int, *, rate: float = 0.5, mode: str = "mean") -> Any:
    """Numbers that are traced, one that is not, and a text that chooses code."""
    assert isinstance(power, int) and not isinstance(rate, float)
    loss = getattr(jnp, mode)((x @ params["w"]) ** power)
    return {"w": params["w"] - rate * loss}, {"loss": loss, "many": [loss, x.sum(axis=0)]}


def test_positions_names_and_defaults(on_two: Callable[..., Any]) -> None:
    options: dict[str, Any] = {"static_argnums": 2, "static_argnames": "mode"}
    step, jitted = on_two(scaled, **options, donate_argnums=0), jax.jit(scaled, **options)
    params, x = {"w": draw(0, 16, 32)}, draw(1, 24, 16)
    for _ in range(2):
        same(step(params, x, 2, rate=0.1), jitted(params, x, 2, rate=0.1))
    same(step(x=x, params=params, power=2, rate=0.1), jitted(params, x, 2, rate=0.1))
    same(step(params, x, 3, rate=1, mode="sum"), jitted(params, x, 3, rate=1, mode="sum"))
    same(step(params, np.asarray(x)[:12], -1 + 3, rate=0.1), jitted(params, x[:12], 2, rate=0.1))
    made = step.plan(params, x, 2, rate=0.1)
    assert step.plan(params, x, 2, rate=0.7) is made
    assert step.plan(params, jax.ShapeDtypeStruct(x.shape, x.dtype), power=2, rate=0.1) is made
    assert made.state == {"params": "output[0]"} and set(made.held) == {"params['w']", "x", "rate"}
    assert step.__name__ == "scaled"
    with pytest.raises(TypeError, match="unexpected"):
        step(params, x, 2, rat=1)


@pytest.mark.parametrize("backend", ["reference", "jit"])
def test_static_arguments_that_are_equal_and_of_another_type_are_other_code(
    backend: str, on_two: Callable[..., Any]
) -> None:
    def step(x: jax.Array, power: float) -> Any:
        return x + 1, x * (2 if power is True else power)

    ours = on_two(step, static_argnums=1, backend=backend, fleet=fleet(50))
    for power in (1, True, 1.0):
        same(ours(jnp.arange(6), power), jax.jit(step, static_argnums=1)(jnp.arange(6), power))


def test_what_cannot_be_called_is_refused(on_two: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"static_argnames: 'mod'.*mode"):
        on_two(scaled, static_argnames="mod")
    with pytest.raises(InputError, match=r"backend.*Choose from auto, jit, reference"):
        shardwright.parallelize(scaled, fleet=TWO, backend="gpu")
    with pytest.raises(InputError, match=r"constraint: is no argument. Did you mean constraints\?"):
        shardwright.parallelize(scaled, fleet=TWO, backend="jit", constraint={"x": "R"})
    of_synthesize = inspect.signature(shardwright.synthesize).parameters.values()
    named = {each.name for each in of_synthesize if each.kind is each.KEYWORD_ONLY}
    assert set(PLANNING) == named - {"fleet", "state"}
    step = on_two(scaled, static_argnums=(2,), static_argnames="mode")
    with pytest.raises(InputError, match=r"power.*cannot be hashed.*tuple"):
        step({"w": draw(0, 4, 4)}, draw(1, 4, 4), [2], rate=0.1)
    shapes = {"w": jax.ShapeDtypeStruct((4, 4), "float32")}
    with pytest.raises(InputError, match="without values"):
        on_two(lambda p: {"w": p["w"] + 1})(shapes)
    with pytest.raises(InputError, match=r"missing\.yaml"):
        shardwright.parallelize(scaled, fleet=tmp_path / "missing.yaml")


def test_state_that_does_not_lead_can_be_named(on_two: Callable[..., Any]) -> None:
    def step(x: jax.Array, params: Any) -> Any:
        return {"loss": (x @ params).sum(), "params": params * 0.9}

    plan = on_two(step, state={"params": "['params']"}).plan(draw(0, 8, 4), draw(1, 4, 8))
    assert plan.state == {"params": "output['params']"}


# -- libraries ----------------------------------------------------------------------------------------


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = linen.relu(linen.Dense(32)(x))
        x = linen.BatchNorm(use_running_average=not train)(x)
        return linen.Dense(4)(linen.Dropout(0.2, deterministic=not train)(x))


class State(TrainState):
    statistics: Any


def test_linen(on_two: Callable[..., Any]) -> None:
    model, x, y = Dense(), draw(0, 24, 8), draw(1, 24, 4)

    def step(state: State, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.statistics}
            key_of_step = jax.random.fold_in(key, state.step)
            out, new = state.apply_fn(
                variables, x, True, mutable=["batch_stats"], rngs={"dropout": key_of_step}
            )
            return jnp.mean((out - y) ** 2), new["batch_stats"]

        (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, statistics=statistics), {"loss": loss}

    variables = model.init(jax.random.key(0), x, False)
    state = State.create(
        apply_fn=model.apply, params=variables["params"], tx=optimizer, statistics=variables["batch_stats"]
    )
    ours, single = on_two(step), jax.jit(step)
    a = b = state
    for number in range(2):
        (a, metrics), (b, wanted) = (
            run(s, x, y, jax.random.key(number)) for run, s in ((ours, a), (single, b))
        )
        same((a, metrics), (b, wanted))
    assert int(a.step) == 2 and sharded(ours.plan(a, x, y, jax.random.key(0)))


def sharded(plan: shardwright.Plan) -> int:
    return sum(isinstance(p, Shard) for p in plan.program.inputs)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def nnx_step(model: Mlp, optimizer: Any, x: jax.Array, y: jax.Array) -> Any:
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return loss, {"norm": optax.tree.norm(gradients)}


def test_nnx_modules_are_updated_in_place(on_two: Callable[..., Any]) -> None:
    x, y = draw(0, 24, 8), draw(1, 24, 4)
    results: list[Any] = []
    for jit in (on_two, nnx.jit):
        model = Mlp(nnx.Rngs(0))
        sgd = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        step, evaluate = jit(nnx_step), jit(lambda model, x: model(x))
        losses = [step(model, sgd, x, y) for _ in range(2)]
        model.eval()
        results.append((losses, evaluate(model, x), nnx.state(model)))
    same(results[0][:2], results[1][:2])
    states = [jax.tree.leaves(nnx.to_pure_dict(state)) for *_, state in results]
    same(*([key_data(leaf) for leaf in leaves] for leaves in states))


def test_an_nnx_step_may_not_change_what_a_module_consists_of(on_two: Callable[..., Any]) -> None:
    def step(model: Mlp, x: jax.Array) -> jax.Array:
        model.seen = nnx.Variable(x.sum())
        return model(x)

    with pytest.raises(TraceError, match="nnx modules: the step changes their structure"):
        on_two(step)(Mlp(nnx.Rngs(0)), draw(0, 24, 8))


class Net(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    name: str = "net"

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        return self.dropout(self.mlp(x), key=key)


def test_equinox_modules_with_static_leaves(on_two: Callable[..., Any]) -> None:
    def step(model: Net, opt_state: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        def loss_of(model: Net) -> jax.Array:
            return jnp.mean((jax.vmap(model)(x, jax.random.split(key, len(x))) - y) ** 2)

        loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
        updates, opt_state = optimizer.update(gradients, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    model = Net(eqx.nn.MLP(8, 4, 32, 1, jax.nn.gelu, key=jax.random.key(0)), eqx.nn.Dropout(0.2))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    rest = (draw(0, 24, 8), draw(1, 24, 4), jax.random.key(2))
    ours, single = on_two(step), eqx.filter_jit(step)
    a = b = (model, opt_state)
    for _ in range(2):
        *a, loss_a = ours(*a, *rest)
        *b, loss_b = single(*b, *rest)
        same((a, loss_a), (b, loss_b))
    assert a[0].mlp.activation is b[0].mlp.activation and a[0].name == "net"
    assert list(ours.plan(*a, *rest).state)[:2] == ["model", "opt_state"]


class Weights(NamedTuple):
    params: Any
    opt_state: Any
    key: jax.Array


def test_haiku_with_a_key_in_its_state(on_two: Callable[..., Any]) -> None:
    def network(x: jax.Array) -> jax.Array:
        x = jax.nn.relu(hk.Linear(32)(x))
        return hk.Linear(4)(hk.dropout(hk.next_rng_key(), 0.2, x))

    model = hk.transform(network)

    def step(weights: Weights, x: jax.Array, y: jax.Array) -> tuple[Weights, jax.Array]:
        key, own = jax.random.split(weights.key)
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, own, x) - y) ** 2))(
            weights.params
        )
        updates, opt_state = optimizer.update(gradients, weights.opt_state)
        return Weights(optax.apply_updates(weights.params, updates), opt_state, key), loss

    x, y = draw(0, 24, 8), draw(1, 24, 4)
    params = model.init(jax.random.key(0), x)
    ours, single = on_two(step), jax.jit(step)
    a = b = Weights(params, optimizer.init(params), jax.random.key(7))
    for _ in range(2):
        (a, loss_a), (b, loss_b) = ours(a, x, y), single(b, x, y)
        same(
            (a._replace(key=jax.random.key_data(a.key)), loss_a),
            (b._replace(key=jax.random.key_data(b.key)), loss_b),
        )


# -- the cache ----------------------------------------------------------------------------------------


def shrink(params: Any, x: jax.Array) -> Any:
    return jax.tree.map(lambda p: p - 0.1 * (x @ p).mean(), params), x.sum()


ARGS = ({"w": jax.ShapeDtypeStruct((16, 32), "float32")}, jax.ShapeDtypeStruct((24, 16), "float32"))


def test_a_second_start_does_not_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**options: Any) -> shardwright.Plan:
        return shardwright.parallelize(shrink, fleet=TWO, cache=tmp_path / "plans", **options).plan(*ARGS)

    first = start()
    (file,) = (tmp_path / "plans").iterdir()
    searched: list[bool] = []
    synthesize = api.synthesize_traced
    monkeypatch.setattr(
        api, "synthesize_traced", lambda *a, **k: (searched.append(True), synthesize(*a, **k))[1]
    )
    again = start()
    assert not searched and again == first and again.traced is not None
    # Anything that the plan was made of changes the key; so does damage, by any byte.
    whole = file.read_bytes()
    for broken in (b"", whole[:-20], whole.replace(b"all_reduce", b"all_redoce", 1).replace(b"R", b"Q", 1)):
        file.write_bytes(broken)
        searched.clear()
        assert start().program == first.program and searched
        assert file.read_bytes() != broken
    for options in ({"devices": "all"}, {"constraints": {"x": "R"}}, {"constraints": lambda name, type: "R"}):
        searched.clear()
        start(**options)
        assert searched, options
        searched.clear()
        start(**options)
        assert not searched, options
    assert len(list((tmp_path / "plans").iterdir())) == 4


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    step = shardwright.parallelize(shrink, fleet=TWO, cache=tmp_path / "file" / "plans")
    assert step.plan(*ARGS).fits


def test_where_plans_are_kept(tmp_path: Path) -> None:
    assert plan_cache.default_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "shardwright" / "plans"
    home = Path.home() / ".cache" / "shardwright" / "plans"
    assert plan_cache.default_folder({}) == plan_cache.default_folder({"XDG_CACHE_HOME": "relative"}) == home


def test_a_plan_under_the_key_of_another_step_is_not_used(tmp_path: Path) -> None:
    """Whoever puts files there can make a plan worse, but not wrong: it is checked against the step."""
    step = shardwright.parallelize(shrink, fleet=TWO, cache=tmp_path)
    plan = step.plan(*ARGS)
    (file,) = tmp_path.iterdir()
    data = json.loads(file.read_bytes().partition(b"\n")[2])
    data["fingerprint"] = "0" * 64
    plan_cache.store(tmp_path, file.stem, shardwright.Plan.from_dict(data))
    assert (
        shardwright.parallelize(shrink, fleet=TWO, cache=tmp_path).plan(*ARGS).fingerprint == plan.fingerprint
    )


# -- one process --------------------------------------------------------------------------------------


def test_without_mpiexec_the_step_runs_here_and_says_so() -> None:
    params, x = {"w": draw(0, 16, 32)}, draw(1, 24, 16)
    step = shardwright.parallelize(fleet=TWO, cache=False)(shrink)
    with pytest.warns(SingleProcessWarning, match=r"shrink runs in this process alone.*mpiexec -n 2"):
        same(step(params, x), shrink(params, x))
    same(step(params, x), shrink(params, x))
    alone = shardwright.parallelize(shrink, fleet=fleet(50), donate_argnames="params", cache=False)
    same(alone(jax.tree.map(jnp.copy, params), x), shrink(params, x))


def test_nothing_heavy_is_imported_with_the_package() -> None:
    light = "import sys, shardwright"
    planned = "import jax; from shardwright import parallelize, save"
    heavy = "print(*[m for m in ('scipy', 'rich', 'mpi4py', 'orbax') if m in sys.modules])"
    code = f"{light}; print(*[m for m in ('jax', 'numpy') if m in sys.modules]); {planned}; {heavy}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["", ""]


def test_every_public_name_is_there() -> None:
    for name in shardwright.__all__:
        assert getattr(shardwright, name) is not None
    assert set(shardwright.__all__) <= set(dir(shardwright))
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        shardwright.paralelize  # noqa: B018
