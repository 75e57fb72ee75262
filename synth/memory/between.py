"""Programs between one that is too large and one that fits under rent.

Tensors that are alike pay alike: at some rent the state of all equal layers is held in stretches, at a little
less that of none. Where fewer would do, that of so many is: the largest tensors first, of equal ones those
that come first. How many are enough is found by halves; what is best beside them, by the search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.ir.placement import Shard
from shardwright.synth.memory.budgets import Renting
from shardwright.synth.prices.tables import Prices
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.search.solution import Solution
from shardwright.synth.shares.turns import Candidate, Turns
from shardwright.synth.space.factors import Use
from shardwright.synth.space.pins import is_shard, pin

#: Programs looked at, at most; this part of the tensors more than need be is near enough.
_MOST, _NEARLY = 6, 16

#: Nodes expanded at most for one of them; what is found is the best if it is proven to be, but for this part.
_NODES, _EXACT = 1000, 1e-6


def between(
    turns: Turns,
    renting: Renting,
    ratios: tuple[float, ...],
    large: Sequence[int],
    least: tuple[Sequence[int], Candidate],
    weighed: Callable[[Solution, Prices, tuple[float, ...]], Candidate],
) -> Candidate:
    """The cheapest program found that fits, which may be the one that is known to.

    Args:
        turns: the search so far.
        renting: what says how large tensors are.
        ratios: share of every device.
        large: assignment of a program that is too large.
        least: of one that fits at these ratios, and what it costs.
        weighed: what a solution at some prices, those of some ratios, costs, and whether it fits.
    """
    small, best = least
    moved = _moved(turns, renting, ratios, large, small)
    low, high = 0, len(moved)
    for _ in range(_MOST):
        if high - low <= 1 + len(moved) // _NEARLY or turns.stop():
            break
        middle = (low + high) // 2
        uses = [pin(turns.space.choices[c], is_shard) for c in moved[:middle]]
        solution, prices = _solved(turns, ratios, uses)
        here = weighed(solution, prices, ratios)
        low, high = (low, middle) if here.fits else (middle, high)
        best = here if here.beats(best) else best
        if solution.bound_s < solution.seconds * (1 - _EXACT):
            break  # equal layers that are not treated alike make the search take long
    return best


def _moved(
    turns: Turns, renting: Renting, ratios: tuple[float, ...], large: Sequence[int], small: Sequence[int]
) -> list[int]:
    """The choices that are held in stretches by the smaller program alone, what frees most first."""
    saved = renting.paid(large, ratios)
    for choice, nbytes in renting.paid(small, ratios).items():
        saved[choice] -= nbytes
    bases = {c: [turns.space.choices[c].domain.holdings[of[c]].base for of in (large, small)] for c in saved}
    cut = {c: [isinstance(base, Shard) for base in some] for c, some in bases.items()}
    moved = [c for c in saved if saved[c] > 0 and cut[c] == [False, True]]
    return sorted(moved, key=lambda c: (-saved[c], c))


def _solved(turns: Turns, ratios: tuple[float, ...], uses: Sequence[Use]) -> tuple[Solution, Prices]:
    """The best program in which some choices are held in stretches."""
    with turns.timer.search():
        prices = Prices.at(turns.listed, ratios)
        solver = SpaceSolver(turns.space, (*turns.extra, *uses))
        solver.solver.level = turns.solver.solver.level
        solution = solver.solve(prices, _NODES, turns.stop)
        turns.searches, turns.expanded = turns.searches + 1, turns.expanded + solution.expanded
    return solution, prices
