"""Factors: prices of what choices make necessary.

A *choice* is what one tensor (or one fused class of tensors) is held in; a *factor* is a price as a
function of some choices; the price of a program is the sum of its factors.

    factor             choices in its scope                     price
    equation           operands, results                        least over signatures: kernel + conversions
    exit               class or port, the tensor's holding      making the holding from that placement
    hold               an input                                 making its second placement
    read, make         a hub (`wide.py`) and another tensor     conversion to and from what it goes with
    enter, leave       outside and inside of a region           conversion on the way in and out
    return             what is made, what it must be            conversion (state, carries, results)
    same, whole        bases that must agree, or be R           none, or impossible
    first dimension    an input pinned by a baseline            none, or impossible
    hand out (whole)   an output of the step                    conversion to anything but Partial, or to R

A factor says nothing of which choices it ties, only of their domains: the equations of twelve equal
layers share their factors, each *used* once per layer. Prices are filled in by `synth.pricing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.cost.traffic import Traffic
from shardwright.ir.graph import Equation
from shardwright.ir.pairs import Paired
from shardwright.ir.placement import Placement, R, Shard, reduction
from shardwright.ir.record import record
from shardwright.ir.regions import outer_placement
from shardwright.ir.rules import Rule, Signature
from shardwright.synth.space.conversions import Domain


@record(frozen=True, slots=True, eq=False)
class Choice:
    """One decision: what a tensor is held in. Compared by identity."""

    index: int
    domain: Domain


class Slot(NamedTuple):
    """How a choice meets the placement that one operand or result of an equation needs.

    Attributes:
        position: of the choice in the factor's scope.
        mode: "exact": the choice is that placement; "use": the placement is made from what is held;
            "derive": what is held is made from that placement.
    """

    position: int
    mode: str


@dataclass(frozen=True, slots=True, eq=False)
class EquationFactor:
    """Equations of one form whose tensors are held in the same domains; literal operands have no slot.

    What is known of its needs is kept in `memo`, which factors that have the same ones share.
    """

    equation: Equation
    rule: Rule
    traffic: Traffic
    signatures: tuple[Signature, ...]
    slots: tuple[Slot | None, ...]
    domains: tuple[Domain, ...]
    weight: float
    memo: list[Needs] = field(default_factory=list["Needs"], repr=False)

    def needs(self) -> Needs:
        """What the signatures that are possible at all need of the choices; worked out once."""
        if not self.memo:
            self.memo.append(_needs(self))
        return self.memo[0]


class Merged(NamedTuple):
    """Signatures that need the same of all choices that are still to come.

    Attributes:
        order: signatures, group by group.
        starts: where each group begins.
        one: a signature of each group, by its number among all.
    """

    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    one: NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """In which order an equation's choices are added up.

    Attributes:
        summed: positions in the scope of choices that are added up.
        merged: what may be merged after each; nothing after the last, unless `exact` follows.
        apart: for which of them holdings of two placements come in at the end.
        exact: positions of choices that are what signatures need and nothing else.
        cells: per group that is left at the end, the holdings of these, as one number.
    """

    summed: tuple[int, ...]
    merged: tuple[Merged | None, ...]
    apart: tuple[bool, ...]
    exact: tuple[int, ...]
    cells: NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """What an equation's signatures need.

    Attributes:
        signatures: numbers of those for which every choice has a holding.
        of: per choice in scope, mode and placements needed (as positions in its routes) by signature, one
            entry per slot.
        memo: what is worked out from these alone (see `shardwright.synth.prices.cheapest`).
    """

    signatures: NDArray[np.intp]
    of: tuple[tuple[tuple[str, NDArray[np.intp]], ...], ...]
    memo: list[Steps] = field(default_factory=list["Steps"], repr=False)


def positions(domain: Domain, needed: Sequence[Placement | None]) -> NDArray[np.intp]:
    """Positions of placements in a domain's routes, -1 where these tensors do not know them."""
    index = domain.routes.index
    return np.array([-1 if p is None else index.get(p, -1) for p in needed], dtype=np.intp)


def _operand(
    domain: Domain, signatures: Sequence[Signature], number: int, mode: str
) -> tuple[NDArray[np.intp], NDArray[np.bool_] | None]:
    """Positions of the placements that signatures need of one operand or result; -1 where there is none.

    And which signatures are thereby possible; None where all are. Remembered with the routes: many factors
    share their signatures.
    """
    exact = mode == "exact"
    memo, key = domain.routes.memo, (id(signatures), number, id(domain) if exact else 0)
    found = memo.get(key)
    if found is None:
        if exact:
            where = _operand(domain, signatures, number, "use")[0]
            held = np.zeros(len(domain.routes.placements) + 1, dtype=np.bool_)  # the last one is for -1
            held[domain.base] = True
            possible = held[where]
        else:
            where = _where(domain, signatures, number)
            possible = where >= 0
        # What is remembered by identity is kept, lest something else comes to have it.
        kept = None if np.logical_and.reduce(possible) else possible
        found = memo[key] = (signatures, domain), where, kept
    return found[1:]


def _where(domain: Domain, signatures: Sequence[Signature], number: int) -> NDArray[np.intp]:
    if isinstance(signatures, Paired):
        placements, memo = signatures.placements[number], domain.routes.memo
        found = memo.get((id(placements),))
        if found is None:
            # What is remembered by identity is kept, lest something else comes to have it.
            found = memo[id(placements),] = placements, positions(domain, placements), None
        return found[1][signatures.at[number]]
    first = len(signatures[0].ins)
    if number < first:
        return positions(domain, [signature.ins[number] for signature in signatures])
    return positions(domain, [signature.outs[number - first] for signature in signatures])


def _needs(factor: EquationFactor) -> Needs:
    of: list[list[tuple[str, NDArray[np.intp]]]] = [[] for _ in factor.domains]
    possible: NDArray[np.bool_] | None = None
    for number, slot in enumerate(factor.slots if factor.signatures else ()):
        if slot is not None:
            where, some = _operand(factor.domains[slot.position], factor.signatures, number, slot.mode)
            of[slot.position].append((slot.mode, where))
            if some is not None:
                possible = some if possible is None else possible & some
    if possible is None or not possible.any():
        return Needs(np.arange(len(factor.signatures)), tuple(map(tuple, of)))
    keep = possible.nonzero()[0]
    return Needs(keep, tuple([tuple([(mode, where[keep]) for mode, where in mine]) for mine in of]))


#: Kinds of factors whose first choice says in what the last one's tensor is made; and the other way around,
#: in what the first one's is needed.
_MADE, _NEEDED = ("exit", "leave", "make"), ("return", "enter", "read")


@dataclass(frozen=True, slots=True, eq=False)
class LinkFactor:
    """A price between choices that is no equation; `kind` and `stacked` say which (see the table above).

    Where the one choice says in which placement the other one's tensor is made or needed, that is the same
    placement (`stacked`: without the dimension of the iterations), or what `beside` has for each holding.
    """

    kind: str
    domains: tuple[Domain, ...]
    weight: float = 1.0
    stacked: bool = False
    beside: tuple[Placement | None, ...] = ()

    def made(self) -> list[Placement | None] | None:
        """By holding of the first choice, in what the last one's tensor is made; None where it is not."""
        return self._across(self.domains[0]) if self.kind in _MADE else None

    def needed(self) -> list[Placement | None] | None:
        """By holding of the last choice, in what the first one's tensor is needed; None where it is not."""
        return self._across(self.domains[-1]) if self.kind in _NEEDED else None

    def _across(self, domain: Domain) -> list[Placement | None]:
        return [self._other(domain, holding) for holding in range(len(domain))]

    def _other(self, domain: Domain, holding: int) -> Placement | None:
        if self.beside:
            return self.beside[holding]
        return outer_placement(domain.holdings[holding].base, self.stacked or self.kind == "leave")

    def table(self, matrices: Matrices) -> Floats:
        """Seconds by holding, one axis per choice in scope; one more in front where prices are several."""
        first, last = self.domains[0], self.domains[-1]
        if self.kind == "hold":
            return matrices.hold(first) * self.weight
        if self.kind == "hand out":
            whole = [k for k, p in enumerate(first.routes.placements) if reduction(p) is None]
            return matrices.use(first)[..., whole].min(axis=-1) * self.weight
        if self.kind == "hand out whole":
            return matrices.use(first)[..., first.routes.index[R]] * self.weight
        if self.kind == "whole":
            return _possible([h.base == R for h in first.holdings])
        if self.kind == "first dimension":
            return _possible([isinstance(h.base, Shard) and h.base.dim == 0 for h in first.holdings])
        if self.kind == "not partial":
            return _possible([reduction(h.base) is None for h in first.holdings])
        if self.kind == "same":
            return _possible([[a.base == b.base for b in last.holdings] for a in first.holdings])
        made, needed = self.made(), self.needed()
        if made is not None:
            return np.swapaxes(_columns(matrices.derive(last), last, made), -1, -2) * self.weight
        assert needed is not None, self.kind
        return _columns(matrices.use(first), first, needed) * self.weight

    def conversions(self, at: Sequence[int]) -> tuple[Conversion, ...]:
        """What has to be converted when the choices in scope are `at`."""
        if self.kind == "hold":
            return (Conversion(0, "hold", R),)
        if self.kind == "hand out":
            return (Conversion(0, "whole", R),)
        if self.kind == "hand out whole":
            return (Conversion(0, "use", R),)
        if self.kind in _MADE:
            made = self._other(self.domains[0], at[0])
            return () if made is None else (Conversion(1, "derive", made),)
        needed = self._other(self.domains[-1], at[-1]) if self.kind in _NEEDED else None
        return () if needed is None else (Conversion(0, "use", needed),)


@record(frozen=True, slots=True)
class Conversion:
    """A tensor is converted: from what is held to `placement` or, to "derive" what is held, from it.

    Attributes:
        position: of the choice in the factor's scope.
        mode: "use", "derive" as in `Slot`; "hold": from the first placement held to the second; "whole": to
            whatever is nearest and not Partial.
        placement: see above.
    """

    position: int
    mode: str
    placement: Placement


class Matrices(Protocol):
    """Seconds of conversions at one set of prices; see `Domain` for their meaning."""

    def use(self, domain: Domain) -> Floats:
        """[holding, placement]."""
        ...

    def derive(self, domain: Domain) -> Floats:
        """[holding, placement]."""
        ...

    def hold(self, domain: Domain) -> Floats:
        """[holding]."""
        ...


class TableFactor(Protocol):
    """A factor that knows its own table: `LinkFactor`, and whatever pins choices."""

    @property
    def domains(self) -> tuple[Domain, ...]:
        """Of the choices in scope."""
        ...

    @property
    def weight(self) -> float:
        """Executions per step."""
        ...

    def table(self, matrices: Matrices) -> Floats:
        """Seconds by holding, one axis per choice in scope."""
        ...

    def conversions(self, at: Sequence[int]) -> tuple[Conversion, ...]:
        """What has to be converted when the choices in scope are `at`."""
        ...


Factor: TypeAlias = EquationFactor | TableFactor


@record(frozen=True, slots=True)
class Use:
    """A factor with the choices it ties, by number."""

    factor: Factor
    scope: tuple[int, ...]


def _possible(cells: object) -> Floats:
    return np.where(np.asarray(cells, dtype=np.bool_), 0.0, np.inf)


def _columns(matrix: Floats, domain: Domain, placements: Sequence[Placement | None]) -> Floats:
    """Columns of placements; one that these tensors do not know is impossible."""
    known = positions(domain, placements)
    found = matrix[..., known]
    found[..., known < 0] = np.inf
    return found
