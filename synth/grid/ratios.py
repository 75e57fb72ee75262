"""Ratios on two mesh axes: of the nodes, and of the devices in each, by linear programs.

    minimise    sum_k weight_k t_k
    subject to  t_k >= constant_krc + slope_krc x_v(c)      rows r of the cost, classes c
                sum over devices of an axis of x_v = 1,  x >= 0

With the devices' shares q fixed, the cost of every instruction is affine in the nodes' shares r, and the
other way round; products are taken by their tangent where they are. r is one variable per kind of nodes, q
one per device class. Solved by HiGHS, as on one axis (`shardwright.synth.shares.ratios`).

In turns they may get stuck: a node that waits for others is as good with any shares that keep it waiting,
and then cannot be given more. Nodes of several kinds, some with several classes, therefore begin with one
program over r and s = rq, in which most of what instructions cost is linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from shardwright.cost.grid.prices import (
    GridCut,
    GridShares,
    GridStack,
    Mesh,
    tangent_in_both,
    tangent_in_devices,
    tangent_in_nodes,
)
from shardwright.cost.share_cost import Floats
from shardwright.ir.placement import lengths

_MOST_ROUNDS, _MOST_MOVES = 3, 12

#: The solver's rounding: a node with so small a share has none.
_NOTHING = 1e-9


class GridBill:
    """The instructions of a program: lines of a price list, and how often each runs per step."""

    def __init__(
        self, stack: GridStack, cuts: Sequence[GridCut], weights: Sequence[float], mesh: Mesh
    ) -> None:
        self.stack, self.cuts, self.mesh = stack, list(cuts), mesh
        self.weights = np.asarray(weights, dtype=np.float64)
        self._known: dict[tuple[float, ...], float] = {}

    def seconds(self, ratios: Sequence[float]) -> float:
        """cost_s at the rounded shares of ratios per device."""
        key = tuple(ratios)
        if key not in self._known:
            each = GridShares(key, self.mesh).stack(self.stack, self.cuts)
            self._known[key] = float(self.weights @ each)
        return self._known[key]

    def best_ratios(self, start: Sequence[float]) -> tuple[float, ...]:
        """Ratios per device at which the program costs least, as far as linear programs and rounding know."""
        mesh = self.mesh
        several, mixed = len(mesh.kind_counts) > 1, len(np.unique(mesh.kind_of)) < len(mesh.kind_of)
        here = per_class(start, mesh)
        options = [tuple(start), mesh.ratios(*mesh.even())]
        if several and mixed:
            there = self._settled(self._together, *here)
            options.append(mesh.ratios(*there))
            here = there if self.seconds(options[-1]) < self.seconds(options[0]) else here

        def in_turns(r: Floats, q: Floats) -> tuple[Floats, Floats]:
            r = self._nodes(r, q) if several else r
            return r, self._devices(r, q) if mixed else q

        options.append(mesh.ratios(*self._settled(in_turns, *here)))
        return self._rounded(options)

    def _settled(
        self, better: Callable[[Floats, Floats], tuple[Floats, Floats]], r: Floats, q: Floats
    ) -> tuple[Floats, Floats]:
        """Shares r and q, made better until they hardly change."""
        for _ in range(_MOST_ROUNDS):
            before = r, q
            r, q = better(r, q)
            if all(np.allclose(a, b, rtol=1e-4) for a, b in zip(before, (r, q), strict=True)):
                break
        return r, q

    def _together(self, r: Floats, q: Floats) -> tuple[Floats, Floats]:
        """Shares of the nodes and of the devices at once."""
        mesh = self.mesh
        kinds, classes = len(mesh.kind_counts), len(q)
        if not r.all():
            r, q = mesh.even()
        constant, of_node, of_device = tangent_in_both(self.stack, r, q)
        # A node's share is that of its devices.
        sums = np.where(mesh.kind_of == np.arange(kinds)[:, None], -mesh.inside, 0.0)
        rows: Floats = np.block(
            [[mesh.kind_counts.astype(np.float64), np.zeros(classes)], [np.eye(kinds), sums]]
        )
        found = _least(
            constant,
            [(of_node, mesh.kind_of), (of_device, kinds + np.arange(classes))],
            self.weights,
            rows,
            np.eye(kinds + 1)[0],
        )
        if found is None:
            return r, q
        share = found[:kinds][mesh.kind_of]
        some = share > _NOTHING
        return share, np.where(some, found[kinds:] / np.where(some, share, 1.0), mesh.even()[1])

    def _nodes(self, r: Floats, q: Floats) -> Floats:
        constant, slope = tangent_in_nodes(self.stack, r, q)
        kind_of, counts = self.mesh.kind_of, self.mesh.kind_counts.astype(np.float64)
        found = _least(constant, [(slope, kind_of)], self.weights, counts[None], np.ones(1))
        return r if found is None else (found / (counts @ found))[kind_of]

    def _devices(self, r: Floats, q: Floats) -> Floats:
        constant, slope = tangent_in_devices(self.stack, r, q)
        mesh = self.mesh
        whole = np.where(mesh.kind_of == np.arange(len(mesh.kind_counts))[:, None], mesh.inside, 0.0)
        found = _least(constant, [(slope, np.arange(len(q)))], self.weights, whole, np.ones(len(whole)))
        return q if found is None else found / (whole @ found)[mesh.kind_of]

    def _rounded(self, options: list[tuple[float, ...]]) -> tuple[float, ...]:
        """The best option, its nodes' shares moved by single units of the axis that matters most."""
        best = min(dict.fromkeys(options), key=self.seconds)
        units = self._dominant(lambda cut: cut.across)
        for _ in range(_MOST_MOVES if units else 0):
            better = min(self._moves(best, units), key=self.seconds, default=best)
            if not self.seconds(better) < self.seconds(best):
                break
            best = better
        return best

    def _dominant(self, count: Callable[[GridCut], int]) -> int:
        even = GridShares(self.mesh.ratios(*self.mesh.even()), self.mesh).stack(self.stack, self.cuts)
        spent: dict[int, float] = {}
        for cut, seconds in zip(self.cuts, self.weights * even, strict=True):
            if count(cut):
                spent[count(cut)] = spent.get(count(cut), 0.0) + float(seconds)
        return max(spent, key=lambda units: (spent[units], -units), default=0)

    def _moves(self, ratios: tuple[float, ...], units: int) -> list[tuple[float, ...]]:
        """With the nodes' shares in whole units, and one unit moved between nodes of any two kinds."""
        mesh, shares = self.mesh, GridShares(ratios, self.mesh)
        counts = lengths(units, 1, shares.of_nodes.tolist())
        kind_of_node = mesh.kind_of[mesh.class_of[np.cumsum((0, *mesh.nodes))[:-1]]]
        givers: dict[tuple[int, int], int] = {}
        takers: dict[tuple[int, int], int] = {}
        for node, (kind, have) in enumerate(zip(kind_of_node.tolist(), counts, strict=True)):
            if have:
                givers.setdefault((kind, have), node)
            takers.setdefault((kind, have), node)
        changes = [(), *((g, t) for g in givers.values() for t in takers.values() if g != t)]
        found: list[tuple[float, ...]] = []
        for change in changes:
            moved = np.array(counts, dtype=np.float64)
            for node, by in zip(change, (-1, 1), strict=False):
                moved[node] += by
            found.append(tuple((moved[mesh.node_of] / units * shares.inside).tolist()))
        return found


def per_class(ratios: Sequence[float], mesh: Mesh) -> tuple[Floats, Floats]:
    """Shares r of the nodes and q of the devices in them, by device class: those of its first member."""
    shares = GridShares(ratios, mesh)
    first = [int(np.flatnonzero(mesh.class_of == c)[0]) for c in range(len(mesh.kind_of))]
    return shares.of_nodes[mesh.node_of[first]], shares.inside[first]


def _least(
    constant: Floats,
    slopes: Sequence[tuple[Floats, NDArray[np.int64]]],
    weights: Floats,
    rows: Floats,
    sums: Floats,
) -> Floats | None:
    """The variables at the optimum; None where the solver finds none.

    Args:
        constant: (instructions, rows, classes).
        slopes: the same, and the variable of every class.
        weights: executions of every instruction.
        rows: (equations, variables) that hold.
        sums: what each adds up to.
    """
    varies = np.flatnonzero(np.max([np.abs(slope).max(axis=(1, 2)) for slope, _ in slopes], axis=0) > 0)
    if not len(varies):
        return None
    merged: dict[bytes, int] = {}
    weight: list[float] = []
    picked: list[int] = []
    for k in varies.tolist():
        key = b"".join([constant[k].tobytes(), *(slope[k].tobytes() for slope, _ in slopes)])
        if key not in merged:
            merged[key] = len(weight)
            weight.append(0.0)
            picked.append(k)
        weight[merged[key]] += float(weights[k])
    scale = max(float(np.abs(slope[picked]).max()) for slope, _ in slopes)
    count, each = len(picked), constant.shape[1] * constant.shape[2]
    variables = rows.shape[1]
    line = np.arange(count * each)
    columns = [np.tile(variable, count * constant.shape[1]) for _, variable in slopes]
    values = [slope[picked].reshape(-1) / scale for slope, _ in slopes]
    columns.append(variables + line // each)
    values.append(-np.ones(len(line)))
    matrix = sparse.csr_matrix(
        (np.concatenate(values), (np.tile(line, len(values)), np.concatenate(columns))),
        shape=(len(line), variables + count),
    )
    solved = linprog(
        np.concatenate([np.zeros(variables), weight]),
        A_ub=matrix,
        b_ub=-constant[picked].reshape(-1) / scale,
        A_eq=np.concatenate([rows, np.zeros((len(rows), count))], axis=1),
        b_eq=sums,
        bounds=[(0.0, None)] * variables + [(None, None)] * count,
        method="highs",
    )
    if solved.status != 0:
        return None
    return np.maximum(np.asarray(solved.x[:variables], dtype=np.float64), 0.0)
