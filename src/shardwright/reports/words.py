"""Placements, collectives and strategies in words."""

from __future__ import annotations

import re
from collections.abc import Mapping

_REDUCED = {"sum": "sums", "max": "maxima", "min": "minima"}

#: What a collective does, by its name.
COLLECTIVES: Mapping[str, str] = {
    "all_gather": "every device gets the whole tensor from all stretches",
    "all_reduce": "partial results are combined, every device gets the whole",
    "reduce_scatter": "partial results are combined, every device gets its own stretch",
    "all_to_all": "stretches of one dimension become stretches of another",
    "broadcast": "one device hands its tensor to all",
    "send": "one device hands its tensor to another",
}

#: How a strategy goes about it, by its name.
STRATEGIES: Mapping[str, str] = {
    "padded": "in blocks as long as the largest share",
    "grouped": "with one broadcast per owner, each of its exact length",
    "exact": "around a ring, every stretch in its exact length",
    "hierarchical": "within each node first, then between one device of every node, then within again",
    "ring": "around a ring, in equal blocks",
    "rs_ag": "halving the tensor round by round, then doubling",
    "tree": "exchanging the whole tensor with partners at doubling distances",
    "scatter_ag": "in pieces, which are then gathered",
    "direct": "in one message",
}


def placed(placement: str, holder: str = "device") -> str:
    """A placement, as `str` writes it, in words; one that is of an unknown form stays as it is.

    Args:
        placement: on one mesh axis (`S(0:64)`), or on two, over the nodes and within each (`R/S(0)`).
        holder: what the parts are on.

    >>> placed("S(0:64)")
    'cut along dimension 0, in whole pieces of 64'
    """
    across, slash, within = placement.partition("/")
    if slash:
        return f"{placed(across, 'node')}; within a node {placed(within)}"
    if placement == "R":
        return f"whole on every {holder}"
    if cut := re.fullmatch(r"S\((\d+)(?::(\d+))?\)", placement):
        by = " over the nodes" if holder == "node" else ""
        return f"cut along dimension {cut[1]}{by}" + (f", in whole pieces of {cut[2]}" if cut[2] else "")
    if partial := re.fullmatch(r"P\((\w+)\)", placement):
        return f"partial {_REDUCED.get(partial[1], partial[1])}, one per {holder}"
    return placement


def exchanged(name: str) -> str:
    """A collective and its strategy (`all_gather.exact`) in words; unknown names stay as they are."""
    kind, _, strategy = name.partition(".")
    said = [COLLECTIVES.get(kind, kind), STRATEGIES.get(strategy, strategy)]
    return ", ".join(part for part in said if part)
