"""Numbers of all layers that a step adds up one after the other, as the norm of all gradients is.

Added up like that, every layer's number would have to be taken out of a stack. A sum of a stack is one
equation; it adds the same numbers in another order. So with the greatest, the least, and whether all or any
are true.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.ir.graph import Atom, Equation, Value
from shardwright.ir.rolling.parts import Stack
from shardwright.ir.rolling.stacks import Stacks

#: What may be done in any order, and with what to all rows of a stack.
TOTALS: Mapping[str, str] = {
    "add": "sum",
    "add_any": "sum",
    "max": "max",
    "min": "min",
    "and": "all",
    "or": "any",
}


@dataclass(frozen=True, slots=True)
class Total:
    """One number made of many: of all rows of stacks, and of others."""

    how: str
    stacks: tuple[Stack, ...]
    rest: tuple[Atom, ...]


class Chains:
    """Equations that make one number of many, in a step whose loops are known.

    What they are made of is not known before other equations are in groups; that they are not to be in any
    is.
    """

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        uses = Counter(a for e in stacks.order for a in e.inputs if isinstance(a, Value))
        uses.update(atom for atom in stacks.graph.outputs if isinstance(atom, Value))
        nodes = {e.outputs[0]: e for e in stacks.order if e.primitive in TOTALS and self._adds(e)}
        inner = {
            atom
            for e in nodes.values()
            for atom in e.inputs
            if isinstance(atom, Value)
            and uses[atom] == 1
            and atom in nodes
            and nodes[atom].primitive == e.primitive
        }
        #: By the last equation of a chain, what all of it is made of.
        self._terms: dict[Equation, list[Atom]] = {}
        for value, equation in nodes.items():
            if value in inner:
                continue
            terms, waiting, members = list[Atom](), list(reversed(equation.inputs)), {equation}
            while waiting:
                atom = waiting.pop()
                if isinstance(atom, Value) and atom in inner:
                    members.add(nodes[atom])
                    waiting.extend(reversed(nodes[atom].inputs))
                else:
                    terms.append(atom)
            if len(members) > 1:
                self._terms[equation] = terms
                stacks.single.update(members)

    def _adds(self, equation: Equation) -> bool:
        """Whether it makes one number of two, beside all loops."""
        numbers = not any(atom.type.rank for atom in equation.inputs)
        boolean = equation.output_types[0].dtype == "bool"
        logical = TOTALS[equation.primitive] in ("all", "any")
        return numbers and boolean == logical and self._stacks.is_plain(equation)

    def total(self, equation: Equation) -> Total | None:
        """What a chain that ends with an equation comes to, if rows of stacks are in it, all of them."""
        terms = self._terms.get(equation)
        if terms is None:
            return None
        found: dict[tuple[object, int], list[tuple[int, int, Atom]]] = defaultdict(list)
        for number, term in enumerate(map(self._stacks.same, terms)):
            place = self._stacks.place_of(term)
            if place is not None:
                what, family, layer = place
                found[what, family].append((layer, number, term))
        whole, done = list[Stack](), set[int]()
        for (_, family), rows in found.items():
            rows.sort(key=lambda row: row[:2])
            stack = self._whole([(layer, term) for layer, _, term in rows], family)
            if stack is not None:
                whole.append(stack)
                done.update(number for _, number, _ in rows)
        rest = [term for number, term in enumerate(terms) if number not in done]
        return Total(TOTALS[equation.primitive], tuple(whole), tuple(rest)) if whole else None

    def _whole(self, rows: Sequence[tuple[int, Atom]], family: int) -> Stack | None:
        """The stack that has these rows and no others."""
        count = next(loop.body.run.times for loop in self._stacks.loops if loop.family == family)
        if [layer for layer, _ in rows] != list(range(count)):
            return None
        return self._stacks.stacked(tuple([atom for _, atom in rows]), family, join=False)
