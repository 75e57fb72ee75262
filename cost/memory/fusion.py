"""Which nodes of a lowered graph get buffers, and in what order their kernels run; see `lowering.py`.

- A reduction takes in the elementwise float32 equations around it, and products before it.
- Other elementwise equations and movements are computed where they are used, again and again. A buffer gets
  what a kernel reads that fuses with nothing (one for each shape), what is handed out, and what is costly and
  would be computed by several kernels.
- What reads no more for it is computed anew even where it is written.
- A kernel runs when its operands are there, behind those that could run before it (breadth first).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardwright.cost.memory.lowering import Lowering
from shardwright.cost.memory.nodes import Node, main_operand
from shardwright.cost.memory.recompute import worth_writing
from shardwright.cost.memory.schedule import least_memory
from shardwright.cost.memory.siblings import siblings

#: Elementwise equations of fewer elements stay out of library fusions.
_LIBRARY_ELEMENTS = 4096
_IN_LIBRARY = frozenset(
    {"abs", "add", "add_any", "broadcast", "ceil", "div", "erf", "exp", "exp2", "expm1", "floor"}
    | {"integer_pow", "log", "log1p", "logistic", "max", "min", "mul", "neg", "pow", "rsqrt", "sign"}
    | {"sqrt", "square", "sub", "tanh"}
)
_LIBRARY_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})

#: Kinds of nodes that are computed where they are used.
_FUSED = frozenset({"loop", "costly", "movement", "rename", "constant", "store"})
#: Those of them that XLA computes twice.
_CHEAP = frozenset({"loop", "movement", "rename", "constant"})

#: In place of the number of a kernel.
_NOBODY, _MANY = -1, -2
#: In place of the number of an input.
_CONSTANTS = -1


class Fusion:
    """Kernels of a lowered graph.

    Attributes:
        reads: by number of a kernel, the nodes whose buffers it reads.
        asked: inputs and kernels in the order in which the results need them, depth first.
    """

    def __init__(self, lowering: Lowering) -> None:
        self._nodes, self._needed = lowering.nodes, lowering.needed
        self._compiler = lowering.compiler
        self._out = dict.fromkeys(node.number for node in lowering.outputs)
        self._groups: dict[int, dict[int, Node]] = {}
        for node in self._nodes if self._compiler.library else ():
            if self._needed[node.number] and node.kind == "reduction" and self._joins(node, begins=True):
                self._grow(node)
        self._buffered = self._find_buffers()
        self._alias: dict[int, Node] = {}
        running = [n for n, buffered in zip(self._nodes, self._buffered, strict=True) if buffered]
        running = [node for node in running if node.kind != "input"]
        self.reads = {node.number: self._operands(node) for node in running}
        self._find_aliases(running)
        self._copy_scattered([node for node in running if node.kind == "scatter"])
        self.asked: list[Node] = []
        self._users: dict[int, list[int]] = {}
        self._missing: dict[int, int] = {}
        self._link()

    # -- library fusions ---------------------------------------------------------------------------

    def _joins(self, node: Node, begins: bool = False) -> bool:
        """Whether a library fusion may take a node in, or begin with it."""
        if (
            node.type.dtype != "float32"
            or node.group is not None
            or (node.number in self._out and not begins)
        ):
            return False
        if node.kind in ("rename", "product"):
            return True
        if node.kind == "reduction":
            return node.what in _LIBRARY_REDUCTIONS
        if node.type.size < _LIBRARY_ELEMENTS or node.kind not in ("loop", "costly", "movement"):
            return False
        return node.what in _IN_LIBRARY

    def _grow(self, seed: Node) -> None:
        """A fusion around a reduction: its single users downwards, then operands that nobody else reads."""
        result, members = seed, {seed.number: seed}
        while len(result.users) == 1 and result.users[0].kind != "product":
            if result.number in self._out or not self._joins(result.users[0]):
                break
            result = result.users[0]
            members[result.number] = result
        waiting = list(members.values())
        while waiting:
            for operand in waiting.pop().ins:
                if operand.number in members or not self._joins(operand):
                    continue
                if all(user.number in members for user in operand.users):
                    members[operand.number] = operand
                    waiting.extend(members.values())
        for member in members.values():
            member.group = result.number
        self._groups[result.number] = members

    # -- fusion ------------------------------------------------------------------------------------

    def _alone(self, node: Node) -> bool:
        """Whether a node reads its operands from memory."""
        if node.kind in _FUSED:
            return node.group is not None
        return node.kind not in self._compiler.takes_in and node.what not in self._compiler.takes_in

    def _find_buffers(self) -> list[bool]:
        """By number, whether a node is written to memory."""
        if self._compiler.thrifty:
            must = self._find_written()
            return worth_writing(self._nodes, must, self._needed, self._compiler.costly)
        found = [False] * len(self._nodes)
        #: The only kernel that computes what is not written; `_NOBODY`, or `_MANY`: only costly ones care.
        roots = [_NOBODY] * len(self._nodes)
        alone = [node.kind not in _FUSED or node.group is not None for node in self._nodes]
        out, needed = self._out, self._needed
        for node in reversed(self._nodes):
            number = node.number
            if not needed[number] or (node.group is not None and node.group != number):
                continue
            written, root = alone[number] or number in out, _NOBODY
            for user in node.users:
                if alone[user.number]:
                    written = True
                    break
                theirs = roots[user.number]
                if root == _NOBODY:
                    root = theirs
                elif theirs not in (root, _NOBODY):
                    root = _MANY
            if written or (root == _MANY and node.kind == "costly"):
                found[number], root = True, number
            roots[number] = root
        return found

    def _find_written(self) -> list[bool]:
        """By number, whether a node is written in any case: kernels, results, what is read from memory."""
        out, needed = self._out, self._needed
        found = [node.kind not in _FUSED and node.what != "iota" for node in self._nodes]
        for node in self._nodes:
            if needed[node.number] and self._alone(node):
                for operand in node.ins:
                    if operand.ins:
                        found[operand.number] = True
        for number in out:
            found[number] = True
        return [mine and wanted for mine, wanted in zip(found, needed, strict=True)]

    def _operands(self, node: Node) -> tuple[Node, ...]:
        """What a kernel reads from memory."""
        members = self._groups.get(node.number)
        if members is not None:
            outside = (o for member in members.values() for o in member.ins if o.number not in members)
            return tuple(dict.fromkeys(outside))
        buffered, alone = self._buffered, self._alone(node)
        found: dict[Node, None] = {}
        seen: set[int] = set()
        waiting = list(node.ins)
        for operand in waiting:  # which grows: XLA appends the operands of what it takes into a fusion
            if operand.number in seen:
                continue
            seen.add(operand.number)
            if buffered[operand.number] and (alone or not self._anew(operand)):
                found[operand] = None
            else:
                waiting.extend(operand.ins)
        return tuple(found)

    def _anew(self, node: Node) -> bool:
        """Whether fusions compute a node anew although it is written: they read no more for it."""
        if node.kind not in _CHEAP or node.group is not None:
            return False
        if self._compiler.thrifty and (
            node.type.size == 1 or node.type.dtype == "bool" or self._narrowed(node)
        ):
            return False  # that takes less to read
        rank = node.type.rank
        wide = [o for o in node.ins if o.what != "broadcast" and o.kind != "constant" and o.type.rank >= rank]
        return len(wide) <= 1 or sum(operand.type.nbytes for operand in node.ins) <= node.type.nbytes

    def _narrowed(self, node: Node) -> bool:
        """Whether a node has fewer bytes than the product that it is made of, element by element."""
        made = main_operand(node)
        while made is not None and not self._buffered[made.number]:
            made = main_operand(made)
        return made is not None and made.kind == "product" and made.type.nbytes > node.type.nbytes

    def _find_aliases(self, running: Sequence[Node]) -> None:
        for node in running:
            if node.kind == "view":
                self._alias[node.number] = node.ins[1]
            elif node.kind == "rename" and node.group is None:
                source = node.ins[0]
                while not self._buffered[source.number] and source.kind == "rename":
                    source = source.ins[0]
                # What is computed where it is used is computed once for each shape.
                if self._buffered[source.number] and self._alone(source):
                    self._alias[node.number] = source

    def _copy_scattered(self, scatters: Sequence[Node]) -> None:
        """What is scattered into is copied as soon as it is there, unless all else that reads it runs before.

        Inputs are not copied here: of state, see `buffers.py`.
        """
        readers: dict[int, set[int]] = {node.ins[0].number: set() for node in scatters}
        for number, operands in self.reads.items() if readers else ():
            for operand in operands:
                if operand.number in readers:
                    readers[operand.number].add(number)
        for node in scatters:
            source = node.ins[0]
            others = readers[source.number] - {node.number}
            if not others or source.kind == "input" or others <= self._before(node):
                continue
            copy = Node(len(self._nodes), "copy", "kernel", (source,), source.type, node.equation)
            self._nodes.append(copy)
            node.ins = (copy, *node.ins[1:])
            self.reads[copy.number] = (source,)
            self.reads[node.number] = tuple([copy if o is source else o for o in self.reads[node.number]])

    def _before(self, node: Node) -> set[int]:
        """Numbers of the kernels that a kernel needs, however indirectly."""
        found: set[int] = set()
        waiting = [node.number]
        while waiting:
            for operand in self.reads.get(waiting.pop(), ()):
                if operand.number not in found:
                    found.add(operand.number)
                    waiting.append(operand.number)
        return found

    def holder(self, node: Node) -> Node:
        """The node whose buffer a node is in."""
        while node.number in self._alias:
            node = self._alias[node.number]
        return node

    def bent(self, kernel: Node) -> set[int]:
        """Numbers of what a kernel reads at other places than it writes, and so may not write over."""
        reads = self.reads[kernel.number]
        found: set[int] = set()
        elsewhere: list[Node] = []
        waiting, seen = [kernel], {kernel.number}
        for node in waiting:  # which grows
            ins = node.ins
            if node.kind == "scatter" or node.what == "dynamic_update_slice":
                elsewhere += ins[1:]
                ins = ins[:1]
            elif node.kind not in ("loop", "costly"):
                elsewhere += ins
                continue
            for operand in ins:
                if operand.number not in seen and operand not in reads:
                    seen.add(operand.number)
                    waiting.append(operand)
        for operand in elsewhere:  # which grows
            if operand.number not in found:
                found.add(operand.number)
                if operand not in reads:
                    elsewhere += operand.ins
        return found

    def _link(self) -> None:
        """Ask for what the results need, depth first, and note who waits for what."""
        reads, nodes, users, missing = self.reads, self._nodes, self._users, self._missing
        waiting = list(reversed(self._out))
        while waiting:
            number = waiting.pop()
            if number < 0:  # what it reads is there
                self.asked.append(nodes[~number])
                for operand in reads.get(~number, ()):
                    users[operand.number].append(~number)
            elif number not in missing:
                operands = reads.get(number, ())
                missing[number] = len(operands)
                users[number] = []
                waiting.append(~number)
                waiting += [operand.number for operand in operands[::-1]]

    def order(self, copied: Collection[int] = ()) -> list[Node]:
        """Kernels as they become ready, first come, first served, as XLA's scheduler on CPUs has them.

        Those that wait for the same one are told in the order in which the results need them. Who waits for a
        loop waits once more, as its operands are gathered in a tuple; so does who waits for an input that is
        `copied`. Constants, which reductions begin with, come behind the inputs.
        """
        if self._compiler.thrifty:
            out = {self.holder(self._nodes[number]).number for number in self._out}
            together = siblings([node for node in self.asked if node.number in self.reads], self.reads)
            return least_memory(self.asked, self.reads, self.holder, out, together)
        reads, nodes, users, missing = self.reads, self._nodes, self._users, dict(self._missing)
        ready = sorted(number for number in missing if number not in reads)
        begin = sorted(number for number, count in missing.items() if not count and number in reads)
        ready = [*[n for n in begin if nodes[n].what == "iota"], *ready, _CONSTANTS]
        begin = [n for n in begin if nodes[n].what != "iota"]
        later = {node.number for node in self.asked if node.kind == "region"}.union(copied)
        found: list[Node] = []
        given = True
        for number in ready:  # which grows
            if number == _CONSTANTS:
                ready += begin
                given = False
                continue
            if number in later:
                later.remove(number)
                ready.append(number)
                continue
            if number in reads:
                found.append(nodes[number])
            for user in users[number]:
                missing[user] -= 1
                if not missing[user]:
                    (begin if given and self._reduces(nodes[user]) else ready).append(user)
        return found

    def _reduces(self, kernel: Node) -> bool:
        members = self._groups.get(kernel.number)
        return any(node.kind == "reduction" for node in (members.values() if members else (kernel,)))
