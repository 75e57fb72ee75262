"""Which results XLA's GPU compiler writes to memory: of what could be computed where it is read, what pays.

XLA's `PriorityFusion` asks a model of the card for every producer, and computes it in all kernels that read
it or in none. What decides is bytes: computed anew by each of n kernels, n times its operands are read;
written, its operands once, and itself n + 1 times, and one more kernel is started. Long polynomials
(`Compiler.costly`) are not computed twice, nor is what is made of them before something is written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardwright.cost.memory.nodes import Node

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
    roots: list[frozenset[int]] = [frozenset()] * len(nodes)
    for node in reversed(nodes):
        number, users = node.number, node.users
        if written[number] or not needed[number]:
            roots[number] = frozenset((number,))
            continue
        if len(users) == 1:
            roots[number] = roots[users[0].number]
            continue
        found = frozenset[int]().union(*[roots[user.number] for user in users])
        times, size = len(found), node.type.nbytes
        if times > 1 and node.ins:
            read = made_of.nbytes(number)
            anew = times * read > read + (times + 1) * size + _START_BYTES
            if anew or made_of.dear(number) or made_of.many(number):
                written[number], found = True, frozenset((number,))
        roots[number] = found if times <= _MOST else frozenset(sorted(found)[:_MOST])
    return written


class _Operands:
    """What is read to compute a node where it is used."""

    def __init__(self, nodes: Sequence[Node], written: Sequence[bool], costly: Collection[str]) -> None:
        self._nodes, self._written, self._costly = nodes, written, costly
        self._known: dict[int, tuple[frozenset[int], bool]] = {}

    def nbytes(self, number: int) -> int:
        """Bytes of what is read; a broadcast or a slice reads no more of anything than it makes of it."""
        most = self._nodes[number].type.nbytes
        return sum(min(self._nodes[one].type.nbytes, most) for one in self._of(number)[0])

    def many(self, number: int) -> bool:
        """Whether that is too much to be read by each of several kernels."""
        return len(self._of(number)[0]) >= _MOST

    def dear(self, number: int) -> bool:
        """Whether something costly is computed."""
        return self._of(number)[1]

    def _of(self, number: int) -> tuple[frozenset[int], bool]:
        known, nodes, waiting = self._known, self._nodes, [number]
        while waiting:
            node = nodes[waiting[-1]]
            unknown = [o.number for o in node.ins if not self._written[o.number] and o.number not in known]
            if unknown:
                waiting += unknown
                continue
            waiting.pop()
            found, dear = set[int](), node.what in self._costly
            for operand in node.ins:
                if self._written[operand.number]:
                    found.add(operand.number)
                else:
                    read, also = known[operand.number]
                    found |= read
                    dear = dear or also
            some = found if len(found) <= _MOST else sorted(found)[:_MOST]
            known[node.number] = frozenset(some), dear
        return known[number]
