"""What an equation costs by what its choices are held in: the least over its signatures.

    table[h0, h1, ...]  =  min over signatures s of  kernel[s] + sum over choices p of conversion_p[s, h_p]

Where signatures are many, three things that they have in common are made use of. None changes a digit,
since the least of sums with one number is the sum of the least with that number, rounding included:

    merging    once some choices are added up, signatures that need the same of all others differ in nothing
               but what they cost so far: the cheapest of them stays
    exact      a choice that is what signatures need, no conversions, says which of them come into question:
               it comes last, and nothing is added up for it
    holdings   a tensor that is held in two placements is used from whichever is nearer: the table is worked
               out for one placement each, and that of two is the lesser one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.synth.space.conversions import Domain
from shardwright.synth.space.factors import Merged, Needs, Steps

#: Sums of fewer entries are made as one array.
_FEW = 1 << 12

#: Larger ones are not, even where nothing is left to be merged.
_LARGE = 1 << 17

#: Signatures are merged if that leaves such a part of them at most.
_FEWER = 0.8


def cheapest(
    kernels: Floats,
    needs: Needs,
    domains: Sequence[Domain],
    conversions: Callable[[Domain, str], Floats],
) -> Floats:
    """The table of an equation, (..., holdings of the first choice, of the second, ...).

    Args:
        kernels: (..., signatures) seconds, those of several prices in front.
        needs: what these signatures need.
        domains: what the choices may be.
        conversions: (..., placements, holdings) seconds between what is needed and what is held, see
            `shardwright.synth.prices.tables.Prices`.
    """
    sizes = [len(domain) for domain in domains]
    front = kernels.ndim - 1
    if kernels.size * int(np.prod(sizes)) <= _FEW:
        total = kernels
        for position, domain in enumerate(domains):
            total = total[..., None] + _needed(needs, position, domain, conversions, position)
        return np.minimum.reduce(total, axis=front)
    if not needs.memo:
        needs.memo.append(_steps(needs, domains))
    steps = needs.memo[0]
    total, left = kernels, np.arange(kernels.shape[-1])
    for number, position in enumerate(steps.summed):
        vector = _needed(
            needs, position, domains[position], conversions, number, left, apart=steps.apart[number]
        )
        merged = steps.merged[number]
        if merged is None and number == len(steps.summed) - 1:
            if number and not front and total.size * vector.shape[-1] > _LARGE:
                total = _least(total, vector.reshape(len(vector), -1))
            else:
                total = np.minimum.reduce(total[..., None] + vector, axis=front)
            break
        total = total[..., None] + vector
        if merged is not None:
            total = np.minimum.reduceat(total.take(merged.order, front), merged.starts, axis=front)
            left = merged.one
    if steps.exact:
        total = _placed(total, steps, [sizes[p] for p in steps.exact], front)
    for number, position in enumerate(steps.summed):
        if steps.apart[number]:
            axis, nearer = front + position, domains[position].nearer
            total = np.minimum(total.take(nearer[0], axis), total.take(nearer[1], axis))
    return total


def _needed(
    needs: Needs,
    position: int,
    domain: Domain,
    conversions: Callable[[Domain, str], Floats],
    axes: int,
    left: NDArray[np.intp] | None = None,
    *,
    apart: bool = False,
) -> Floats:
    """(..., signatures, 1, ..., holdings): what signatures need of one choice, after so many others.

    Args:
        needs, position, domain, conversions: see `cheapest`.
        axes: how many others were added up.
        left: signatures; all by default.
        apart: for holdings of one placement only.
    """
    vector: Floats | None = None
    for mode, where in needs.of[position]:
        found = conversions(domain, mode)
        if apart:
            found = found[..., domain.one]
        found = found.take(where if left is None else where[left], axis=-2)
        vector = found if vector is None else vector + found
    assert vector is not None, "a choice in scope is some operand's or result's"
    return vector.reshape(*vector.shape[:-1], *(1,) * axes, vector.shape[-1])


def _placed(total: Floats, steps: Steps, sizes: Sequence[int], front: int) -> Floats:
    """The table with axes of the exact choices in place of that of the signatures."""
    shape = *total.shape[:front], int(np.prod(sizes)) + 1, *total.shape[front + 1 :]
    found = np.full(shape, np.inf)
    before = (slice(None),) * front
    found[*before, steps.cells] = total
    found = found[*before, :-1].reshape(*total.shape[:front], *sizes, *total.shape[front + 1 :])
    axes = (*steps.exact, *steps.summed)
    back = sorted(range(len(axes)), key=axes.__getitem__)
    return np.ascontiguousarray(found.transpose(*range(front), *[front + axis for axis in back]))


def _steps(needs: Needs, domains: Sequence[Domain]) -> Steps:
    """See `Steps`."""
    exact = tuple([p for p, slots in enumerate(needs.of) if _is_exact(slots, domains[p])])
    exact = () if len(exact) == len(domains) else exact
    summed = tuple([p for p in range(len(domains)) if p not in exact])
    left = np.arange(len(needs.signatures))
    cell = np.zeros(len(left), dtype=np.intp)  # -1: of none, its needs contradict each other
    never = np.zeros(len(left), dtype=np.bool_)
    for p in exact:
        (_, where), *others = needs.of[p]
        place = np.full(len(domains[p].routes.placements) + 1, -1)
        place[domains[p].base] = np.arange(len(domains[p]))
        cell = cell * len(domains[p]) + place[where]
        for _, other in others:
            never |= other != where
    cell[never] = -1
    merged: list[Merged | None] = []
    for number in range(len(summed)):
        code = cell[left]
        for p in summed[number + 1 :]:
            for _, where in needs.of[p]:
                # Numbered anew: products of many sizes would not fit.
                _, code = np.unique(code * (int(where.max()) + 2) + where[left] + 1, return_inverse=True)
        last = number == len(summed) - 1
        found = None if last and not exact else _merged(code, left, always=last)
        merged.append(found)
        left = left if found is None else found.one
    apart = tuple(
        [domains[p].one is not None and len(needs.of[p]) == 1 and needs.of[p][0][0] == "use" for p in summed]
    )
    return Steps(summed, tuple(merged), apart, exact, cell[left])


def _is_exact(slots: Sequence[tuple[str, NDArray[np.intp]]], domain: Domain) -> bool:
    """Whether a choice is what signatures need, each of its values another placement."""
    return all(mode == "exact" for mode, _ in slots) and len(set(domain.base.tolist())) == len(domain)


def _merged(code: NDArray[np.intp], left: NDArray[np.intp], *, always: bool) -> Merged | None:
    """Signatures of equal codes, None where hardly any are."""
    found, at = np.unique(code, return_inverse=True)
    if len(found) > _FEWER * len(left) and not always:
        return None
    order = np.argsort(at, kind="stable")
    starts = np.searchsorted(at[order], np.arange(len(found)))
    return Merged(order, starts, left[order[starts]])


def _least(total: Floats, last: Floats) -> Floats:
    """The least over signatures of (signatures, ...) + (signatures, holdings), with holdings as last axis.

    Holding by holding, so that what is added up stays in the cache.
    """
    room = np.empty_like(total)
    found = np.empty((last.shape[1], *total.shape[1:]))
    for k, column in enumerate(last.T):
        np.add(total, column.reshape(-1, *(1,) * (total.ndim - 1)), out=room)
        room.min(axis=0, out=found[k])
    return np.ascontiguousarray(np.moveaxis(found, 0, -1))
