"""Distributed programs: instructions with checked pre- and postconditions.

    program     ::= inputs (property*) instruction* outputs (property*)
    property    ::= value placement group                       what is known of a value so far
    instruction ::= compute | move | loop
    compute     ::= {ins} equation {outs}                       one equation on local shards
    move        ::= {value pre} kind.strategy {value post}      a collective, or a free local conversion
    loop        ::= {ins} equation (program*) {outs}            a region run on the devices together

Every instruction is a Hoare triple over properties: it needs what stands before it and establishes
what stands after. `verify` walks the program once and checks each triple against the rules of the
primitives, the collectives and what has been established so far.

A value may be held in several placements at once: gathered once, used many times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from shardwright.ir import collectives
from shardwright.ir.errors import ProgramError
from shardwright.ir.graph import Equation, Graph, Literal, TensorType, Value, per_form, value_types
from shardwright.ir.placement import Grid, OwnRatios, Placement, R, Shard, cuts
from shardwright.ir.record import record
from shardwright.ir.regions import boundary
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Signature, allows

if TYPE_CHECKING:
    from shardwright.ir.wires import Wires

#: Devices that take part, as indices into the plan's devices; None means all of them.
Group: TypeAlias = tuple[int, ...] | None


class Property(NamedTuple):
    """`value` is held in `placement` by the devices of `group`."""

    value: int
    placement: Placement
    group: Group = None

    def __str__(self) -> str:
        return f"%{self.value} {self.placement}{format_group(self.group)}"


def covers(held: Property, wanted: Property) -> bool:
    """Whether `wanted` follows from `held`: itself, or what all of a larger group hold whole."""
    if held.value != wanted.value or held.placement != wanted.placement:
        return False
    if held.group == wanted.group:
        return True
    smaller = held.group is None or (wanted.group is not None and set(wanted.group) <= set(held.group))
    return held.placement == R and smaller


@record(frozen=True, slots=True)
class Compute:
    """Run equation `equation` of the graph on local shards."""

    equation: int
    signature: Signature


@record(frozen=True, slots=True)
class Move:
    """Establish `value` in placement `post` from `pre`, by collective `kind` carried out as `strategy`.

    `group` are the devices that take part; `root` is the one that has the value at first where not all
    of them have (broadcast and send/receive).
    """

    kind: str
    value: int
    pre: Placement
    post: Placement
    strategy: str = ""
    group: Group = None
    root: int | None = None


@record(frozen=True, slots=True)
class Loop:
    """Run the regions of equation `equation`, each as a distributed program of its own.

    `signature` places the equation's operands and results; the bodies' own inputs and outputs are
    placed by `shardwright.ir.regions`.
    """

    equation: int
    signature: Signature
    bodies: tuple[Program, ...]


Instruction: TypeAlias = Compute | Move | Loop


@dataclass(frozen=True, slots=True)
class Program:
    """A distributed program over the values and equations of one graph.

    Attributes:
        inputs: placement in which each input of the graph is handed in (constants are always R).
        instructions: in execution order, the same on every device.
        outputs: placement in which each output of the graph is handed out.
        memo: what was worked out of it (`shardwright.ir.wires`).
    """

    inputs: tuple[Placement, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Placement, ...]
    memo: dict[object, Any] = field(default_factory=dict[object, Any], init=False, compare=False, repr=False)

    def all_instructions(self) -> Iterator[Instruction]:
        """Instructions of this program and, depth first, of every loop body."""
        for instruction in self.instructions:
            yield instruction
            if isinstance(instruction, Loop):
                for body in instruction.bodies:
                    yield from body.all_instructions()


def placements(program: Program) -> Iterator[Placement]:
    """The placements in a program, those of signatures that many equations share once."""
    yield from program.inputs
    yield from program.outputs
    signatures: dict[int, Signature] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Move):
            yield instruction.pre
            yield instruction.post
            continue
        signatures[id(instruction.signature)] = instruction.signature
        if isinstance(instruction, Loop):
            for body in instruction.bodies:
                yield from placements(body)
    for signature in signatures.values():
        yield from signature.ins
        yield from signature.outs


def nodes_of(program: Program) -> tuple[int, ...] | None:
    """Devices of every node that a program on two mesh axes is for; None for one axis."""
    return next((p.nodes for p in placements(program) if isinstance(p, Grid)), None)


def own_ratios(program: Program) -> dict[int, OwnRatios]:
    """The ratios that a program has beside those of its plan, by number, in order of their numbers.

    Raises:
        ProgramError: two of one number differ.
    """
    found: dict[int, OwnRatios] = {}
    for placement in placements(program):
        if type(placement) is Shard and placement.by is not None:
            own = found.setdefault(placement.by.number, placement.by)
            if own != placement.by:
                raise ProgramError(
                    place=f"ratios {own.number} of a program",
                    reason="differ from one placement to another",
                    remedy="Number them anew",
                )
    return dict(sorted(found.items()))


def format_group(group: Group) -> str:
    """` on {0,2}`, or nothing for all devices."""
    return "" if group is None else " on {" + ",".join(map(str, group)) + "}"


# ---------------------------------------------------------------------------------------------------
# Verification


def verify(program: Program, graph: Graph) -> None:
    """Check every triple of `program` against `graph`.

    Raises:
        ProgramError: naming the first instruction that breaks its contract, with the lines around it.
    """
    own_ratios(program)
    _expect(len(program.inputs) == len(graph.inputs), program, graph, 0, "places another number of inputs")
    _expect(len(program.outputs) == len(graph.outputs), program, graph, 0, "places another number of outputs")
    # Equations of one form under one signature are judged once; the program keeps the signatures.
    #: None for loops, each of which is judged by itself.
    judged: dict[tuple[int, int], str | None] = {}
    keys: list[tuple[int, int] | None] = []
    count, equations = len(graph.equations), graph.equations
    for line, instruction in enumerate(program.instructions):
        if isinstance(instruction, Move):
            keys.append(None)
            continue
        number = instruction.equation
        key = (id(equations[number].form) if 0 <= number < count else 0), id(instruction.signature)
        if key not in judged:
            problem = _malformed(instruction, graph)
            _expect(not problem, program, graph, line, problem)
            plain = isinstance(instruction, Compute) and not equations[number].regions
            judged[key] = _check(instruction, equations[number]) if plain else None
        keys.append(key)
    from shardwright.ir.wires import wires

    found, types = wires(cast(Any, program), graph), value_types(graph)
    established = _Established(found)
    whole = established.whole
    for value, placement in zip(graph.inputs, program.inputs, strict=True):
        whole.add(found.number(value.index, placement))
    for value in graph.constants:
        whole.add(found.number(value.index, R))
    for line, (instruction, key) in enumerate(zip(program.instructions, keys, strict=True)):
        if key is None:
            problem = _check_move(cast(Move, instruction), types, established)
        else:
            instruction = cast("Compute | Loop", instruction)
            problem = judged[key]
            if problem is None:
                problem = _check(instruction, equations[instruction.equation])
            if not problem and not whole.issuperset(found.reads[line]):
                problem = _missing(instruction, equations[instruction.equation], established)
            whole.update(found.makes[line])
        if problem:
            _expect(False, program, graph, line, problem)
    for atom, placement in zip(graph.outputs, program.outputs, strict=True):
        held = isinstance(atom, Literal) and placement == R
        held = held or (isinstance(atom, Value) and Property(atom.index, placement) in established)
        _expect(
            held,
            program,
            graph,
            len(program.instructions),
            f"output {atom} is never established as {placement}",
        )
    for out, inp in graph.state.items():
        same = program.outputs[out] == program.inputs[inp]
        _expect(
            same,
            program,
            graph,
            len(program.instructions),
            f"state output {out} does not return as it came in",
        )


class _Established:
    """What is known so far.

    Attributes:
        whole: what all devices have established, by number.
        grouped: what some of them have.
    """

    def __init__(self, found: Wires) -> None:
        self._wires = found
        self.whole: set[int] = set()
        self.grouped: set[Property] = set()

    def add(self, found: Property) -> None:
        if found.group is None:
            self.whole.add(self._wires.number(found.value, found.placement))
        else:
            self.grouped.add(found)

    def __contains__(self, wanted: Property) -> bool:
        number = self._wires.number(wanted.value, wanted.placement)
        if number in self.whole and (wanted.group is None or wanted.placement == R):
            return True
        return any(covers(held, wanted) for held in self.grouped)

    def of(self, value: int) -> list[Property]:
        """What is known of a value."""
        some = [Property(*key) for key in self._wires.keys(self.whole) if key[0] == value]
        return [*some, *(held for held in self.grouped if held.value == value)]


def _expect(condition: bool, program: Program, graph: Graph, line: int, problem: str) -> None:
    if condition:
        return
    from shardwright.ir.text import format_program

    lines = format_program(cast(Any, program), graph).splitlines()
    here = next((i for i, text in enumerate(lines) if text.lstrip().startswith(f"{line}:")), len(lines) - 1)
    around = "\n".join(
        ("> " if i == here else "  ") + lines[i] for i in range(max(0, here - 5), min(len(lines), here + 6))
    )
    raise ProgramError(
        place=f"instruction {line}",
        reason=problem,
        remedy=f"This is a bug in whatever wrote the program:\n{around}",
    )


def _malformed(instruction: Compute | Loop, graph: Graph) -> str:
    """What keeps an instruction from being read at all, "" if nothing."""
    if not 0 <= instruction.equation < len(graph.equations):
        return f"there is no equation {instruction.equation}"
    equation, signature = graph.equations[instruction.equation], instruction.signature
    if len(signature.ins) != len(equation.inputs) or len(signature.outs) != len(equation.outputs):
        return f"{equation.primitive} has {len(equation.inputs)} operands and {len(equation.outputs)} results"
    return ""


def _check(instruction: Compute | Loop, equation: Equation) -> str:
    """What is wrong with an instruction, whatever has been established; "" if nothing."""
    signature = instruction.signature
    for atom, placement in zip(equation.inputs, signature.ins, strict=True):
        # A literal is known to every device, and a Partial of it is free: one owner keeps it.
        if isinstance(atom, Literal) and cuts(placement):
            return f"literal {atom} cannot be sharded"
    if isinstance(instruction, Loop):
        return _check_loop(instruction, equation)
    if equation.regions:
        uniform = all(p == R for p in (*signature.ins, *signature.outs))
        return "" if uniform else f"{equation.primitive} has regions: only replicated, or as a loop"
    return "" if _allowed(equation, signature) else f"no rule of {equation.primitive} allows {signature}"


def _missing(instruction: Compute | Loop, equation: Equation, established: _Established) -> str:
    """Which operand has not been established."""
    pairs = zip(equation.inputs, instruction.signature.ins, strict=True)
    lacking = ((a, p) for a, p in pairs if isinstance(a, Value) and Property(a.index, p) not in established)
    atom, placement = next(lacking)
    held = ", ".join(sorted(str(known.placement) for known in established.of(atom.index))) or "nothing"
    return f"needs {atom} as {placement}, established: {held}"


@per_form
def _judged(equation: Equation) -> dict[Signature, bool]:
    """Signatures of one form of equations that were looked up before."""
    return {}


def _allowed(equation: Equation, signature: Signature) -> bool:
    known = _judged(equation)
    found = known.get(signature)
    if found is None:
        found = known[signature] = allows(rule_of(equation), equation, signature)
    return found


def _check_move(move: Move, types: Mapping[int, TensorType], established: _Established) -> str:
    wanted = Property(move.value, move.pre, move.group if move.root is None else (move.root,))
    if wanted not in established:
        held = ", ".join(sorted(map(str, established.of(move.value)))) or "nothing"
        return f"needs {wanted}, established: {held}"
    problem = wrong_move(move, types[move.value].shape)
    if not problem:
        established.add(Property(move.value, move.post, move.group))
    return problem


def wrong_move(move: Move, shape: tuple[int, ...]) -> str:
    """Why a move of a tensor of this shape is none, whatever is established before it; empty if it is one."""
    collective = collectives.registry().get(move.kind)
    if collective is None:
        return f"there is no collective {move.kind}"
    if collective.rooted != (move.root is not None):
        return f"{move.kind} {'needs' if collective.rooted else 'has no'} root"
    if not collectives.carries_out(collective, move.pre, move.post):
        return f"{move.kind} does not turn {move.pre} into {move.post}"
    if move.strategy not in collective.strategies:
        return f"{move.kind} has no strategy {move.strategy!r}"
    if move.group is not None and (not move.group or list(move.group) != sorted(set(move.group))):
        return f"group {move.group} does not name devices in order, each once"
    if move.root is not None and move.group is not None and move.root not in move.group:
        return f"root {move.root} is not in the group{format_group(move.group)}"
    if move.kind == "send" and (move.group is None or len(move.group) != 2):
        return "send needs a group of two"
    for placement in (move.pre, move.post):
        if any(cut.dim >= len(shape) or shape[cut.dim] % cut.unit for cut in cuts(placement)):
            return f"%{move.value} of shape {shape} cannot be cut as {placement}"
        if isinstance(placement, Grid) and move.group is not None:
            return f"a group{format_group(move.group)} has no nodes to lie across, as {placement} does"
    return ""


def _check_loop(loop: Loop, equation: Equation) -> str:
    if len(loop.bodies) != len(equation.regions):
        return f"{equation.primitive} has {len(equation.regions)} regions"
    for number, (body, region) in enumerate(zip(loop.bodies, equation.regions, strict=True)):
        if len(body.inputs) != len(region.inputs) or len(body.outputs) != len(region.outputs):
            return f"region {number} has {len(region.inputs)} inputs and {len(region.outputs)} outputs"
    problem = boundary(equation).check(loop.signature, [(body.inputs, body.outputs) for body in loop.bodies])
    if problem:
        return problem
    for body, region in zip(loop.bodies, equation.regions, strict=True):
        verify(body, region)
    return ""
