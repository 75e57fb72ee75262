"""The least that instructions on two mesh axes can cost: at any shares, or where nodes have some in a range.

With the share r of a node fixed, a device of it has a share of at least 1/n (in whole units, where there are
few), and another of at most 1/n: devices of one class in one node therefore cost at least

    f(r) = max over rows, and over q in { least share of the largest, most of the smallest },
           of  c0 + c2 q + (c1 + c3 q) r

(the products are never negative; those of q count at the largest device, `products_of_largest`). In a node
of several classes, any weights w that add up to one over its devices give such rows: the maximum is at least
the average, and where q adds up to one, the sum of w s q is at least the least w s. What is left is a water
level in r over the nodes: nodes of one kind that have R together cost at least f(R / number of nodes), or, in
few whole units, what the largest and the smallest number of them must cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.grid.prices import ONE, Q2, R_Q2, RQ, GridCut, GridStack, Mesh, Q, R
from shardwright.cost.share_cost import Floats

#: Dimensions of up to so many units per node are dealt in whole units; with more the error is small.
FEW = 16

#: Instructions dealt at once, times numbers of units that a node may have.
_CELLS = 1 << 14

#: Halvings of the range in which a level lies.
_HALVINGS = 44


@dataclass(frozen=True, slots=True)
class Ranges:
    """Some of all shares of nodes.

    Attributes:
        low, high: what the nodes of the first kind have together, before it is rounded.
        units: a dimension of so many units, whose rounding is known better; 0 for none.
        dealt: how many of these the nodes of the first kind have together: least and most.
        others: the same as `low` and `high` of the kinds after the first; none where nothing is said of them.
    """

    low: float = 0.0
    high: float = 1.0
    units: int = 0
    dealt: tuple[int, int] = (0, 0)
    others: tuple[tuple[float, float], ...] = ()

    def of_kinds(self, kinds: int) -> list[tuple[float, float]]:
        """Least and most share of all nodes of every kind, as far as all shares add up to one."""
        found = [(self.low, self.high), *(self.others or [(0.0, 1.0)] * (kinds - 1))]
        least, most = (sum(each) for each in zip(*found, strict=True))
        return [(max(low, 1 - (most - high)), min(high, 1 - (least - low))) for low, high in found]

    def cut(self, kind: int, at: float, kinds: int) -> tuple[Ranges, Ranges]:
        """Two ranges that cover this one, by the share of all nodes of one kind."""
        if not kind:
            return replace(self, high=at), replace(self, low=at)
        others = self.of_kinds(kinds)[1:]
        found: list[Ranges] = []
        for ends in ((others[kind - 1][0], at), (at, others[kind - 1][1])):
            found.append(replace(self, others=(*others[: kind - 1], ends, *others[kind:])))
        return found[0], found[1]

    def halves(self, at: float, nodes: tuple[int, int]) -> tuple[Ranges, Ranges]:
        """Two ranges that cover this one: by units dealt while several numbers are possible, then by shares.

        Args:
            at: share of the first kind to cut at, where the units dealt are known.
            nodes: of the first kind, and of all kinds.
        """
        least, most = self.dealt
        if least < most:
            middle = (least + most) // 2
            slack = nodes[0] * (nodes[1] - nodes[0]) / nodes[1] + 1e-6
            lower, upper = (least, middle), (middle + 1, most)
            return (
                replace(self, high=min(self.high, (middle + slack) / self.units), dealt=lower),
                replace(self, low=max(self.low, (middle + 1 - slack) / self.units), dealt=upper),
            )
        return replace(self, high=at), replace(self, low=at)


def floors(stack: GridStack, cuts: Sequence[GridCut], mesh: Mesh, ranges: Ranges | None = None) -> Floats:
    """What every instruction costs at least.

    Args:
        stack: costs of the instructions.
        cuts: how each cuts its tensors.
        mesh: the fleet by nodes.
        ranges: in which the nodes' shares lie; None for any.

    Returns:
        Seconds.
    """
    kinds = len(mesh.kind_counts)
    nodes = int(mesh.kind_counts.sum())
    within = np.array([(0.0, 1.0)] * kinds if ranges is None else ranges.of_kinds(kinds))
    across = np.array([cut.across for cut in cuts], dtype=np.int64)
    inside = np.array([0 if cut.nested else cut.within for cut in cuts], dtype=np.int64)
    nested = np.array([cut.nested for cut in cuts], dtype=np.bool_)
    rows = [_rows(stack.terms, inside, mesh, kind) for kind in range(kinds)]
    constant, slope = (np.stack([each[k] for each in rows], axis=1) for k in (0, 1))
    found = np.zeros(len(cuts))
    few = (across > 0) & (across <= FEW * nodes)
    many = np.flatnonzero(~few)
    found[many] = level(constant[many], slope[many], mesh.kind_counts, within)
    for units in np.unique(across[few]).tolist():
        mine = np.flatnonzero(few & (across == units))
        limits = _limits(units, mesh, within, ranges)
        found[mine] = _dealt(
            stack.terms[mine], constant[mine], slope[mine], nested[mine], units, mesh, limits
        )
    if len(mesh.kind_of) > kinds:
        found = np.maximum(found, stack.floor(mesh))
    return found


def _rows(terms: Floats, units: NDArray[np.int64], mesh: Mesh, kind: int) -> tuple[Floats, Floats]:
    """Constant and slope, (instructions, rows), of what a node of a kind costs at least by its share."""
    classes = np.flatnonzero(mesh.kind_of == kind)
    inside = mesh.inside[classes]
    devices = int(inside.sum())
    one, r, q, rq = (terms[:, f][:, :, classes] for f in (ONE, R, Q, RQ))
    if len(classes) == 1:
        largest, smallest = _shares(units, devices)
        at = [share[:, None] for share in (largest, smallest)]
        more, steeper = products_of_largest(terms[..., classes[0]], at[0])
        constant = np.concatenate([one[:, :, 0] + q[:, :, 0] * share for share in at], axis=1)
        slope = np.concatenate([r[:, :, 0] + rq[:, :, 0] * share for share in at], axis=1)
        constant[:, : more.shape[1]] += more
        slope[:, : more.shape[1]] += steeper
        return constant, slope
    found: list[tuple[Floats, Floats]] = []
    pull = np.abs(q + rq / mesh.kind_counts.sum())
    for weight in (
        np.ones_like(one),
        1.0 / np.maximum(pull, pull.max(axis=2, keepdims=True) * 1e-6 + 1e-300),
    ):
        weight = weight / (weight @ inside)[:, :, None]
        # The least of w s(r) is concave in r: never below the line between its ends.
        low, high = (weight * q).min(axis=2), (weight * (q + rq)).min(axis=2)
        found.append(((weight * one) @ inside + low, (weight * r) @ inside + high - low))
    constant, slope = (np.concatenate([each[k] for each in found], axis=1) for k in (0, 1))
    return constant, slope


def products_of_largest(terms: Floats, least: Floats) -> tuple[Floats, Floats]:
    """What c5 q (1 - q) + c7 r q (1 - q) adds to the largest device at its least share, where it counts.

    With the products a row is concave in q: of all shares q from the least to one, it is least at one of
    these two. As much of the products counts as leaves it no more at the least share than at one, whatever r.

    Args:
        terms: (instructions, features, rows) of the only class of a node.
        least: (instructions, 1) least share of its largest device.

    Returns:
        What to add to constant and slope, (instructions, rows).
    """
    room = terms[:, Q], terms[:, Q] + terms[:, RQ]
    taken = least * terms[:, Q2], least * (terms[:, Q2] + terms[:, R_Q2])
    part = np.ones_like(terms[:, Q])
    for has, takes in zip(room, taken, strict=True):
        enough = np.where(takes > has, np.maximum(has, 0.0) / np.where(takes > 0, takes, 1.0), 1.0)
        part = np.minimum(part, np.where(has < 0, 0.0, enough))
    part = part * least * (1 - least)
    return part * terms[:, Q2], part * terms[:, R_Q2]


def _shares(units: NDArray[np.int64], devices: int) -> tuple[Floats, Floats]:
    """The least share that the largest of some devices can have, the most that the smallest can.

    Args:
        units: that are dealt; 0 for any fraction.
        devices: how many.
    """
    some = np.maximum(units, 1)
    least = np.where(units > 0, np.ceil(units / devices) / some, 1.0 / devices)
    return least, np.where(units > 0, np.floor(units / devices) / some, 1.0 / devices)


def level(constant: Floats, slope: Floats, counts: NDArray[np.int64], within: Floats) -> Floats:
    """The least of the maximum over kinds, (instructions, kinds, rows), of constant + slope R / count."""
    slope = slope / counts[:, None]
    low, high = within[:, :1], within[:, 1:]
    if len(counts) == 1:
        return (constant + slope).max(axis=(1, 2))  # all nodes are of one kind: they have everything
    least = np.minimum(constant + slope * low, constant + slope * high).max(axis=(1, 2))
    room = float((high - low).sum())
    some = low + (high - low) * (max(0.0, 1.0 - float(low.sum())) / room if room > 0 else 0.0)
    most = (constant + slope * some).max(axis=(1, 2))
    open_ = np.flatnonzero(most > least + 1e-13 * np.abs(most))
    if not len(open_):
        return least
    constant, slope = constant[open_], slope[open_]
    if len(counts) == 2:
        least[open_] = np.minimum(_crossing(constant, slope, within), most[open_])
        return least
    below, above = least[open_], most[open_]
    rising, falling = slope > 0, slope < 0
    by = np.where(slope == 0, 1.0, slope)
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        crossing = (middle[:, None, None] - constant) / by
        upto = np.minimum(np.where(rising, crossing, np.inf).min(axis=2), high[:, 0])
        from_ = np.maximum(np.where(falling, crossing, -np.inf).max(axis=2), low[:, 0])
        enough = (upto >= from_).all(axis=1) & (upto.sum(axis=1) >= 1) & (from_.sum(axis=1) <= 1)
        above, below = np.where(enough, middle, above), np.where(enough, below, middle)
    least[open_] = below
    return least


def _crossing(constant: Floats, slope: Floats, within: Floats) -> Floats:
    """The same of two kinds, the second of which has what the first has not.

    Shares at which a row costs no more than some level are an interval, and intervals have a point in common
    if any two of them have: the level is that at which the last two rows meet.
    """
    (low, high), (other_low, other_high) = within.tolist()
    low, high = max(low, 1 - other_high), min(high, 1 - other_low)
    rows = np.concatenate([constant[:, 0], constant[:, 1] + slope[:, 1]], axis=1)
    steep = np.concatenate([slope[:, 0], -slope[:, 1]], axis=1)
    found = np.minimum(rows + steep * low, rows + steep * high).max(axis=1)
    for row, down in zip(rows.T[..., None], steep.T[..., None], strict=True):
        crosses = (down < 0) & (steep > 0)
        span = np.where(crosses, steep - down, 1.0)
        found = np.maximum(found, np.where(crosses, (row * steep - rows * down) / span, -np.inf).max(axis=1))
    return found


def _limits(units: int, mesh: Mesh, within: Floats, ranges: Ranges | None) -> Sequence[tuple[float, float]]:
    """How many units the nodes of every kind may have together."""
    total = int(mesh.kind_counts.sum())
    found: list[tuple[float, float]] = []
    for count, (low, high) in zip(mesh.kind_counts.tolist(), within.tolist(), strict=True):
        # Rounding by largest remainder moves no more than this from some kinds to the others.
        slack = count * (total - count) / total + 1e-6
        found.append((low * units - slack, high * units + slack))
    if ranges is not None and units == ranges.units:
        least, most = ranges.dealt
        found[0] = max(found[0][0], least), min(found[0][1], most)
        if len(found) == 2:
            found[1] = max(found[1][0], units - most), min(found[1][1], units - least)
    return found


def _dealt(
    terms: Floats,
    constant: Floats,
    slope: Floats,
    nested: NDArray[np.bool_],
    units: int,
    mesh: Mesh,
    limits: Sequence[tuple[float, float]],
) -> Floats:
    """The same where nodes have whole numbers of so many units; and those of a kind within limits."""
    step = max(1, _CELLS // (units + 1))
    found: list[Floats] = []
    for at in range(0, len(terms), step):
        some = slice(at, at + step)
        found.append(
            _dealt_at_once(terms[some], constant[some], slope[some], nested[some], units, mesh, limits)
        )
    return np.concatenate(found)


def _dealt_at_once(
    terms: Floats,
    constant: Floats,
    slope: Floats,
    nested: NDArray[np.bool_],
    units: int,
    mesh: Mesh,
    limits: Sequence[tuple[float, float]],
) -> Floats:
    """`_dealt` of few instructions: what is worked out of them stays in the cache."""
    dealt = np.arange(units + 1)
    left: Floats | None = None
    for kind, count in enumerate(mesh.kind_counts.tolist()):
        each = _by_units(constant[:, kind], slope[:, kind], units)
        classes = np.flatnonzero(mesh.kind_of == kind)
        if nested.any() and len(classes) == 1:  # a node deals what it has of them
            own = _nested(terms[nested][..., classes[0]], dealt, int(mesh.inside[classes[0]]))
            each[nested] = np.maximum(each[nested], own)
        low, high = limits[kind]
        if len(mesh.kind_counts) == 1:  # its nodes have everything
            if not low <= units <= high:
                return np.full(len(terms), np.inf)
            return np.maximum(
                each[:, -(-units // count) :].min(axis=1), each[:, : units // count + 1].min(axis=1)
            )
        at_least = np.minimum.accumulate(each[:, ::-1], axis=1)[:, ::-1]
        at_most = np.minimum.accumulate(each, axis=1)
        together = np.maximum(at_least[:, -(-dealt // count)], at_most[:, dealt // count])
        together[:, (dealt < low) | (dealt > high)] = np.inf
        if left is None:
            left = together
        elif kind == len(mesh.kind_counts) - 1:
            left = np.maximum(left, together[:, ::-1])
            return left.min(axis=1)
        else:
            joined = np.full_like(left, np.inf)
            for n in dealt.tolist():
                both = np.maximum(left[:, : units + 1 - n], together[:, n, None])
                np.minimum(joined[:, n:], both, out=joined[:, n:])
            left = joined
    raise AssertionError("a fleet has nodes")


def _by_units(constant: Floats, slope: Floats, units: int) -> Floats:
    """The maximum over rows of constant + slope r: (instructions, numbers of units from none to all)."""
    share = np.arange(units + 1) / units
    found = slope[:, :1] * share + constant[:, :1]
    for row in range(1, constant.shape[1]):
        np.maximum(found, slope[:, row, None] * share + constant[:, row, None], out=found)
    return found


def _nested(terms: Floats, dealt: NDArray[np.int64], devices: int) -> Floats:
    """What a node with so many of the units costs at least: (instructions, numbers of units)."""
    units = len(dealt) - 1
    one, r, q, rq = (terms[:, f, :, None] for f in (ONE, R, Q, RQ))
    largest, smallest = _shares(dealt, devices)
    share_of_node = dealt / units
    rows = [one + r * share_of_node + (q + rq * share_of_node) * share for share in (largest, smallest)]
    return np.maximum(*[each.max(axis=1) for each in rows])
