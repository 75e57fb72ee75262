"""The order in which XLA's GPU compiler runs kernels: of three orders, the one that needs least memory.

They are those of XLA's `ListMemoryScheduler`, `DFSMemoryScheduler` and `PostOrderScheduler`. What they count
is buffers that kernels write: nothing lies over anything yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import heappop, heappush

from shardwright.cost.memory.nodes import Node


def least_memory(
    asked: Sequence[Node],
    reads: Mapping[int, Sequence[Node]],
    holder: Callable[[Node], Node],
    handed_out: Collection[int],
    together: Mapping[int, int],
) -> list[Node]:
    """Kernels in an order that takes little memory.

    Args:
        asked: inputs and kernels in an order in which operands come first.
        reads: by number of a kernel, the nodes whose buffers it reads.
        holder: the node whose buffer a node is in.
        handed_out: numbers of nodes that are there until the end.
        together: by number of a kernel, that of another one beside which it runs.
    """
    flow = _Flow(asked, reads, holder, handed_out)
    orders = [flow.kernels, flow.deepest_first(), flow.greedily()]
    if together:
        orders = [_beside(order, together) for order in orders]
    return min(orders, key=flow.peak)


def _beside(order: Sequence[Node], together: Mapping[int, int]) -> list[Node]:
    """An order with kernels right behind, or before, those beside which they run, whichever comes first."""
    families: dict[int, list[Node]] = {}
    for node in order:
        families.setdefault(together.get(node.number, node.number), []).append(node)
    found: list[Node] = []
    for node in order:
        found += families.pop(together.get(node.number, node.number), ())
    return found


class _Flow:
    """Who reads what: kernels by their position in `kernels`."""

    def __init__(
        self,
        asked: Sequence[Node],
        reads: Mapping[int, Sequence[Node]],
        holder: Callable[[Node], Node],
        handed_out: Collection[int],
    ) -> None:
        self.kernels = [node for node in asked if node.number in reads]
        self.place = place = {node.number: at for at, node in enumerate(self.kernels)}
        #: Kernels that a kernel waits for; and those whose buffers it reads, which may be others' by then.
        self.needs: list[list[int]] = []
        self.uses: list[list[int]] = []
        self.size = [0] * len(self.kernels)
        for at, node in enumerate(self.kernels):
            if holder(node) is node and node.kind not in ("region", "store"):
                self.size[at] = node.type.nbytes
            operands = reads[node.number]
            self.needs.append([place[o.number] for o in operands if o.number in place])
            held = (holder(operand).number for operand in operands)
            self.uses.append([place[n] for n in dict.fromkeys(held) if n in place])
        self.waiting: list[list[int]] = [[] for _ in self.kernels]
        for at, needed in enumerate(self.needs):
            for one in needed:
                self.waiting[one].append(at)
        self.kept = {place[n] for n in handed_out if n in place}

    def _readers(self) -> list[int]:
        found = [0] * len(self.kernels)
        for used in self.uses:
            for one in used:
                found[one] += 1
        for one in self.kept:
            found[one] += 1
        return found

    def peak(self, order: Sequence[Node]) -> int:
        """The most bytes that are there at a time."""
        left, alive, most = self._readers(), 0, 0
        for node in order:
            at = self.place[node.number]
            alive += self.size[at]
            most = max(most, alive)
            for one in self.uses[at]:
                left[one] -= 1
                if not left[one]:
                    alive -= self.size[one]
            if not left[at]:
                alive -= self.size[at]
        return most

    def greedily(self) -> list[Node]:
        """Of those that are ready the one first that frees most; of equal ones that of most readers."""
        left, missing = self._readers(), [len(needed) for needed in self.needs]
        readers = list(left)
        users: list[list[int]] = [[] for _ in self.kernels]
        for at, used in enumerate(self.uses):
            for one in used:
                users[one].append(at)
        size, done = self.size, [False] * len(self.kernels)
        ready: list[tuple[int, int, int, int]] = []
        count = 0

        def priority(at: int) -> int:
            return sum(size[one] for one in self.uses[at] if left[one] == 1) - size[at]

        def add(at: int) -> None:
            nonlocal count
            count += 1
            heappush(ready, (-priority(at), -readers[at], -count, at))

        for at, wanting in enumerate(missing):
            if not wanting:
                add(at)
        order: list[Node] = []
        while ready:
            at = heappop(ready)[-1]
            if done[at]:
                continue
            done[at] = True
            order.append(self.kernels[at])
            for one in self.uses[at]:
                left[one] -= 1
                if left[one] == 1:  # who reads it last would free it now
                    for user in users[one]:
                        if not done[user] and not missing[user]:
                            add(user)
            for user in self.waiting[at]:
                missing[user] -= 1
                if not missing[user]:
                    add(user)
        return order

    def deepest_first(self) -> list[Node]:
        """Depth first, into operands with most other readers, then those that all in all need most."""
        size, needs = self.size, self.needs
        extra, total = [0] * len(needs), [0] * len(needs)
        for at, needed in enumerate(needs):
            extra[at] = max(0, len(self.waiting[at]) - 1) + sum(extra[one] for one in needed)
            total[at] = size[at] + sum(total[one] for one in needed)
        seen = [False] * len(needs)
        order: list[Node] = []
        ends = [at for at in range(len(needs)) if not self.waiting[at]]
        stack = [(at, False) for at in sorted(ends, key=lambda at: (extra[at], total[at]))]
        while stack:
            at, ran = stack.pop()
            if ran:
                order.append(self.kernels[at])
            elif not seen[at]:
                seen[at] = True
                stack.append((at, True))
                stack += [(one, False) for one in sorted(needs[at], key=lambda one: (extra[one], total[one]))]
        return order
