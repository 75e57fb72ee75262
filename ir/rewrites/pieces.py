"""What every value of a step is when the batch comes in pieces; see `shardwright.ir.rewrites.microbatch`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np

from shardwright.ir.errors import InputError
from shardwright.ir.graph import Atom, Equation, Form, Graph, Value
from shardwright.ir.graph import Literal as Scalar
from shardwright.ir.jaxpr import source_text
from shardwright.ir.placement import Partial, Placement, R, Shard
from shardwright.ir.regions import scan_counts
from shardwright.ir.registry import is_contraction, rule_of
from shardwright.ir.rules import Signature, cuts, letter_signature, signatures


class Apart(Enum):
    """What is made outside of the loop: before it, of no data, or after it, of sums."""

    INVARIANT = "invariant"
    LATER = "later"


#: What a value is, see above.
Kind: TypeAlias = Apart | Shard | Partial
INVARIANT, LATER = Apart.INVARIANT, Apart.LATER
SUM = Partial("sum")


class NotInPiecesError(InputError):
    """A step that cannot be run in micro-batches."""


class _NeedsWholeError(NotInPiecesError):
    """What is in the way is that values are not known before all of the batch was seen; see `wanted`."""

    def __init__(self, error: InputError, wanted: Sequence[Value]) -> None:
        super().__init__(place=error.place, reason=error.reason, remedy=error.remedy)
        self.wanted = tuple(wanted)


def refuse(
    reason: str,
    place: str = "microbatches",
    remedy: str = "Plan with microbatches=1, or leave the number to the planner",
) -> NotInPiecesError:
    """The error that says why the step cannot be run in pieces."""
    return NotInPiecesError(place=place, reason=reason, remedy=remedy)


def without_state(error: NotInPiecesError, otherwise: str) -> NotInPiecesError:
    """The same, of a step none of whose arguments is state: parameters may be taken for the batch."""
    reason = f"{error.reason} (no state was found, so that parameters may count as the batch)"
    remedy = (
        f"Say with state= what comes back as it went in, of one shape and dtype, or plan with {otherwise}"
    )
    return NotInPiecesError(place=error.place, reason=reason, remedy=remedy)


@dataclass(slots=True)
class Split:
    """A graph by kinds.

    Attributes:
        kinds: of every value.
        local: how every equation in the loop is done on a piece.
        inner: of scans and conds in the loop, their regions.
        ends: what the outputs of a region are handed on as: what is the same for every piece is cut where
            that of another branch, or what it is carried on as, comes in pieces.
        zeros: values that are known to be zero throughout.
        makers: equation of every value.
        inside: values that are the same for every piece, but made in the loop: by a scan, beside others.
        ahead: equations that are done on the whole batch before the loop, see `Pieces.of_step`.
    """

    kinds: dict[Value, Kind] = field(default_factory=dict[Value, Kind])
    local: dict[int, Signature] = field(default_factory=dict[int, Signature])
    inner: dict[int, tuple[Split, ...]] = field(default_factory=dict[int, "tuple[Split, ...]"])
    ends: tuple[Kind, ...] = ()
    zeros: set[Value] = field(default_factory=set[Value])
    makers: dict[Value, Equation] = field(default_factory=dict[Value, Equation])
    inside: set[Value] = field(default_factory=set[Value])
    ahead: set[int] = field(default_factory=set[int])

    def kind(self, atom: Atom) -> Kind:
        """Literals are invariant."""
        return self.kinds[atom] if isinstance(atom, Value) else INVARIANT

    def is_zero(self, atom: Atom) -> bool:
        """Whether all of it is known to be zero."""
        if isinstance(atom, Scalar):
            return not isinstance(atom.value, str) and bool(np.all(np.asarray(atom.value) == 0))
        return atom in self.zeros

    def spread(self, value: Value, dim: int) -> Equation | None:
        """The equation that broadcasts an invariant tensor along a dimension: it can make a piece as well."""
        maker = self.makers.get(value)
        if maker is None or maker.primitive != "broadcast_in_dim":
            return None
        known = maker.params["broadcast_dimensions"]
        return maker if dim not in known or maker.inputs[0].type.shape[known.index(dim)] == 1 else None


#: Of a scan or cond: the kinds of its operands and of its results, and what is in its regions.
_Within: TypeAlias = tuple[list[Kind], list[Kind], tuple[Split, ...]]


class Pieces:
    """Finds out what every value is.

    Args:
        count: of pieces.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        #: The step as far as it is known: where an equation stands in the way, what is before it.
        self.found = Split()
        #: By form, kinds of operands, and which of them are zero: repeated layers have those of one.
        self._known: dict[tuple[Form, tuple[Kind, ...], tuple[bool, ...]], Signature | None] = {}

    def of_step(self, graph: Graph, given: Sequence[Kind]) -> Split:
        """The kinds of a step's values, given those of its inputs.

        What the loop wants to know of the whole batch before it begins, such as how many of its labels count,
        is worked out ahead, if that takes little: elementwise equations and reductions of no tensors larger
        than those of the batch.

        Raises:
            NotInPiecesError: something else needs the whole batch at once.
        """
        ahead: set[int] = set()
        while True:
            self.found = Split(ahead=ahead)
            try:
                return self.split(graph, given, top=True, found=self.found)
            except _NeedsWholeError as error:
                more = self._ahead(error.wanted, given, graph)
                if more is None or more <= ahead:
                    raise
                ahead = ahead | more

    def _ahead(self, wanted: Sequence[Value], given: Sequence[Kind], graph: Graph) -> set[int] | None:
        """The equations that make some values of the whole batch; None if that takes much."""
        batch = (v.type for v, kind in zip(graph.inputs, given, strict=True) if kind != INVARIANT)
        largest = max(math.prod(each.shape) for each in batch)
        found, needed, queue = self.found, set[int](), list(wanted)
        while queue:
            value = queue.pop()
            if value in found.inside:
                return None  # the same for every piece, but made in the loop
            maker = found.makers.get(value)
            if maker is None or maker.index in needed or found.kinds.get(value) == INVARIANT:
                continue
            # A number that is spread over a tensor is spread over every piece of it.
            spread = maker.primitive == "broadcast_in_dim" and not maker.inputs[0].type.rank
            sizes = (math.prod(each.shape) for each in (*maker.input_types, *maker.output_types))
            if maker.regions or is_contraction(maker.primitive) or not (spread or max(sizes) <= largest):
                return None
            needed.add(maker.index)
            queue += maker.input_values
        return needed

    def split(
        self,
        graph: Graph,
        given: Sequence[Kind],
        *,
        top: bool,
        zeros: Iterable[Value] = (),
        found: Split | None = None,
    ) -> Split:
        """The kinds of a graph's values, given those of its inputs, of which some are zero.

        Where an equation stands in the way, `found` has those before it.
        """
        found = Split() if found is None else found
        found.zeros.update(zeros)
        found.kinds.update(zip(graph.inputs, given, strict=True))
        found.kinds.update(dict.fromkeys(graph.constants, INVARIANT))
        for equation in graph.equations:
            found.makers.update(dict.fromkeys(equation.outputs, equation))
            outs = self._outs(equation, found, top)
            if equation.index in found.ahead and any(map(_waits, outs)):
                found.local.pop(equation.index, None)
                outs = [INVARIANT] * len(outs)
            found.kinds.update(zip(equation.outputs, outs, strict=True))
            for value, kind in zip(equation.outputs, outs, strict=True):
                if isinstance(kind, Shard) and value.type.shape[kind.dim] % (self.count * kind.unit):
                    raise self._stuck(equation, "does not come in equal pieces")
        for atom in graph.outputs if top else ():
            if isinstance(atom, Value) and atom in found.inside:
                raise self._stuck(found.makers[atom], "hands out what is made anew for every piece")
        return found

    def _stuck(self, equation: Equation, why: str, wanted: Sequence[Value] = ()) -> NotInPiecesError:
        error = refuse(why, f"{equation.primitive} at {source_text(equation.source)}")
        return _NeedsWholeError(error, wanted) if wanted else error

    def _early(self, equation: Equation, found: Split, top: bool) -> NotInPiecesError:
        """The error of an equation in the loop that reads what is known after it only."""
        early = [v for v in equation.input_values if top and _waits(found.kind(v))]
        what = "sum" if any(found.kind(v) in (SUM, LATER) for v in equation.input_values) else "maximum"
        return self._stuck(equation, f"needs a {what} over the whole batch before all of it was seen", early)

    def _outs(self, equation: Equation, found: Split, top: bool) -> Sequence[Kind]:
        kinds: list[Kind] = [found.kind(atom) for atom in equation.inputs]
        count = len(equation.outputs)
        from_inside = any(atom in found.inside for atom in equation.inputs)
        if from_inside and all(kind == INVARIANT for kind in kinds) and not equation.regions:
            found.local[equation.index] = Signature((R,) * len(equation.inputs), (R,) * count)
            found.inside.update(equation.outputs)
            return [INVARIANT] * count
        if all(kind == INVARIANT for kind in kinds):
            if from_inside:
                raise self._stuck(equation, "walks over what is made anew for every piece")
            spread = equation.primitive in ("broadcast_in_dim", "convert_element_type", "reshape")
            if spread and found.is_zero(equation.inputs[0]):
                found.zeros.update(equation.outputs)
            return [INVARIANT] * count
        in_pieces = any(isinstance(kind, Shard) for kind in kinds)
        partial = any(isinstance(kind, Partial) for kind in kinds)
        if LATER in kinds or (partial and not in_pieces):
            passed = None if LATER in kinds else self._passes(equation, found, kinds, top)
            if passed is not None:
                found.local[equation.index] = passed
                return [out for out in passed.outs if isinstance(out, Partial)]
            if in_pieces or not top:
                raise self._early(equation, found, top)
            if from_inside:
                raise self._stuck(equation, "needs after all pieces what is made anew for each")
            return [LATER] * count
        if equation.regions:
            return self._inside(equation, found, kinds, top)
        signature = self._signature(equation, found, kinds)
        if signature is None and equation.index in found.ahead:
            return [LATER] * count
        if signature is None and partial:
            raise self._early(equation, found, top)
        if signature is None:
            why = "works on the whole batch at once"
            raise self._stuck(equation, why, equation.outputs if top else ())
        found.local[equation.index] = signature
        return [out for out in signature.outs if isinstance(out, Shard | Partial)]

    def _passes(self, equation: Equation, found: Split, kinds: Sequence[Kind], top: bool) -> Signature | None:
        """How a sum or maximum passes an equation piece by piece; None where that is not right, or no use."""
        if equation.regions or (top and not equation.part):
            return None
        grows = sum(t.nbytes for t in equation.output_types) > sum(
            t.nbytes for t, kind in zip(equation.input_types, kinds, strict=True) if isinstance(kind, Partial)
        )
        if top and grows:
            return None
        for signature in signatures(rule_of(equation), equation):
            placed = all(isinstance(out, Partial) for out in signature.outs)
            if placed and self._serves(equation, found, kinds, signature):
                return signature
        return None

    def _signature(self, equation: Equation, found: Split, kinds: Sequence[Kind]) -> Signature | None:
        """The signature that an equation is done with on a piece; the one that takes fewest other pieces."""
        key = equation.form, tuple(kinds), tuple(map(found.is_zero, equation.inputs))
        if key not in self._known:
            self._known[key] = self._find_signature(equation, found, kinds)
        return self._known[key]

    def _find_signature(self, equation: Equation, found: Split, kinds: Sequence[Kind]) -> Signature | None:
        rule, best = rule_of(equation), None
        for letter in rule.letters:
            cut_ins, _ = cuts(rule, equation, letter)
            units = {
                kind.unit // cut.minor if cut is not None and cut.dim == kind.dim else 0
                for kind, cut in zip(kinds, cut_ins, strict=True)
                if isinstance(kind, Shard)
            }
            if len(units) != 1 or not min(units):
                continue
            signature = letter_signature(rule, equation, letter, min(units))
            placed = all(isinstance(out, Shard | Partial) for out in signature.outs)
            if placed and self._serves(equation, found, kinds, signature):
                taken = sum(isinstance(p, Shard) for p in signature.ins)
                if best is None or taken < best[0]:
                    best = taken, signature
        return None if best is None else best[1]

    def _serves(self, equation: Equation, found: Split, kinds: Sequence[Kind], signature: Signature) -> bool:
        """Whether operands of these kinds can be had as a signature wants them."""
        for atom, kind, wanted in zip(equation.inputs, kinds, signature.ins, strict=True):
            if isinstance(kind, Shard | Partial):
                good = wanted == kind
            elif isinstance(wanted, Shard):
                tensor = atom.type
                good = tensor.shape[wanted.dim] % (self.count * wanted.unit) == 0
            else:
                # The maximum over pieces that are all the same is each of them; so is a sum of nothings.
                good = wanted == R or (isinstance(wanted, Partial) and (wanted != SUM or found.is_zero(atom)))
            if not good:
                return False
        return True

    def of_scan(self, equation: Equation, found: Split, kinds: Sequence[Kind]) -> Sequence[Kind]:
        """The kinds of a scan's results, given those of its operands; what is in it is added to `found`.

        Raises:
            NotInPiecesError: its body cannot be done on pieces so.
        """
        return self._inside(equation, found, kinds, True)

    def _inside(self, equation: Equation, found: Split, kinds: Sequence[Kind], top: bool) -> Sequence[Kind]:
        """A scan in the loop, or a cond that goes the same way for every piece."""
        if equation.primitive != "scan" and (equation.primitive != "cond" or kinds[0] != INVARIANT):
            raise self._stuck(equation, "decides by the data where control goes")
        if any(map(_waits, kinds)):
            raise self._early(equation, found, top)
        within = self._scan if equation.primitive == "scan" else self._cond
        ins, outs, regions = within(equation, found, kinds)
        if all(kind == INVARIANT for kind in outs):
            raise self._stuck(equation, "makes nothing of the batch that it reads")
        found.inner[equation.index] = regions
        found.inside.update(v for v, k in zip(equation.outputs, outs, strict=True) if k == INVARIANT)
        found.local[equation.index] = Signature(tuple(map(placed, ins)), tuple(map(placed, outs)))
        return outs

    def _cond(self, equation: Equation, found: Split, kinds: Sequence[Kind]) -> _Within:
        """The kinds of operands and results: those of branches have to go together."""
        _, *given = kinds
        zero = [found.is_zero(atom) for atom in equation.inputs[1:]]
        branches: list[Split] = []
        for branch in equation.regions:
            zeros = [value for value, none in zip(branch.inputs, zero, strict=True) if none]
            branches.append(self.split(branch, given, top=False, zeros=zeros))
        outs: list[Kind] = []
        for ends in zip(*(branch.outputs for branch in equation.regions), strict=True):
            pairs = list(zip(branches, ends, strict=True))
            # Of a sum nothing may be added up once for every piece but what is nothing.
            varying = {split.kind(atom) for split, atom in pairs} - {INVARIANT}
            fixed = [split.is_zero(atom) for split, atom in pairs if split.kind(atom) == INVARIANT]
            if len(varying) > 1 or (varying == {SUM} and not all(fixed)):
                raise self._stuck(equation, "makes of the batch in one branch what it does not in another")
            outs.append(varying.pop() if varying else INVARIANT)
        for split in branches:
            split.ends = tuple(outs)
        return list(kinds), outs, tuple(branches)

    def _scan(self, equation: Equation, found: Split, kinds: Sequence[Kind]) -> _Within:
        """The kinds of what goes into an iteration, and of results: the carry is what it turns out to be."""
        (body,) = equation.regions
        consts, carries = scan_counts(equation.params)
        inside: list[Kind] = []
        for position, kind in enumerate(kinds):
            if position >= consts + carries and isinstance(kind, Shard):
                if kind.dim == 0:
                    raise self._stuck(equation, "walks along the batch")
                kind = Shard(kind.dim - 1, kind.unit)
            inside.append(kind)
        zeros = {
            body.inputs[consts + i]: i
            for i in range(carries)
            if inside[consts + i] == INVARIANT and found.is_zero(equation.inputs[consts + i])
        }
        while True:
            # What begins as zero may turn out to be a sum; if it does not, it is zero at first only.
            split = self.split(body, inside, top=False, zeros=zeros)
            after = [split.kind(atom) for atom in body.outputs]
            changed = False
            for i in range(carries):
                before = inside[consts + i]
                # What is the same for every piece is cut where it is carried on in pieces.
                if before == after[i] or (isinstance(before, Shard) and after[i] == INVARIANT):
                    continue
                zero = found.is_zero(equation.inputs[consts + i])
                if before != INVARIANT or (after[i] == SUM and not zero):
                    raise self._stuck(equation, "carries on what comes in other pieces")
                inside[consts + i] = after[i]
                changed = True
            if not changed and not zeros:
                break
            zeros = {v: i for v, i in zeros.items() if inside[consts + i] == INVARIANT} if changed else {}
        outs: list[Kind] = list(inside[consts : consts + carries])
        split.ends = (*outs, *after[carries:])
        for kind in after[carries:]:
            outs.append(Shard(kind.dim + 1, kind.unit) if isinstance(kind, Shard) else kind)
        return inside, outs, (split,)


def _waits(kind: Kind) -> bool:
    """Whether something is not known before all pieces were seen."""
    return kind == LATER or isinstance(kind, Partial)


def placed(kind: Kind) -> Placement:
    """How an operand or a result of a kind is placed on pieces, as if they were devices."""
    return kind if isinstance(kind, Shard | Partial) else R
