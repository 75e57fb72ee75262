"""Where a step does the same over and over: stretches of equations with a period.

JAX traces layers one after the other, forward, and their transposes one after the other, backward. Equations
of equal form are equal here whatever the tensors and the numbers written into them; of a sequence of them, a
run is a stretch in which each is as the one a period before. Names are not looked at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.fingerprint import fingerprint, params_text
from shardwright.ir.graph import Equation, Graph, Value

#: Periods tried at most, those with which most equations are as the one a period before; and how many equal
#: equations there may be in each: of layers of several kinds that take turns, all may be there as often.
_PERIODS, _EQUAL = 64, 4

#: What takes one of several values, such as a layer's, and where that stands does not matter.
_TAKES = frozenset({"slice", "squeeze", "dynamic_slice"})

#: What makes keys of random numbers, which may differ from layer to layer by a number that is written there.
_KEYS = frozenset({"random_split", "random_fold_in"})


@dataclass(frozen=True, slots=True)
class Run:
    """Equations `order[first : first + period * times]`: `times` iterations of `period` equations each."""

    first: int
    period: int
    times: int

    @property
    def last(self) -> int:
        """Behind the last of its equations."""
        return self.first + self.period * self.times

    def at(self, position: int, order: Sequence[Equation]) -> list[Equation]:
        """The equations in one position of all iterations."""
        return [order[self.first + self.period * n + position] for n in range(self.times)]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Equations `first` to `last` of an order, each as the one `period` before: where runs may be."""

    first: int
    last: int
    period: int

    @property
    def repeated(self) -> int:
        """Equations that are there once more than they would be in a loop."""
        return ((self.last - self.first) // self.period - 1) * self.period

    def runs(self) -> Iterator[Run]:
        """Of as many iterations as there can be, from every equation where so many can begin."""
        times, rest = divmod(self.last - self.first, self.period)
        for phase in range(rest + 1):
            yield Run(self.first + phase, self.period, times)


def in_order(graph: Graph) -> tuple[Equation, ...]:
    """The equations, those first that only take something out of arguments, wherever the step has them."""
    early = set(graph.inputs) | set(graph.constants)
    ahead, rest = list[Equation](), list[Equation]()
    for equation in graph.equations:
        takes = equation.primitive in _TAKES or equation.primitive in _KEYS
        if takes and early.issuperset(equation.input_values):
            early.update(equation.outputs)
            ahead.append(equation)
        else:
            rest.append(equation)
    return (*ahead, *rest)


def kind(equation: Equation) -> Hashable:
    """What equations are compared by: what they do, but for the tensors and the literals."""
    form = equation.form
    regions = tuple([fingerprint(region) for region in equation.regions])
    if not regions:
        key = (form.primitive, *form.params, *form.params.values(), form.input_types, form.output_types)
        try:
            hash(key)
        except TypeError:  # a parameter without a hash, such as an array
            pass
        else:
            return (*key, equation.part)
    every = [equation, *(e for region in equation.regions for e in region.all_equations())]
    held = (array for e in every for region in e.regions for array in region.constants.values())
    constants, code = tuple(map(_contents, held)), tuple(map(_code, every))
    key = (form.primitive, params_text(form.params), form.input_types, form.output_types)
    return *key, regions, code, constants, equation.part


def _code(equation: Equation) -> Hashable:
    """What is called in an equation and is no region of it: that a fingerprint names by its type alone.

    What a function was traced to says more than the function, which may be another for every layer.
    """
    if equation.regions:
        return ()
    traced = [v for v in equation.params.values() if hasattr(v, "eqns")]
    if traced:
        return tuple([(str(v), *map(_contents, getattr(v, "consts", ()))) for v in traced])
    called = [v for v in equation.params.values() if callable(v)]
    return tuple([id(v) if getattr(v, "__hash__", None) is None else v for v in called])


def _contents(array: object) -> Hashable:
    try:
        known: NDArray[np.generic] = np.asarray(array)
    except TypeError:  # keys of random numbers: each is one of its own
        return id(array)
    return str(known.dtype), known.shape, known.tobytes()


def stretches(order: Sequence[Equation]) -> list[Stretch]:
    """Where equations repeat with a period, in the order of their ends; they may overlap."""
    known: dict[Hashable, int] = {}
    kinds = np.array([known.setdefault(kind(e), len(known)) for e in order], np.int64)
    found: list[Stretch] = []
    for period in _periods(kinds):
        alike = np.concatenate([[False], kinds[:-period] == kinds[period:], [False]])
        change = np.flatnonzero(alike[1:] != alike[:-1])
        for first, last in zip(change[::2].tolist(), change[1::2].tolist(), strict=True):
            if last - first >= period:
                found.append(Stretch(first, last + period, period))
    return sorted(found, key=lambda s: (s.last, s.period, s.first))


def _periods(kinds: NDArray[np.int64]) -> list[int]:
    """Distances between equal equations that most have: from one to the next, to the one after, and so on."""
    order = np.argsort(kinds, kind="stable")
    found: list[int] = []
    for lag in range(1, _EQUAL + 1):
        same = kinds[order][lag:] == kinds[order][:-lag]
        counted = Counter[int]((order[lag:] - order[:-lag])[same].tolist())
        most = sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:_PERIODS]
        found += [period for period, _ in most]
    return list(dict.fromkeys(found))


def apart(found: Sequence[Stretch]) -> list[Stretch]:
    """Of stretches, in the order of their ends, those without overlaps that repeat most equations together.

    Weighted intervals: the best up to the end of each is the best without it, or it and the best up to where
    it begins (Kleinberg and Tardos 2005, section 6.1).
    """
    ends = [stretch.last for stretch in found]
    best: list[tuple[int, int]] = [(0, 0)]  # equations, and of as many stretches the fewer the better
    before: list[int] = []
    for n, stretch in enumerate(found):
        before.append(bisect_right(ends, stretch.first, hi=n))
        repeated, stretches = best[before[n]]
        best.append(max(best[n], (repeated + stretch.repeated, stretches - 1)))
    kept: list[Stretch] = []
    n = len(found)
    while n:
        if best[n] == best[n - 1]:
            n -= 1
        else:
            kept.append(found[n - 1])
            n = before[n - 1]
    return kept[::-1]


def makers_of(order: Sequence[Equation]) -> dict[Value, tuple[int, int]]:
    """By value, where in an order it is made, and as which result."""
    return {value: (at, k) for at, e in enumerate(order) for k, value in enumerate(e.outputs)}
