"""Shares on two mesh axes within budgets: as near to those that a program likes as memory allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.cost.share_cost import Floats


def capped(
    liked: Sequence[float],
    fitting: Sequence[float],
    needs: Sequence[float],
    has: Sequence[float],
    budgets: Sequence[float] | Floats,
) -> tuple[float, ...]:
    """Shares in proportion to those that are liked, but for devices that are full before.

    What a device needs counts as linear in its share: it is, but for what is cut in its node and not over
    nodes, and where another moment becomes the fullest. So what comes of this is to be looked at.

    Args:
        liked: share of every device with which a program costs least.
        fitting: shares with which it fits.
        needs: bytes of every device at the shares that are liked.
        has: at those that fit.
        budgets: bytes of every device, no less than it `has`.
    """
    wanted, sure = np.array(liked), np.array(fitting)
    more, taken = wanted - sure, np.subtract(needs, has, dtype=np.float64)
    # Of devices with equal shares, which stay so, some have a row more than others.
    _, alike = np.unique(np.stack([wanted, sure, budgets]), axis=1, return_inverse=True)
    most_taken = np.full(len(more), -np.inf)
    np.maximum.at(most_taken, alike, taken)
    # Where both are the same, as if all that a device needs were shares of something.
    own = np.divide(has, sure, out=np.zeros(len(more)), where=sure > 0)
    rate = np.divide(most_taken[alike], more, out=own, where=more != 0)
    room = np.divide(np.subtract(budgets, has), rate, out=np.full(len(more), np.inf), where=rate > 0)
    most = sure + room
    shares, open_ = np.zeros(len(more)), np.full(len(more), True)
    while open_.any():
        left, asked = 1.0 - shares.sum(), wanted[open_].sum()
        # Those that want nothing take what the others have no room for as they did where it fitted.
        aim = wanted if asked > 0 else sure
        total = aim[open_].sum()
        here = np.where(open_, aim * (left / total if total > 0 else 0.0), 0.0)
        full = open_ & (here > most)
        if not full.any():
            shares[open_] = here[open_]
            break
        shares[full] = most[full]
        open_ &= ~full
    return tuple((shares / shares.sum()).tolist())
