"""Kernels that XLA's GPU compiler makes one of, though neither needs the other: they read the same.

Its `MultiOutputFusion` does so after all else. Of interest here is when that is: what the backward part makes
of results of the forward part alone, such as probabilities turned to be an operand of a product, is made in
the forward part, beside what that makes of them, and is there from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.cost.memory.nodes import Node, main_operand

#: Kinds of kernels that are made one.
_FUSIBLE = frozenset({"loop", "costly", "movement", "rename"})

#: What is turned so that fewer elements than this stay together is written as it lies first, and turned from
#: there, where it is made of so many operands: to read all of them out of step takes longer, if by a few
#: hundredths only in XLA's model of it.
_AT_A_TIME, _SEVERAL = 16, 4


def siblings(kernels: Sequence[Node], reads: Mapping[int, Sequence[Node]]) -> dict[int, int]:
    """By number of a kernel, that of an earlier one beside which it runs.

    Args:
        kernels: in an order in which operands come first.
        reads: by number of a kernel, the nodes whose buffers it reads.
    """
    first: dict[tuple[frozenset[int], int], Node] = {}
    found: dict[int, int] = {}
    for kernel in kernels:
        operands = reads[kernel.number]
        if kernel.kind in _FUSIBLE and any(operand.kind != "input" for operand in operands):
            key = frozenset([operand.number for operand in operands]), kernel.type.size
            elder = first.setdefault(key, kernel)
            if elder is not kernel and _made_at_once(elder, kernel, operands):
                found[kernel.number] = elder.number
    return found


def _made_at_once(one: Node, other: Node, operands: Sequence[Node]) -> bool:
    """Whether two kernels that read the same are one: one of them turns it at most, or they have a source."""
    here, there = _turned(one, operands), _turned(other, operands)
    if here is None or there is None:
        return False
    orders, lengths = (here[0], there[0]), here[1]
    if orders[0] == orders[1] or any(sorted(order) == list(order) for order in orders):
        return True
    if one.type.dtype == "float32":
        return True  # what is cast lies with its source; in float32 one is turned from the other
    few = any(min(lengths[-1], lengths[order[-1]]) < _AT_A_TIME for order in orders)
    return few and len(operands) >= _SEVERAL


def _turned(kernel: Node, operands: Sequence[Node]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The order in which a kernel has the dimensions of its largest operand, and their lengths.

    Those of one element aside; None where that operand is cut or reshaped.
    """
    order = tuple(range(kernel.type.rank))
    node = kernel
    while node is kernel or node not in operands:
        if node.what == "transpose":
            order = tuple([node.order[d] for d in order])
        elif node.kind not in ("loop", "costly") and not _same(node):
            return None
        operand = main_operand(node)
        if operand is None:
            return None
        node = operand
    left = [d for d, length in enumerate(node.type.shape) if length > 1]
    place = {d: number for number, d in enumerate(left)}
    return tuple([place[d] for d in order if d in place]), tuple([node.type.shape[d] for d in left])


def _same(node: Node) -> bool:
    """Whether a node has its operand's elements as they lie."""
    return node.kind == "rename" and node.type.shape == node.ins[0].type.shape
