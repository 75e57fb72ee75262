"""Tensors of which one part alone is read are that part from the beginning.

To cut a part out of a whole tensor costs nothing by the model, nor does to fill one with a number that is
never written, so that an assignment may do either; but the whole would be held, and the part be copied in
every step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from shardwright.ir.graph import Equation, Graph, per_graph
from shardwright.ir.placement import Placement
from shardwright.ir.program import Compute, Instruction, Move, Program
from shardwright.ir.wires import wires, with_wires
from shardwright.synth.programs.rounds import ends
from shardwright.synth.space.factors import EquationFactor
from shardwright.synth.space.frame import Frame


def handed_in_as_read(program: Program, frame: Frame, pinned: Collection[int]) -> Program:
    """The program with arguments handed in as the part that is read of them, where only one is.

    State comes back as it went in and stays.

    Args:
        program: of the step.
        frame: of the step.
        pinned: choices that are.
    """
    graph, inputs, dropped = frame.graph, list(program.inputs), set[int]()
    state = set(graph.state.values())
    places = {value.index: place for place, value in enumerate(graph.inputs) if place not in state}
    for position, move in _only_cuts(program, graph, places):
        place = places[move.value]
        choice = frame.choice[graph.inputs[place]]
        if (
            inputs[place] == move.pre
            and choice.index not in pinned
            and any(holding.base == move.post for holding in choice.domain.holdings)
        ):
            inputs[place] = move.post
            dropped.add(position)
    return _without(program, graph, dropped, tuple(inputs), {}) if dropped else program


def made_as_read(program: Program, frame: Frame) -> Program:
    """The program with what is made of no tensor made as the part that is read of it, where only one is.

    Args:
        program: of the frame.
        frame: of the step, or of a loop's body.
    """
    instead: dict[int, tuple[Instruction, int, Placement]] = {}
    dropped: set[int] = set()
    graph, makers = frame.graph, _of_nothing(frame.graph)
    for position, move in _only_cuts(program, graph, makers):
        equation = makers[move.value]
        factor = frame.uses[equation].factor
        assert isinstance(factor, EquationFactor)
        signature = next((s for s in factor.signatures if s.outs == (move.post,)), None)
        _, made_at, made = instead.get(move.value) or _made(program, equation)
        if signature is not None and made == move.pre:
            instead[move.value] = Compute(equation.index, signature), made_at, move.post
            dropped.add(position)
    changed = {at: instruction for instruction, at, _ in instead.values()}
    return _without(program, graph, dropped, program.inputs, changed) if dropped else program


@per_graph
def _of_nothing(graph: Graph) -> Mapping[int, Equation]:
    """What has no tensor for an operand, by its only result."""
    found = (e for e in graph.equations if not e.input_values and len(e.outputs) == 1 and not e.regions)
    return {equation.outputs[0].index: equation for equation in found}


def _made(program: Program, equation: Equation) -> tuple[Instruction, int, Placement]:
    """What carries out an equation, where it is, and the placement of the result."""
    return next(
        (instruction, position, instruction.signature.outs[0])
        for position, instruction in enumerate(program.instructions)
        if not isinstance(instruction, Move) and instruction.equation == equation.index
    )


def _only_cuts(program: Program, graph: Graph, values: Collection[int]) -> Iterator[tuple[int, Move]]:
    """Slices of some values that are all that is read of what they read, and where they are."""
    cuts = [
        (position, instruction)
        for position, instruction in enumerate(program.instructions)
        if isinstance(instruction, Move) and instruction.kind == "slice" and instruction.value in values
    ]
    if not cuts:
        return
    found = wires(program, graph)
    readers = dict.fromkeys([found.number(move.value, move.pre) for _, move in cuts], 0)
    for reads in found.reads:
        for number in reads:
            if number in readers:
                readers[number] += 1
    given_back = ends(program, graph, found)
    for position, move in cuts:
        number = found.number(move.value, move.pre)
        if readers[number] == 1 and number not in given_back:
            yield position, move


def _without(
    program: Program,
    graph: Graph,
    dropped: Collection[int],
    inputs: tuple[Placement, ...],
    changed: Mapping[int, Instruction],
) -> Program:
    """A program without some instructions, and with others changed, by position."""
    found = wires(program, graph)
    left = [position for position in range(len(program.instructions)) if position not in dropped]
    instructions = tuple([changed.get(p, program.instructions[p]) for p in left])
    kept = found.taken(left)
    for at, position in enumerate(left):
        instruction = changed.get(position)
        if isinstance(instruction, Compute):
            (value,) = graph.equations[instruction.equation].outputs
            kept.makes[at] = [kept.number(value.index, instruction.signature.outs[0])]
    return with_wires(Program(inputs, instructions, program.outputs), graph, kept)
