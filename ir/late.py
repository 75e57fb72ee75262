"""Cheap computations where their results are read: less is handed from one compiled segment to the next.

A program has a local instruction as early as it can be. What a later segment alone reads would then be
written to memory at the end of one compiled function and read again in another; computed there, XLA fuses it
with its reader. Broadcasts, reshapes and cheap arithmetic may be computed in several segments, each from the
same operands.

Only elementwise instructions and rearrangements move, and only where no more bytes are handed on than before:
contractions stay, and can run beside the exchanges that they do not wait for. What is cheap is computed again
by later segments that would take as long to read it, unless it has to be in memory for the first one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.ir.flow import Flow, inputs, outputs
from shardwright.ir.host import reloads
from shardwright.ir.placement import Shard
from shardwright.ir.program import Compute, Move, Property
from shardwright.ir.registry import registry

#: Rearrangements that cost XLA nothing, inside of several readers, too. Transposes do: three readers of a
#: transposed gradient would walk across its rows three times.
COPIED = frozenset({"broadcast_in_dim", "iota", "reshape", "squeeze"})

#: Arithmetic that takes less than reading its result from memory.
CHEAP = frozenset({
    "abs", "add", "add_any", "and", "convert_element_type", "copy", "eq", "ge", "gt", "integer_pow", "le",
    "lt", "max", "min", "mul", "ne", "neg", "not", "or", "select_n", "sign", "square", "stop_gradient", "sub",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """Local instructions that are computed together.

    Attributes:
        positions: theirs, in order.
        first: of those that the program has there; for messages.
    """

    positions: tuple[int, ...]
    first: int

    def interface(self, flow: Flow) -> tuple[tuple[Property, ...], tuple[Property, ...]]:
        """What the run reads from outside and what it writes."""
        needs: dict[int, Property] = {}
        made: dict[int, Property] = {}
        for position in self.positions:
            for number, prop in zip(flow.reads[position], flow.needs[position], strict=True):
                if number not in made:
                    needs[number] = prop
            made.update(zip(flow.makes[position], flow.gives[position], strict=True))
        return tuple(needs.values()), tuple(made.values())


def as_they_are(runs: Sequence[Sequence[int]]) -> list[Run]:
    """Every instruction where the program has it."""
    return [Run(tuple(run), min(run, default=-1)) for run in runs]


def late(flow: Flow, runs: Sequence[Sequence[int]], between: Sequence[Sequence[int]]) -> list[Run]:
    """Move instructions to later runs.

    Args:
        flow: the program.
        runs: positions of the local instructions that are computed together, in order.
        between: positions of what is read when a run is finished, of all runs but the last.

    Returns:
        The runs; an instruction may be in several. A run that was empty stays so.
    """
    found = _Late(flow, runs, between).runs()
    pairs = zip(found, runs, strict=True)
    return [
        Run(tuple(new), min(set(new).intersection(old), default=min(new, default=-1))) for new, old in pairs
    ]


class _Late:
    def __init__(self, flow: Flow, runs: Sequence[Sequence[int]], between: Sequence[Sequence[int]]) -> None:
        self.flow = flow
        self.before = runs
        #: The runs that each instruction is computed in, or after which it reads.
        self.at: dict[int, tuple[int, ...]] = {p: (i,) for i, run in enumerate(runs) for p in run}
        self.at |= {position: (i,) for i, positions in enumerate(between) for position in positions}
        self.computed = {position for run in runs for position in run}
        #: All that is read or made by its number, see `Flow`.
        self.readers: dict[int, list[int]] = {}
        self.made: set[int] = set()
        #: What is established more than once: its readers read different things.
        self.again: set[int] = set()
        given = frozenset(map(flow.number, inputs(flow.program, flow.graph)))
        self.from_host = {p for p in self.computed if reloads(flow.program.instructions[p], flow.graph)}
        # Nothing else is computed where something comes from host memory.
        self.filled = [i for i, run in enumerate(runs) if run and not self.from_host.issuperset(run)]
        for position in self.from_host:
            self.again.update(flow.reads[position])  # it is there before, to be moved
        for position in self.at:
            for number in flow.makes[position]:
                if number in self.made or number in given:
                    self.again.add(number)
            self.made.update(flow.makes[position])
            for number in flow.reads[position]:
                self.readers.setdefault(number, []).append(position)
        self.kept = frozenset(map(flow.number, outputs(flow.program, flow.graph)))
        #: Bytes of a device's part: of what is cut, at most about half.
        self.nbytes: dict[int, int] = {}
        for position in self.at:
            numbers = (*flow.reads[position], *flow.makes[position])
            for number, prop in zip(numbers, (*flow.needs[position], *flow.gives[position]), strict=True):
                if number not in self.nbytes:
                    nbytes = flow.types[prop.value].nbytes
                    self.nbytes[number] = nbytes // 2 if isinstance(prop.placement, Shard) else nbytes

    def runs(self) -> list[list[int]]:
        for position in sorted(self.computed, reverse=True):
            if self._is_light(position):
                self.at[position] = self._best(position)
        for position in self._leaving():
            made = max(self.at[i][0] for i in self.flow.producers[position])
            # What it was not to run before may itself be computed later by now, where that is read.
            read = min(run for number in self.flow.makes[position] for run in self._read_at(number))
            self.at[position] = (min(made, read),)
        found: list[list[int]] = [[] for _ in self.before]
        for position in sorted(self.computed):
            for run in self.at[position]:
                found[run].append(position)
        return found

    def _leaving(self) -> list[int]:
        """What exchanges alone need, of one operand that is computed here: it goes where that is made.

        No segment is there for it alone.
        """
        found: set[int] = set()
        flow, here = self.flow, self.computed - self.from_host
        for position in sorted(self.computed, reverse=True):
            one = len(flow.reads[position]) == 1 and flow.producers[position] <= here
            after = flow.consumers[position]
            sent = bool(after) and all(flow.exchange[i] or i in found for i in after)
            if one and sent and flow.producers[position] and self._is_light(position):
                found.add(position)
        return sorted(found.difference(p for p in found if self.kept.intersection(self.flow.makes[p])))

    def _is_light(self, position: int) -> bool:
        instruction = self.flow.program.instructions[position]
        again = self.again
        if again and not again.isdisjoint((*self.flow.reads[position], *self.flow.makes[position])):
            return False
        if isinstance(instruction, Move):
            return True
        if not isinstance(instruction, Compute):
            return False
        op = registry().get(self.flow.graph.equations[instruction.equation].primitive)
        return op is not None and op.kind in ("elementwise", "movement")

    def _best(self, position: int) -> tuple[int, ...]:
        """The runs in which an instruction is best computed."""
        flow, (home,) = self.flow, self.at[position]
        makes = flow.makes[position]
        if self.kept.intersection(makes):
            return (home,)  # it is written to memory wherever it is computed
        wanted = {run for number in makes for run in self._read_at(number)}
        runs = sorted({self.filled[bisect_right(self.filled, run) - 1] for run in wanted})
        if not runs or runs == [home]:
            return (home,)
        saved = sum([self.nbytes[number] for number in makes])
        chosen = [runs[0] if self._handed_on(position, runs[0]) <= saved else home]
        if self._is_free(position):
            chosen += [run for run in runs[1:] if self._handed_on(position, run) <= saved]
        # If one run had to be handed what is cheap, its operands would be kept beside it for the others.
        elif (
            self._is_cheap(position)
            and not self._in_memory(position, runs[0])
            and all(self._fetched(position, run) <= saved for run in runs[1:])
        ):
            chosen += runs[1:]
        return tuple(dict.fromkeys(chosen))

    def _primitive(self, position: int) -> str:
        instruction = self.flow.program.instructions[position]
        if isinstance(instruction, Compute):
            return self.flow.graph.equations[instruction.equation].primitive
        return ""

    def _is_free(self, position: int) -> bool:
        """Whether a reader fused with it takes no longer."""
        return self._primitive(position) in COPIED

    def _is_cheap(self, position: int) -> bool:
        """Whether it is computed again rather than read from memory."""
        instruction = self.flow.program.instructions[position]
        if isinstance(instruction, Move):
            return isinstance(instruction.post, Shard)
        return self._primitive(position) in CHEAP

    def _in_memory(self, position: int, run: int) -> bool:
        """Whether a result is written to memory in a run: not only what fuses reads it there."""
        readers = (reader for number in self.flow.makes[position] for reader in self.readers.get(number, ()))
        return any(run in self.at[reader] and not self._fuses(reader) for reader in readers)

    def _fuses(self, position: int) -> bool:
        """Whether XLA computes an instruction together with what it reads."""
        instruction = self.flow.program.instructions[position]
        op = registry().get(self._primitive(position))
        fused = op is not None and op.kind in ("elementwise", "movement", "reduction")
        return isinstance(instruction, Move) or fused

    def _handed_on(self, position: int, run: int) -> int:
        """Bytes that must be kept until `run` for an instruction to be computed there."""
        more = 0
        for number in self.flow.reads[position]:
            if number in self.made and not self._read_from(run, number, position):
                more += self.nbytes[number]
        return more

    def _fetched(self, position: int, run: int) -> int:
        """Bytes of an instruction's operands that nothing else reads in a run."""
        return sum(
            self.nbytes[number]
            for number in self.flow.reads[position]
            if not any(run in self.at[i] for i in self.readers[number] if i != position)
        )

    def _read_from(self, run: int, number: int, but: int) -> bool:
        """Whether others than `but` read a property in a run, or after it, or in a later one."""
        if number in self.kept and self.filled[-1] >= run:
            return True
        # The last readers first: of what thousands read, one of them tells.
        readers = reversed(self.readers.get(number, ()))
        return any(reader != but and max(self.at[reader]) >= run for reader in readers)

    def _read_at(self, number: int) -> list[int]:
        """Runs in which, or after which, a property is read."""
        found = [run for reader in self.readers.get(number, ()) for run in self.at[reader]]
        return [*found, self.filled[-1]] if number in self.kept else found
