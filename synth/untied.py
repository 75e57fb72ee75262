"""State that is updated where it lies, by ratios of its own, although what computes is cut by the plan's.

Where contractions read a parameter in stretches (of experts, of columns), its update ties optimizer state to
them: gradients come cut as the parameter is, and what is added to it has to be. So a device that computes
most has to hold most of the state, whatever its memory. Here that tie is cut: what passes between the update
and the rest of the step goes through whole tensors, gathered and sliced anew, once per step.

Which instructions are carried out where the state lies is a minimum cut (Ford and Fulkerson 1956): state on
one side, contractions, loops and exchanges between stretches on the other; a tensor that passes from one to
the other costs its bytes. Of adam that leaves two tensors to be sent for each parameter, the gradient and the
update. Updates are put in order of outputs, one after the other, so that only one is whole at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from shardwright.cost.bill import Shares, cut_of
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Atom, Equation, Graph, Value, value_types
from shardwright.ir.placement import OwnRatios, Partial, Placement, R, Shard
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program
from shardwright.ir.registry import is_contraction
from shardwright.ir.repeated import equations_of
from shardwright.ir.rules import Signature
from shardwright.ir.ties import Cut, cut_by, stretches
from shardwright.ir.wires import Key, keys_made, keys_read

Placements: TypeAlias = tuple[Placement, ...]

#: State of less than this part of the largest stays: sending it takes as long as starting to.
_LARGE = 1e-3

#: Nodes of the network: the two sides; the instructions come after them.
_STATE, _COMPUTE, _FIRST = 0, 1, 2

#: Stands where an instruction was that ties nothing.
_NOTHING = Move("own", 0, R, Partial())

#: Capacities are whole numbers of 32 bits: all tensors together have so many units, and more is no limit.
_UNITS, _NO_LIMIT = 1 << 29, 1 << 30


def untied(program: Program, graph: Graph, model: CostModel, ratios: tuple[float, ...]) -> Program | None:
    """The program with its state cut by other ratios than what computes; None where nothing ties them.

    Args:
        program: verified, on one mesh axis, cut by the plan's ratios alone.
        graph: the step.
        model: says which strategy gathers a tensor.
        ratios: of every device, for the state: where it is cut otherwise, that is for the caller to say.
    """
    sides = _Sides(program, graph)
    return _Apart(sides, model, OwnRatios(1, ratios)).program() if sides.tied else None


class _Sides:
    """On which side every instruction of a program is carried out.

    Args:
        program: the program.
        graph: the step.

    Attributes:
        tied: whether something passes from one side to the other, so that it may.
    """

    def __init__(self, program: Program, graph: Graph) -> None:
        self.given, self.graph = program, graph
        loops = [each if isinstance(each, Loop) else _NOTHING for each in program.instructions]
        held = replace(program, instructions=tuple(loops))
        #: What loops tie, and state: whatever else ties it is on either side.
        self._found = stretches(held, graph)
        self._computes = [False] * self._found.count
        inside = (each for each in held.all_instructions() if not isinstance(each, Loop))
        lines = zip(self._found.along(held, graph), inside, equations_of(held, graph), strict=True)
        for stretch, instruction, equation in lines:
            if stretch is not None and _computes(instruction, equation):
                self._computes[stretch] = True
        #: Who makes what is cut, and who reads it.
        self._maker: dict[Key, int] = {}
        self._readers: dict[Key, dict[int, None]] = {}
        for position, instruction in enumerate(program.instructions):
            for key in keys_read(instruction, graph):
                if isinstance(key[1], Shard):
                    self._readers.setdefault(key, {})[self._node(position, key)] = None
            for key in keys_made(instruction, graph):
                if isinstance(key[1], Shard):
                    self._maker.setdefault(key, self._node(position, key))
        #: The state, as it is given and handed out.
        self._state: frozenset[Key] = frozenset(self._own_state())
        self._maker.update((key, self._node(None, key)) for key in _cut(graph.inputs, program.inputs))
        for key in _cut(graph.outputs, program.outputs):
            self._readers.setdefault(key, {})[self._node(None, key)] = None
        self.tied = bool(self._state) and self._passing[0] > 0

    def with_state(self, position: int | None, key: Key) -> bool:
        """Whether an instruction, or what hands in or out, has a tensor cut as the state is."""
        return bool(self._passing[1][self._node(position, key)])

    def inside(self) -> dict[Cut, None]:
        """What loops have cut inside of them as the state is."""
        _, side = self._passing
        first = _FIRST + len(self.given.instructions)
        return {cut: None for cut, stretch in self._found.of.items() if cut.path and side[first + stretch]}

    def _node(self, position: int | None, key: Key) -> int:
        """Of an instruction; loops, and what the step is given and hands out, tie what is cut."""
        instruction = None if position is None else self.given.instructions[position]
        if position is None and key in self._state:
            return _STATE
        if position is None or instruction is None or isinstance(instruction, Loop):
            stretch = self._found.of[Cut((), *key)]
            return _COMPUTE if self._computes[stretch] else _FIRST + len(self.given.instructions) + stretch
        equation = None if isinstance(instruction, Move) else self.graph.equations[instruction.equation]
        return _COMPUTE if _computes(instruction, equation) else _FIRST + position

    def _own_state(self) -> Iterator[Key]:
        """What is to lie by ratios of its own: all that is large, and that nothing reads that computes."""
        given, graph = self.given, self.graph
        pairs = [(graph.inputs[at], given.inputs[at], out) for out, at in graph.state.items()]
        found: list[tuple[int, Key, Key]] = []
        for value, placement, out in pairs:
            key, atom = (value.index, placement), graph.outputs[out]
            read = self._readers.get(key, {})
            if isinstance(placement, Shard) and isinstance(atom, Value) and read and _COMPUTE not in read:
                found.append((value.type.nbytes, key, (atom.index, placement)))
        least = _LARGE * max((nbytes for nbytes, _, _ in found), default=0)
        for nbytes, *ends in found:
            yield from ends if nbytes >= least else ()

    @cached_property
    def _passing(self) -> tuple[int, NDArray[np.bool_]]:
        """Units that pass from side to side, and the nodes on that of the state."""
        types = value_types(self.graph)
        there = {key: readers for key, readers in self._readers.items() if key in self._maker}
        sizes = [types[value].nbytes for value, _ in there]
        unit = max(1, -(-sum(sizes) // _UNITS))
        nodes = _FIRST + len(self.given.instructions) + self._found.count
        edges: list[tuple[int, int, int]] = []
        for nbytes, (key, readers) in zip(sizes, there.items(), strict=True):
            maker, units = self._maker[key], -(-nbytes // unit)
            if self._is_slice(maker):
                continue  # the other side slices it as well
            # One node is where the state is as soon as a reader is, another where the rest is.
            for node in readers:
                edges += [(node, nodes, _NO_LIMIT), (nodes + 1, node, _NO_LIMIT)]
            edges += [(nodes, maker, units), (maker, nodes + 1, units)]
            nodes += 2
        network = _network([edge for edge in edges if edge[0] != edge[1]], nodes)
        flow = maximum_flow(network, _STATE, _COMPUTE)
        left = csr_array(network - flow.flow)
        left.eliminate_zeros()
        side = np.zeros(nodes, dtype=np.bool_)
        side[breadth_first_order(left, _STATE, return_predecessors=False)] = True
        return int(flow.flow_value), side

    def _is_slice(self, node: int) -> bool:
        if not 0 <= node - _FIRST < len(self.given.instructions):
            return False
        instruction = self.given.instructions[node - _FIRST]
        return isinstance(instruction, Move) and instruction.kind == "slice"


def _computes(instruction: Instruction, equation: Equation | None) -> bool:
    """Whether what an instruction has cut is cut by the plan's ratios: as `kinds_of` has it."""
    if isinstance(instruction, Move):
        return isinstance(instruction.pre, Shard) and isinstance(instruction.post, Shard)
    return equation is not None and is_contraction(equation.primitive)


def _network(edges: Sequence[tuple[int, int, int]], nodes: int) -> csr_array:
    """Capacities from node to node: of several, their sum, but no more than no limit."""
    heads, tails, units = np.array(edges, dtype=np.int64).reshape(-1, 3).T
    summed = csr_array(coo_array((units, (heads, tails)), shape=(nodes, nodes)))
    summed.sum_duplicates()
    few = np.minimum(summed.data, _NO_LIMIT).astype(np.int32)
    return csr_array((few, summed.indices, summed.indptr), shape=(nodes, nodes))


def _cut(atoms: Sequence[Atom], placements: Sequence[Placement]) -> Iterator[Key]:
    """What is sharded."""
    for atom, placement in zip(atoms, placements, strict=True):
        if isinstance(atom, Value) and isinstance(placement, Shard):
            yield atom.index, placement


class _Apart:
    """Writes a program anew, with what one side makes and the other reads sent there."""

    def __init__(self, sides: _Sides, model: CostModel, own: OwnRatios) -> None:
        self._sides, self._model, self._own = sides, model, own
        self._shares = Shares(own.shares, model.class_of)
        self._given, self._graph = sides.given, sides.graph
        self._values = {value.index: value for value in sides.graph.values()}
        self._written: list[Instruction] = []
        self._held: set[Key] = set()
        #: What was gathered for the other side, before the program itself does.
        self._early: set[Key] = set()
        #: Positions of what sends from side to side.
        self._sent: set[int] = set()

    def program(self) -> Program:
        """See `untied`."""
        given, graph = self._given, self._graph
        instructions = cut_by(given, graph, dict.fromkeys(self._sides.inside(), self._own)).instructions
        inputs = tuple([self._at(None, v, p) for v, p in zip(graph.inputs, given.inputs, strict=True)])
        self._held.update((value.index, p) for value, p in zip(graph.inputs, inputs, strict=True))
        self._held.update((value.index, R) for value in graph.constants)
        for position, instruction in enumerate(instructions):
            self._write(position, instruction)
        outputs = self._brought(None, graph.outputs, given.outputs)
        return Program(inputs, self._one_by_one(outputs), outputs)

    def _at(self, position: int | None, atom: Atom, placement: Placement) -> Placement:
        """The placement of a tensor on the side of an instruction."""
        if not isinstance(atom, Value) or not isinstance(placement, Shard):
            return placement
        mine = self._sides.with_state(position, (atom.index, placement))
        return replace(placement, by=self._own) if mine else placement

    def _brought(self, position: int | None, atoms: Sequence[Atom], placements: Placements) -> Placements:
        """Placements of tensors on the side of an instruction that reads them, where they are by then."""
        found: list[Placement] = []
        for atom, placement in zip(atoms, placements, strict=True):
            found.append(self._at(position, atom, placement))
            if isinstance(atom, Value) and (atom.index, found[-1]) not in self._held:
                other = replace(placement, by=self._own) if found[-1] == placement else placement
                if (atom.index, R) not in self._held:
                    self._send(self._gather(atom, other))
                    self._early.add((atom.index, R))
                self._send(Move("slice", atom.index, R, found[-1]))
        return tuple(found)

    def _gather(self, value: Value, placement: Placement) -> Move:
        model, cut = self._model, cut_of([value.type], [placement])

        def seconds(strategy: str) -> float:
            cost = model.move("all_gather", strategy, value.type, placement, R)
            return self._shares.seconds(cost, cut)

        strategy = min(model.strategies("all_gather", placement, R), key=seconds)
        return Move("all_gather", value.index, placement, R, strategy)

    def _send(self, move: Move) -> None:
        self._sent.add(len(self._written))
        self._append(move)

    def _append(self, instruction: Instruction) -> None:
        self._written.append(instruction)
        self._held.update(keys_made(instruction, self._graph))

    def _write(self, position: int, instruction: Instruction) -> None:
        if isinstance(instruction, Move):
            value = [self._values[instruction.value]]
            post = self._at(position, value[0], instruction.post)
            if (instruction.value, post) in self._early:
                self._early.discard((instruction.value, post))
                return
            (pre,) = self._brought(position, value, (instruction.pre,))
            self._append(replace(instruction, pre=pre, post=post))
            return
        equation, signature = self._graph.equations[instruction.equation], instruction.signature
        ins = self._brought(position, equation.inputs, signature.ins)
        pairs = zip(equation.outputs, signature.outs, strict=True)
        outs = tuple([self._at(position, value, placement) for value, placement in pairs])
        self._append(replace(instruction, signature=Signature(ins, outs)))

    def _one_by_one(self, outputs: Placements) -> tuple[Instruction, ...]:
        """The instructions, those of updates last, by the outputs that they are for."""
        written, graph = self._written, self._graph
        reads = [keys_read(instruction, graph) for instruction in written]
        makers: dict[Key, int] = {}
        readers: dict[Key, list[int]] = {}
        for number, instruction in enumerate(written):
            for key in keys_made(instruction, graph):
                makers.setdefault(key, number)
            for key in reads[number]:
                readers.setdefault(key, []).append(number)
        ends = zip(graph.outputs, outputs, strict=True)
        wanted = [(atom.index, placement) for atom, placement in ends if isinstance(atom, Value)]
        late = self._late(reads, readers, frozenset(wanted))
        order = [number for number in range(len(written)) if number not in late]
        placed = set(order)
        for last in [*(makers[key] for key in wanted if key in makers), *sorted(late)]:
            waiting = [last]
            while waiting:
                first = [n for n in map(makers.get, reads[waiting[-1]]) if n is not None and n not in placed]
                if waiting[-1] in placed:
                    waiting.pop()
                elif first:
                    waiting += first[::-1]
                else:
                    placed.add(waiting[-1])
                    order.append(waiting.pop())
        return tuple([written[number] for number in order])

    def _late(
        self, reads: Sequence[Sequence[Key]], readers: Mapping[Key, Sequence[int]], wanted: frozenset[Key]
    ) -> set[int]:
        """What waits for what is sent, and what only that reads, if it is local or a gather."""
        late, after = set(self._sent), set[Key]()
        for number, instruction in enumerate(self._written):
            if number in late or not after.isdisjoint(reads[number]):
                late.add(number)
                after.update(keys_made(instruction, self._graph))
        for number in range(len(self._written) - 1, -1, -1):
            instruction = self._written[number]
            made = keys_made(instruction, self._graph)
            read = [other for key in made for other in readers.get(key, ())]
            moves = isinstance(instruction, Move) and instruction.kind in ("all_gather", "slice")
            # What is not added up yet is whole on every device: it is read as soon as may be.
            whole = any(isinstance(placement, Partial) for _, placement in reads[number])
            local = isinstance(instruction, Compute) and not (whole or self._contracts(instruction))
            if read and late.issuperset(read) and wanted.isdisjoint(made) and (moves or local):
                late.add(number)
        return late

    def _contracts(self, instruction: Compute) -> bool:
        return _computes(instruction, self._graph.equations[instruction.equation])
