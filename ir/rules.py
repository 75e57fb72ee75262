"""Placement rules: one axis string per primitive, everything else derived from it.

    axes    ::= operand ("," operand)* "->" operand ("," operand)*
    operand ::= axis+ | "."                                            "." is a scalar
    axis    ::= letter | letter "!" | "(" letter (letter | size)+ ")" | "1"

As in einsum, a letter names an axis, and the same letter means the same axis. A letter with `!` is
blocked: it is never sharded. `(h d)` is a merged dimension whose major axis `h` may be sharded, a head
of `d` elements never being cut; a minor axis may be a plain size, `(h 64)`. `1` is a dimension of size
one that stretches over its counterpart.

Derived from `b m k, b k n -> b m n`:

- a letter of inputs and outputs shards through: `S(0), S(0) -> S(0)` for b;
- a letter of inputs alone is contracted: `S(2), S(1) -> P(sum)` for k;
- a letter of outputs alone can be produced sharded from replicated inputs;
- `linear` says through which operands (jointly) a Partial(sum) passes: "each" alone, all "joint"ly, or
  an explicit tuple of operand tuples; `monotone` says the same for Partial(max) and Partial(min), and
  `upper`, `lower` for one of the two alone (a running maximum passes Partial(max) only);
- floating point operations are `flop_per_point` times the product of all axis sizes.

The idea of deriving placements from an axis string is nnScaler's (OSDI'24) dimops and JAX's
`custom_partitioning` sharding rules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeAlias

from shardwright.ir.axis_strings import Axes, Axis, blocked_letters, cut_letters, merges, parsed
from shardwright.ir.graph import Equation, TensorType, per_form
from shardwright.ir.placement import (
    REDUCE_OPS,
    Grid,
    Partial,
    Placement,
    R,
    ReduceOp,
    Shard,
    components,
)

Operands: TypeAlias = tuple[tuple[int, ...], ...]
Passing: TypeAlias = Literal["each", "joint"] | Operands


@dataclass(frozen=True, slots=True)
class Signature:
    """A placement of every operand and every result under which the local computation is right."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.ins))} -> {', '.join(map(str, self.outs))}"


@dataclass(frozen=True)
class Rule:
    """What the axis string and the flags of one equation say about placements.

    Attributes:
        axes: the axis string.
        reduce: operation that contracted letters leave to be done; None blocks them.
        linear: operands through which Partial(sum) passes to every output.
        monotone: operands through which Partial(max) and Partial(min) pass to every output.
        upper: further operands through which Partial(max) passes, but not Partial(min).
        lower: further operands through which Partial(min) passes, but not Partial(max).
        accumulator: operand that must be Partial (not Replicate) where a letter is contracted,
            because every device would add it once (the operand of scatter-add).
        whole: results that are the same whatever stretch of a contracted letter a device has.
        flop_per_point: floating point operations per point of the iteration space.
        across: a letter that is sharded on one axis, and on two over the nodes, while `within` is in them.
        within: a letter that is sharded in nodes, while `across` is over them, and not otherwise.
        note: why a known primitive runs replicated here; "" where it does not. The planner lists it.
    """

    axes: str
    reduce: ReduceOp | None = "sum"
    linear: Passing = ()
    monotone: Passing = ()
    upper: Passing = ()
    lower: Passing = ()
    accumulator: int | None = None
    whole: tuple[int, ...] = ()
    flop_per_point: float = 1.0
    across: str = ""
    within: str = ""
    note: str = ""

    @property
    def parsed(self) -> tuple[tuple[Axes, ...], tuple[Axes, ...]]:
        """Axes of the operands and of the results."""
        return parsed(self.axes)

    @property
    def blocked(self) -> frozenset[str]:
        """Letters that are never sharded, by `!` or as minor letters of a merged dimension."""
        return blocked_letters(self.axes)

    @property
    def all_letters(self) -> tuple[str, ...]:
        """Letters that may be sharded, in order of appearance."""
        return cut_letters(self.axes, self.reduce is not None)

    @property
    def letters(self) -> tuple[str, ...]:
        """The same on one axis."""
        found = self.all_letters
        return tuple([letter for letter in found if letter != self.within]) if self.within else found


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a letter appears in one operand: its dimension and the elements per step of the letter."""

    dim: int
    minor: int


def letter_sizes(rule: Rule, equation: Equation) -> Mapping[str, int]:
    """Size of every letter. Of the letters of a merged dimension, all but one are known from elsewhere."""
    known = _known_sizes(equation)
    found = known.get(rule.axes)
    if found is None:
        found = known[rule.axes] = _letter_sizes(rule, equation)
    return found


@per_form
def _known_sizes(equation: Equation) -> dict[str, Mapping[str, int]]:
    """By axis string, what `letter_sizes` found for equations of this form."""
    return {}


def _letter_sizes(rule: Rule, equation: Equation) -> dict[str, int]:
    sizes: dict[str, int] = {}
    merged: list[tuple[Axis, int]] = []
    for side, types in zip(rule.parsed, (equation.input_types, equation.output_types), strict=True):
        for axes, tensor in zip(side, types, strict=True):
            for axis, size in zip(axes, tensor.shape, strict=True):
                if len(axis.letters) == 1:
                    sizes[axis.letters[0]] = size
                elif axis.letters:
                    merged.append((axis, size))
    for axis, size in merged:
        sizes |= {letter: int(letter) for letter in axis.letters if letter.isdigit()}
        unknown = [letter for letter in axis.letters if letter not in sizes]
        assert len(unknown) <= 1, f"axis string {rule.axes!r} leaves {unknown} without a size"
        if unknown:
            known = math.prod(sizes[letter] for letter in axis.letters if letter in sizes)
            sizes[unknown[0]] = size // known if known else 0
    return sizes


#: By letter, where it is cut in the operands and in the results; "" stands for a letter that is in none.
Cuts: TypeAlias = dict[str, tuple[tuple[Cut | None, ...], tuple[Cut | None, ...]]]


def cuts(
    rule: Rule, equation: Equation, letter: str
) -> tuple[tuple[Cut | None, ...], tuple[Cut | None, ...]]:
    """Where `letter` is cut in every operand and every result; None where it does not appear."""
    found = cuts_of(rule.axes, minor_sizes(rule, equation))
    return found.get(letter) or found[""]


def minor_sizes(rule: Rule, equation: Equation) -> tuple[tuple[str, int], ...]:
    """Sizes of the minor letters of merged dimensions, in order of appearance."""
    if not merges(rule.axes):
        return ()
    sizes = letter_sizes(rule, equation)
    minors = (name for side in rule.parsed for axes in side for axis in axes for name in axis.letters[1:])
    return tuple((name, sizes[name]) for name in minors)


@cache
def cuts_of(axes: str, minors: tuple[tuple[str, int], ...]) -> Cuts:
    """`cuts` of all letters of an axis string whose minor letters have these sizes."""
    (ins, outs), sizes = parsed(axes), dict(minors)
    places: dict[str, list[Cut | None]] = {"": [None] * (len(ins) + len(outs))}
    for position, each in enumerate((*ins, *outs)):
        for dim, axis in enumerate(each):
            if axis.letters:
                mine = places.setdefault(axis.letters[0], places[""].copy())
                if mine[position] is None:
                    mine[position] = Cut(dim, math.prod([sizes[minor] for minor in axis.letters[1:]]))
    return {letter: (tuple(mine[: len(ins)]), tuple(mine[len(ins) :])) for letter, mine in places.items()}


def letter_signature(rule: Rule, equation: Equation, letter: str, unit: int = 1) -> Signature:
    """The signature that shards `letter`, cut at multiples of `unit` of its own steps."""
    found = _letter_signature(*cuts(rule, equation, letter), rule.reduce, rule.accumulator, unit)
    outs = tuple([R if k in rule.whole and isinstance(p, Partial) else p for k, p in enumerate(found.outs)])
    return Signature(found.ins, outs) if rule.whole else found


def _letter_signature(
    cut_ins: Sequence[Cut | None],
    cut_outs: Sequence[Cut | None],
    reduce: ReduceOp | None,
    accumulator: int | None,
    unit: int,
) -> Signature:
    def place(cut: Cut | None, otherwise: Placement) -> Placement:
        return otherwise if cut is None else Shard(cut.dim, cut.minor * unit)

    contracted = all(cut is None for cut in cut_outs)
    ins = [place(cut, R) for cut in cut_ins]
    missing: Placement = Partial(reduce) if reduce else R
    if contracted and accumulator is not None and cut_ins[accumulator] is None:
        ins[accumulator] = missing
    return Signature(tuple(ins), tuple(place(cut, missing) for cut in cut_outs))


def admits(tensor: TensorType, placement: Placement) -> bool:
    """Whether the dtype has the all-reduce that completes a Partial: booleans no sum, complex no order."""
    return not isinstance(placement, Partial) or placement.op not in _without(tensor.dtype)


@cache
def _without(dtype: str) -> tuple[ReduceOp, ...]:
    """Reductions that a dtype does not have."""
    if dtype.startswith("key<"):
        return REDUCE_OPS
    return ("sum",) if dtype == "bool" else ("max", "min") if dtype.startswith("complex") else ()


def _passing(passing: Passing, operands: int) -> Operands:
    if passing == "each":
        return tuple((i,) for i in range(operands))
    if passing == "joint":
        return (tuple(range(operands)),) if operands else ()
    return passing


def signatures(
    rule: Rule, equation: Equation, units: Mapping[str, int] | None = None
) -> tuple[Signature, ...]:
    """All signatures of an equation: replicated, one per shardable letter, and the passing Partials.

    Args:
        rule: the equation's rule.
        equation: gives the shapes.
        units: steps of a letter that must stay together, by letter; one where absent, none where the
            letter cannot be cut at all.
    """
    letters = rule.letters
    steps = (1,) * len(letters) if units is None else tuple([units.get(letter, 1) for letter in letters])
    minors = minor_sizes(rule, equation)
    passing = (rule.linear, rule.monotone, rule.upper, rule.lower)
    cut = tuple(zip(letters, steps, strict=True))
    return _signatures(rule.axes, minors, cut, rule.reduce, rule.accumulator, passing, _lacking(equation))


@cache
def _signatures(
    axes: str,
    minors: tuple[tuple[str, int], ...],
    cut: tuple[tuple[str, int], ...],
    reduce: ReduceOp | None,
    accumulator: int | None,
    passing: tuple[Passing, Passing, Passing, Passing],
    lacking: frozenset[tuple[int, ReduceOp]],
) -> tuple[Signature, ...]:
    """`signatures`, one object for what is equal in all that counts: equations differ in less than it seems.

    Args:
        axes: axis string.
        minors: sizes of the minor letters of merged dimensions.
        cut: letters that may be sharded, and of each the steps that must stay together.
        reduce: see `Rule`.
        accumulator: see `Rule`.
        passing: operands through which sums, both orders, maxima alone and minima alone pass.
        lacking: see `_lacking`.
    """
    ins, outs = parsed(axes)
    found = [Signature((R,) * len(ins), (R,) * len(outs))]
    where = cuts_of(axes, minors)
    for letter, unit in cut:
        if unit:
            found.append(_letter_signature(*where[letter], reduce, accumulator, unit))
    reductions: tuple[tuple[ReduceOp, ...], ...] = (("sum",), ("max", "min"), ("max",), ("min",))
    for operands, ops in zip(passing, reductions, strict=True):
        for some in _passing(operands, len(ins)):
            for op in ops:
                partial: Placement = Partial(op)
                placed = tuple(partial if i in some else R for i in range(len(ins)))
                found.append(Signature(placed, (partial,) * len(outs)))
    return tuple([signature for signature in found if not lacking or _admitted(signature, lacking)])


def signatures_of_both(
    rule: Rule, equation: Equation, units: Mapping[str, int]
) -> tuple[tuple[Signature, ...], tuple[Signature, ...]]:
    """Of a rule with a letter across the nodes and one within them: the signatures of either axis, in pairs.

    Args:
        rule: the equation's rule.
        equation: gives the shapes.
        units: see `signatures`.
    """
    whole = Signature((R,) * len(equation.inputs), (R,) * len(equation.outputs))
    pair = rule.across, rule.within
    if not all(letter in rule.all_letters and units.get(letter, 1) for letter in pair):
        return (whole,), (whole,)
    across, within = (letter_signature(rule, equation, letter, units.get(letter, 1)) for letter in pair)
    return (whole, across), (whole, within)


@per_form
def _lacking(equation: Equation) -> frozenset[tuple[int, ReduceOp]]:
    """Operands and results, by position, and the reductions that these do not have."""
    tensors = (*equation.input_types, *equation.output_types)
    return frozenset((k, op) for k, tensor in enumerate(tensors) for op in _without(tensor.dtype))


def _admitted(signature: Signature, lacking: Collection[tuple[int, ReduceOp]]) -> bool:
    placements = (*signature.ins, *signature.outs)
    return not any(isinstance(p, Partial) and (k, p.op) in lacking for k, p in enumerate(placements))


def passes_through(rule: Rule, equation: Equation, operands: Collection[int]) -> bool:
    """Whether Partial(sum) passes through these operands at once to all results, all others being R."""
    count = len(equation.inputs)
    if not any(set(operands) == set(some) for some in _passing(rule.linear, count)):
        return False
    lacking = _lacking(equation)
    return all((k, "sum") not in lacking for k in (*operands, *range(count, count + len(equation.outputs))))


@cache
def on_axes(signature: Signature) -> tuple[Signature, ...]:
    """A signature on each of its mesh axes: itself, or that across the nodes and that within them."""
    if not any(isinstance(p, Grid) for p in (*signature.ins, *signature.outs)):
        return (signature,)
    pairs = [[components(p) for p in side] for side in (signature.ins, signature.outs)]
    return tuple(Signature(*(tuple(pair[axis] for pair in side) for side in pairs)) for axis in (0, 1))


def joint(signature: Signature) -> Signature | None:
    """The signature with the plan's ratios, if all its shards are cut by the same others; else None."""
    own = {p.by for p in (*signature.ins, *signature.outs) if isinstance(p, Shard)}
    if len(own) != 1 or None in own:
        return None
    ins, outs = (
        tuple(Shard(p.dim, p.unit) if isinstance(p, Shard) else p for p in side)
        for side in (signature.ins, signature.outs)
    )
    return Signature(ins, outs)


def allows(rule: Rule, equation: Equation, wanted: Signature) -> bool:
    """Whether `wanted` follows from the rule, for any unit its shards carry."""
    axes = on_axes(wanted)
    if len(axes) > 1 and rule.across:
        units = _steps(rule, equation, rule.across, axes[0]) | _steps(rule, equation, rule.within, axes[1])
        return axes in list(zip(*signatures_of_both(rule, equation, units), strict=True))
    if len(axes) > 1:
        return all(allows(rule, equation, one) for one in axes)
    wanted = joint(wanted) or wanted  # ratios of their own change nothing, if all shards have them
    units: dict[str, int] = {}
    for letter in rule.letters:
        units |= _steps(rule, equation, letter, wanted)
    return any(wanted == signature for signature in signatures(rule, equation, units))


def _steps(rule: Rule, equation: Equation, letter: str, wanted: Signature) -> dict[str, int]:
    """The steps of a letter that a signature keeps together, if it shards it."""
    cut_ins, cut_outs = cuts(rule, equation, letter)
    for cut, placement in zip((*cut_ins, *cut_outs), (*wanted.ins, *wanted.outs), strict=True):
        if cut is not None and isinstance(placement, Shard) and placement.dim == cut.dim and cut.minor:
            return {letter: max(1, placement.unit // cut.minor)}
    return {}


def flop_count(rule: Rule, equation: Equation) -> float:
    """Floating point operations of the whole, unsharded equation."""
    if not rule.flop_per_point:
        return 0.0
    sizes = letter_sizes(rule, equation)
    return rule.flop_per_point * math.prod(size for letter, size in sizes.items() if not letter.isdigit())


def counted(rule: Rule, equation: Equation, flop: float) -> Rule:
    """`rule` with `flop` operations in all, where they are not a multiple of the iteration space."""
    points = flop_count(replace(rule, flop_per_point=1.0), equation)
    return replace(rule, flop_per_point=flop / points if points else 0.0)
