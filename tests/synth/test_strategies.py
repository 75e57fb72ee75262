"""Strategies inside the search: chosen per exchange, and sufficient factors found as a program."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright import Plan, synthesize
from shardwright.cost.bill import bill
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.moves import strategies
from shardwright.cost.traffic import traffic
from shardwright.ir.collectives import Collective, registry
from shardwright.ir.graph import TensorType
from shardwright.ir.patterns import SUFFICIENT_FACTORS, patterns
from shardwright.ir.placement import Partial, Placement, R, Shard
from shardwright.ir.program import Compute, Move
from shardwright.ir.rules import Signature
from shardwright.ir.trace import Traced, trace
from shardwright.synth.prices.lists import Catalogue, PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.search.priced import solve
from shardwright.synth.space.space import Space

EXAMPLES = Path(__file__).parents[2] / "examples"
TESTBED = Fleet.load(EXAMPLES / "fleets" / "hap_testbed.yaml")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# ---------------------------------------------------------------------------------------------------
# One strategy per exchange against one for all


class Everywhere(Catalogue):
    """One strategy per collective wherever it is used; free choice for collectives not named."""

    def __init__(self, choice: dict[str, str]) -> None:
        super().__init__()
        self.choice = choice

    def strategies(self, collective: Collective) -> tuple[str, ...]:
        name = self.choice.get(collective.kind)
        return collective.strategies if name is None else (name,)


def compared(traced: Traced, kinds: tuple[str, ...]) -> tuple[float, list[float], set[str]]:
    """Seconds with a choice per exchange, with every single choice for `kinds`, and the strategies chosen."""
    model, space = CostModel(TESTBED), Space(traced.graph)
    ratios = [1 / len(TESTBED.devices)] * len(TESTBED.devices)
    prices = Prices.at(model, ratios)
    free = solve(space, prices)
    program = emit(space, free.assignment, prices)
    used = {item.label for item in bill(program, traced.graph, model) if item.exchange}
    singles: list[float] = []
    for names in itertools.product(*(registry()[kind].strategies for kind in kinds)):
        listed = PriceList(model, Everywhere(dict(zip(kinds, names, strict=True))))
        singles.append(solve(space, Prices.at(listed, ratios)).seconds)
    return free.seconds, singles, used


def test_a_choice_per_exchange_beats_every_single_choice_on_the_testbed() -> None:
    """A large gradient and a small one want different all-reduces."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            first, second, scale = params
            return jnp.sum(jnp.tanh(jnp.tanh(x @ first) @ second) * scale)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    traced = trace(step, [f32(2048, 2048), f32(2048, 2048), f32(2048)], f32(1 << 20, 2048))
    free, singles, used = compared(traced, ("all_gather", "reduce_scatter", "all_reduce"))
    assert len(singles) == 64
    assert free <= min(singles) * (1 + 1e-12)
    assert free < min(singles) * (1 - 1e-4)
    assert len({label for label in used if label.startswith("all_reduce")}) > 1


@pytest.mark.full
@pytest.mark.parametrize("example", ["gpt2:small", "vit:base", "bert:base"])
def test_a_choice_per_exchange_beats_every_single_choice_on_examples(
    example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module, factory = example.split(":")
    step, args = getattr(importlib.import_module(module), factory)()
    # Other collectives are left free: that is no dearer than any single choice for them.
    free, singles, _ = compared(trace(step, *args), ("all_reduce",))
    assert free < min(singles) * (1 - 1e-4)


# ---------------------------------------------------------------------------------------------------
# Sufficient factors


WIDTH, DEPTH = 1024, 10


def adapter(weight: Any, momentum: Any, frozen: Any, x: Any, target: Any) -> Any:
    """A trained layer between two frozen stacks, whose work makes it worth sharing the batch out."""

    def stack(h: Any) -> Any:
        for _ in range(DEPTH):
            h = jnp.tanh(h @ frozen)
        return h

    def loss(weight: Any) -> Any:
        return jnp.sum((stack(stack(x) @ weight) - target) ** 2)

    gradient = jax.grad(loss)(weight)
    momentum = 0.9 * momentum + gradient
    return weight - 0.01 * momentum, momentum


def slow_network(devices: int = 2) -> Fleet:
    card = {
        "name": "card",
        "flops": "2 TFLOP/s",
        "memory_bandwidth": "500 GB/s",
        "memory": "64 GB",
    }
    link = {"bandwidth": "1 GB/s", "latency": "1 ms"}
    node = {"devices": {"type": card, "count": devices}, "link": link}
    return Fleet.from_dict({"name": "slow", "nodes": [node]})


def arguments(batch: int) -> tuple[Any, ...]:
    square = f32(WIDTH, WIDTH)
    return square, square, square, f32(batch, WIDTH), f32(batch, WIDTH)


def planned(batch: int) -> Plan:
    return synthesize(
        adapter, *arguments(batch), fleet=slow_network(), state={"weight": "[0]", "momentum": "[1]"}
    )


def factors_or_gradient(batch: int) -> tuple[float, float]:
    """Seconds by which the two programs differ, as the prices have them.

    Factors: gather x [b, m] and the gradient of y [b, n], and let every device compute all of x^T dy.
    Gradient: every device computes its part of the sum, and the parts are all-reduced. The layer's weight
    and momentum are replicated, and so is their update, in both.
    """
    traced = trace(adapter, *arguments(batch))
    model = CostModel(slow_network())
    even = np.full(1, 0.5)
    products = [
        e for e in traced.graph.equations
        if e.primitive == "dot_general" and e.params["dimension_numbers"][0] == ((0,), (0,))
    ]  # fmt: skip
    (product,) = products
    through = traffic(traced.graph)[product]
    whole = model.kernel(product, Signature((R, R), (R,)), through).exact(even)
    part = model.kernel(product, Signature((Shard(0), Shard(0)), (Partial(),)), through).exact(even)

    def cheapest(kind: str, tensor: TensorType, pre: Placement, post: Placement) -> float:
        names = registry()[kind].strategies
        return min(model.move(kind, name, tensor, pre, post).exact(even) for name in names)

    factor, gradient = TensorType((batch, WIDTH), "float32"), TensorType((WIDTH, WIDTH), "float32")
    gathered = 2 * cheapest("all_gather", factor, Shard(0), R)
    return gathered + whole, cheapest("all_reduce", gradient, Partial(), R) + part


def labels(plan: Plan) -> dict[str, str]:
    return {exchange.name.split(".")[0]: exchange.pattern for exchange in plan.exchanges}


def crossover() -> int:
    """The batch beyond which gathering the factors is the dearer of the two."""
    low, high = 2, 1 << 14
    while high - low > 2:
        middle = (low + high) // 4 * 2
        factors, gradient = factors_or_gradient(middle)
        low, high = (middle, high) if factors < gradient else (low, middle)
    return high


def test_the_crossover_is_the_closed_form() -> None:
    """On two devices, with m = n, float32 and products bound by arithmetic.

    Factors: 2 (a + 4 b m g / 2) + 2 b m^2 / F. Gradient: a + 4 m^2 g + b m^2 / F, by recursive doubling.
    Equal where b = (4 m^2 g - a) / (4 m g + m^2 / F).
    """
    a, g, rate, m = 1e-3, 1e-9, 2e12, WIDTH
    assert crossover() == pytest.approx((4 * m * m * g - a) / (4 * m * g + m * m / rate), abs=3)


@pytest.mark.parametrize(("relative", "finds"), [(0.5, True), (0.97, True), (1.03, False), (2.0, False)])
def test_the_search_finds_sufficient_factors_below_the_crossover(relative: float, finds: bool) -> None:
    plan = planned(2 * round(crossover() * relative / 2))
    assert plan.held["weight"] == plan.held["momentum"] == "R"
    found = labels(plan)
    assert set(found) == ({"all_gather"} if finds else {"all_reduce"})
    assert (found.get("all_gather") == SUFFICIENT_FACTORS) == finds
    assert (SUFFICIENT_FACTORS in str(plan)) == finds
    assert Plan.from_dict(plan.to_dict()).exchanges == plan.exchanges


def test_both_factors_are_gathered_and_the_product_is_redundant() -> None:
    plan = planned(512)
    assert plan.traced is not None
    program, graph = plan.program, plan.traced.graph
    gathers = [i for i in program.instructions if isinstance(i, Move) and i.kind == "all_gather"]
    assert [patterns(program, graph).get(id(i)) for i in gathers] == [SUFFICIENT_FACTORS] * 2
    redundant = [
        i
        for i in program.instructions
        if isinstance(i, Compute)
        and graph.equations[i.equation].primitive == "dot_general"
        and i.signature == Signature((R, R), (R,))
    ]
    assert len(redundant) == 1
    # What else is gathered is no factor: the same gather with another reader loses the name.
    reader = Move("slice", gathers[0].value, R, Shard(0))
    more = replace(program, instructions=(*program.instructions, reader))
    assert [patterns(more, graph).get(id(i)) for i in gathers] == [None, SUFFICIENT_FACTORS]


def test_every_strategy_is_weighed() -> None:
    """The search asks for all strategies that make sense on the fleet: leaders take several nodes."""
    even, tensor = [0.25] * 4, TensorType((64, 64), "float32")
    node = slow_network(2).to_dict()["nodes"][0]  # type: ignore[index]
    network = {"bandwidth": "1 Gbit/s", "latency": "1 ms"}
    nodes = Fleet.from_dict({"name": "nodes", "nodes": [{**node, "count": 2}], "network": network})
    for fleet, leaders in ((slow_network(4), False), (nodes, True)):
        prices = Prices.at(CostModel(fleet), even)
        for kind, pre, post in (
            ("all_gather", Shard(0), R),
            ("reduce_scatter", Partial(), Shard(0)),
            ("all_reduce", Partial(), R),
            ("all_to_all", Shard(0), Shard(1)),
        ):
            step = prices.list.step(tensor, pre, post)
            assert step is not None
            known = {name for k, name in strategies() if k == kind}
            seconds = dict(zip(step.strategies, prices.seconds[list(step.lines)], strict=True))
            weighed = {name for name, each in seconds.items() if np.isfinite(each)}
            assert weighed == (known if leaders else known - {"hierarchical"})
            assert prices.step(tensor, pre, post) == min(seconds.values())
