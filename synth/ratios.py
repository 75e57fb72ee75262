"""The ratio LP: how much of every sharded axis each device class gets, for a given program.

    minimise    sum_k weight_k t_k                          t_k: seconds of instruction k          `t`
    subject to  t_k >= constant_krc + linear_krc s_c        rows r of its ShareCost, classes c     `rows`
                fixed_t + shared_t s_c <= memory_c          moments t of the footprint             `budget`
                counts . s = 1,  s >= 0                     s_c: share of one device of class c    `shares`

Instructions whose costs have equal rows share one epigraph variable. Exchanges that are not affine in
the shares enter by their tangent at the current shares (`ShareCost.affine_at`). Solved by HiGHS (Huangfu
and Hall 2018) through scipy: a modelling layer would take longer than the solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from shardwright.cost.bill import Item
from shardwright.cost.memory import Footprint
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
    constants: list[Floats] = []
    slopes: list[Floats] = []
    weights: list[float] = []
    group_of: dict[bytes, int] = {}
    fixed = 0.0
    # Equal layers have equal costs: each is looked at once.
    times: dict[int, float] = {}
    costs: dict[int, ShareCost] = {}
    for item in items:
        costs[id(item.cost)] = item.cost
        times[id(item.cost)] = times.get(id(item.cost), 0.0) + item.weight
    for number, cost in costs.items():
        if not cost.varies:
            fixed += times[number] * cost.exact(at)
            continue
        constant, linear = cost.affine_at(at)
        key = constant.tobytes() + linear.tobytes()
        if key in group_of:
            weights[group_of[key]] += times[number]
            continue
        group_of[key] = len(weights)
        constants.append(constant)
        slopes.append(linear)
        weights.append(times[number])
    classes = len(model.counts)
    if not weights:
        return RatioSolution(OPTIMAL, np.full(classes, 1.0 / model.counts.sum()), fixed)

    if classes == 1 and memory is None:
        only = np.full(1, 1.0 / model.counts.sum())
        each = [float((c + slope * only).max()) for c, slope in zip(constants, slopes, strict=True)]
        return RatioSolution(OPTIMAL, only, fixed + float(np.dot(weights, each)))

    # Seconds are scaled to the largest slope, bytes to the smallest memory: solvers like numbers near one.
    scale = max(float(np.abs(s).max()) for s in slopes)
    which = np.repeat(np.arange(len(weights)), [len(c) for c in constants])
    constant, slope = np.concatenate(constants) / scale, np.concatenate(slopes) / scale
    columns = classes + len(weights)
    # Variables: shares, then t. One block of rows per class: slope s_c - t <= -constant.
    blocks: list[sparse.csr_matrix] = []
    rights: list[Floats] = []
    count = np.arange(len(which))
    for c in range(classes):
        values = np.concatenate([slope[:, c], -np.ones(len(which))])
        places = np.concatenate([count, count]), np.concatenate([np.full(len(which), c), classes + which])
        blocks.append(sparse.csr_matrix((values, places), shape=(len(which), columns)))
        rights.append(-constant[:, c])
    if memory is not None:
        for c, device in enumerate(model.types):
            limit = float(device.memory_bytes if budgets is None else budgets[c])
            moments = np.arange(len(memory.shared))
            places = moments, np.full(len(moments), c)
            blocks.append(sparse.csr_matrix((memory.shared / limit, places), shape=(len(moments), columns)))
            rights.append(1 - memory.fixed / limit)
    objective = np.concatenate([np.zeros(classes), weights])
    whole = sparse.csr_matrix(np.concatenate([model.counts, np.zeros(len(weights))])[None, :])
    bounds = [(0.0, None)] * classes + [(None, None)] * len(weights)
    found = linprog(
        objective,
        A_ub=sparse.vstack(blocks, format="csr"),
        b_ub=np.concatenate(rights),
        A_eq=whole,
        b_eq=[1.0],
        bounds=bounds,
        method="highs",
    )
    status = _STATUS.get(int(found.status), str(found.message))
    if status != OPTIMAL:
        return RatioSolution(status, np.empty(0), np.inf)
    shares = np.maximum(np.asarray(found.x[:classes], dtype=np.float64), 0.0)
    shares /= float(model.counts @ shares)
    return RatioSolution(status, shares, fixed + scale * float(found.fun))
