"""The choices of one graph's values, and the factors of its equations; see `frame.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from shardwright.cost.traffic import Traffic, traffic
from shardwright.ir.graph import Equation, Value
from shardwright.ir.placement import ReduceOp
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Signature
from shardwright.ir.table import Flags, Numbers, Table, codes, table
from shardwright.synth.space.conversions import Domain
from shardwright.synth.space.factors import Choice, EquationFactor, Slot, Use
from shardwright.synth.space.frame import Frame
from shardwright.synth.space.fuse import Fusion, fuse
from shardwright.synth.space.making import Made
from shardwright.synth.space.outstanding import Outstanding
from shardwright.synth.space.wide import beside, hubs

#: In the place of a factor that is still to come.
_NONE: Any = None


class Framing:
    """Fills in a frame: the caller goes through values and equations in order.

    Args:
        made: what gets the choices and factors.
        frame: that is filled in.
        outstanding: what may be Partial, and which signatures there are.
    """

    def __init__(self, made: Made, frame: Frame, outstanding: Outstanding) -> None:
        graph = frame.graph
        self._made, self._frame = made, frame
        self._codes, self._meant = outstanding.codes[graph], outstanding.meant
        sums = np.array(["sum" in partials for _, partials in self._meant], dtype=np.bool_)
        self._signatures = outstanding.signatures[graph]
        #: Equations of many tensors, and the value that is the hub of each.
        self._hub_of = hubs(graph, self._signatures)
        self._hubs = np.zeros(len(self._codes), dtype=np.bool_)
        self._hubs[list(self._hub_of.values())] = True
        fusion = fuse(graph, sums[self._codes], self._hubs)
        self._of_value, self._outside = fusion.of_value.tolist(), fusion.outside.tolist()
        self._of_class: list[Choice | None] = [None] * len(fusion.sums)
        self._sums = fusion.sums.tolist()
        self._domains: dict[tuple[str, int, int], Domain] = {}
        #: Of every value the choice from which users outside of its class get it, and that of its class.
        self._placed = [0] * (2 * len(self._codes))
        self._through = traffic(graph)
        self._slots, self._begin = _slots(table(graph), fusion, self._hubs)
        #: Equations without regions so far, and where their factors come.
        self._waiting: list[Equation] = []
        self._places: list[int] = []
        through = [self._through[equation] for equation in graph.equations]
        self._kinds = _kinds(self._signatures, through, self._slots, self._begin)

    # -- choices -----------------------------------------------------------------------------------

    def add_input(self, value: Value) -> None:
        """The choice of an input."""
        fused, frame = self._of_value[value.index], self._frame
        if fused >= 0:
            self._place(value, self._class_choice(fused, value))
            if not self._meant[self._codes[value.index]][1]:
                self._made.tie("not partial", frame.choice[value])
        elif self._outside[value.index] > 1:
            self._place(value, self._choice("given", value))
            self._made.tie("hold", frame.choice[value], weight=frame.weight)
        else:
            self._place(value, self._choice("single", value))

    def add_constant(self, value: Value) -> None:
        """The choice of a constant."""
        self._place(value, self._choice("whole", value))

    def add_result(self, value: Value) -> None:
        """The choice of a result: that of its class, and another one for who reads it from elsewhere.

        So with a hub, which has a placement of its own.
        """
        fused, outside = self._of_value[value.index], self._outside[value.index]
        if self._hubs[value.index]:
            mine = self._choice("single", value)
        elif fused >= 0:
            mine = self._of_class[fused] or self._class_choice(fused, value)
        else:
            self._place(value, self._choice("multiple" if outside > 1 else "single", value))
            return
        self._place(value, mine)
        if outside > 1:
            left = self._frame.exits[value] = self._choice("multiple", value)
            self._placed[2 * value.index] = left.index
            self._made.tie("exit", mine, left, weight=self._frame.weight)

    def _place(self, value: Value, choice: Choice) -> None:
        self._frame.choice[value] = choice
        self._placed[2 * value.index] = self._placed[2 * value.index + 1] = choice.index

    def _choice(self, what: str, value: Value) -> Choice:
        code = self._codes[value.index]
        key = what, code, id(value.type)
        domain = self._domains.get(key)
        if domain is None:
            domain = self._domains[key] = self._made.words.domains.domain(
                what, value.type, *self._meant[code]
            )
        return self._made.choice(domain)

    def _class_choice(self, fused: int, value: Value) -> Choice:
        """The placement in which a class is computed, made when the first of its values is met."""
        found = self._of_class[fused]
        if found is None:
            partials: tuple[ReduceOp, ...] = ("sum",) if self._sums[fused] else ()
            units = self._meant[self._codes[value.index]][0]
            found = self._made.choice(self._made.words.domains.single(value.type, units, partials))
            self._of_class[fused] = found
        return found

    # -- factors -----------------------------------------------------------------------------------

    def add_use(self, equation: Equation) -> None:
        """The factor of an equation without regions has its place here; `close` puts it there."""
        self._waiting.append(equation)
        self._places.append(len(self._made.uses))
        self._made.uses.append(_NONE)

    def close(self) -> None:
        """The factors of all equations, each with its choices: what is alike is found for all at once."""
        choices, uses, several = self._made.choices, self._made.uses, self._frame.uses
        known: dict[int, int] = {}
        domain = np.array([known.setdefault(id(choice.domain), len(known)) for choice in choices], np.intp)
        equations = np.array([equation.index for equation in self._waiting], dtype=np.intp)
        scopes, kinds = np.array(self._placed, dtype=np.intp)[self._slots], np.array(self._kinds, np.intp)
        counts = np.diff(self._begin)[equations]
        for count in np.unique(counts).tolist():
            mine = np.flatnonzero(counts == count)
            here = self._begin[equations[mine]][:, None] + np.arange(count)
            scope = scopes[here]
            # Of every choice the first place that it has: some have several.
            first = (scope[:, :, None] == scope[:, None, :]).argmax(axis=2)
            rows = np.column_stack([kinds[equations[mine]], first, domain[scope]])
            _, examples, alike = np.unique(codes(rows), return_index=True, return_inverse=True)
            factors: list[EquationFactor] = []
            for k in examples.tolist():
                given, slots = scope[k].tolist(), self._slots[here[k]].tolist()
                found = tuple(dict.fromkeys(given))
                modes = [2 * found.index(c) + s % 2 for c, s in zip(given, slots, strict=True)]
                domains = tuple([choices[choice].domain for choice in found])
                factors.append(self._factor(self._waiting[mine[k]], modes, domains))
            apart = (first == np.arange(count)).all(axis=1).tolist()
            lines = zip(mine.tolist(), alike.tolist(), scope.tolist(), apart, strict=True)
            for number, factor, given, once in lines:
                use = Use(factors[factor], tuple(given if once else dict.fromkeys(given)))
                uses[self._places[number]] = several[self._waiting[number]] = use
        for number in [k for k, index in enumerate(equations.tolist()) if index in self._hub_of]:
            uses[self._places[number]] = self._around_hub(self._waiting[number])

    def _around_hub(self, equation: Equation) -> Use:
        """The factor of an equation of many tensors with its hub alone; ties the others to that."""
        whole, factor = self._frame.uses[equation], self._frame.uses[equation].factor
        assert isinstance(factor, EquationFactor)
        made = [value.index for value in equation.outputs]
        hub = len(equation.inputs) + made.index(self._hub_of[equation.index])
        slot = factor.slots[hub]
        assert slot is not None, "a result has a choice"
        choices = [self._made.choices[choice] for choice in whole.scope]
        center = choices[slot.position]
        for number, each in enumerate(factor.slots):
            if each is not None and number != hub:
                other, reads = choices[each.position], number < len(equation.inputs)
                found = beside(factor.signatures, hub, number, center.domain)
                scope = (other, center) if reads else (center, other)
                self._made.tie("read" if reads else "make", *scope, weight=factor.weight, beside=found)
        alone = [None if number != hub else slot._replace(position=0) for number in range(len(factor.slots))]
        return Use(self._of_slots(equation, alone, (center.domain,)), (center.index,))

    def _factor(self, equation: Equation, modes: list[int], domains: tuple[Domain, ...]) -> EquationFactor:
        """The factor of an equation.

        Args:
            equation: the equation.
            modes: of its operands and results that are no literals, twice the place in the scope, and one
                more where the mode is "exact".
            domains: of the choices in its scope.
        """
        rest = iter(modes)
        usual = [*[(atom, "use") for atom in equation.inputs], *[(v, "derive") for v in equation.outputs]]
        slots: list[Slot | None] = []
        for atom, mode in usual:
            coded = next(rest) if isinstance(atom, Value) else None
            slots.append(None if coded is None else Slot(coded // 2, "exact" if coded % 2 else mode))
        return self._of_slots(equation, slots, domains)

    def _of_slots(
        self, equation: Equation, slots: Sequence[Slot | None], domains: tuple[Domain, ...]
    ) -> EquationFactor:
        given, through = self._signatures[equation.index], self._through[equation]
        weight, words = self._frame.weight, self._made.words
        found = words.on_mesh(given)
        key = (id(found), through, weight, *slots, *domains)
        factor = words.factors.get(key)
        if factor is None:
            # Lists of signatures that differ by types alone are made of the same ones.
            alike = (*map(id, given), *slots, *[domain.alike for domain in domains])
            factor = words.factors[key] = EquationFactor(
                equation,
                rule_of(equation),
                through,
                found,
                tuple(slots),
                domains,
                weight,
                words.needs.setdefault(alike, []),
            )
        return factor


def _slots(found: Table, fusion: Fusion, hubs: Flags) -> tuple[Numbers, Numbers]:
    """Of every equation, twice each operand that is no literal, then each result; and where these begin.

    One more where the equation has it in the placement of its class, or makes a hub.
    """
    values, mine = found.operands >= 0, fusion.of_equation >= 0
    exact = mine[found.maker] | hubs[found.results]
    slots = np.concatenate([(2 * found.operands + fusion.within)[values], 2 * found.results + exact])
    of = np.concatenate([found.reader[values], found.maker])
    begin = np.concatenate([[0], np.bincount(of, minlength=len(found.form)).cumsum()])
    return slots[np.argsort(of, kind="stable")], begin


def _kinds(
    signatures: Sequence[tuple[Signature, ...]],
    through: Iterable[Traffic],
    slots: Numbers,
    begin: Numbers,
) -> list[int]:
    """Of every equation a number; equations of one number differ in no more than their choices.

    Args:
        signatures: of every equation.
        through: what of every equation goes through memory.
        slots, begin: see `_slots`.
    """
    known: dict[tuple[int, Traffic, bytes], int] = {}
    exact = (slots & 1).astype(np.int8).tobytes()
    return [
        known.setdefault((id(some), memory, exact[first:last]), len(known))
        for some, memory, (first, last) in zip(signatures, through, pairwise(begin.tolist()), strict=True)
    ]
