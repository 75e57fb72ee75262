"""Equations of many tensors, such as a concatenation: a star of small factors in place of one table.

The table of an equation has an axis for each of its tensors,

    table[h0, h1, ...]  =  min over signatures s of  kernel[s] + sum over choices p of conversion_p[s, h_p]

and every tensor more makes it several times as large. But the placement that a result is made in mostly says
with which signature it was made. Such a result, the *hub*, gets a choice of that placement alone, like the
tensors of a class, and is handed on from there. With it, each other tensor has a price of its own:

    kernel[hub]  +  sum over choices p of  conversion_p[hub, h_p]

Nothing is lost: the least over the hub is the least over the signatures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.ir.graph import Graph
from shardwright.ir.placement import Placement
from shardwright.ir.rules import Signature
from shardwright.ir.table import table
from shardwright.synth.space.conversions import Domain
from shardwright.synth.space.fuse import kind

#: Tensors of one table. Held in thirty ways each, as on two mesh axes, four of them make a million prices.
_TENSORS = 4


def hubs(graph: Graph, signatures: Sequence[Sequence[Signature]]) -> dict[int, int]:
    """Equations of many tensors, by index, and the value that is the hub of each.

    Args:
        graph: the graph.
        signatures: of every equation; none of those with regions.
    """
    found = table(graph)
    values = np.bincount(found.reader[found.operands >= 0], minlength=len(found.form))
    hubs: dict[int, int] = {}
    for equation in np.flatnonzero(values + np.diff(found.made) > _TENSORS).tolist():
        hub = hub_of(signatures[equation]) if signatures[equation] else None
        # Elementwise ones are in the class of their result: all their tensors of its shape are one choice.
        if hub is not None and kind(graph.equations[equation]) != "elementwise":
            hubs[equation] = int(found.results[found.made[equation] + hub])
    return hubs


def hub_of(signatures: Sequence[Signature]) -> int | None:
    """The first result that no two signatures make in the same placement; None where there is none."""
    made = zip(*[signature.outs for signature in signatures], strict=True)
    return next((k for k, outs in enumerate(made) if len(set(outs)) == len(outs)), None)


def beside(
    signatures: Sequence[Signature], hub: int, number: int, domain: Domain
) -> tuple[Placement | None, ...]:
    """By holding of a hub, the placement in which another operand or result is needed or made with it.

    Args:
        signatures: of the equation.
        hub: which operand or result it is; operands are counted first.
        number: which the other one is.
        domain: of the hub; a holding that no signature makes has None.
    """
    both = [(*signature.ins, *signature.outs) for signature in signatures]
    known = {each[hub]: each[number] for each in both}
    return tuple([known.get(holding.base) for holding in domain.holdings])
