"""Signatures on two mesh axes: one over the nodes and one in each, from those on one axis (`rules.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.placement import Grid, Partial, Placement, Single, grid
from shardwright.ir.rules import Signature


def paired(across: Signature, within: Signature, nodes: tuple[int, ...]) -> Signature | None:
    """The signature that is `across` over the nodes and `within` in each; None where a pair is no placement.

    What the nodes compute is the equation on their shards: its own devices may share that out as they like.
    """
    return next(iter(pairs((across,), (within,), nodes)), None)


class Paired(tuple[Signature, ...]):
    """Signatures on two mesh axes, all pairs of some on one, with what they say tensor by tensor.

    Attributes:
        placements: of every operand and result, the different ones, which are few.
        at: (operands and results, signatures), which of them each signature has.
    """

    placements: tuple[tuple[Placement, ...], ...]
    at: NDArray[np.intp]


def pairs(across: Sequence[Signature], within: Sequence[Signature], nodes: tuple[int, ...]) -> Paired:
    """All that are one signature of `across` over the nodes and one of `within` in each (see `paired`)."""
    first = tuple(dict.fromkeys(across))
    return _own(_pairs(first, first if within is across else tuple(dict.fromkeys(within)), nodes))


def in_turn(across: Sequence[Signature], within: Sequence[Signature], nodes: tuple[int, ...]) -> Paired:
    """The first of `across` with the first of `within`, and so on."""
    return _own(_pairs(tuple(across), tuple(within), nodes, in_turn=True))


def _own(known: Paired) -> Paired:
    """Lists are told apart by identity: equal ones have no more than what is in them in common."""
    made = Paired(known)
    made.placements, made.at = known.placements, known.at
    return made


@cache
def _pairs(
    across: tuple[Signature, ...],
    within: tuple[Signature, ...],
    nodes: tuple[int, ...],
    *,
    in_turn: bool = False,
) -> Paired:
    over_nodes, in_each = _coded(across), _coded(within)
    ins = len(across[0].ins) if across else 0
    each = [_crossed(a, w, nodes) for (a, _), (w, _) in zip(over_nodes, in_each, strict=True)]
    codes = [
        (table[rows, columns] if in_turn else table[rows[:, None], columns].reshape(-1))
        for (_, table), (_, rows), (_, columns) in zip(each, over_nodes, in_each, strict=True)
    ]
    at = np.stack(codes) if codes else np.zeros((0, 0), dtype=np.intp)
    at = at[:, (at >= 0).all(axis=0)]
    listed = [[some[code] for code in row] for (some, _), row in zip(each, at.tolist(), strict=True)]
    made = Paired([Signature(whole[:ins], whole[ins:]) for whole in zip(*listed, strict=True)])
    made.placements, made.at = tuple([some for some, _ in each]), at
    return made


#: The different placements of an operand or result on one axis, and which of them every signature has.
_Coded: TypeAlias = tuple[tuple[Single, ...], NDArray[np.intp]]


@cache
def _coded(found: tuple[Signature, ...]) -> tuple[_Coded, ...]:
    """What signatures on one axis say of every operand and result."""
    coded: list[_Coded] = []
    for column in zip(*[(*one.ins, *one.outs) for one in found], strict=True):
        assert not any(isinstance(p, Grid) for p in column), "each is of one axis"
        numbers: dict[Single, int] = {}
        at = [numbers.setdefault(cast("Single", p), len(numbers)) for p in column]
        coded.append((tuple(numbers), np.array(at, dtype=np.intp)))
    return tuple(coded)


@cache
def _crossed(
    across: tuple[Single, ...], within: tuple[Single, ...], nodes: tuple[int, ...]
) -> tuple[tuple[Placement, ...], NDArray[np.intp]]:
    """Pairs of placements, and [across, within]: which is which; -1 where a pair is no placement."""
    numbers: dict[Placement, int] = {}
    table = np.full((len(across), len(within)), -1, dtype=np.intp)
    for i, a in enumerate(across):
        for j, w in enumerate(within):
            both = _both(a, w, nodes)
            if both is not None:
                table[i, j] = numbers.setdefault(both, len(numbers))
    return tuple(numbers), table


@cache
def _both(across: Single, within: Single, nodes: tuple[int, ...]) -> Placement | None:
    """The placement over the nodes and within them; None where two reductions would be left to be done."""
    if isinstance(across, Partial) and isinstance(within, Partial) and across != within:
        return None
    return grid(across, within, nodes)
