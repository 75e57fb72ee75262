"""The least over signatures, whatever they have in common: the sum of everything, made as one array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.cost.share_cost import Floats
from shardwright.ir.trace import trace
from shardwright.synth.prices import cheapest as module
from shardwright.synth.prices.cheapest import cheapest
from shardwright.synth.space.conversions import Domain, Domains
from shardwright.synth.space.factors import EquationFactor
from shardwright.synth.space.space import Space
from shardwright.synth.space.vocabulary import Vocabulary


def _step(w: jax.Array, m: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    def loss(w: jax.Array) -> jax.Array:
        h = jnp.sin(x @ w)
        return jnp.mean((h @ w.T) ** 2) + jnp.sum(jnp.concatenate([h, h, x @ w], axis=1) * 2.0)

    value, gradient = jax.value_and_grad(loss)(w)
    m = 0.9 * m + gradient * gradient
    return w - 0.1 * gradient / (jnp.sqrt(m) + w * w), m, value


def _conversions(prices: tuple[int, ...], seed: int) -> Callable[[Domain, str], Floats]:
    """Random seconds between placements and holdings; of two placements, the nearer counts."""
    known: dict[tuple[Domain, str], Floats] = {}

    def of(domain: Domain, mode: str) -> Floats:
        if (domain, mode) not in known:
            count = len(domain.routes.placements)
            generator = np.random.default_rng([seed, len(known)])
            if mode == "exact":
                found = np.where(domain.base == np.arange(count + 1)[:, None], 0.0, np.inf)
            else:
                cost = np.round(generator.uniform(0, 1, (*prices, count, count)), 1)
                cost[cost > 0.9] = np.inf
                held = domain.use(cost) if mode == "use" else domain.derive(cost)
                found = np.full((*prices, count + 1, len(domain)), np.inf)
                found[..., :count, :] = held.swapaxes(-1, -2)
            known[domain, mode] = found
        return known[domain, mode]

    return of


def _summed(factor: EquationFactor, kernels: Floats, conversions: Callable[[Domain, str], Floats]) -> Floats:
    total, needs = kernels, factor.needs()
    for position, domain in enumerate(factor.domains):
        total = total[..., None]
        vector = np.zeros(())
        for mode, where in needs.of[position]:
            vector = vector + conversions(domain, mode).take(where, axis=-2)
        total = total + vector.reshape(*vector.shape[:-1], *(1,) * position, vector.shape[-1])
    return total.min(axis=kernels.ndim - 1)


@pytest.mark.parametrize("nodes", [None, (2, 1)])
@pytest.mark.parametrize("prices", [(), (3,)])
@pytest.mark.parametrize("large", [1, 1 << 17])
def test_the_least_is_that_of_all_sums(
    nodes: tuple[int, ...] | None, prices: tuple[int, ...], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FEW", 0)
    monkeypatch.setattr(module, "_LARGE", large)
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 8), (8, 8), (4, 8))]
    space = Space(trace(_step, *shapes).graph, nodes)
    factors = [f for f in dict.fromkeys(u.factor for u in space.uses) if isinstance(f, EquationFactor)]
    merged = exact = apart = 0
    for number, factor in enumerate(factors):
        needs = factor.needs()
        kernels = np.random.default_rng(number).uniform(0, 1, (*prices, len(needs.signatures)))
        conversions = _conversions(prices, number)
        found = cheapest(kernels, needs, factor.domains, conversions)
        np.testing.assert_array_equal(found, _summed(factor, kernels, conversions))
        (steps,) = needs.memo
        merged += any(each is not None for each in steps.merged)
        exact, apart = exact + bool(steps.exact), apart + any(steps.apart)
    assert merged and exact and apart  # else this says little


@pytest.mark.parametrize("nodes", [None, (2, 1)])
def test_needs_that_factors_have_in_common_are_those_of_each(nodes: tuple[int, ...] | None) -> None:
    def step(w: jax.Array, v: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(x @ w)
        return x + jnp.sin(h) * jnp.cos(h), h + jnp.sin(jnp.tanh(h @ v)) * 2.0

    # Tensors of several types, cut alike.
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 8), (8, 8), (4, 8))]
    graphs = [trace(step, *shapes).graph]
    graphs.append(trace(step, *[jax.ShapeDtypeStruct(each.shape, "bfloat16") for each in shapes]).graph)
    words = Vocabulary(Domains(nodes))
    uses = [use for graph in graphs for use in Space(graph, nodes, words).uses]
    factors = [f for f in dict.fromkeys(use.factor for use in uses) if isinstance(f, EquationFactor)]
    for factor in factors:
        needs, own = factor.needs(), replace(factor, memo=[]).needs()
        np.testing.assert_array_equal(needs.signatures, own.signatures)
        for mine, theirs in zip(needs.of, own.of, strict=True):
            assert [mode for mode, _ in mine] == [mode for mode, _ in theirs]
            for (_, where), (_, there) in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(where, there)
    assert len({id(factor.needs()) for factor in factors}) < len(factors)
    assert len({id(factor.needs()) for factor in factors}) > 4  # else this says little
