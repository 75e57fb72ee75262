"""A* over partial programs.

A node holds the choices made so far, in reverse order of elimination: the properties of the tensors
decided. Its successors decide the next choice; g is the price of every factor that is fully decided, h
the messages of the buckets still open, which never exceed what is missing. The first node that decides
everything is therefore the best program of the space. With exact messages h is perfect, and only the
best path is expanded.

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


@dataclass(frozen=True, slots=True)
class Node:
    """A partial assignment: every choice decided so far (others are unset) and the price g of what they settle."""

    values: NDArray[np.int16]
    g: float


@dataclass(frozen=True, slots=True)
class Found:
    """An optimal assignment.

    Attributes:
        assignment: value of every choice, by number.
        cost: its price.
        expanded: nodes expanded on the way.
    """

    assignment: tuple[int, ...]
    cost: float
    expanded: int


def a_star(sizes: Sequence[int], elimination: Elimination) -> Found | None:
    """The cheapest assignment of all choices, None if every one of them costs infinitely much.

    f = g + h, where h adds up what the open buckets have sent to decided choices. Deciding a choice
    opens its bucket: what the bucket had sent leaves h; its own factors, now fully decided, enter g;
    and the messages it had received enter h.

    Args:
        sizes: values per choice.
        elimination: buckets of the same choices; their messages are the heuristic.
    """
    decide = list(reversed(elimination.buckets))
    received = {id(message) for bucket in decide for message in bucket.messages}
    tie = itertools.count()
    root = Node(np.zeros(len(sizes), dtype=np.int16), 0.0)
    heap: list[tuple[float, int, int, Node]] = [(elimination.bound, 0, next(tie), root)]
    expanded = 0
    while heap:
        f, negative_depth, _, node = heapq.heappop(heap)
        depth = -negative_depth
        if depth == len(decide):
            return Found(tuple(int(v) for v in node.values), f, expanded)
        expanded += 1
        bucket = decide[depth]
        settled, promised = _open(bucket, received, sizes[bucket.choice], node.values)
        left = bucket.constant + sum(_at(message, node.values) for message in bucket.messages)
        f_values = f - left + settled + promised
        for value in np.flatnonzero(np.isfinite(f_values)):
            values = node.values.copy()
            values[bucket.choice] = value
            # Of equal f the deeper node first: a perfect heuristic then walks straight to the goal.
            child = Node(values, node.g + float(settled[value]))
            heapq.heappush(heap, (float(f_values[value]), -(depth + 1), next(tie), child))
    return None


def _open(
    bucket: Bucket, received: set[int], size: int, values: NDArray[np.int16]
) -> tuple[Floats, Floats]:
    """Per value of the bucket's choice: price of its own factors, and promises of the messages it received."""
    settled, promised = np.zeros(size), np.zeros(size)
    for term in bucket.terms:
        row = term.table[tuple(slice(None) if v == bucket.choice else values[v] for v in term.scope)]
        if id(term) in received:
            promised = promised + row
        else:
            settled = settled + row
    return settled, promised


def _at(term: Term, values: NDArray[np.int16]) -> float:
    return float(term.table[tuple(values[v] for v in term.scope)])
