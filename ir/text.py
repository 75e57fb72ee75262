"""The readable form of a program, and back.

    program {
      ratios @1: 0.75 0.25
      in   0 %0 S(0)@1  # float32[50257,768] params['wte']
      0: %5 R = all_gather.padded %5 S(0)
      1: %7 S(0), %8 P(sum) = dot_general#3(%5 R, %6 S(0))
      2: %9 R = scan#4(%7 R) {
        program { … }
      }
      out  0 %9 R
    }

`parse_program(format_program(p, graph)) == p`. The ratios are those that a program has beside the plan's.
Everything after `#` and a space is commentary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from shardwright.ir.errors import ProgramError
from shardwright.ir.graph import Graph, Literal, TensorType, Value
from shardwright.ir.placement import OwnRatios, Placement, parse_placement
from shardwright.ir.program import Compute, Group, Instruction, Loop, Move, Program, format_group, own_ratios
from shardwright.ir.rules import Signature


def format_program(program: Program, graph: Graph, indent: str = "") -> str:
    """The text of `program`; the graph supplies names, types and primitives for the reader."""
    lines = [f"{indent}program {{"]
    inner = indent + "  "
    types = {value.index: value.type for value in graph.values()}
    for own in own_ratios(program).values():
        lines.append(f"{inner}ratios {own}: {' '.join(map(repr, own.shares))}")
    for i, placement in enumerate(program.inputs):
        value = graph.inputs[i] if i < len(graph.inputs) else None
        name = graph.input_names[i] if i < len(graph.input_names) else ""
        note = f"  # {value.type} {name}".rstrip() if value is not None else ""
        lines.append(f"{inner}in   {i} {value or '?'} {placement}{note}")
    for line, instruction in enumerate(program.instructions):
        lines.extend(_format(instruction, line, graph, types, inner))
    for i, placement in enumerate(program.outputs):
        atom = graph.outputs[i] if i < len(graph.outputs) else "?"
        name = graph.output_names[i] if i < len(graph.output_names) else ""
        lines.append(f"{inner}out  {i} {atom} {placement}" + (f"  # {name}" if name else ""))
    return "\n".join([*lines, f"{indent}}}"])


def format_instruction(program: Program, graph: Graph, line: int) -> str:
    """The line of instruction `line`, for messages."""
    types = {value.index: value.type for value in graph.values()}
    return next(_format(program.instructions[line], line, graph, types, ""))


def _format(
    instruction: Instruction, line: int, graph: Graph, types: Mapping[int, TensorType], indent: str
) -> Iterator[str]:
    if isinstance(instruction, Move):
        kind = f"{instruction.kind}.{instruction.strategy}" if instruction.strategy else instruction.kind
        root = f" from {instruction.root}" if instruction.root is not None else ""
        where = format_group(instruction.group)
        value = f"%{instruction.value}"
        note = f"  # {types[instruction.value]}" if instruction.value in types else ""
        triple = f"{value} {instruction.post} = {kind} {value} {instruction.pre}"
        yield f"{indent}{line}: {triple}{root}{where}{note}"
        return
    known = 0 <= instruction.equation < len(graph.equations)
    equation = graph.equations[instruction.equation] if known else None
    signature = instruction.signature
    atoms = equation.inputs if equation is not None else ()
    results = equation.outputs if equation is not None else ()

    def side(names: tuple[Value | Literal, ...], placements: tuple[Placement, ...]) -> str:
        padded = [*map(str, names), *("?" for _ in placements)]
        return ", ".join(f"{name.replace(' ', '')} {p}" for name, p in zip(padded, placements, strict=False))

    name = f"{equation.primitive if equation is not None else '?'}#{instruction.equation}"
    head = f"{indent}{line}: {side(results, signature.outs)} = {name}({side(atoms, signature.ins)})"
    if isinstance(instruction, Compute):
        yield head
        return
    yield head + " {"
    for body, region in zip(
        instruction.bodies, equation.regions if equation is not None else (), strict=False
    ):
        yield format_program(body, region, indent + "  ")
    yield indent + "}"


_RATIOS = re.compile(r"ratios @([1-9]\d*): ([\d.e+ -]+)")
_IN_OUT = re.compile(r"(in|out)\s+(\d+) (\S+) (\S+)")
_MOVE = re.compile(r"\d+: %(\d+) (\S+) = (\w+)(?:\.(\w+))? %\1 (\S+?)(?: from (\d+))?(?: on \{([\d,]*)\})?")
_COMPUTE = re.compile(r"\d+: (.*?)\s*= ?[\w\-?]+#(\d+)\((.*)\)( \{)?")


def parse_program(text: str) -> Program:
    """Inverse of `format_program`.

    Raises:
        ProgramError: naming the line that does not parse.
    """
    lines = [(n, _strip(line)) for n, line in enumerate(text.splitlines(), 1)]
    reader = _Reader([(n, line) for n, line in lines if line])
    program = reader.program()
    if reader.position != len(reader.lines):
        reader.fail("text goes on after the program")
    return program


def _strip(line: str) -> str:
    return re.sub(r"\s+# .*$", "", line).strip()


class _Reader:
    """Recursive descent over the lines of a program."""

    def __init__(self, lines: list[tuple[int, str]]) -> None:
        self.lines = lines
        self.position = 0
        self.own: dict[int, OwnRatios] = {}

    def fail(self, reason: str) -> None:
        number, line = self.lines[self.position] if self.position < len(self.lines) else (0, "end of text")
        raise ProgramError(
            place=f"line {number} ({line})", reason=reason, remedy="See the grammar in ir/text.py"
        )

    def next(self, wanted: str = "") -> str:
        if self.position >= len(self.lines) or (wanted and self.lines[self.position][1] != wanted):
            self.fail(f"expected {wanted or 'more text'}")
        self.position += 1
        return self.lines[self.position - 1][1]

    def program(self) -> Program:
        self.next("program {")
        while match := _RATIOS.fullmatch(self.lines[self.position][1]):
            number = int(match[1])
            self.own[number] = OwnRatios(number, tuple(map(float, match[2].split())))
            self.position += 1
        ends: dict[str, list[Placement]] = {"in": [], "out": []}
        instructions: list[Instruction] = []
        while (line := self.next()) != "}":
            self.position -= 1
            if match := _IN_OUT.fullmatch(line):
                ends[match[1]].append(self.placement(match[4]))
                self.position += 1
            else:
                instructions.append(self.instruction(line))
        return Program(tuple(ends["in"]), tuple(instructions), tuple(ends["out"]))

    def placement(self, text: str) -> Placement:
        return parse_placement(text, own=self.own)

    def placements(self, side: str) -> tuple[Placement, ...]:
        """Placements of a side such as `%5 R, 0.5 R, %6 S(0)`."""
        return tuple(self.placement(part.split(" ")[1]) for part in side.split(", ")) if side else ()

    def instruction(self, line: str) -> Instruction:
        if match := _MOVE.fullmatch(line):
            self.position += 1
            group: Group = tuple(int(i) for i in match[7].split(",")) if match[7] else None
            root = int(match[6]) if match[6] else None
            pre, post = self.placement(match[5]), self.placement(match[2])
            return Move(match[3], int(match[1]), pre, post, match[4] or "", group, root)
        match = _COMPUTE.fullmatch(line)
        if match is None:
            self.fail("is no instruction")
        assert match is not None
        self.position += 1
        signature = Signature(self.placements(match[3]), self.placements(match[1]))
        if not match[4]:
            return Compute(int(match[2]), signature)
        bodies: list[Program] = []
        while self.position < len(self.lines) and self.lines[self.position][1] == "program {":
            bodies.append(self.program())
        self.next("}")
        return Loop(int(match[2]), signature, tuple(bodies))
