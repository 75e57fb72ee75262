"""A* over partial programs.

A node holds the choices made so far, in reverse order of elimination: the properties of the tensors
decided. Its successors decide the next choice; g is the price of every factor that is fully decided, h
the messages of the buckets still open, which never exceed what is missing. The first node that decides
everything is therefore the best program of the space. With exact messages h is perfect, and only the
best path is expanded. With a weaker h the search may have to stop early; it then completes its most
promising nodes greedily and says how far from the best the result can be at most.

The search knows nothing of tensors: choices are numbers, factors are tables.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.share_cost import Floats
from shardwright.synth.eliminate import Bucket, Elimination, Term

#: Expansions after which the search completes what it has.
MOST_NODES = 30_000

#: How many of the most promising nodes are then completed.
_DIVES = 16


@dataclass(slots=True)
class Node:
    """A partial assignment: the value of the latest choice, and the node that decided those before.

    f is g + h; g itself is not needed, since f of a successor follows from f of its parent.
    """

    f: float
    depth: int
    value: int
    parent: Node | None
    values: NDArray[np.int16] | None = None  # all values so far, once the node is expanded


@dataclass(frozen=True, slots=True)
class Found:
    """An assignment, and how good it is.

    Attributes:
        assignment: value of every choice, by number.
        cost: its price.
        bound: no assignment costs less; equal to the cost if the search ended by itself.
        expanded: nodes expanded on the way.
    """

    assignment: tuple[int, ...]
    cost: float
    bound: float
    expanded: int


def a_star(sizes: Sequence[int], elimination: Elimination, most_nodes: int = MOST_NODES) -> Found | None:
    """The cheapest assignment of all choices, None if every one of them costs infinitely much.

    Args:
        sizes: values per choice.
        elimination: buckets of the same choices; their messages are the heuristic.
        most_nodes: expansions after which to stop searching (see the module's docstring).
    """
    tree = _Tree(sizes, elimination)
    tie = itertools.count()
    heap: list[tuple[float, int, int, Node]] = [(tree.root.f, 0, next(tie), tree.root)]
    expanded = 0
    while heap and expanded < most_nodes:
        f, _, _, node = heapq.heappop(heap)
        if node.depth == len(tree.decide):
            return Found(tree.assignment(node), f, f, expanded)
        expanded += 1
        for child in tree.expand(node):
            # Of equal f the deeper node first: a perfect heuristic then walks straight to the goal.
            heapq.heappush(heap, (child.f, -child.depth, next(tie), child))
    ends = [end for end in map(tree.dive, [entry[-1] for entry in heapq.nsmallest(_DIVES, heap)]) if end]
    if not ends:
        return None
    best = min(ends, key=lambda end: end.f)
    return Found(tree.assignment(best), best.f, min(best.f, heap[0][0]), expanded)


class _Tree:
    """Successors of nodes.

    Deciding a choice opens its bucket: what the bucket had sent leaves h; its own factors, now fully
    decided, enter g; and the messages it had received enter h.
    """

    def __init__(self, sizes: Sequence[int], elimination: Elimination) -> None:
        self.sizes = sizes
        self.decide: list[Bucket] = list(reversed(elimination.buckets))
        self.root = Node(elimination.bound, 0, 0, None)

    def assignment(self, node: Node) -> tuple[int, ...]:
        return tuple(int(value) for value in self.values(node))

    def values(self, node: Node) -> NDArray[np.int16]:
        """All values decided at a node (those of undecided choices are unset)."""
        if node.values is None:
            if node.parent is None:
                node.values = np.zeros(len(self.sizes), dtype=np.int16)
            else:
                node.values = self.values(node.parent).copy()
                node.values[self.decide[node.depth - 1].choice] = node.value
        return node.values

    def expand(self, node: Node) -> list[Node]:
        """Successors that are not impossible."""
        bucket, values = self.decide[node.depth], self.values(node)
        total: Floats = np.zeros(self.sizes[bucket.choice])
        for term in bucket.terms:
            at = tuple(slice(None) if v == bucket.choice else values[v] for v in term.scope)
            total = total + term.table[at]
        left = bucket.constant + sum(_at(message, values) for message in bucket.messages)
        f = node.f - left + total
        return [Node(float(f[v]), node.depth + 1, int(v), node) for v in np.flatnonzero(np.isfinite(f))]

    def dive(self, node: Node) -> Node | None:
        """A complete assignment below `node`, by the most promising successors; None if there is none."""
        open_nodes = [node]
        while open_nodes:
            current = open_nodes.pop()
            if current.depth == len(self.decide):
                return current
            # Where the most promising one turns out to be impossible, the next best is tried.
            open_nodes.extend(sorted(self.expand(current), key=lambda child: -child.f))
        return None


def _at(term: Term, values: NDArray[np.int16]) -> float:
    return float(term.table[tuple(values[v] for v in term.scope)])
