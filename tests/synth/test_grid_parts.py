"""Parts of a fleet on two mesh axes: bounds for which nothing is priced, and what they spare."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright import Fleet, Plan, synthesize
from shardwright.cost.grid.model import GridModel
from shardwright.cost.model import CostModel
from shardwright.cost.subfleet import subfleet
from shardwright.ir.graph import Graph
from shardwright.ir.trace import trace
from shardwright.synth.grid import choice
from shardwright.synth.grid.alternate import GridSearch
from shardwright.synth.grid.choice import GridChoosing
from shardwright.synth.grid.part import GridPart, on_grid
from shardwright.synth.grid.pricing import GridPriceList
from shardwright.synth.parts import candidates, products_s
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer

OWN = {"name": "own", "flops": "9 TFLOP/s", "memory_bandwidth": "300 GB/s", "memory": "8 GB"}


def fleet(*kinds: Any, size: int = 2) -> Fleet:
    near, far = {"bandwidth": "100 GB/s", "latency": "5 us"}, {"bandwidth": "100 Gbit/s", "latency": "10 us"}
    nodes = [{"devices": {"type": kind, "count": size}, "link": near} for kind in kinds]
    return Fleet.from_dict({"name": "parts", "nodes": nodes, "network": far})


FLEETS = {
    "cards": fleet("A100-SXM-80GB", "A100-SXM-80GB", "V100-SXM2-32GB", "V100-SXM2-32GB"),
    "old cards": fleet("T4", "T4", "P100-16GB", "P100-16GB", size=4),
    "one of its own": fleet("A100-40GB", "A100-40GB", OWN, OWN),
}


def step(params: Any, x: jax.Array) -> Any:
    def loss_of(params: Any) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return h + jnp.tanh(h @ w), None

        h, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.mean((jnp.einsum("nd,dk->nk", h, params["out"])) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - (0.01 * g).astype(p.dtype), params, gradients), loss


def arguments(dtype: Any, rows: int = 16_384, width: int = 4096) -> tuple[Any, ...]:
    shapes = {"layers": (3, width, width), "out": (width, width // 2)}
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return params, jax.ShapeDtypeStruct((rows, width), dtype)


def trace_of(dtype: Any = jnp.bfloat16) -> Graph:
    return trace(step, *arguments(dtype), state={}).graph


@pytest.mark.parametrize("where", FLEETS.values(), ids=FLEETS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_no_part_computes_faster_than_its_products_at_the_peak(where: Fleet, dtype: Any) -> None:
    graph = trace_of(dtype)
    parts = on_grid(where, candidates(where))
    assert len(parts) > 2
    space = Space(graph, GridPart(where, parts[0]).nodes)
    known = products_s(space, CostModel(where), parts)
    for members, bound_s in zip(parts, known, strict=True):
        part = subfleet(where, members, "part") if len(members) < len(where.devices) else where
        listed = GridPriceList(GridModel(CostModel(part)))
        priced_s = GridSearch(graph, space, listed, Timer()).arithmetic_s()
        # Large products come near the peak: what is left is what the rest takes.
        assert 0.2 * priced_s < bound_s <= priced_s * (1 + 1e-9)


def planned(monkeypatch: pytest.MonkeyPatch, bounds: Any = products_s) -> tuple[Plan, list[tuple[int, ...]]]:
    """A plan, and the parts that were looked at, in turn."""
    looked: list[tuple[int, ...]] = []
    look_at = GridChoosing._look_at

    def told(self: GridChoosing, part: GridPart, *args: Any, **options: Any) -> None:
        looked.append(part.members)
        look_at(self, part, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(GridChoosing, "_look_at", told)
        patched.setattr(choice, "products_s", bounds)
        given = arguments(jnp.bfloat16)
        return synthesize(step, *given, fleet=FLEETS["cards"], axes=2, recompute="off"), looked


def test_what_is_far_from_the_best_is_not_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, looked = planned(monkeypatch)
    unbounded, all_looked = planned(monkeypatch, lambda space, model, parts: [0.0] * len(parts))
    assert plan.cost_s == unbounded.cost_s and plan.bound_s == pytest.approx(unbounded.bound_s)
    v100s = (4, 5, 6, 7)
    assert v100s in all_looked and v100s not in looked


def test_devices_that_may_be_alike_are_looked_at_before_others_are_bounded_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def priced(space: Space, model: CostModel, parts: Any) -> list[float]:
        some = [subfleet(model.fleet, members, "part") for members in parts]
        listed = [GridPriceList(GridModel(CostModel(part))) for part in some]
        return [GridSearch(trace_of(), space, each, Timer()).arithmetic_s() for each in listed]

    _, looked = planned(monkeypatch, priced)
    a100s, whole = (0, 1, 2, 3), tuple(range(8))
    assert looked[:3] == [whole, a100s, a100s]
