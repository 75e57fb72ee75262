"""What rent charges for at its two moments, against the memory that programs take."""

from __future__ import annotations

from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from synth_cases import fleet, mlp, shape
from test_budgets import GRAPHS

from shardwright.api import synthesize as plan_of
from shardwright.cost.fleet import Fleet
from shardwright.cost.memory.liveness import footprint
from shardwright.cost.model import CostModel
from shardwright.ir.donation import donating
from shardwright.ir.graph import Graph
from shardwright.ir.placement import Placement, R, Shard
from shardwright.ir.trace import trace
from shardwright.synth.memory.alive import final_values
from shardwright.synth.memory.budgets import Limits, Renting
from shardwright.synth.memory.rent import Rents, most_shares, too_small
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.space.space import Space


def with_momentum(w: Any, m: Any, x: Any) -> tuple[Any, Any]:
    m = 0.9 * m + x.T @ lax.tanh(x @ w)
    return w - 0.1 * m, m


#: The state of "large state" fills more than all else.
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = GRAPHS | {
    "mlp": mlp(),
    "large state": (with_momentum, (shape(48, 48), shape(48, 48), shape(4, 48))),
}


def graph_of(name: str, *, donated: bool = False) -> Graph:
    step, args = CASES[name]
    return donating(trace(step, *args), donated).graph


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_no_program_takes_less_than_it_pays_for(name: str, donated: bool) -> None:
    graph = graph_of(name, donated=donated)
    space, model = Space(graph), CostModel(fleet((4, 1)))
    limits = np.array(Limits.of(model).nbytes)
    renting = Renting(graph, space, Limits.of(model))
    later: set[bool] = set()
    for ratios in ((0.5, 0.5), (0.8, 0.2)):
        prices = Prices.at(PriceList(model), ratios)
        for rent_s in (0.0, 1e-12, 1e-8):
            for assignment, _ in islice(renting.in_order(prices, ratios, rent_s), 20):
                program = emit(space, assignment, prices)
                bases = [
                    space.choices[choice.index].domain.holdings[assignment[choice.index]].base
                    for choice in (space.root.choice[value] for value in graph.inputs)
                ]
                if list(program.inputs) != bases:
                    continue  # what is never read whole comes in stretches: another assignment says so
                peak = footprint(program, graph).peak(np.array(ratios))
                excess = renting.rents.excess_bytes(assignment, limits)
                assert excess.shape == (Rents.MOMENTS, 2)
                assert (peak.sum() >= excess[:, 0] + limits.sum() - 1e-6).all()
                assert (peak >= (excess[:, 1] + limits.min())[:, None] - 1e-6).all()
                later.add(bool(excess[1, 0] > excess[0, 0]))
    assert (True in later) == (name == "large state" and not donated)


def test_replicated_state_is_there_twice_in_the_end() -> None:
    graph = graph_of("large state")
    space, model = Space(graph), CostModel(fleet((1, 1)))
    limits = Limits.of(model).nbytes
    rents = Rents(graph, space)
    choices = [space.root.choice[value].index for value in graph.inputs[:2]]
    assignment = [0] * len(space.choices)
    for choice in choices:
        holdings = space.choices[choice].domain.holdings
        assignment[choice] = next(n for n, h in enumerate(holdings) if str(h.base) == "R")
    state = sum(value.type.nbytes for value in graph.inputs[:2])
    of_one = rents.excess_bytes(assignment, limits)[1, 1] + min(limits)
    assert of_one >= 2 * state
    assert sum(value.type.nbytes for value in final_values(graph)) == state
    assert not final_values(graph_of("large state", donated=True))


def test_what_cannot_hold_the_old_state_and_the_new_is_too_small() -> None:
    graph = graph_of("large state")
    inputs = sum(value.type.nbytes for value in graph.inputs)
    state = sum(value.type.nbytes for value in graph.inputs[:2])
    least = inputs + state
    assert too_small(graph, (0.4 * least, 0.55 * least))
    assert most_shares(graph, (0.4 * least, 0.55 * least)).sum() < 1


def test_rent_is_linear_in_what_an_assignment_takes() -> None:
    """The tables and the constant add up to the multipliers times the excess: the plane of the ascent."""
    graph = graph_of("large state")
    space, model = Space(graph), CostModel(fleet((2, 1)))
    limits, rents = Limits.of(model).nbytes, Rents(graph, space)
    generator = np.random.default_rng(0)
    for _ in range(20):
        at = generator.random((Rents.MOMENTS, 2))
        tables = rents.floors(at, len(limits))
        assignment = [int(generator.integers(len(choice.domain))) for choice in space.choices]
        paid = sum(float(tables[use.factor][assignment[use.scope[0]]]) for use in rents.uses)
        excess = rents.excess_bytes(assignment, limits)
        assert paid + rents.constant_s(at, limits) == pytest.approx(float((at * excess).sum()))


def from_an_argument(w: Any, x: Any) -> Any:
    """A loop whose body is at its fullest before it makes what it carries on."""

    def body(h: Any, _: None) -> tuple[Any, None]:
        a = jnp.tanh(h @ w)
        return h * jnp.sum(jnp.sort(a, 0) * a), None

    return jnp.sum(lax.scan(body, x, None, length=3)[0])


def recurrent(w: Any, x: Any) -> tuple[Any, Any]:
    """A loop whose gradient begins with zeros, as does that of a loop over micro-batches around it."""

    def loss_of(w: Any) -> Any:
        def cell(h: Any, x: Any) -> tuple[Any, Any]:
            h = jnp.tanh(x @ w["in"] + h @ w["back"])
            return h, h

        return jnp.mean(lax.scan(cell, jnp.zeros((x.shape[0], 32)), jnp.swapaxes(x, 0, 1))[1] ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients), loss


LOOPS: dict[str, tuple[Any, tuple[Any, ...], int]] = {
    "from an argument": (from_an_argument, (shape(64, 256), shape(16, 64)), 1),
    "recurrent": (recurrent, ({"in": shape(16, 32), "back": shape(32, 32)}, shape(6, 3, 16)), 2),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_device_with_the_memory_for_a_loop_is_not_ruled_out(name: str) -> None:
    step, args, pieces = LOOPS[name]

    def where(memory: int, *others: str) -> Fleet:
        rows = [("fast", 1000, memory), *((other, 100, 10**9) for other in others)]
        kinds = [
            {"name": kind, "flops": f"{k} kFLOP/s", "memory_bandwidth": f"{k} kB/s", "memory": f"{nbytes} B"}
            for kind, k, nbytes in rows
        ]
        network = {"network": {"bandwidth": "10 kB/s", "latency": "1 ms"}} if others else {}
        return Fleet.from_dict({"name": "lab", "nodes": [{"devices": {"type": k}} for k in kinds], **network})

    as_it_is: Any = {"recompute": "off", "microbatches": pieces}
    alone = plan_of(step, *args, fleet=where(10**9), **as_it_is)
    (nbytes,) = alone.memory_bytes
    assert not too_small(alone.step().graph, [nbytes])
    both = plan_of(step, *args, fleet=where(nbytes, "slow"), axes=1, **as_it_is)
    assert both.fits
    assert both.bound_s <= both.cost_s <= alone.cost_s * (1 + 1e-9)


def test_what_is_cut_in_few_units_pays_for_those_that_a_device_is_dealt() -> None:
    """Four experts on three devices are two on one of them."""

    def step(experts: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.einsum("eij,bi->ebj", experts, x).sum(0)

    graph = trace(step, shape(4, 48, 96), shape(64, 48)).graph
    space, model = Space(graph), CostModel(fleet((1, 1, 1)))
    renting = Renting(graph, space, Limits.of(model))
    choice = space.root.choice[graph.inputs[0]]

    def paid() -> dict[Placement, float]:
        found: dict[Placement, float] = {}
        for number, holding in enumerate(choice.domain.holdings):
            if holding.extra is None:
                assignment = [number if c is choice else 0 for c in space.choices]
                found[holding.base] = renting.paid(assignment, (1 / 3,) * 3)[choice.index] / nbytes
        return found

    nbytes = graph.inputs[0].type.nbytes
    by_shares = paid()
    renting.dealt = True
    by_units = paid()
    # On all devices together it is there once; the smallest counts as all of them.
    assert by_units[Shard(0)] == pytest.approx(1 + 3 * 2 / 4)
    assert by_units[Shard(2)] == pytest.approx(1 + 3 * 1 / 3)
    assert by_units[R] == pytest.approx(3 + 3)
    assert by_shares == pytest.approx({placement: 2 if placement != R else 6 for placement in by_units})
