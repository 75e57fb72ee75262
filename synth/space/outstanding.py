"""Which signatures equations have, and which reductions their results may then have outstanding.

A value may be Partial only if a signature makes it so, from what may itself be Partial. Equations of one form
whose tensors have the same units and the same reductions outstanding are one: they are judged once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

from shardwright.ir.graph import Equation, Graph, Value
from shardwright.ir.placement import Partial, ReduceOp, Shard
from shardwright.ir.regions import boundary
from shardwright.ir.rules import Signature, on_axes
from shardwright.ir.table import table
from shardwright.synth.space.units import Units
from shardwright.synth.space.vocabulary import Vocabulary

_NONE: frozenset[ReduceOp] = frozenset()
_SUMS: frozenset[ReduceOp] = frozenset(("sum",))

#: Signatures of an equation, and numbers that stand for its results.
_Found: TypeAlias = tuple[tuple[Signature, ...], tuple[int, ...]]


class Outstanding:
    """See the module's docstring.

    Attributes:
        partials: which reductions every value may have outstanding.
        codes: of every graph, of its values by their indices, a number that stands for units and reductions.
        meant: the units and reductions that such a number stands for.
        signatures: of every graph, of its equations; none for those with regions.

    Args:
        graph: a step, with what is in its regions.
        units: of its values.
        words: what spaces have in common.
        listed: the signatures of an equation.
    """

    def __init__(
        self,
        graph: Graph,
        units: Units,
        words: Vocabulary,
        listed: Callable[[Equation], tuple[Signature, ...]],
    ) -> None:
        self._units, self._arising, self._listed = units, words.arising, listed
        self.partials: dict[Value, frozenset[ReduceOp]] = {}
        self.codes: dict[Graph, list[int]] = {}
        self.meant: list[tuple[tuple[int, ...], frozenset[ReduceOp]]] = []
        self.signatures: dict[Graph, list[tuple[Signature, ...]]] = {}
        self._numbers: dict[tuple[int, frozenset[ReduceOp]], int] = {}
        self._add(graph, frozenset())

    def _code(self, unit: int, some: frozenset[ReduceOp]) -> int:
        found = self._numbers.get((unit, some))
        if found is None:
            found = self._numbers[unit, some] = len(self.meant)
            self.meant.append((self._units.numbered(unit), some))
        return found

    def _add(self, graph: Graph, carried: frozenset[Value]) -> None:
        """Take in a graph; carries of a loop may be Partial if they are sums."""
        unit, all_of_it = self._units.numbers(graph), table(graph)
        given = (*graph.inputs, *graph.constants)
        begin = len(given)
        code = [
            self._code(unit[value.index], _SUMS if value in carried and value.type.is_float else _NONE)
            for value in given
        ]
        judged: list[tuple[Signature, ...]] = []
        known: dict[tuple[int, ...], _Found] = {}
        operands = all_of_it.operands.tolist()
        code.append(-1)  # of literals, behind those of all values so far
        lines = zip(
            graph.equations,
            all_of_it.form.tolist(),
            pairwise(all_of_it.begin.tolist()),
            pairwise((all_of_it.made + begin).tolist()),
            strict=True,
        )
        for equation, form, (first, last), (out, end) in lines:
            key = (form, *[code[value] for value in operands[first:last]], *unit[out:end])
            found = known.get(key)
            if found is None:
                if equation.regions:
                    found = (), self._region(equation, unit[out:end])
                else:
                    found = known[key] = self._judge(equation, key[1 : last - first + 1], unit[out:end])
            judged.append(found[0])
            code[out:] = *found[1], -1
        code.pop()
        self.codes[graph], self.signatures[graph] = code, judged
        self.partials.update(zip(graph.values(), [self.meant[number][1] for number in code], strict=True))

    def _judge(self, equation: Equation, operands: tuple[int, ...], units: list[int]) -> _Found:
        """Of an equation whose operands and whose results' units these numbers stand for."""
        found = self._listed(equation)
        coming = tuple([_NONE if number < 0 else self.meant[number][1] for number in operands])
        arising = self._arise(found, coming, len(units))
        return found, tuple(map(self._code, units, arising))

    def _arise(
        self, found: tuple[Signature, ...], coming: tuple[frozenset[ReduceOp], ...], results: int
    ) -> tuple[frozenset[ReduceOp], ...]:
        """Which reductions the results may have outstanding, if operands come with these."""
        key = (id(found), coming)
        if key not in self._arising:
            self._arising[key] = tuple(
                frozenset(
                    placement.op
                    for signature in found
                    for one in on_axes(signature)
                    if isinstance(placement := one.outs[k], Partial) and _arises(one, placement, coming)
                )
                for k in range(results)
            )
        return self._arising[key]

    def _region(self, equation: Equation, units: list[int]) -> tuple[int, ...]:
        """Numbers that stand for the results of an equation with regions."""
        wiring = boundary(equation)
        for r, region in enumerate(equation.regions):
            self._add(region, frozenset(region.inputs[into] for _, _, to, into in wiring.carries if to == r))
        arising = [_NONE] * len(units)
        for port in wiring.outs:
            inner = equation.regions[port.region].outputs[port.inner]
            arising[port.outer] = self.partials[inner] if isinstance(inner, Value) else _NONE
        return tuple(map(self._code, units, arising))


def _arises(signature: Signature, result: Partial, coming: tuple[frozenset[ReduceOp], ...]) -> bool:
    """Whether a signature makes a new Partial, or passes one that may come in."""
    return any(
        isinstance(placement, Shard) or (placement == result and result.op in ops)
        for placement, ops in zip(signature.ins, coming, strict=True)
    )
