"""Which arguments of a step are its batch, of how many rows; see `shardwright.ir.rewrites.microbatch`."""

from __future__ import annotations

import math

from shardwright.ir.graph import Graph, Value, per_graph
from shardwright.ir.placement import Shard
from shardwright.ir.rewrites.pieces import INVARIANT, Kind, NotInPiecesError, Pieces, refuse

#: Of so many sizes, those of the largest arguments, it is looked which one the batch has.
_SIZES = 6


def batch_of(graph: Graph, count: int, asked: str = "microbatches") -> list[Kind]:
    """Which inputs come in pieces, which were asked for as `asked`."""
    data = _data(graph)
    if not data:
        raise refuse("no argument but state has rows", asked, f"Plan with {asked}=1")
    rows = _rows(graph)
    if rows % count or rows < count:
        raise refuse(
            f"a batch of {rows} has no {count} equal pieces",
            asked,
            f"Plan with {asked}={' or '.join(map(str, _beside(rows, count)))}",
        )
    own = set(data)
    return [Shard(0) if v in own and v.type.shape[0] == rows else INVARIANT for v in graph.inputs]


def _data(graph: Graph) -> list[Value]:
    """Arguments that are no state and have rows."""
    state = set(graph.state.values())
    return [v for i, v in enumerate(graph.inputs) if i not in state and v.type.rank]


@per_graph
def _rows(graph: Graph) -> int:
    """Of which size the batch is.

    Parameters that are not trained, and masks, are no batch, however large: of several sizes that arguments
    have it is the one by which most of what is made comes in pieces.
    """
    largest: dict[int, int] = {}
    for value in _data(graph):
        size = value.type.shape[0]
        largest[size] = max(largest.get(size, 0), value.type.nbytes)
    sizes = sorted(largest, key=lambda size: -largest[size])
    if len(sizes) == 1:
        return sizes[0]
    return max(sizes[:_SIZES], key=lambda size: _apart(graph, size))


def _apart(graph: Graph, size: int) -> tuple[bool, int]:
    """Whether the step comes in pieces if arguments of `size` rows are the batch, and how much of it does.

    That is in bytes of what equations make: if one of them stands in the way, of those before it.
    """
    if size < 2:
        return False, 0
    count = next((n for n in range(2, math.isqrt(size) + 1) if size % n == 0), size)
    own = {value for value in _data(graph) if value.type.shape[0] == size}
    pieces, whole = Pieces(count), True
    try:
        pieces.of_step(graph, [Shard(0) if v in own else INVARIANT for v in graph.inputs])
    except NotInPiecesError:
        whole = False
    kinds = pieces.found.kinds
    made = (value for equation in graph.equations for value in equation.outputs)
    return whole, sum(value.type.nbytes for value in made if isinstance(kinds.get(value), Shard))


def _beside(rows: int, count: int) -> list[int]:
    """The nearest numbers of equal pieces that so many rows have: the next below, the next above; or 1."""
    low = [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
    known = sorted({*low, *(rows // n for n in low)})
    return [n for n in known if n < count][-1:] + [n for n in known if n > count][:1] or [1]
