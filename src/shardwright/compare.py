"""Comparing the strategies of a collective on a fleet: predicted, and measured on MPI ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from statistics import median

import numpy as np

from shardwright.backends.launch import under_mpi
from shardwright.backends.measuring.job import measure_on
from shardwright.backends.measuring.timing import ExchangeCase, Request, Tick, example, measure
from shardwright.cost.fleet import Fleet, FleetLike
from shardwright.cost.model import CostModel
from shardwright.cost.moves import strategies
from shardwright.cost.quantity import MEMORY, parse_quantity
from shardwright.ir.arguments import check_several, is_number, is_whole
from shardwright.ir.collectives import registry
from shardwright.ir.errors import InputError
from shardwright.ir.graph import TensorType

MOST_BYTES = 1 << 40
#: Ranks per core beyond which a measurement says more of the scheduler than of the strategies.
MOST_RANKS_PER_CORE = 8
#: Predictions that differ by less than this part are the same: at even shares `padded` is `exact`, and which
#: of the two a sum rounds up changes from byte to byte.
_SAME = 1e-12


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """One way to carry out a collective.

    Attributes:
        strategy: its name.
        predicted_s: by the cost model.
        link_bytes: that the busiest link carries.
        measured_s: median over rounds of the slowest rank's time, None where nothing was measured.
    """

    strategy: str
    predicted_s: float
    link_bytes: float
    measured_s: float | None = None


@dataclass(frozen=True, slots=True)
class Crossover:
    """From this size on, another strategy is predicted to be the fastest."""

    nbytes: int
    before: str
    after: str


def compare_collectives(
    fleet: FleetLike,
    collective: str,
    nbytes: int | str = 64 << 20,
    ratios: Sequence[float] | None = None,
    measure: bool = False,
) -> tuple[StrategyRow, ...]:
    """Every strategy of a collective over all devices of a fleet, the one predicted fastest first.

    Args:
        fleet: a fleet, or the path of a fleet file.
        collective: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", …
        nbytes: size of the whole tensor: bytes, or text such as "64 MiB".
        ratios: share of every device of what is cut; even by default.
        measure: also carry out each strategy on as many MPI ranks of this machine as the fleet has devices
            (under mpiexec: on the job's).

    Raises:
        InputError: no such collective, ratios that do not fit the fleet or do not sum to 1, a size that is
            none, or ranks that cannot be had.
    """
    return sweep_collectives(fleet, collective, (nbytes,), ratios, measure)[0]


def sweep_collectives(
    fleet: FleetLike,
    collective: str,
    sizes: Sequence[int | str],
    ratios: Sequence[float] | None = None,
    measure: bool = False,
    tick: Tick = lambda done, total: None,
) -> tuple[tuple[StrategyRow, ...], ...]:
    """`compare_collectives` for several sizes, with one start of the ranks."""
    inventory = Fleet.of(fleet)
    shares = _checked_ratios(ratios, inventory)
    kind = _checked_kind(collective)
    check_several("sizes", sizes, "[1 << 20, '64 MiB']")
    checked = [_checked_bytes(size) for size in sizes]
    predict = _predictor(inventory, kind, shares)
    swept = [predict(nbytes) for nbytes in checked]
    if measure and swept:
        names = [row.strategy for row in swept[0]]
        seconds = _measured(inventory, kind, names, checked, shares, tick)
        swept = [
            tuple(replace(row, measured_s=seconds[row.strategy, nbytes]) for row in rows)
            for nbytes, rows in zip(checked, swept, strict=True)
        ]
    return tuple(map(_ranked, swept))


def _ranked(rows: Sequence[StrategyRow]) -> tuple[StrategyRow, ...]:
    """Rows by prediction; those that are predicted alike stay in the registry's order."""
    ranked: list[StrategyRow] = []
    left = list(rows)
    while left:
        most_s = min(row.predicted_s for row in left) * (1 + _SAME)
        ranked += [row for row in left if row.predicted_s <= most_s]
        left = [row for row in left if row.predicted_s > most_s]
    return tuple(ranked)


def crossovers(
    fleet: FleetLike,
    collective: str,
    low: int | str,
    high: int | str,
    ratios: Sequence[float] | None = None,
) -> tuple[Crossover, ...]:
    """Where between two sizes the strategy predicted fastest changes, to the byte.

    The sizes are looked at in eighths of an octave; a strategy that leads for less than that may be missed.

    Raises:
        InputError: see `compare_collectives`.
    """
    inventory = Fleet.of(fleet)
    predict = _predictor(inventory, _checked_kind(collective), _checked_ratios(ratios, inventory))

    def fastest(nbytes: int) -> str:
        return _ranked(predict(nbytes))[0].strategy

    points = steps(_checked_bytes(low), _checked_bytes(high), 8)
    names = [fastest(nbytes) for nbytes in points]
    found: list[Crossover] = []
    for (left, before), (right, after) in zip(
        zip(points, names, strict=True), list(zip(points, names, strict=True))[1:], strict=False
    ):
        if before != after:
            while right - left > 1:
                middle = (left + right) // 2
                left, right = (middle, right) if fastest(middle) == before else (left, middle)
            found.append(Crossover(right, before, fastest(right)))
    return tuple(found)


def steps(low: int, high: int, per_octave: float) -> list[int]:
    """Sizes from `low` to `high`, both included, evenly spaced on a logarithmic scale."""
    count = max(1, math.ceil(math.log2(high / low) * per_octave)) if high > low else 0
    sizes = (round(low * (high / low) ** (i / count)) for i in range(count + 1)) if count else (low,)
    return sorted(set(sizes))


def _predictor(fleet: Fleet, kind: str, shares: Sequence[float]) -> Callable[[int], tuple[StrategyRow, ...]]:
    model, at = CostModel(fleet), np.asarray(shares, dtype=np.float64)
    move, _ = example(kind, "", 1)

    def row(strategy: str, nbytes: int) -> StrategyRow:
        cost = model.move(kind, strategy, TensorType((nbytes,), "uint8"), move.pre, move.post)
        seconds = float(cost.per_device(at, model.class_of).max())
        link_bytes = strategies()[kind, strategy].link_bytes(model.topology, nbytes, at)
        return StrategyRow(strategy, seconds, link_bytes)

    names = model.strategies(kind, move.pre, move.post)
    return lambda nbytes: tuple(row(strategy, nbytes) for strategy in names)


def _measured(
    fleet: Fleet,
    kind: str,
    names: Sequence[str],
    sizes: Sequence[int],
    shares: tuple[float, ...],
    tick: Tick,
) -> dict[tuple[str, int], float]:
    """Seconds by strategy and size."""
    keys = [(strategy, nbytes) for nbytes in sizes for strategy in names]
    request = Request(tuple(ExchangeCase(kind, s, nbytes, shares) for s, nbytes in keys))
    ranks = len(fleet.devices)
    if under_mpi():
        from shardwright.backends.mpi.moves import mpi

        comm = mpi().COMM_WORLD
        if comm.size != ranks:
            raise InputError(
                place="measuring",
                reason=f"{fleet.name} has {ranks} devices, but {comm.size} MPI ranks are running",
                remedy=f"Start it with mpiexec -n {ranks}, or without mpiexec",
            )
        measured = measure(request, comm, tick)
    else:
        most = MOST_RANKS_PER_CORE * (os.cpu_count() or 1)
        if ranks > most:
            raise InputError(
                place="measuring",
                reason=f"{fleet.name} has {ranks} devices, and {ranks} ranks are too many for the "
                f"{os.cpu_count()} cores of this machine",
                remedy=f"Measure a fleet of at most {most} devices here, or start the command with mpiexec "
                "on the machines themselves",
            )
        measured = measure_on(ranks, request, tick)
    return {key: median(samples) for key, samples in zip(keys, measured.exchange_s, strict=True)}


def _checked_kind(collective: str) -> str:
    known = [kind for kind, c in registry().items() if not c.local]
    if collective in known:
        return collective
    near = get_close_matches(str(collective), known, n=2)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    reason = "sends nothing" if collective in registry() else "is no collective"
    raise InputError(
        place=f"collective '{collective}'",
        reason=reason,
        remedy=f"{hint}There are {', '.join(known)}",
    )


def _checked_ratios(ratios: Sequence[float] | None, fleet: Fleet) -> tuple[float, ...]:
    devices = len(fleet.devices)
    if devices < 2:
        raise InputError(
            place=fleet.name, reason="has one device: nothing is exchanged", remedy="Name a larger fleet"
        )
    if ratios is None:
        return (1.0 / devices,) * devices
    if not isinstance(ratios, np.ndarray):
        check_several("ratios", ratios, str([round(1 / devices, 3)] * devices))
    if other := [r for r in ratios if not is_number(r)]:
        raise InputError(place="ratios", reason=f"{other[0]!r} is no number", remedy="Give shares of devices")
    shares = tuple(float(r) for r in ratios)
    if len(shares) != devices:
        raise InputError(
            place="ratios",
            reason=f"are {len(shares)}, but {fleet.name} has {devices} devices",
            remedy=f"Give {devices} numbers, in the order of the fleet file",
        )
    if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise InputError(
            place="ratios",
            reason=f"sum to {sum(shares):.6g}" if min(shares) >= 0 else "are not all between 0 and 1",
            remedy="Give shares between 0 and 1 that sum to 1",
        )
    return shares


def _checked_bytes(size: int | str) -> int:
    nbytes = int(parse_quantity(size, MEMORY, place="bytes")) if isinstance(size, str) else size
    if not is_whole(nbytes) or not 1 <= nbytes <= MOST_BYTES:
        reason = f"{size!r} is {'out of range' if is_whole(nbytes) else 'no number of bytes'}"
        raise InputError(place="bytes", reason=reason, remedy="Give 1 byte to 1 TiB, such as '64 MiB'")
    return nbytes
