"""Random programs at random prices, on random fleets with random ratios, equal the single-device evaluation.

A program is a list of steps drawn from `OPS` (`arithmetic.py`, `movement.py`), which spans the rule registry.
Prices are drawn per instruction instead of modelled: tiny tensors would otherwise stay replicated, and any
program of the space must be right, not only a cheap one.

Floats are small whole numbers as long as operations keep them whole, and sums of whole numbers are equal
in any order; what jumps (sorting, comparing, rounding, counting) is applied to whole numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from movement import OPS
from pool import Entry, Pool

from shardwright.backends.reference import ReferenceExecutable
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.ir.placement import R, Shard
from shardwright.ir.program import Compute, Program, verify
from shardwright.ir.registry import registry
from shardwright.ir.rules import Signature
from shardwright.ir.trace import trace
from shardwright.synth.prices.lists import PriceList
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.search.priced import solve
from shardwright.synth.space.space import Space

Line = tuple[str, tuple[int, ...]]

_SHAPES = ((6, 4), (4, 6), (4,), (4, 3, 6))


def arguments(seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    floats = [jnp.asarray(rng.integers(-3, 4, shape), jnp.float32) for shape in _SHAPES]
    ints = [jnp.asarray(rng.integers(-9, 10, shape), jnp.int32) for shape in ((6, 4), (6,), ())]
    return (*floats, *ints, jax.random.key(seed))


def entries(args: Sequence[Any]) -> list[Entry]:
    return [Entry(x, True, 9.0) for x in args]


def run(lines: Sequence[Line], args: Sequence[Any]) -> list[Entry]:
    """The values that a program adds to its arguments: all that nothing says must not be handed out."""
    pool = Pool(entries(args))
    for name, picks in lines:
        pool.picks = list(picks)
        try:
            pool.entries.append(OPS[name](pool))
        except LookupError:
            continue
    return pool.entries[len(args) :]


# One number per line stands for all its picks: they are then spread evenly, which hypothesis' own are not.
_PICKS = st.integers(0, 12**6 - 1).map(lambda n: tuple(n // 12**k % 12 for k in range(6)))
_LINES = st.lists(st.tuples(st.sampled_from(sorted(OPS)), _PICKS), min_size=4, max_size=9)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Two or three devices, unlike each other."""
    speeds = draw(st.lists(st.sampled_from([1, 2, 5]), min_size=2, max_size=3))
    devices = [
        {
            "type": {
                "name": f"speed-{speed}",
                "flops": f"{speed} GFLOP/s",
                "memory_bandwidth": f"{speed} GB/s",
                "memory": "1 GB",
                "launch": "0.01 us",
            }
        }
        for speed in speeds
    ]
    link = {"bandwidth": "100 GB/s", "latency": "0.01 us"}
    return Fleet.from_dict({"name": "random", "nodes": [{"count": 1, "devices": devices, "link": link}]})


@st.composite
def ratios(draw: st.DrawFn, devices: int) -> tuple[float, ...]:
    weights = draw(
        st.lists(st.sampled_from([0, 1, 1, 2, 3, 7]), min_size=devices, max_size=devices).filter(any)
    )
    return tuple(w / sum(weights) for w in weights)


def random_prices(model: CostModel, seed: int) -> Prices:
    """A price of its own for every kernel and every move, of very different sizes."""
    rng = np.random.default_rng(seed)
    return Prices(PriceList(model), lambda costs, units, tied: rng.exponential(size=len(units)) ** 3)


@settings(
    max_examples=20 if settings().max_examples <= 100 else 1000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(st.data(), _LINES, st.integers(0, 2**16), fleets())
def test_random_programs(data: st.DataObject, lines: list[Line], seed: int, fleet: Fleet) -> None:
    if seed % 50 == 0:
        jax.clear_caches()  # a thousand programs leave gigabytes of executables
    args = arguments(seed % 7)
    single = run(lines, args)
    if not single:
        return
    traced = trace(lambda *xs: [e.x for e in run(lines, xs)], *args, state=_state(single, args, seed))
    shares = data.draw(ratios(len(fleet.devices)))
    model = CostModel(fleet)
    prices = random_prices(model, seed) if seed % 8 else Prices.at(model, shares)
    space = Space(traced.graph)
    program = emit(space, solve(space, prices).assignment, prices)
    verify(program, traced.graph)
    for result, entry in zip(ReferenceExecutable(traced, program, shares)(*args), single, strict=True):
        compare_result(result, entry, lines)


def _state(single: Sequence[Entry], args: Sequence[Any], seed: int) -> dict[int | str, Any]:
    """Every other program hands an argument back as state, where a result has its type."""
    found: dict[int | str, Any] = {}
    for out, entry in enumerate(single if seed % 2 else ()):
        for position, arg in enumerate(args):
            if position not in found and entry.shape == arg.shape and entry.x.dtype == arg.dtype:
                found[position] = out
                break
    return found


def compare_result(result: Any, entry: Entry, lines: Sequence[Line]) -> None:
    got, wanted = np.asarray(result), np.asarray(entry.x)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, lines
    if entry.whole or not entry.float:
        np.testing.assert_array_equal(got, wanted, err_msg=str(lines))
    else:
        largest = float(np.abs(wanted).max(initial=0.0))
        np.testing.assert_allclose(
            got, wanted, rtol=0, atol=1e-4 * largest + 1e-6 * entry.most, err_msg=str(lines)
        )


def test_devices_that_read_different_operands_run_different_executables() -> None:
    """Found by the test above: the first device's stretch is all of `x`, the second's all of `y`.

    Compiled without the operand that it does not read, either function has the same text.
    """
    args = (jnp.arange(4.0), jnp.arange(4.0, 8.0))
    traced = trace(lambda x, y: jnp.concatenate([x, y]), *args, state={})
    program = Program((R, R), (Compute(0, Signature((R, R), (Shard(0),))),), (Shard(0),))
    verify(program, traced.graph)
    (joined,) = ReferenceExecutable(traced, program, (0.5, 0.5))(*args)
    np.testing.assert_array_equal(joined, np.arange(8.0))


# ---------------------------------------------------------------------------------------------------
# The table itself


def test_the_operations_span_the_registry() -> None:
    """Alone, with every first choice, each operation applies; together they make most primitives."""
    args = arguments(0)
    base: list[Line] = [("compare", (3, 0, 0)), ("total", (0, 0, 0, 1)), ("place_of_largest", (0, 0))]
    base += [("truth", (0, 0, 0)), ("truth", (0, 0, 0)), ("counting", (6,)), ("separate", (8, 0))]
    used: set[str] = set()
    for name in OPS:
        for picks in [(k,) * 6 for k in range(12)] + [(0, k, k // 2, k, k // 3, k) for k in range(12)]:
            lines = [*base, (name, picks)]
            made = run(lines, args)
            jaxpr = trace(lambda *xs, lines=lines: [e.x for e in run(lines, xs)], *args, state={})
            used |= {e.primitive for e in jaxpr.graph.all_equations()}
            if len(made) > len(run(base, args)):
                break
        else:
            raise AssertionError(f"{name} never applies")
    assert used <= set(registry()) | {"scan", "while", "cond"}
    assert len(used) >= 60, sorted(used)
