"""Numbers with the interval they lie in, and what makes a fit untrustworthy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from shardwright.ir.errors import InputError

Array = NDArray[np.float64]

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A fitted value and its confidence interval of 95 %."""

    value: float
    low: float
    high: float

    @property
    def relative(self) -> float:
        """Half the interval's width, as a part of the value."""
        return (self.high - self.low) / (2 * self.value) if self.value else math.inf


class Fit(Protocol):
    """What a fit says of itself."""

    def complaint(self) -> str | None:
        """Why it is not to be trusted, None if it is."""
        ...


def refuse(fits: Iterable[Fit]) -> None:
    """Raise what is wrong with the fits, if anything is.

    Raises:
        InputError: naming all that cannot be trusted.
    """
    complaints = [complaint for fit in fits if (complaint := fit.complaint())]
    if complaints:
        raise InputError(
            place="calibrate",
            reason=f"the measurements are too noisy: {'; '.join(complaints)}",
            remedy="Stop other work on the machine and try again, or pass --force to use them all the same",
        )


def rounded(value: float) -> float:
    """To four digits: more than any of these measurements is worth, and legible in a fleet file."""
    return float(f"{value:.4g}")


def spread(samples: Sequence[float]) -> float:
    """How much repeated runs differ: half the distance of the quartiles, as a part of the median."""
    low, middle, high = np.quantile(np.asarray(samples, dtype=np.float64), (0.25, 0.5, 0.75))
    return float((high - low) / (2 * middle))


def margins(design: Array, residual: Array) -> Array:
    """Half-widths of a least-squares solution's confidence intervals, infinite where nothing is left over.

    Args:
        design: (observations, parameters), the residual's derivative.
        residual: at the solution.
    """
    observations, parameters = design.shape
    freedom = observations - parameters
    if freedom <= 0:
        return np.full(parameters, np.inf)
    variance = float(residual @ residual) / freedom
    covariance = np.linalg.pinv(design.T @ design) * variance
    factor = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
    # What no observation depends on can be anything.
    idle = np.abs(design).max(axis=0) < 1e-9
    return np.where(idle, np.inf, factor * np.sqrt(np.maximum(np.diag(covariance), 0.0)))
