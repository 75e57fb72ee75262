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
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.synth.search.eliminate import Bucket, Elimination

#: Expansions after which the search completes what it has.
MOST_NODES = 30_000

#: How many of the most promising nodes are then completed.
DIVES = 16

#: Values of the next choice, best first, with what each adds to f.
Successors: TypeAlias = tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """One stage of the elimination.

    Attributes:
        class_of: class of every choice in this stage.
        values: per class, the values of the choice that the tables of this stage are over.
        elimination: what was done.
    """

    class_of: Sequence[int]
    values: Sequence[NDArray[np.intp]]
    elimination: Elimination


@dataclass(slots=True, eq=False)
class Node:
    """A partial assignment: the value of the latest choice, and the node that decided those before.

    f is g + h; g itself is not needed, since f of a successor follows from f of its parent. Successors
    enter the queue one at a time: the next best of a parent when the one before it is expanded.
    """

    f: float
    depth: int
    value: int
    parent: Node | None
    rank: int  # among the successors of the parent
    values: list[int] | None = None  # by choice, once the node is expanded
    following: Successors | None = None  # as soon as they are known


@dataclass(frozen=True, slots=True)
class Found:
    """An assignment, and how good it is.

    Attributes:
        assignment: value of every choice.
        cost: its price.
        bound: no assignment costs less; equal to the cost if the search ended by itself.
        expanded: nodes expanded on the way.
    """

    assignment: tuple[int, ...]
    cost: float
    bound: float
    expanded: int


def a_star(
    layers: Sequence[Layer],
    most_nodes: int = MOST_NODES,
    stop: Callable[[], bool] = lambda: False,
    dives: int = DIVES,
    steps: float = math.inf,
) -> Found | None:
    """The cheapest assignment of all choices, None if every one of them costs infinitely much.

    Args:
        layers: stages of the elimination, the last eliminates what is left; messages are the heuristic.
        most_nodes: expansions after which to stop searching (see the module's docstring); what is exact is
            walked straight down all the same.
        stop: asked now and then whether to stop searching before that.
        dives: how many of the most promising nodes are then completed; with none, what is found costs
            infinitely much.
        steps: of these, for each choice that a node leaves open: where what is most promising turns out to be
            impossible time and again, a node is given up.
    """
    tree = _Tree(layers)
    if not np.isfinite(tree.root.f):
        return None
    tie = itertools.count()
    heap: list[tuple[float, int, int, Node]] = [(tree.root.f, 0, next(tie), tree.root)]
    expanded = 0
    while heap and expanded < most_nodes:
        f, _, _, node = heapq.heappop(heap)
        if node.depth == len(tree.decide):
            return Found(tree.assignment(node), f, f, expanded)
        if node.depth >= tree.exact_from:
            straight = tree.straight(node)
            if straight is not None:
                return Found(tuple(straight), f, f, expanded + len(tree.decide) - node.depth)
        expanded += 1
        if expanded % 512 == 0 and stop():
            heapq.heappush(heap, (f, -node.depth, next(tie), node))
            break
        # Of equal f the deeper node first: a perfect heuristic then walks straight to the goal.
        for following in (tree.child(node, 0), tree.sibling(node)):
            if following is not None:
                heapq.heappush(heap, (following.f, -following.depth, next(tie), following))
    if not dives:
        return Found((), math.inf, heap[0][0], expanded)
    likely = [entry[-1] for entry in heapq.nsmallest(dives, heap)]
    ends = [end for end in [tree.dive(node, steps) for node in likely] if end]
    if not ends:
        return None if steps == math.inf else Found((), math.inf, heap[0][0], expanded)
    best = min(ends, key=lambda end: end.f)
    return Found(tree.assignment(best), best.f, min(best.f, heap[0][0]), expanded)


def in_order(layers: Sequence[Layer]) -> Iterator[tuple[tuple[int, ...], float]]:
    """All assignments of finite cost with their costs, the cheapest first; see `a_star`."""
    tree = _Tree(layers)
    tie = itertools.count()
    heap: list[tuple[float, int, int, Node]] = []
    if np.isfinite(tree.root.f):
        heap.append((tree.root.f, 0, next(tie), tree.root))
    while heap:
        f, _, _, node = heapq.heappop(heap)
        options = [tree.sibling(node)]
        if node.depth == len(tree.decide):
            yield tree.assignment(node), f
        else:
            options.append(tree.child(node, 0))
        for following in options:
            if following is not None:
                heapq.heappush(heap, (following.f, -following.depth, next(tie), following))


class _Tree:
    """Successors of nodes.

    Deciding a choice opens its bucket: what the bucket had sent leaves h; its own factors, now fully
    decided, enter g; and the messages it had received enter h. Buckets of one operation have the same
    successors where their neighbours have the same values.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.decide: list[tuple[Layer, Bucket]] = [
            (layer, bucket)
            for layer in reversed(layers)
            for bucket in reversed(layer.elimination.tape.buckets)
        ]
        #: The depth from which on no bucket is split: messages are exact, and f rises no more.
        self.exact_from = max((k + 1 for k, (_, b) in enumerate(self.decide) if len(b.parts) > 1), default=0)
        bound = sum(float(layer.elimination.constant) for layer in layers)
        self.root = Node(bound, 0, 0, None, 0)
        self._known: dict[tuple[object, ...], Successors] = {}
        self._place: dict[tuple[int, int], dict[int, int]] = {}

    def assignment(self, node: Node) -> tuple[int, ...]:
        return tuple(self.values(node))

    def straight(self, node: Node) -> list[int] | None:
        """What the search finds below a node where f no longer rises; None where it does.

        The queue would hand out the best successor of what it handed out before, every time.
        """
        values = self.values(node).copy()
        for layer, bucket in self.decide[node.depth :]:
            following = self._after(layer, bucket, values)
            if not following or following[0][0] != 0.0:
                return None
            values[bucket.choice] = following[0][1]
        return values

    def _settled(self) -> list[int]:
        """By choice, its value if it never has to be decided, else any."""
        found = [0] * len(self.layers[0].class_of)
        decided = {bucket.choice for _, bucket in self.decide}
        for layer in self.layers:
            only = [int(left[0]) if len(left) == 1 else -1 for left in layer.values]
            for choice, kind in enumerate(layer.class_of):
                if only[kind] >= 0 and choice not in decided:
                    found[choice] = only[kind]
        return found

    def values(self, node: Node) -> list[int]:
        """All values decided at a node (those of undecided choices are unset)."""
        if node.values is None:
            parent = node.parent
            if parent is None:
                node.values = self._settled()
            else:
                mine = self.values(parent)
                # A first child takes its parent's list over: what differs lies beyond the parent's depth.
                mine = mine if node.rank == 0 else mine.copy()
                mine[self.decide[node.depth - 1][1].choice] = node.value
                node.values = mine
        return node.values

    def child(self, node: Node, rank: int) -> Node | None:
        """The successor of a rank, None where there are no more."""
        following = self.successors(node)
        if rank >= len(following):
            return None
        added, value = following[rank]
        return Node(node.f + added, node.depth + 1, value, node, rank)

    def sibling(self, node: Node) -> Node | None:
        """The next successor of a node's parent."""
        return None if node.parent is None else self.child(node.parent, node.rank + 1)

    def successors(self, node: Node) -> Successors:
        """All possible values of the next choice, the best first."""
        if node.following is None:
            node.following = self._after(*self.decide[node.depth], self.values(node))
        return node.following

    def _after(self, layer: Layer, bucket: Bucket, values: Sequence[int]) -> Successors:
        if len(bucket.parts) == 1:
            number, rest = bucket.parts[0]
            key = (id(layer), number, *[values[u] for u in rest])
        else:
            key = (id(layer), *[(n, *[values[u] for u in rest]) for n, rest in bucket.parts])
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._open(layer, bucket, values)
        return found

    def _open(self, layer: Layer, bucket: Bucket, values: Sequence[int]) -> Successors:
        total, left = np.zeros(()), 0.0
        for number, others in bucket.parts:
            done = layer.elimination.done[number]
            rest = [self._index(layer, u, values[u]) for u in others]
            for table, axes in done.sources:
                total = total + table[tuple([slice(None) if axis == 0 else rest[axis - 1] for axis in axes])]
            left += float(done.least) + (0.0 if done.message is None else float(done.message[tuple(rest)]))
            if done.loose is not None:
                axes, table = done.loose
                left += float(table[tuple([rest[axis] for axis in axes])])
        mine = layer.values[layer.class_of[bucket.choice]]
        added = np.atleast_1d(total - left)
        order = added.argsort(kind="stable")
        order = order[np.isfinite(added[order])]
        return tuple(zip(added[order].tolist(), mine[order].tolist(), strict=True))

    def _index(self, layer: Layer, choice: int, value: int) -> int:
        """Position of a value on the axes of a layer's tables."""
        kind = layer.class_of[choice]
        key = (id(layer), kind)
        if key not in self._place:
            self._place[key] = {int(v): k for k, v in enumerate(layer.values[kind])}
        return self._place[key][value]

    def dive(self, node: Node, steps: float = math.inf) -> Node | None:
        """A complete assignment below `node`, by the most promising successors; None if there is none.

        Or if none was found in so many steps for each choice that is open.
        """
        current, left = node, steps * (len(self.decide) - node.depth)
        while current.depth < len(self.decide):
            if current.depth == self.exact_from:
                straight = self.straight(current)
                if straight is not None:
                    return Node(current.f, len(self.decide), 0, current, 0, straight)
            left -= 1
            if left < 0:
                return None
            following = self.child(current, 0)
            while following is None:
                # Where the most promising one turns out to be impossible, the next best is tried.
                if current is node or current.parent is None:
                    return None
                following, current = self.sibling(current), current.parent
            current = following
        return current
