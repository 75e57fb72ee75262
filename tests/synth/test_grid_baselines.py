"""Baselines on two mesh axes: the best of their recipes, although hardly any exchange is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from baseline_cases import STEPS, Made, arguments, draw, trained
from grid_cases import FLEETS
from test_search import as_milp

import shardwright
from shardwright.cost.fleet import Fleet
from shardwright.ir.program import Compute
from shardwright.ir.rules import on_axes
from shardwright.ir.trace import marked, trace
from shardwright.memory.device_memory import peaks
from shardwright.synth.grid import baselines
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.narrow import search
from shardwright.synth.search.narrow.buckets import Bounds, Buckets
from shardwright.synth.search.solution import Solution
from shardwright.synth.space.factors import Use
from shardwright.synth.space.roles import roles
from shardwright.synth.space.space import Space

#: Recipes without any exchange but all-reduces.
SUMS = baselines.GRID_RECIPES[:2]


def blocks(count: int) -> Made:
    """Transformer blocks, one after the other."""

    def normed(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def block(h: Any, w: Any) -> Any:
        x, heads = normed(h), (*h.shape[:2], 2, h.shape[2] // 2)
        q, k, v = ((x @ w[name]).reshape(heads).transpose(0, 2, 1, 3) for name in "qkv")
        seen = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2)) @ v
        h = h + seen.transpose(0, 2, 1, 3).reshape(h.shape) @ w["o"]
        return h + jax.nn.gelu(normed(h) @ w["up"]) @ w["down"]

    def loss_of(p: Any, x: Any) -> Any:
        for w in p:
            x = block(x, w)
        return jnp.mean(x**2)

    one = {**{name: draw(16, 16) for name in "qkvo"}, "up": draw(16, 32), "down": draw(32, 16)}
    return trained(loss_of), arguments([one] * count, draw(12, 8, 16))


@pytest.mark.parametrize(("name", "where"), [("mlp", "1 + 3"), ("layers", "2 + 3, one of them mixed")])
def test_highs_finds_no_better_program_of_a_recipe(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Solution, float]] = []

    class Watched(GridSolver):
        def __init__(self, space: Space, extra: Sequence[Use] = ()) -> None:
            super().__init__(space, extra)
            self.uses = (*space.uses, *extra)
            self.sizes = [len(choice.domain) for choice in space.choices]

        def solve(self, prices: Prices, *args: Any, **others: Any) -> Solution:
            solution = super().solve(prices, *args, **others)
            tables = dict(zip(self.factors, prices.tables(self.factors), strict=True))
            terms = [(use.scope, tables[use.factor]) for use in self.uses]
            found.append((solution, as_milp(self.sizes, terms)))
            return solution

    monkeypatch.setattr(baselines, "GridSolver", Watched)
    monkeypatch.setattr(baselines, "GRID_RECIPES", SUMS)
    step, args = STEPS[name]()
    assert shardwright.baselines(step, *args, fleet=FLEETS[where], axes=2) and len(found) == 2
    for solution, best in found:
        assert solution.bound_s == pytest.approx(solution.seconds, rel=1e-9)
        assert solution.seconds == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("where", FLEETS)
def test_what_is_impossible_does_not_hold_up_the_search(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all-reduces alone it is most of what tables hold; two dozen ways there and back were made."""
    looks: list[Bounds] = []

    class Counted(Buckets):
        def bounds(self) -> Bounds:
            looks.append(super().bounds())
            return looks[-1]

    monkeypatch.setattr(search, "Buckets", Counted)
    monkeypatch.setattr(baselines, "GRID_RECIPES", SUMS)
    step, args = blocks(2)
    found = shardwright.baselines(step, *args, fleet=FLEETS[where], axes=2)
    assert len(found) == 2 and len(looks) <= 4


def test_memory_is_what_the_cards_would_take() -> None:
    """As of the same programs within a plan: a T4 has no bfloat16, and multiplies it in float32."""

    def update(params: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            hidden = jax.nn.relu(x.astype(jnp.bfloat16) @ params["up"].astype(jnp.bfloat16))
            return jnp.mean((hidden @ params["down"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))

    shapes = {"up": (256, 512), "down": (512, 256)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    args = weights, jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    link = {"bandwidth": "10 GB/s", "latency": "5 us"}
    most: list[dict[str, int]] = []
    for card in ("T4", "A100-PCIE-40GB"):
        node = {"count": 2, "devices": {"type": card, "count": 2}, "link": link}
        fleet = Fleet.from_dict({"name": card, "nodes": [node], "network": link})
        graph = marked(trace(update, *args), compiler=fleet.compiler).graph
        found = shardwright.baselines(update, *args, fleet=fleet, axes=2)
        for each in found:
            assert each.memory_bytes == peaks(each.program, graph, each.ratios, fleet.types)
        most.append({each.name: max(each.memory_bytes) for each in found})
    assert len(most[0]) == 2 and most[0].keys() == most[1].keys()
    assert all(most[0][name] > 1.05 * most[1][name] for name in most[0])


def test_programs_keep_to_their_recipe() -> None:
    """Data parallelism cuts the batch of every product that reads it, on both axes; tensors, across alone."""
    step, args = STEPS["mlp"]()
    graph = marked(trace(step, *args)).graph
    known = roles(graph, Space(graph).units)
    seen = dict[str, set[tuple[bool, bool]]]()
    for each in shardwright.baselines(step, *args, fleet=FLEETS["2 + 3, one of them mixed"], axes=2):
        for instruction in each.program.instructions:
            if not isinstance(instruction, Compute):
                continue
            equation, axes = graph.equations[instruction.equation], on_axes(instruction.signature)
            if equation.primitive == "dot_general":
                across, within = axes if len(axes) == 2 else axes * 2
                split = known.splits_batch(equation, across), known.splits_batch(equation, within)
                seen.setdefault(each.name, set()).add(split)
    assert seen.pop("tensor parallelism in nodes, data across") == {(True, False)}
    assert seen and all(split == {(True, True)} for split in seen.values())
