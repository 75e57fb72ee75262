"""The ratio LP: how much of every sharded axis each device class gets, for a given program.

    minimise    sum_k weight_k t_k                          t_k: seconds of instruction k          `t`
    subject to  t_k >= constant_krc + linear_krc s_c        rows r of its ShareCost, classes c     `rows`
                fixed_t + shared_t s_c <= memory_c          moments t of the footprint             `budget`
                counts . s = 1,  s >= 0                     s_c: share of one device of class c    `shares`

Instructions whose costs have equal rows share one epigraph variable. Exchanges that are not affine in
the shares enter by their tangent at the current shares (`ShareCost.affine_at`). Solved by HiGHS (Huangfu
and Hall 2018) through scipy: a modelling layer would take longer than the solver.

A program may have several ratios (`solve_several`): then there are shares for each of them, and only the rows
of the budget have more than one in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from shardwright.cost.bill import Item, counted
from shardwright.cost.memory.liveness import Footprint, Footprints
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats, ShareCost

OPTIMAL = "optimal"
_STATUS = {0: OPTIMAL, 2: "infeasible", 3: "unbounded"}


@dataclass(frozen=True, slots=True)
class RatioSolution:
    """Outcome of the LP; the status is a value, not an exception.

    Attributes:
        status: "optimal" if all is well, "infeasible" where memory does not suffice, else the solver's words.
        shares: share of one device of each class (empty unless optimal).
        seconds: the LP's objective plus what does not depend on shares.
    """

    status: str
    shares: Floats
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == OPTIMAL


@dataclass(frozen=True, slots=True)
class SeveralSolution:
    """`RatioSolution` of a program with several ratios: `shares` has those of every part."""

    status: str
    shares: tuple[Floats, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == OPTIMAL


def solve_ratios(
    items: Sequence[Item],
    model: CostModel,
    at: Floats,
    memory: Footprint | None = None,
    budgets: Floats | None = None,
) -> RatioSolution:
    """The best shares for a program.

    Args:
        items: the program's bill.
        model: gives device classes, their counts and memory.
        at: shares per class around which products of shares are linearised.
        memory: the program's footprint; None for no budget rows.
        budgets: bytes for a device of every class, by default its memory.
    """
    together = None if memory is None else Footprints(memory.fixed, memory.shared[:, None])
    found = solve_several((items,), model, (at,), together, budgets)
    return RatioSolution(found.status, found.shares[0] if found.ok else np.empty(0), found.seconds)


def solve_several(
    parts: Sequence[Sequence[Item]],
    model: CostModel,
    at: Sequence[Floats],
    memory: Footprints | None = None,
    budgets: Floats | None = None,
) -> SeveralSolution:
    """The best shares for a program whose parts have ratios of their own; nothing but memory ties them.

    Args:
        parts: the program's bill, by the ratios that its items are cut by.
        model: gives device classes, their counts and memory.
        at: for every part, shares per class around which products of shares are linearised.
        memory: the program's footprint, with as many ratios as there are parts; None for no budget rows.
        budgets: bytes for a device of every class, by default its memory.
    """
    classes = len(model.counts)
    even = np.full(classes, 1.0 / model.counts.sum())
    linears = [_linear(items, shares) for items, shares in zip(parts, at, strict=True)]
    fixed = sum(part.fixed for part in linears)
    count = sum(len(part.weights) for part in linears)
    if not count and (memory is None or len(parts) == 1):
        return SeveralSolution(OPTIMAL, (even,) * len(parts), fixed)
    if classes == 1 and memory is None:
        each = [
            weight * float((constant + slope * even).max())
            for part in linears
            for constant, slope, weight in zip(part.constants, part.slopes, part.weights, strict=True)
        ]
        return SeveralSolution(OPTIMAL, (even,) * len(parts), fixed + sum(each))

    # Seconds are scaled to the largest slope, bytes to the smallest memory: solvers like numbers near one.
    scale = max((float(np.abs(s).max()) for part in linears for s in part.slopes), default=1.0)
    columns = classes * len(parts) + count
    # Variables: the shares of every part, then t. One block of rows per class: slope s_c - t <= -constant.
    blocks: list[sparse.csr_matrix] = []
    rights: list[Floats] = []
    first = classes * len(parts)
    for number, part in enumerate(linears):
        if not part.weights:
            continue
        which = np.repeat(np.arange(len(part.weights)), [len(c) for c in part.constants])
        constant, slope = np.concatenate(part.constants) / scale, np.concatenate(part.slopes) / scale
        row = np.arange(len(which))
        for c in range(classes):
            values = np.concatenate([slope[:, c], -np.ones(len(which))])
            column = np.concatenate([np.full(len(which), classes * number + c), first + which])
            places = np.concatenate([row, row]), column
            blocks.append(sparse.csr_matrix((values, places), shape=(len(which), columns)))
            rights.append(-constant[:, c])
        first += len(part.weights)
    if memory is not None:
        for c, device in enumerate(model.types):
            limit = float(device.memory_bytes if budgets is None else budgets[c])
            moments = np.arange(len(memory.fixed))
            column = np.concatenate([np.full(len(moments), classes * k + c) for k in range(len(parts))])
            places = np.tile(moments, len(parts)), column
            values = memory.shared.T.ravel() / limit
            blocks.append(sparse.csr_matrix((values, places), shape=(len(moments), columns)))
            rights.append(1 - memory.fixed / limit)
    weights = [weight for part in linears for weight in part.weights]
    objective = np.concatenate([np.zeros(classes * len(parts)), weights])
    whole = np.zeros((len(parts), columns))
    for number in range(len(parts)):
        whole[number, classes * number : classes * (number + 1)] = model.counts
    bounds = [(0.0, None)] * (classes * len(parts)) + [(None, None)] * count
    found = linprog(
        objective,
        A_ub=sparse.vstack(blocks, format="csr"),
        b_ub=np.concatenate(rights),
        A_eq=sparse.csr_matrix(whole),
        b_eq=np.ones(len(parts)),
        bounds=bounds,
        method="highs",
    )
    status = _STATUS.get(int(found.status), str(found.message))
    if status != OPTIMAL:
        return SeveralSolution(status, (), np.inf)
    solved = np.asarray(found.x[: classes * len(parts)], dtype=np.float64).reshape(len(parts), classes)
    shares = np.maximum(solved, 0.0)
    shares /= (shares @ model.counts)[:, None]
    return SeveralSolution(status, tuple(shares), fixed + scale * float(found.fun))


@dataclass(frozen=True, slots=True)
class _Linear:
    """A bill at some shares: what does not depend on them, and rows of the rest; equal ones are one."""

    fixed: float
    constants: list[Floats]
    slopes: list[Floats]
    weights: list[float]


def _linear(items: Sequence[Item], at: Floats) -> _Linear:
    found = _Linear(0.0, [], [], [])
    group_of: dict[bytes, int] = {}
    fixed = 0.0
    # Equal layers have equal costs: each is looked at once.
    times: dict[int, float] = {}
    costs: dict[int, ShareCost] = {}
    for item, count in counted(items):
        costs[id(item.cost)] = item.cost
        times[id(item.cost)] = times.get(id(item.cost), 0.0) + item.weight * count
    for number, cost in costs.items():
        if not cost.varies:
            fixed += times[number] * cost.exact(at)
            continue
        constant, linear = cost.affine_at(at)
        key = constant.tobytes() + linear.tobytes()
        if key in group_of:
            found.weights[group_of[key]] += times[number]
            continue
        group_of[key] = len(found.weights)
        found.constants.append(constant)
        found.slopes.append(linear)
        found.weights.append(times[number])
    return replace(found, fixed=fixed)
