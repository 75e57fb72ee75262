"""Buffers of a graph on one device, over the kernels that XLA runs: who is alive when, and where it lies.

- A buffer lives from the kernel that writes it to the last one that reads it.
- An elementwise kernel may write over an operand of its shape that nobody reads afterwards, if it reads no
  element of it but the one that it writes; so may a scatter.
- State is written over the input that it continues (the input is donated). Where the input may still be read
  by then, it is copied first. Until a result is written, its place can hold other buffers (`places.py`).
- A loop's bodies have their own buffers while it runs. What is carried has one place: what it begins with is
  made or copied there, and every iteration writes over it. What may still be read by then is copied first.
- All of it is packed into one arena, by decreasing size, each buffer into the least gap that holds it.

What XLA's kernels allocate for themselves (packed operands of a product, scratch of threads) is not in it, as
it is not in `compiled.memory_analysis()`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.memory.compilers import COMPILERS, Compiler
from shardwright.cost.memory.fusion import Fusion
from shardwright.cost.memory.lowering import Lowering
from shardwright.cost.memory.nodes import Buffer, Node
from shardwright.cost.memory.places import Place, settle, share
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Equation, Graph, Value, per_graph
from shardwright.ir.regions import boundary

#: XLA aligns buffers on CPUs to so many bytes.
_ALIGNMENT = 64

#: Kinds of kernels that may write over an operand.
_IN_PLACE = ("loop", "costly", "scatter")


@dataclass(frozen=True, slots=True)
class Layout:
    """Memory of one device that runs a graph.

    Attributes:
        arguments_bytes: inputs and constants, and outputs that are not written over inputs.
        kernels: how many run.
        buffers: scratch.
        scratch_bytes: size of the arena that holds them.
    """

    arguments_bytes: int
    kernels: int
    buffers: tuple[Buffer, ...]
    scratch_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments and arena."""
        return self.arguments_bytes + self.scratch_bytes

    @property
    def peak_kernel(self) -> int:
        """The kernel during which most is alive."""
        return int(self.over_time.argmax()) if self.kernels else 0

    @property
    def over_time(self) -> Floats:
        """Bytes alive while each kernel runs, arguments included: (kernels,)."""
        change = np.zeros(self.kernels + 1)
        for buffer in self.buffers:
            change[buffer.first] += buffer.nbytes
            change[buffer.last + 1] -= buffer.nbytes
        return self.arguments_bytes + change.cumsum()[: self.kernels]


@per_graph
def layout(graph: Graph) -> Layout:
    """The layout of a whole step, or of a segment; the state of its graph is donated, and nothing else."""
    return _Allocation(graph, top=True, compiler=COMPILERS[graph.compiler]).layout()


def scratch_bytes(graph: Graph) -> int:
    """Bytes of the arena of such a program."""
    return layout(graph).scratch_bytes


class _Allocation:
    """Where the buffers of a graph lie; of a loop's body, `carried` says which output becomes which input."""

    def __init__(
        self,
        graph: Graph,
        *,
        top: bool,
        sliced: Collection[int] = (),
        stored: Collection[int] = (),
        carried: Mapping[int, int] = MappingProxyType({}),
        compiler: Compiler,
    ) -> None:
        self.graph, self.compiler = graph, compiler
        self.top, self.carried = top, carried
        self.lowering = Lowering(graph, partial(_inner, compiler=compiler), compiler, sliced, stored)
        self.fusion = Fusion(self.lowering)
        self.last_read: dict[int, int] = {}
        self.read_by: dict[int, set[str]] = {}
        self._lying: dict[int, Buffer] = {}
        self._elsewhere: dict[int, set[int]] = {}
        self._reduced = self._find_reduced() if compiler.thrifty else set[int]()
        self._readers, self._before = self._find_readers()
        self._pairs = self._continued()
        self._copied = self._find_copied()
        self.kernels = self.fusion.order(self._copied)
        self.times = {kernel.number: time for time, kernel in enumerate(self.kernels)}

    def layout(self) -> Layout:
        made = self.buffers()
        graph, kernels = self.graph, self.kernels
        held = sum(value.type.nbytes for value in (*graph.inputs, *graph.constants))
        inside: dict[int, list[Buffer]] = {}
        reported: list[Buffer] = []
        for buffer in made:
            (reported if buffer.within is None else inside.setdefault(buffer.first, [])).append(buffer)
        for time, some in inside.items():
            reported.append(Buffer(_most(some), time, time, kernels[time].what, kernels[time].equation))
        return Layout(held + self._handed_out(), len(kernels), tuple(reported), pack(made))

    def buffers(self) -> list[Buffer]:
        """All of them, those inside of loops included."""
        fusion, lying = self.fusion, self._lying
        for time, kernel in enumerate(self.kernels):
            self.last_read[fusion.holder(kernel).number] = time
            part = kernel.equation.part if kernel.equation is not None else ""
            for operand in fusion.reads[kernel.number]:
                source = fusion.holder(operand).number
                self.last_read[source] = time
                self.read_by.setdefault(source, set()).add(part)
        end = max(len(self.kernels) - 1, 0)
        for node in self.lowering.outputs:
            self.last_read[fusion.holder(node).number] = end
        pairs, made = self._pairs, list[Buffer]()
        begins: dict[int, Buffer] = {}
        for source, target in pairs:
            last = self.last_read.get(source.number, -1)
            if source.number in self._copied:
                early = 1 - (source.number + 1) / (len(self.graph.inputs) + 1)
                last = max(last, 0) if self._copied[source.number] else end
                given = Buffer(source.type.nbytes, 0, last, "copy", None, early=early)
                made.append(given)
            elif self.top:
                given = Buffer(source.type.nbytes, -1, last, "", None)
            else:
                continue
            begins[target.number] = lying[source.number] = given
        results = {target.number for _, target in pairs if target.kind != "input"}
        if self.top:
            results |= {fusion.holder(node).number for node in self.lowering.outputs}
        for kernel in fusion.asked:
            if kernel.kind == "region":
                time = self.times[kernel.number]
                made += [replace(buffer, first=time, last=time) for buffer in kernel.inner]
            elif kernel.kind not in ("input", "store") and fusion.holder(kernel) is kernel:
                if kernel.kind == "product" and self.compiler.workspace_bytes:
                    time = self.times[kernel.number]
                    space = self.compiler.workspace_bytes
                    made.append(Buffer(space, time, time, "workspace", kernel.equation))
                buffer = lying[kernel.number] = self._buffer(kernel)
                if kernel.number not in results:
                    made.append(buffer)
        if self.top:
            places = [
                Place(lying[node.number], begins.get(node.number))
                for node in fusion.asked
                if node.number in results and node.kind != "input"
            ]
            made = settle(made, places)
        return share(made)

    def _buffer(self, kernel: Node) -> Buffer:
        number, time = kernel.number, self.times[kernel.number]
        over: list[Buffer] = []
        if kernel.kind in _IN_PLACE:
            for operand in self.fusion.reads[number]:
                buffer = self._lying.get(self.fusion.holder(operand).number)
                if buffer is not None and buffer.last == time and self._over(operand, kernel):
                    over.append(buffer)
        role = _role(kernel, self.read_by.get(number, ()))
        last = self.last_read[number]
        return Buffer(kernel.type.nbytes, time, last, kernel.what, kernel.equation, role, over=over)

    def _find_copied(self) -> dict[int, bool]:
        """Inputs that may still be read when a node is written over them; False: or that are handed on."""
        moved = {target.number for _, target in self._pairs if target.kind == "input"}
        found: dict[int, bool] = {}
        for source, target in self._pairs:
            reading = self._readers.get(source.number, ())
            done, over = self._before.get(target.number, 0), self._over(source, target)
            if source.number in moved:
                found[source.number] = False
            elif any(not done >> n & 1 for n in reading if n != target.number or not over):
                found[source.number] = True
        return found

    def _over(self, source: Node, target: Node) -> bool:
        """Whether a kernel may write over an operand that nobody reads afterwards."""
        if target.kind not in _IN_PLACE or target.group is not None or source.type != target.type:
            return False
        if target.number in self._reduced:
            return False
        return source.number not in self._bent(target)

    def _find_reduced(self) -> set[int]:
        """Numbers of what reductions read: the same kernel writes it and reduces it, and over nothing."""
        nodes, reads = self.lowering.nodes, self.fusion.reads
        sums = [operands for number, operands in reads.items() if nodes[number].kind == "reduction"]
        return {self.fusion.holder(operand).number for operands in sums for operand in operands}

    def _bent(self, kernel: Node) -> set[int]:
        found = self._elsewhere.get(kernel.number)
        if found is None:
            found = self._elsewhere[kernel.number] = self.fusion.bent(kernel)
        return found

    def _continued(self) -> list[tuple[Node, Node]]:
        """Inputs that are donated, or carried by a loop, with the nodes that are written over them."""
        graph, of = self.graph, self.lowering.of
        pairs: list[tuple[Node, Node]] = []
        for out, position in (graph.state if self.top else self.carried).items():
            atom = graph.outputs[out]
            if isinstance(atom, Value):
                pairs.append((of[graph.inputs[position]], self.fusion.holder(of[atom])))
        return [(source, target) for source, target in pairs if source is not target]

    def _find_readers(self) -> tuple[dict[int, list[int]], dict[int, int]]:
        """Kernels that read each input; and by kernel, which readers certainly run before it, as bits."""
        readers: dict[int, list[int]] = {}
        before: dict[int, int] = {}
        for kernel in self.fusion.asked:
            done = 0
            reads_input = False
            for operand in self.fusion.reads.get(kernel.number, ()):
                done |= before.get(operand.number, 0)
                source = self.fusion.holder(operand)
                if source.kind == "input":
                    readers.setdefault(source.number, []).append(kernel.number)
                    reads_input = True
            before[kernel.number] = done | (1 << kernel.number if reads_input else 0)
        return readers, before

    def _handed_out(self) -> int:
        """Bytes of outputs that are not written over an input."""
        state = {out for out, _ in self.graph.state.items()}
        fresh = [a for out, a in enumerate(self.graph.outputs) if out not in state]
        return sum(atom.type.nbytes for atom in fresh)


def _role(kernel: Node, readers: Collection[str]) -> str:
    part = kernel.equation.part if kernel.equation is not None else ""
    if part == "forward" and "backward" in readers:
        return "saved"
    return "gradient" if part == "backward" and "" in readers else "temporary"


def _inner(equation: Equation, compiler: Compiler) -> list[Buffer]:
    """What the bodies of a loop or branch need, one after another, at times between 0 and 1."""
    wiring = boundary(equation)
    found: list[Buffer] = []
    for number, region in enumerate(equation.regions):
        sliced = [port.inner for port in wiring.ins if port.stacked and port.region == number]
        stored = [port.inner for port in wiring.outs if port.stacked and port.region == number]
        carried = {out: into for of, out, to, into in wiring.carries if of == to == number}
        body = _Allocation(
            region, top=False, sliced=sliced, stored=stored, carried=carried, compiler=compiler
        )
        part = 1 / ((len(body.kernels) + 2) * len(equation.regions))
        begin = number / len(equation.regions)
        for buffer in body.buffers():
            # A body's time runs from before its first kernel, where a loop within it begins, to the last one.
            start, end = (begin + (time + 1.5) * part for time in (buffer.start, buffer.end))
            found.append(replace(buffer, within=(start, end)))
    return found


def _most(buffers: Sequence[Buffer]) -> int:
    """The most bytes that are alive at a time."""
    starts = np.array([buffer.start for buffer in buffers])
    ends = np.array([buffer.end for buffer in buffers])
    sizes = np.array([buffer.nbytes for buffer in buffers], dtype=np.int64)
    alive = (starts[:, None] <= starts) & (ends[:, None] >= starts)
    return int((sizes[:, None] * alive).sum(axis=0).max(initial=0))


def pack(buffers: list[Buffer]) -> int:
    """Place buffers by decreasing size, each in the least gap that holds it; bytes of the arena.

    The order is that of XLA's `GlobalDecreasingSizeBestFitHeap`.
    """
    order = sorted(buffers, key=lambda b: (-b.nbytes, b.start - b.end, b.start))
    count = len(order)
    first = np.array([b.start for b in order], dtype=np.float64)
    last = np.array([b.end for b in order], dtype=np.float64)
    sizes = [-(-b.nbytes // _ALIGNMENT) * _ALIGNMENT for b in order]
    starts, ends = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    top = 0
    for number, buffer in enumerate(order):
        alive = ((first[:number] <= last[number]) & (last[:number] >= first[number])).nonzero()[0]
        offset = _gap(starts[alive], ends[alive], sizes[number])
        starts[number], ends[number] = offset, offset + sizes[number]
        buffer.offset = offset
        top = max(top, offset + buffer.nbytes)
    return top


def _gap(starts: NDArray[np.int64], ends: NDArray[np.int64], size: int) -> int:
    """Where a buffer fits best between those that are placed."""
    if not len(starts):
        return 0
    order = starts.argsort(kind="stable")
    free = np.zeros(len(order) + 1, dtype=np.int64)
    np.maximum.accumulate(ends[order], out=free[1:])
    room = starts[order] - free[:-1]
    fits = (room >= size).nonzero()[0]
    if not len(fits):
        return int(free[-1])
    return int(free[fits[room[fits].argmin()]])
