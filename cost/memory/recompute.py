"""Which results XLA's GPU compiler writes to memory: of what could be computed where it is read, what pays.

XLA's `PriorityFusion` asks a model of the card for every producer, and computes it in all kernels that read
it or in none. What decides is bytes: computed anew by each of n kernels, n times its operands are read;
written, its operands once, and itself n + 1 times, and one more kernel is started. Long polynomials
(`Compiler.costly`) are not computed twice, nor is what is made of them before something is written. What
a half is read for in float32 is as large as what it may be made of: the half itself is asked about, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardwright.cost.memory.nodes import HALVES, Node

#: Starting a kernel takes as long as a card's memory takes for so many bytes: 1 µs (XLA's model) at 1.5 TB/s.
_START_BYTES = 1_500_000
#: Who is made of so many operands is written (XLA: where a kernel would have 96); the rest of them, as of
#: kernels that compute something, are not looked at.
_MOST = 16


def worth_writing(
    nodes: Sequence[Node], must: Sequence[bool], needed: Sequence[bool], costly: Collection[str]
) -> list[bool]:
    """By number, whether a node is written.

    Args:
        nodes: operands come before users.
        must: whether a node is written in any case.
        needed: whether anything depends on it.
        costly: primitives that are not computed twice.
    """
    written = list(must)
    made_of = _Operands(nodes, must, costly)
    #: The kernels that compute what is not written.
    roots: list[Collection[int]] = [()] * len(nodes)
    for node in reversed(nodes):
        number, users = node.number, node.users
        if written[number] or not needed[number]:
            roots[number] = (number,)
        elif len(users) == 1 and (node.type.dtype not in HALVES or users[0].type.dtype in HALVES):
            roots[number] = roots[users[0].number]
        elif node.ins:
            found = set[int]()
            for user in users:
                found.update(roots[user.number])
                if len(found) > _MOST:
                    break
            if len(found) > 1 and made_of.pay(node, found):
                written[number], found = True, {number}
            roots[number] = found
    return written


class _Operands:
    """What is read to compute a node where it is used, as far as only what must be is written."""

    def __init__(self, nodes: Sequence[Node], written: Sequence[bool], costly: Collection[str]) -> None:
        self._nodes, self._written = nodes, written
        #: How many operands at most; and whether something costly is computed.
        self._most = most = [0] * len(nodes)
        self._dear = dear = [node.what in costly for node in nodes]
        for node in nodes:
            if not written[node.number]:
                for operand in node.ins:
                    number = operand.number
                    most[node.number] += 1 if written[number] else most[number]
                    dear[node.number] |= dear[number] and not written[number]
        self._known: dict[int, frozenset[int]] = {}

    def pay(self, node: Node, kernels: Collection[int]) -> bool:
        """Whether these kernels had better read a node than compute it."""
        number, size, times = node.number, node.type.nbytes, len(kernels)
        if self._dear[number]:
            return True
        spared, most = (times + 1) * size + _START_BYTES, self._most_read(node, kernels)
        if self._most[number] < _MOST and (times - 1) * self._most[number] * most <= spared:
            return False
        found = self._of(number)
        read = sum(min(self._nodes[one].type.nbytes, most) for one in found)
        return len(found) >= _MOST or (times - 1) * read > spared

    def _most_read(self, node: Node, kernels: Collection[int]) -> int:
        """Bytes of an operand, at most: a broadcast or a slice reads no more of anything than it makes of it.

        What is narrower than float32 may be made of that, which does not count where it is read turned.
        """
        if node.type.dtype in HALVES and not any(self._nodes[k].what == "transpose" for k in kernels):
            return 2 * node.type.nbytes
        return node.type.nbytes

    def _of(self, number: int) -> frozenset[int]:
        """Numbers of the operands."""
        known, nodes, waiting = self._known, self._nodes, [number]
        while waiting:
            node = nodes[waiting[-1]]
            inside = [o.number for o in node.ins if not self._written[o.number]]
            unknown = [one for one in inside if one not in known]
            if unknown:
                waiting += unknown
                continue
            waiting.pop()
            found = {o.number for o in node.ins if self._written[o.number]}.union(*[known[n] for n in inside])
            known[node.number] = frozenset(found if len(found) <= _MOST else sorted(found)[:_MOST])
        return known[number]
