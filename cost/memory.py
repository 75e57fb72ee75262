"""Bytes that each device holds over a program, by liveness.

What is written is what a compiler writes for the whole step (`cost/written.py`), and beside it what an
exchange reads or makes. All else is computed where it is read, so that what it is made of lives until then.

- Between two exchanges a device runs one compiled program: what that reads from outside is there until it
  ends, and what it hands on has its place from its beginning.
- A buffer lives from the instruction that writes it to the last that reads it; an elementwise result is
  written over an operand of its size that nobody reads afterwards.
- Arguments and constants are there throughout: the caller may read the old state again.

The plan's figures come from a closer look at fewer programs: `shardwright/device_memory.py`. This one is for
programs of which there are many. It does not know in which order a compiler runs a stretch, nor how buffers
are packed; `Footprint.peak` is within a tenth of the other for most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TypeAlias

import numpy as np

from shardwright.cost.lines import ALIASES
from shardwright.cost.share_cost import Floats
from shardwright.cost.written import Written, written
from shardwright.ir.collectives import registry
from shardwright.ir.graph import Graph, TensorType, Value, per_graph, value_types
from shardwright.ir.host import is_reload
from shardwright.ir.placement import Placement, R, Shard, by_node, cuts, region, seat
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program, nodes_of, own_ratios
from shardwright.ir.recompute import begins_again, repeats

Key: TypeAlias = tuple[int, Placement]
#: Bytes of a tensor in a placement: fixed, and times a device's share (one for each of a program's ratios).
Bytes: TypeAlias = tuple[float, ...]
Size: TypeAlias = Callable[[TensorType, Placement], Bytes]
_NOTHING = TensorType((0,), "float32")
#: A tenant that may be written over one of others, and when.
_Over: TypeAlias = tuple[int, tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes over time as affine functions of a device's share: `fixed[t] + shared[t] * share`.

    Only moments that can be the peak under some share are kept (the Pareto front).
    """

    fixed: Floats
    shared: Floats

    def peak(self, share: Floats) -> Floats:
        """Peak bytes of devices with these shares."""
        return (self.fixed[:, None] + self.shared[:, None] * share[None, :]).max(axis=0)


def footprint(program: Program, graph: Graph) -> Footprint:
    """The program's memory over time; loop bodies add their own peak moments to that of the loop."""
    return _front(_moments(program, graph, written(graph), top=True))


@dataclass(frozen=True, slots=True)
class Footprints:
    """A `Footprint` of a program with several ratios.

    Attributes:
        fixed: (moments,) bytes whatever the shares.
        shared: (moments, ratios) bytes times a device's share: the plan's ratios first, then by number.
    """

    fixed: Floats
    shared: Floats

    def peak(self, shares: Floats) -> Floats:
        """Peak bytes of devices whose shares are (ratios, devices)."""
        return (self.fixed[:, None] + self.shared @ shares).max(axis=0)


def footprints(program: Program, graph: Graph) -> Footprints:
    """`footprint` of a program with ratios of its own, which `own_ratios` numbers."""
    columns = {number: 2 + place for place, number in enumerate(own_ratios(program))}
    width = 2 + len(columns)

    def size(tensor: TensorType, placement: Placement) -> Bytes:
        column = 0
        if isinstance(placement, Shard):
            column = 1 if placement.by is None else columns[placement.by.number]
        return tuple([float(tensor.nbytes) if place == column else 0.0 for place in range(width)])

    front = _front_array(_moments(program, graph, written(graph), top=True, size=size))
    return Footprints(front[:, 0], front[:, 1:])


def peak_bytes(program: Program, graph: Graph, ratios: Sequence[float]) -> tuple[int, ...]:
    """Peak bytes of every device at its ratio."""
    if own := own_ratios(program):
        every = np.array([ratios, *(each.shares for each in own.values())])
        return tuple(int(b) for b in footprints(program, graph).peak(every))
    return tuple(int(b) for b in footprint(program, graph).peak(np.asarray(ratios)))


@per_graph
def all_bytes(graph: Graph) -> int:
    """Bytes of all tensors of a step, each whole: what a device needs that holds all of them at once, twice.

    Twice, because of what a compiler keeps in two forms, and exchanges pack.
    """
    found = sum(v.type.nbytes for v in graph.values())
    inner = sum(all_bytes(region) for equation in graph.equations for region in equation.regions)
    return 2 * found + inner


def _size(tensor: TensorType, placement: Placement) -> Bytes:
    return (0.0, float(tensor.nbytes)) if isinstance(placement, Shard) else (float(tensor.nbytes), 0.0)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak bytes of every device at ratios that are settled.

    `seen` says whether that is of the program as it will run, rather than of the model.
    """

    bytes: tuple[int, ...]
    seen: bool = False

    def peak(self, share: Floats) -> Floats:
        """As `Footprint.peak`, for the ratios that are settled."""
        assert len(share) == len(self.bytes), f"{len(share)} shares for {len(self.bytes)} devices"
        return np.asarray(self.bytes, dtype=np.float64)


def peaks_by_device(program: Program, graph: Graph, ratios: Sequence[float]) -> Peaks:
    """Peak bytes of every device of a program on one mesh axis or on two.

    Devices of equal ratio, in nodes of equal ratio, count as the first of them: it gets what rounding leaves
    over.
    """
    nodes = nodes_of(program)
    others = own_ratios(program).values()
    known: dict[tuple[object, ...], int] = {}
    found: list[int] = []
    for device, ratio in enumerate(ratios):
        home = (None, 0) if nodes is None else seat(device, nodes)
        own = None if nodes is None else round(by_node(ratios, nodes)[0][home[0] or 0], 9)
        key = (round(ratio, 9), own, *(round(other.shares[device], 9) for other in others))
        if key not in known:
            held = partial(_held, device=device, ratios=tuple(ratios), known={})
            known[key] = int(_moments(program, graph, written(graph), top=True, size=held)[:, 0].max())
        found.append(known[key])
    return Peaks(tuple(found))


def _held(
    tensor: TensorType,
    placement: Placement,
    device: int,
    ratios: tuple[float, ...],
    known: dict[tuple[TensorType, Placement], float],
) -> Bytes:
    """Bytes that a device has of a tensor."""
    key = tensor, placement
    if key not in known:
        lengths = [length for _, length in region(tensor.shape, placement, device, ratios)]
        known[key] = tensor.nbytes * prod(lengths) / max(prod(tensor.shape), 1)
    return known[key], 0.0


@dataclass(slots=True)
class _Tenants:
    """What a program establishes, in order; a property that is established anew is another tenant.

    Attributes:
        stretch: the stretch between exchanges in which it is made; -1 for what is given.
        sources: tenants in memory that it is read from: itself, or what it is computed from.
        first, last: when its buffer is there; -1, -1 without one.
        size: of its buffer, as `Size` has it.
        leaves: tenants that another stretch reads, or that are handed out.
        over: tenants that may be written over operands, with these and the moment.
    """

    stretch: list[int] = field(default_factory=list[int])
    sources: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    first: list[int] = field(default_factory=list[int])
    last: list[int] = field(default_factory=list[int])
    size: list[Bytes] = field(default_factory=list[Bytes])
    leaves: set[int] = field(default_factory=set[int])
    over: list[tuple[int, tuple[int, ...], int]] = field(
        default_factory=list[tuple[int, tuple[int, ...], int]]
    )

    def add(self, stretch: int) -> int:
        number = len(self.stretch)
        self.stretch.append(stretch)
        self.sources.append((number,))
        self.first.append(-1)
        self.last.append(-1)
        self.size.append((0.0, 0.0))
        return number

    def write(self, number: int, time: int, size: Bytes) -> None:
        self.first[number] = self.last[number] = time
        self.size[number] = size

    def read(self, numbers: tuple[int, ...], time: int) -> None:
        for number in numbers:
            if self.last[number] < time:
                self.last[number] = time


class _Walk:
    """Follows the instructions of a program, or of a loop's body, and notes who is in memory when."""

    def __init__(self, program: Program, graph: Graph, held: Written, size: Size, *, top: bool) -> None:
        self.program, self.graph, self.held, self.size, self.top = program, graph, held, size, top
        self.types = value_types(graph)
        self.end = len(program.instructions)
        self.stretches, self.ends = _stretches(program, graph)
        self.tenants = _Tenants()
        self.current: dict[Key, int] = {}
        self.reads: list[tuple[int, ...]] = []
        self.made: list[tuple[int, ...]] = []
        self.time_of: dict[int, int] = {}
        #: (moment, bytes) beside the tenants: temporaries, bodies, what exchanges pack.
        self.beside: list[tuple[int, int, Bytes]] = []
        self.inner: list[tuple[int, Floats]] = []
        self._establish()
        self._follow()

    def _establish(self) -> None:
        tenants, current, graph, program = self.tenants, self.current, self.graph, self.program
        given = [(v.index, p) for v, p in zip(graph.inputs, program.inputs, strict=True)]
        for key in (*given, *((v.index, R) for v in graph.constants)):
            current[key] = tenants.add(-1)
            if not self.top and key[0] in self.held.values:
                tenants.write(current[key], 0, self.size(self.types[key[0]], key[1]))
        for time, instruction in enumerate(program.instructions):
            stretch = self.stretches[time]
            read = tuple([current[key] for key in keys_read(instruction, graph) if key in current])
            for number in read:
                if tenants.stretch[number] != stretch:
                    tenants.leaves.add(number)
            made: list[int] = []
            for key in keys_made(instruction, graph):
                current[key] = number = tenants.add(stretch)
                made.append(number)
            self.reads.append(read)
            self.made.append(tuple(made))
            if not isinstance(instruction, Move):
                self.time_of.setdefault(instruction.equation, time)
        if self.top:
            for key in _keys(graph, program):
                if key is not None and key in current:
                    tenants.leaves.add(current[key])

    def _follow(self) -> None:
        tenants = self.tenants
        canonical: dict[Key, int] = {}
        for time, instruction in enumerate(self.program.instructions):
            read, made = self.reads[time], self.made[time]
            if isinstance(instruction, Compute):
                self._compute(time, instruction, read, made, canonical)
                continue
            sources = _union([tenants.sources[number] for number in read])
            keys = keys_made(instruction, self.graph)
            if isinstance(instruction, Move) and registry()[instruction.kind].local:
                (number,), (key,) = made, keys
                tenants.sources[number] = sources
                if number in tenants.leaves:
                    self._write(number, time, key, sources)
                continue
            for number, key in zip(made, keys, strict=True):
                self._write(number, time, key, sources)
            tenants.read(sources, time)
            if isinstance(instruction, Move):
                self._pack(time, instruction)
            else:
                self._bodies(time, instruction)

    def _write(self, number: int, time: int, key: Key, sources: tuple[int, ...]) -> None:
        tenants = self.tenants
        tenants.write(number, time, self.size(self.types[key[0]], key[1]))
        tenants.sources[number] = (number,)
        tenants.read(sources, time)

    def _compute(
        self,
        time: int,
        instruction: Compute,
        read: tuple[int, ...],
        made: tuple[int, ...],
        canonical: dict[Key, int],
    ) -> None:
        tenants, held = self.tenants, self.held
        equation = self.graph.equations[instruction.equation]
        if is_reload(equation):  # what it reads is in host memory until it is read
            for number, value, placement in zip(
                made, equation.outputs, instruction.signature.outs, strict=True
            ):
                self._write(number, time, (value.index, placement), ())
            return
        sources = _union([tenants.sources[number] for number in read])
        renames = equation.primitive in ALIASES
        for number, value, placement in zip(made, equation.outputs, instruction.signature.outs, strict=True):
            index = value.index
            equal = canonical.get((held.same.get(index, index), placement))
            leaves = number in tenants.leaves
            if equal is not None and tenants.stretch[equal] == self.stretches[time] and not leaves:
                tenants.sources[number] = tenants.sources[equal]
            elif index in held.values or (leaves and not (renames and sources)):
                self._write(number, time, (index, placement), sources)
                if index in held.over and not leaves:
                    tenants.over.append((number, sources, time))
            else:
                tenants.sources[number] = sources
                if leaves:  # another name for what must then stay
                    tenants.leaves.update(sources)
            canonical[index, placement] = number
        for temporary in held.temporaries.get(equation.index, ()):
            self._temporary(time, instruction, temporary.like, temporary.part, temporary.readers)

    def _temporary(
        self, time: int, instruction: Compute, like: int, part: float, readers: tuple[int, ...]
    ) -> None:
        equation, signature = self.graph.equations[instruction.equation], instruction.signature
        atom = (*equation.inputs, *equation.outputs)[like]
        placement = (*signature.ins, *signature.outs)[like]
        whole = self.size(atom.type, placement)
        times = [self.time_of.get(reader, time) for reader in readers]
        stretch = self.stretches[time]
        last = max([t for t in times if self.stretches[t] == stretch], default=time)
        self.beside.append((time, max(last, time), tuple([part * n for n in whole])))

    def _pack(self, time: int, move: Move) -> None:
        """What an exchange takes beside its operand and result."""
        tensor = self.types[move.value]
        if move.strategy == "padded":  # equal blocks for all, and the device's own
            # On two axes both may be cut: the one that is cut further is the device's own.
            cut = max(move.pre, move.post, key=lambda p: len(cuts(p)))
            own = self.size(tensor, cut)[1:]
            self.beside.append((time, time, (float(tensor.nbytes), *own)))
        elif move.kind == "all_to_all":
            for placement in (move.pre, move.post):
                self.beside.append((time, time, self.size(tensor, placement)))

    def _bodies(self, time: int, loop: Loop) -> None:
        regions = self.graph.equations[loop.equation].regions
        helds = self.held.regions[loop.equation]
        for body, inside, held in zip(loop.bodies, regions, helds, strict=True):
            moments = _front_array(_moments(body, inside, held, top=False, size=self.size))
            if _exchanges(
                loop, self.graph
            ):  # run by the host: operands of an iteration, results until they are stacked
                for value, placement in zip(inside.inputs, body.inputs, strict=True):
                    moments = moments + self.size(value.type, placement)
                pairs = zip(self.graph.equations[loop.equation].outputs, loop.signature.outs, strict=True)
                for value, placement in pairs:
                    moments = moments + self.size(value.type, placement)
            self.inner.append((time, moments))

    def moments(self) -> Floats:
        """(time, columns of a `Size`): bytes while each instruction runs."""
        tenants, end = self.tenants, self.end
        first, last = tenants.first, tenants.last
        for number in tenants.leaves:
            if last[number] >= 0 and end:
                # Outside of the stretch that makes it, it is there as long as whole stretches run.
                last[number] = self.ends[self.stretches[min(last[number], end - 1)]]
        if self.top:
            for key in _keys(self.graph, self.program):
                if key is not None and key in self.current:
                    for number in tenants.sources[self.current[key]]:
                        last[number] = end
        taken: set[int] = set()
        after: dict[int, int] = {}
        for number, sources, time in tenants.over:
            for source in sources:
                if (
                    last[source] == time
                    and source not in taken
                    and source not in tenants.leaves
                    and tenants.size[source] == tenants.size[number]
                    and first[source] >= 0
                ):
                    taken.add(source)
                    after[number] = time + 1
                    break
        starts = {stretch: time for time, stretch in reversed(list(enumerate(self.stretches)))}
        change = np.zeros((end + 2, len(self.size(_NOTHING, R))))
        if self.top:
            given = [(v.index, p) for v, p in zip(self.graph.inputs, self.program.inputs, strict=True)]
            for index, placement in (*given, *((v.index, R) for v in self.graph.constants)):
                change[0] += self.size(self.types[index], placement)
        rows: list[tuple[float, ...]] = []
        for number, begin in enumerate(first):
            if begin < 0 or (self.top and tenants.stretch[number] < 0):
                continue
            if number in tenants.leaves and tenants.stretch[number] >= 0:
                begin = starts[tenants.stretch[number]]
            begin = after.get(number, begin)
            if begin <= last[number]:
                rows.append((begin, last[number] + 1, *tenants.size[number]))
        rows.extend((begin, until + 1, *size) for begin, until, size in self.beside)
        if rows:
            table = np.array(rows)
            np.add.at(change, table[:, 0].astype(np.intp), table[:, 2:])
            np.subtract.at(change, np.minimum(table[:, 1].astype(np.intp), end + 1), table[:, 2:])
        over_time = change.cumsum(axis=0)[: end + 1]
        # While a loop runs, what it stacks up is allocated already.
        extra = [over_time[time] + inside for time, inside in self.inner]
        return np.concatenate([over_time, *extra])


def _stretches(program: Program, graph: Graph) -> tuple[list[int], list[int]]:
    """The stretch that every instruction is in, an exchange being one of its own; and where each ends.

    What is computed again begins a stretch, too: it is compiled apart from what it repeats.
    """
    found: list[int] = []
    ends: list[int] = [0]
    start, before = 0, False
    for time, instruction in enumerate(program.instructions):
        exchanges = _exchanges(instruction, graph)
        again = not exchanges and begins_again(instruction, graph, program.instructions[start:time])
        if time and (exchanges or before or again):
            ends.append(time)
            start = time
        ends[-1] = time
        found.append(len(ends) - 1)
        before = exchanges
    return found, ends


def _exchanges(instruction: Instruction, graph: Graph) -> bool:
    """Whether it is an exchange, or a loop that the host runs: it exchanges, or computes something again."""
    if isinstance(instruction, Move):
        return not registry()[instruction.kind].local
    if isinstance(instruction, Loop):
        regions = graph.equations[instruction.equation].regions
        pairs = zip(instruction.bodies, regions, strict=True)
        return any(map(repeats, regions)) or any(
            _exchanges(inner, region) for body, region in pairs for inner in body.instructions
        )
    return False


def _union(sources: list[tuple[int, ...]]) -> tuple[int, ...]:
    if len(sources) == 1:
        return sources[0]
    return tuple(dict.fromkeys([number for some in sources for number in some]))


def _moments(program: Program, graph: Graph, held: Written, *, top: bool, size: Size = _size) -> Floats:
    """(time, columns of `size`): bytes while every instruction runs, `size` being those of one tensor."""
    return _Walk(program, graph, held, size, top=top).moments()


def _keys(graph: Graph, program: Program) -> Iterator[Key | None]:
    for atom, placement in zip(graph.outputs, program.outputs, strict=True):
        yield (atom.index, placement) if isinstance(atom, Value) else None


@per_graph
def stored(graph: Graph) -> frozenset[int]:
    """Indices of values that are written to memory."""
    return written(graph).values.union(value.index for value in graph.inputs)


def keys_read(instruction: Instruction, graph: Graph) -> list[Key]:
    """What an instruction reads, as (value, placement)."""
    if isinstance(instruction, Move):
        return [(instruction.value, instruction.pre)]
    equation = graph.equations[instruction.equation]
    pairs = zip(equation.inputs, instruction.signature.ins, strict=True)
    return [(a.index, p) for a, p in pairs if isinstance(a, Value)]


def keys_made(instruction: Instruction, graph: Graph) -> list[Key]:
    """What an instruction makes, as (value, placement)."""
    if isinstance(instruction, Move):
        return [(instruction.value, instruction.post)]
    outputs = graph.equations[instruction.equation].outputs
    return [(v.index, p) for v, p in zip(outputs, instruction.signature.outs, strict=True)]


def _front_array(moments: Floats) -> Floats:
    """Moments that no other dominates in all columns."""
    if moments.shape[1] > 2:
        found = np.unique(moments, axis=0)[::-1]
        for row in found.copy():
            found = found[~((found <= row).all(axis=1) & (found < row).any(axis=1))]
        return found
    order = np.lexsort((-moments[:, 1], -moments[:, 0]))
    best = -np.inf
    kept: list[int] = []
    for row in order:
        if moments[row, 1] > best:
            kept.append(int(row))
            best = float(moments[row, 1])
    return moments[kept]


def _front(moments: Floats) -> Footprint:
    front = _front_array(moments)
    return Footprint(front[:, 0], front[:, 1])
