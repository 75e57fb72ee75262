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
from shardwright.synth.grid import baselines
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.narrow import search
from shardwright.synth.search.narrow.buckets import Bounds, Buckets
from shardwright.synth.search.solution import Solution
from shardwright.synth.space.factors import Use
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
