"""Latency and bandwidth of a link from timed exchanges.

The price of a strategy is α A + β B: A counts its rounds, B the bytes through its busiest link, both known
(they are its price on links without latency or without bytes), and α (s) and β (s/byte) are fitted.
Least squares of *relative* errors, because times span four orders of magnitude and small exchanges are as
frequent as large ones; α and β not negative.

Libraries change protocols and algorithms with the size, so that no single line fits: sizes are split into
ranges, each with a line of its own. Where to split is found exactly, by dynamic programming over the sizes,
and how often by Schwarz's criterion (Bayesian information criterion; Annals of Statistics 6, 1978).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, sqrt
from statistics import median

import numpy as np
from scipy.optimize import nnls

from shardwright.cost.calibrate.estimate import Array, Estimate, margins, rounded, spread
from shardwright.cost.strategy_links import SizeRange, StrategyLink

MOST_RANGES = 4
#: A range has at least so many sizes: two numbers are fitted to it.
LEAST_SIZES = 3
#: What a range counts for: two numbers and where it ends, twice, because the end was searched for.
PARAMETERS = 6
#: Typical relative error above which a fit is refused, and spread of repeated runs above which times are.
MOST_ERROR = 0.35
MOST_SPREAD = 0.35
#: What stands for nothing in a fleet file, whose quantities are above zero.
LEAST_LATENCY_S = 1e-9
MOST_BYTE_PER_S = 1e15


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """A timed exchange.

    Attributes:
        strategy: such as "all_gather.exact".
        nbytes: of the whole tensor.
        rounds: what its latency is multiplied by (A).
        link_bytes: what its seconds per byte are multiplied by (B).
        seconds: one per repetition.
    """

    strategy: str
    nbytes: int
    rounds: float
    link_bytes: float
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RangeFit:
    """A line for tensors up to a size (None: of any).

    Attributes:
        up_to_bytes: as in `SizeRange`.
        latency_s: α.
        second_per_byte: β.
    """

    up_to_bytes: float | None
    latency_s: Estimate
    second_per_byte: Estimate

    def seconds(self, rounds: float, link_bytes: float) -> float:
        """The line."""
        return self.latency_s.value * rounds + self.second_per_byte.value * link_bytes

    def as_link(self) -> SizeRange:
        """What a fleet file says of it."""
        byte_per_s = 1 / max(self.second_per_byte.value, 1 / MOST_BYTE_PER_S)
        latency_s = max(self.latency_s.value, LEAST_LATENCY_S)
        return SizeRange(self.up_to_bytes, rounded(latency_s), rounded(byte_per_s))


@dataclass(frozen=True, slots=True)
class StrategyFit:
    """All ranges of one strategy.

    Attributes:
        strategy: its name.
        ranges: the lines, ascending.
        link: what a fleet file says of them: in it a larger tensor never costs less, across ranges neither.
        error: root mean square of the relative error of the medians.
        spread: typical spread of repeated runs.
    """

    strategy: str
    ranges: tuple[RangeFit, ...]
    link: StrategyLink
    error: float
    spread: float

    def complaint(self) -> str | None:
        """Why the fit is not to be trusted, None if it is."""
        if self.spread > MOST_SPREAD:
            return f"repeated runs of {self.strategy} differ by ±{self.spread:.0%}"
        if self.error > MOST_ERROR:
            return f"lines in the size miss the times of {self.strategy} by {self.error:.0%}"
        return None


def fit_strategies(times: Iterable[ExchangeTimes]) -> tuple[StrategyFit, ...]:
    """Fit each strategy on its own."""
    groups: dict[str, list[ExchangeTimes]] = {}
    for time in times:
        groups.setdefault(time.strategy, []).append(time)
    return tuple(_fit_strategy(name, group) for name, group in groups.items())


def fit_line(times: Sequence[ExchangeTimes], up_to_bytes: float | None = None) -> RangeFit:
    """One line through all of them."""
    seconds = _medians(times)
    design = np.array([[t.rounds, t.link_bytes] for t in times]) / seconds[:, None]
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    found, _ = nnls(design / scale, np.ones(len(times)))
    width = margins(design / scale, design / scale @ found - 1) / scale
    found = found / scale
    latency, per_byte = (
        Estimate(float(v), max(0.0, float(v - w)), float(v + w)) for v, w in zip(found, width, strict=True)
    )
    return RangeFit(up_to_bytes, latency, per_byte)


def _fit_strategy(name: str, times: Sequence[ExchangeTimes]) -> StrategyFit:
    by_size: dict[int, list[ExchangeTimes]] = {}
    for time in sorted(times, key=lambda t: t.nbytes):
        by_size.setdefault(time.nbytes, []).append(time)
    sizes = list(by_size)
    splits = _best_splits(by_size)
    ranges: list[RangeFit] = []
    for first, last in splits:
        limit = None if last == len(sizes) else float(round(sqrt(sizes[last - 1] * sizes[last])))
        inside = [time for size in sizes[first:last] for time in by_size[size]]
        ranges.append(fit_line(inside, limit))
    link = _rising(StrategyLink(name, tuple(fit.as_link() for fit in ranges)), times)
    errors = [_seconds(link.at(t.nbytes), t, t.nbytes) / np.median(t.seconds) - 1 for t in times]
    return StrategyFit(
        name,
        tuple(ranges),
        link,
        sqrt(float(np.mean(np.square(errors)))),
        float(np.median([spread(time.seconds) for time in times])),
    )


def _seconds(found: SizeRange, time: ExchangeTimes, nbytes: float) -> float:
    """Of an exchange such as `time`, of so many bytes."""
    scale = nbytes / time.nbytes
    return found.latency_s * time.rounds + time.link_bytes * scale / found.bandwidth_byte_per_s


def _best_splits(by_size: Mapping[int, Sequence[ExchangeTimes]]) -> list[tuple[int, int]]:
    """Half-open ranges of size indices: the best for each number of ranges, then the best number."""
    sizes = list(by_size)
    count, observations = len(sizes), sum(len(group) for group in by_size.values())

    def error(first: int, last: int) -> float:
        inside = [time for size in sizes[first:last] for time in by_size[size]]
        line = fit_line(inside)
        predicted = np.array([line.seconds(t.rounds, t.link_bytes) for t in inside])
        return float(np.square(predicted / _medians(inside) - 1).sum())

    table = {
        (first, last): error(first, last)
        for first in range(count)
        for last in range(first + 1, count + 1)
        if last - first >= min(LEAST_SIZES, count)
    }
    best: dict[tuple[int, int], tuple[float, list[int]]] = {
        (1, last): (table[0, last], [0]) for last in range(1, count + 1) if (0, last) in table
    }
    for pieces in range(2, MOST_RANGES + 1):
        for last in range(1, count + 1):
            options = [
                (best[pieces - 1, middle][0] + table[middle, last], [*best[pieces - 1, middle][1], middle])
                for middle in range(1, last)
                if (pieces - 1, middle) in best and (middle, last) in table
            ]
            if options:
                best[pieces, last] = min(options)

    def criterion(pieces: int) -> float:
        # Noise below a per cent is nobody's concern, and would make the logarithm reward fitting it.
        variance = max(best[pieces, count][0] / observations, 1e-4)
        return observations * log(variance) + PARAMETERS * pieces * log(observations)

    pieces = min((p for p in range(1, MOST_RANGES + 1) if (p, count) in best), key=criterion)
    starts = [*best[pieces, count][1], count]
    return list(pairwise(starts))


def _rising(link: StrategyLink, times: Sequence[ExchangeTimes]) -> StrategyLink:
    """Later ranges raised where they would make a larger tensor cheaper than a smaller one."""
    result = [link.ranges[0]]
    for found in link.ranges[1:]:
        before = result[-1]
        edge = before.up_to_bytes
        assert edge is not None
        drops = [(_seconds(before, t, edge) - _seconds(found, t, edge)) / t.rounds for t in times if t.rounds]
        lift = max(0.0, *drops)
        # Rounding must not undo it.
        latency_s = rounded((found.latency_s + lift) * 1.001) if lift else found.latency_s
        result.append(SizeRange(found.up_to_bytes, latency_s, found.bandwidth_byte_per_s))
    return StrategyLink(link.strategy, tuple(result))


def _medians(times: Sequence[ExchangeTimes]) -> Array:
    # Of a few samples each, again and again: numpy's takes far longer.
    return np.array([median(t.seconds) for t in times], dtype=np.float64)
