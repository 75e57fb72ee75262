"""The best program at one set of prices: tables, reductions, elimination, A*."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.ir.errors import PlanError
from shardwright.synth.eliminate import Term, collect, eliminate, min_fill, quantised
from shardwright.synth.factors import Factor, Prices
from shardwright.synth.prune import prune
from shardwright.synth.search import MOST_NODES, a_star
from shardwright.synth.space import Space

#: Largest table of an exact bucket; beyond it mini-buckets keep the heuristic admissible, and A* searches.
MOST_CELLS = 1 << 23


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment at one set of prices.

    Attributes:
        assignment: position in its domain of every choice.
        seconds: what it costs.
        bound_s: what no assignment can be cheaper than at these prices; equal to `seconds` where the search
            ended by itself.
        expanded: nodes that A* expanded.
        width: most choices in one table of the elimination.
    """

    assignment: tuple[int, ...]
    seconds: float
    bound_s: float
    expanded: int
    width: int


def _reduced(space: Space, prices: Prices, extra: Sequence[Factor]) -> tuple[list[Term], list[int]]:
    factors = (*space.factors, *extra)
    raw = (Term(tuple(c.index for c in f.scope), prices.table(f)) for f in factors)
    return quantised(collect(raw)), [len(choice.domain.holdings) for choice in space.choices]


def solve(
    space: Space,
    prices: Prices,
    most_cells: int = MOST_CELLS,
    most_nodes: int = MOST_NODES,
    extra: Sequence[Factor] = (),
) -> Solution:
    """The cheapest program of `space` at `prices`; `extra` factors pin choices (for baselines).

    Raises:
        PlanError: no assignment is possible at all.
    """
    terms, sizes = _reduced(space, prices, extra)
    pruned = prune(sizes, terms)
    order = min_fill(pruned.sizes, [term.scope for term in pruned.terms])
    elimination = eliminate(pruned.sizes, pruned.terms, order, most_cells)
    found = a_star(pruned.sizes, elimination, most_nodes)
    if found is None:
        raise PlanError(
            place="search",
            reason="no program of this space carries out the step",
            remedy="Please report the step: its rules contradict each other",
        )
    return Solution(pruned.lift(found.assignment), found.cost, found.bound, found.expanded, elimination.width)


def bound(space: Space, prices: Prices, most_cells: int = MOST_CELLS) -> float:
    """A lower bound on the cost of every program of `space` at `prices` (exact where buckets fit)."""
    terms, sizes = _reduced(space, prices, ())
    pruned = prune(sizes, terms)
    order = min_fill(pruned.sizes, [term.scope for term in pruned.terms])
    return eliminate(pruned.sizes, pruned.terms, order, most_cells).bound
