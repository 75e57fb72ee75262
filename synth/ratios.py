"""The ratio LP: how much of every sharded axis each device class gets, for a given program.

    minimise    sum_k weight_k t_k                          t_k: seconds of instruction k          `t`
    subject to  t_k >= constant_krc + linear_krc s_c        rows r of its ShareCost, classes c     `rows`
                fixed_t + shared_t s_c <= memory_c          moments t of the footprint             `budget`
                counts . s = 1,  s >= 0                     s_c: share of one device of class c    `shares`

Instructions whose costs have equal rows share one epigraph variable. Exchanges that are not affine in
the shares enter by their tangent at the current shares (`ShareCost.affine_at`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cvxpy as cp
import numpy as np

from shardwright.cost.bill import Item
from shardwright.cost.memory import Footprint
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import Floats


@dataclass(frozen=True, slots=True)
class RatioSolution:
    """Outcome of the LP; the status is a value, not an exception.

    Attributes:
        status: cvxpy's status, "optimal" if all is well.
        shares: share of one device of each class (empty unless optimal).
        seconds: the LP's objective plus what does not depend on shares.
    """

    status: str
    shares: Floats
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == cp.OPTIMAL


def solve_ratios(
    items: Sequence[Item], model: CostModel, at: Floats, memory: Footprint | None = None
) -> RatioSolution:
    """The best shares for a program.

    Args:
        items: the program's bill.
        model: gives device classes, their counts and memory.
        at: shares per class around which products of shares are linearised.
        memory: the program's footprint; None for no budget rows.
    """
    constants: list[Floats] = []
    slopes: list[Floats] = []
    weights: list[float] = []
    group_of: dict[bytes, int] = {}
    fixed = 0.0
    for item in items:
        if not item.cost.varies:
            fixed += item.weight * item.cost.exact(at)
            continue
        constant, linear = item.cost.affine_at(at)
        key = constant.tobytes() + linear.tobytes()
        if key in group_of:
            weights[group_of[key]] += item.weight
            continue
        group_of[key] = len(weights)
        constants.append(constant)
        slopes.append(linear)
        weights.append(item.weight)
    classes = len(model.counts)
    if not weights:
        return RatioSolution(cp.OPTIMAL, np.full(classes, 1.0 / model.counts.sum()), fixed)

    # Seconds are scaled to the largest slope, bytes to the smallest memory: solvers like numbers near one.
    scale = max(float(np.abs(s).max()) for s in slopes)
    shares = cp.Variable(classes, nonneg=True)
    t = cp.Variable(len(weights))
    rows = [np.full(c.shape[0], k) for k, c in enumerate(constants)]
    which = np.concatenate(rows)
    constant, slope = np.concatenate(constants) / scale, np.concatenate(slopes) / scale
    limits: list[cp.Constraint] = [
        t[which] >= constant[:, c] + slope[:, c] * shares[c] for c in range(classes)
    ]
    limits.append(model.counts @ shares == 1)
    if memory is not None:
        limit = np.array([device.memory_bytes for device in model.types], dtype=np.float64)
        for c in range(classes):
            limits.append(memory.fixed / limit[c] + memory.shared / limit[c] * shares[c] <= 1)
    problem = cp.Problem(cp.Minimize(np.asarray(weights) @ t), limits)
    problem.solve(solver=cp.HIGHS)
    if problem.status != cp.OPTIMAL or shares.value is None:
        return RatioSolution(str(problem.status), np.empty(0), np.inf)
    found = np.maximum(np.asarray(shares.value, dtype=np.float64), 0.0)
    found /= float(model.counts @ found)
    value = float(np.asarray(problem.value, dtype=np.float64))
    return RatioSolution(str(problem.status), found, fixed + scale * value)
