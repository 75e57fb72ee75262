"""Who is in memory when, over the instructions of a program: see `liveness.py` for what is said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from shardwright.cost.memory.exchange_buffers import packed_beside
from shardwright.cost.memory.stretches import cut_at_exchanges, exchanges
from shardwright.cost.memory.tenancy import Bytes, Size, Tenants, union
from shardwright.cost.memory.written import Written
from shardwright.cost.share_cost import Floats
from shardwright.cost.traffic import ALIASES
from shardwright.ir.carried import carried_on, carries
from shardwright.ir.collectives import registry
from shardwright.ir.donation import continued, in_time
from shardwright.ir.graph import Equation, Graph, TensorType, Value, value_types
from shardwright.ir.host import is_reload, uses_host
from shardwright.ir.placement import R
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program, Property
from shardwright.ir.regions import entering, stacked_results
from shardwright.ir.registry import registry as operations
from shardwright.ir.table import Flags, Numbers
from shardwright.ir.wires import Number, apart, wires

_NOTHING = TensorType((0,), "float32")
_BYTE = TensorType((1,), "uint8")


def moments(program: Program, graph: Graph, held: Written, *, top: bool, size: Size) -> Floats:
    """(time, columns of `size`): bytes while every instruction runs, `size` being those of one tensor."""
    given = continued(program, graph) if top else {}
    return _Walk(program, graph, held, size, given, top=top).moments()


def front(rows: Floats) -> Floats:
    """Moments that no other dominates in all columns."""
    if rows.shape[1] > 2:
        found = np.unique(rows, axis=0)[::-1]
        for row in found.copy():
            found = found[~((found <= row).all(axis=1) & (found < row).any(axis=1))]
        return found
    ordered = rows[np.lexsort((-rows[:, 1], -rows[:, 0]))]
    best = np.maximum.accumulate(np.concatenate([[-np.inf], ordered[:-1, 1]]))
    return ordered[ordered[:, 1] > best]


class _Walk:
    """Follows the instructions of a program, or of a loop's body, and notes who is in memory when.

    Args:
        program, graph, held, size: as of `moments`.
        over: new -> old, which was given and may give its memory.
        top: whether it is no body.
    """

    def __init__(
        self,
        program: Program,
        graph: Graph,
        held: Written,
        size: Size,
        over: Mapping[Property, Property],
        *,
        top: bool,
    ) -> None:
        self.program, self.graph, self.held, self.size, self.top = program, graph, held, size, top
        self.types, self.host = value_types(graph), uses_host(graph)
        self.end = len(program.instructions)
        self.stretches, self.ends = cut_at_exchanges(program, graph)
        self.wires = wires(program, graph)
        given = len(graph.inputs) + len(graph.constants)
        self.tenants = Tenants(given + sum(map(len, self.wires.makes)))
        self.current: dict[Number, int] = {}
        self.given: dict[Number, int] = {}
        self.reads: list[tuple[int, ...]] = []
        #: Of what is given, the last stretch that reads it.
        self.read_last: dict[int, int] = {}
        self.made: list[Sequence[int]] = []
        #: By stretch, what it reads for tenants that it computes itself, and these.
        self.moved: dict[int, list[tuple[Sequence[int], Sequence[int]]]] = {}
        #: When an equation is carried out first.
        self.time_of: dict[int, int] = {}
        #: (moment, bytes) beside the tenants: temporaries, bodies, what exchanges pack.
        self.beside: list[tuple[int, int, Bytes]] = []
        self.inner: list[tuple[int, Floats]] = []
        #: (time, tenant) of loops that the host runs: results that are counted inside, and what is carried on
        #: in its place; stretches of exchanges and such loops.
        self.inside: list[tuple[int, int]] = []
        self.begun: list[tuple[int, int]] = []
        self.talking: set[int] = set()
        #: Of what is given, what such a loop makes of it in its place.
        self.through: dict[int, int] = {}
        self._establish()
        #: By number; and bytes by type and number.
        self.placements = list(self.wires.numbers)
        self.sizes: dict[tuple[int, int], Bytes] = {}
        self._follow()
        #: Tenants in the place of something given -> that.
        self.instead = dict(self._over_given(over))

    def _establish(self) -> None:
        tenants, current, graph, program = self.tenants, self.current, self.graph, self.program
        given = [(v.index, p) for v, p in zip(graph.inputs, program.inputs, strict=True)]
        given += [(v.index, R) for v in graph.constants]
        for number, (index, placement) in enumerate(given):
            current[self.wires.number(index, placement)] = number
            if not self.top and index in self.held.values:
                tenants.write(number, 0, self.size(self.types[index], placement))
        self.given.update(current)
        count = len(given)
        for reads, makes in zip(self.wires.reads, self.wires.makes, strict=True):
            self.reads.append(tuple([current[key] for key in reads if key in current]))
            for number, key in enumerate(makes, count):
                current[key] = number
            self.made.append(range(count, count + len(makes)))
            count += len(makes)
        if self.held.temporaries:
            lines = reversed(list(enumerate(program.instructions)))
            self.time_of = {i.equation: time for time, i in lines if not isinstance(i, Move)}
        times, stretches = np.arange(self.end), np.array(self.stretches, dtype=np.intp)
        reader, maker = (times.repeat(list(map(len, some))) for some in (self.reads, self.made))
        made_in = np.concatenate([np.full(len(given), -1, dtype=np.intp), stretches[maker]])
        tenants.stretch = made_in.tolist()
        read = np.fromiter(chain.from_iterable(self.reads), np.intp, len(reader))
        read_in, known = stretches[reader], made_in[read] < 0
        tenants.leaves.update(read[made_in[read] != read_in].tolist())
        # The last one of several is kept.
        self.read_last.update(zip(read[known].tolist(), read_in[known].tolist(), strict=True))
        if self.top:
            self._find_later(read, reader, np.bincount(reader[~known], minlength=self.end) == 0)

    def _find_later(self, read: Numbers, reader: Numbers, of_given: Flags) -> None:
        """Find the tenants that a later stretch computes itself.

        Args:
            read: tenants that instructions read, one after another.
            reader: which instruction reads each.
            of_given: of every instruction, whether it reads nothing but what is given.
        """
        tenants, instructions = self.tenants, self.program.instructions
        handed_out = {self.current[key] for key in self._handed_out() if key in self.current}
        tenants.leaves |= handed_out
        #: Cheaply made of what is given: what it reads, and which stretches read it; -1: exchanges, loops.
        light: dict[int, tuple[tuple[int, ...], set[int]]] = {}
        for time in np.flatnonzero(of_given).tolist():
            if self._light(instructions[time]):
                light.update((number, (self.reads[time], set())) for number in self.made[time])
        those = np.zeros(len(tenants.stretch), dtype=np.bool_)
        those[list(light)] = True
        mine = those[read]
        for number, time in zip(read[mine].tolist(), reader[mine].tolist(), strict=True):
            talks = isinstance(instructions[time], Loop) or exchanges(instructions[time], self.graph)
            light[number][1].add(-1 if talks else self.stretches[time])
        for number, (needed, readers) in light.items():
            apart = len(readers) == 1 and readers.isdisjoint((-1, tenants.stretch[number]))
            if apart and number not in handed_out:
                tenants.later.add(number)
                # What it reads is read when that stretch runs: nothing takes its memory before.
                (stretch,) = readers
                self.moved.setdefault(stretch, []).append((needed, (number,)))
                self.read_last |= {old: max(stretch, self.read_last[old]) for old in needed}

    def _light(self, instruction: Instruction) -> bool:
        """Whether an instruction is cheap enough for `shardwright/ir/late.py` to move it."""
        if not isinstance(instruction, Compute):
            return False
        rule = operations().get(self.graph.equations[instruction.equation].primitive)
        return rule is not None and rule.kind in ("elementwise", "movement")

    def _handed_out(self) -> Iterator[Number]:
        for atom, placement in zip(self.graph.outputs, self.program.outputs, strict=True):
            if isinstance(atom, Value):
                yield self.wires.number(atom.index, placement)

    def _follow(self) -> None:
        equations, held, stretches = self.graph.equations, self.held, self.stretches
        same, stretch_of, sources_of = held.same, self.tenants.stretch, self.tenants.sources
        leaves, later, over = self.tenants.leaves, self.tenants.later, self.tenants.over
        values, swapped = held.values, held.swapped
        canonical: dict[Number, int] = {}
        lines = zip(self.program.instructions, self.reads, self.made, self.wires.makes, strict=True)
        for time, (instruction, read, made, makes) in enumerate(lines):
            sources = sources_of[read[0]] if len(read) == 1 else union([sources_of[n] for n in read])
            if not isinstance(instruction, Compute):
                self._move_or_loop(time, instruction, sources)
                continue
            equation = equations[instruction.equation]
            if self.host and is_reload(equation):  # what it reads is in host memory until it is read
                for number, code in zip(made, makes, strict=True):
                    self._write(number, time, code, ())
                continue
            for number, code, value in zip(made, makes, equation.outputs, strict=True):
                index = value.index
                equal = canonical.get(code - index + same[index] if index in same else code)
                canonical[code], leaf = number, number in leaves
                if equal is not None and not leaf and stretch_of[equal] == stretches[time]:
                    sources_of[number] = sources_of[equal]
                # What another stretch hands over is transposed where it is used.
                elif (
                    index in values and (index not in swapped or stretch_of[read[0]] == stretches[time])
                ) or (leaf and number not in later and not (equation.primitive in ALIASES and sources)):
                    self._write(number, time, code, sources)
                    if index in held.over and not leaf:
                        over.append((number, sources, time))
                else:
                    sources_of[number] = sources
                    if leaf:  # another name for what must then stay
                        leaves.update(sources)
            if equation.index in held.temporaries:
                for temporary in held.temporaries[equation.index]:
                    self._temporary(time, instruction, temporary.like, temporary.part, temporary.readers)

    def _move_or_loop(self, time: int, instruction: Move | Loop, sources: tuple[int, ...]) -> None:
        tenants, made, makes = self.tenants, self.made[time], self.wires.makes[time]
        if isinstance(instruction, Move) and registry()[instruction.kind].local:
            (number,), (code,) = made, makes
            tenants.sources[number] = sources
            if number in tenants.leaves:
                self._write(number, time, code, sources)
            return
        if isinstance(instruction, Move) or exchanges(instruction, self.graph):
            self.talking.add(self.stretches[time])
        for number, code in zip(made, makes, strict=True):
            self._write(number, time, code, sources)
        tenants.read(sources, time)
        if isinstance(instruction, Move):
            packed = packed_beside(instruction, self.types[instruction.value], self.size)
            self.beside.extend((time, time, nbytes) for nbytes in packed)
        else:
            self._bodies(time, instruction)

    def _write(self, number: int, time: int, code: Number, sources: tuple[int, ...]) -> None:
        index, placement = apart(code)
        tensor = self.types[index]
        key = id(tensor), placement
        size = self.sizes.get(key)
        if size is None:
            size = self.sizes[key] = self.size(tensor, self.placements[placement])
        self.tenants.write(number, time, size)
        self.tenants.read(sources, time)

    def _temporary(
        self, time: int, instruction: Compute, like: int | None, part: float, readers: tuple[int, ...]
    ) -> None:
        equation, signature = self.graph.equations[instruction.equation], instruction.signature
        if like is None:
            whole = self.size(_BYTE, R)
        else:
            atom = (*equation.inputs, *equation.outputs)[like]
            whole = self.size(atom.type, (*signature.ins, *signature.outs)[like])
        times = [self.time_of.get(reader, time) for reader in readers]
        stretch = self.stretches[time]
        last = max([t for t in times if self.stretches[t] == stretch], default=time)
        self.beside.append((time, max(last, time), tuple([part * n for n in whole])))

    def _bodies(self, time: int, loop: Loop) -> None:
        equation = self.graph.equations[loop.equation]
        helds, hosted = self.held.regions[loop.equation], exchanges(loop, self.graph)
        ends = zip(loop.bodies, equation.regions, helds, strict=True)
        kept: dict[int, int] = {}
        for number, (body, inside, held) in enumerate(ends):
            carried = carries(equation, number)
            walk = _Walk(body, inside, held, self.size, carried_on(body, inside, carried), top=False)
            peaks = front(walk.moments())
            if hosted:
                for i in sorted(entering(equation, number)):  # rows of operands are copies
                    peaks = peaks + self.size(inside.inputs[i].type, body.inputs[i])
                # What is given is numbered as the inputs are.
                olds = set(walk.instead.values())
                kept.update((carry.operand, carry.result) for carry in carried if carry.into in olds)
            self.inner.append((time, peaks))
        if hosted:
            self._count_once(time, equation, kept)

    def _count_once(self, time: int, equation: Equation, kept: Mapping[int, int]) -> None:
        """Note what of a loop that the host runs is counted inside (see `shardwright/ir/carried.py`).

        Args:
            time, equation: of the loop.
            kept: operands that it carries on in their place -> results.
        """
        stacked, made = stacked_results(equation), self.made[time]
        self.inside.extend((time, number) for k, number in enumerate(made) if k not in stacked)
        read = self.reads[time]
        operands = [k for k, atom in enumerate(equation.inputs) if isinstance(atom, Value)]
        for operand, number in zip(operands, read, strict=True):
            if operand in kept and read.count(number) == 1:
                self.begun.append((time, number))
                self.through[number] = made[kept[operand]]

    def moments(self) -> Floats:
        """(time, columns of a `Size`): bytes while each instruction runs."""
        end = self.end
        self._stay()
        change = np.zeros((end + 2, len(self.size(_NOTHING, R))))
        if self.top:
            given = [(v.index, p) for v, p in zip(self.graph.inputs, self.program.inputs, strict=True)]
            for index, placement in (*given, *((v.index, R) for v in self.graph.constants)):
                change[0] += self.size(self.types[index], placement)
        rows = self._rows()
        if rows:
            table = np.array(rows)
            np.add.at(change, table[:, 0].astype(np.intp), table[:, 2:])
            np.subtract.at(change, np.minimum(table[:, 1].astype(np.intp), end + 1), table[:, 2:])
        over_time = change.cumsum(axis=0)[: end + 1]
        # While a loop runs, what it stacks up is allocated already.
        once = self._counted_inside()
        extra = [over_time[time] + inside - once.get(time, 0.0) for time, inside in self.inner]
        return np.concatenate([over_time, *extra])

    def _counted_inside(self) -> dict[int, Floats]:
        """Of loops that the host runs, by time: what they begin with in its place, and most results."""
        tenants, found = self.tenants, dict[int, Floats]()
        # What lies in the place of something given is counted there.
        mine = [(time, number) for time, number in self.inside if self.top or number not in self.instead]
        for time, number in self.begun:
            made = tenants.sources[number] == (number,) and tenants.stretch[number] not in (-1, *self.talking)
            if made and tenants.last[number] <= time:
                mine.append((time, number))
            elif self.instead.get(self.through[number]) == number:
                found[time] = found.get(time, 0.0) + np.array(tenants.size[self.through[number]])
        for time, number in mine:
            if tenants.first[number] >= 0:
                found[time] = found.get(time, 0.0) + np.array(tenants.size[number])
        return found

    def _stay(self) -> None:
        """What leaves its stretch, or is handed out, stays for longer than it is read."""
        tenants, end, last = self.tenants, self.end, self.tenants.last
        for number in tenants.leaves:
            if last[number] >= 0 and end:
                # Outside of the stretch that makes it, it is there as long as whole stretches run.
                last[number] = self.ends[self.stretches[min(last[number], end - 1)]]
        if self.top:
            for key in self._handed_out():
                if key in self.current:
                    for number in tenants.sources[self.current[key]]:
                        last[number] = end

    def _rows(self) -> list[tuple[float, ...]]:
        """From when to when a tenant or something beside them is in memory, and its bytes."""
        tenants, end = self.tenants, self.end
        first, last = tenants.first, tenants.last
        instead = () if self.top else self.instead
        after = tenants.written_over(instead)
        starts = [0, *[time + 1 for time in self.ends]]
        rows: list[tuple[float, ...]] = []
        for number in self.instead if self.top else ():
            rows.append((starts[tenants.stretch[number]], end + 1, *(-n for n in tenants.size[number])))
        for number, begin in enumerate(first):
            if begin < 0 or (self.top and tenants.stretch[number] < 0) or number in instead:
                continue
            if number in tenants.leaves and tenants.stretch[number] >= 0:
                begin = starts[tenants.stretch[number]]
            begin = after.get(number, begin)
            if begin <= last[number]:
                rows.append((begin, last[number] + 1, *tenants.size[number]))
        rows.extend((begin, until + 1, *size) for begin, until, size in self.beside)
        return rows

    def _over_given(self, over: Mapping[Property, Property]) -> Iterator[tuple[int, int]]:
        """Tenants that are written over what is given, with that, as far as new -> old says that they may."""
        if not over:
            return
        tenants, number_of = self.tenants, self.wires.number
        through_loops = Counter(
            number
            for instruction, read in zip(self.program.instructions, self.reads, strict=True)
            if isinstance(instruction, Loop) and exchanges(instruction, self.graph)
            for number in read
        )
        pairs: dict[int, dict[int, int]] = {}
        for new, old in over.items():
            before = self.given[number_of(old.value, old.placement)]
            sources = tenants.sources[self.current[number_of(new.value, new.placement)]]
            if len(sources) != 1:
                continue
            (after,) = sources
            times = through_loops[before]
            if times and (self.top or times > 1 or self.through.get(before) != after):
                continue
            stretch = tenants.stretch[after]
            alike = tenants.size[after] == self.size(self.types[old.value], old.placement)
            if alike and stretch >= 0 and stretch == self.read_last.get(before):
                pairs.setdefault(stretch, {})[after] = before
        lines = {stretch: list(self.moved.get(stretch, ())) for stretch in pairs}
        for stretch, read, made in zip(self.stretches, self.reads, self.made, strict=True):
            if stretch in pairs:
                lines[stretch].append((read, made))
        for stretch, mine in pairs.items():
            yield from in_time(lines[stretch], mine).items()
