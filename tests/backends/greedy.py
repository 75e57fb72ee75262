"""Valid programs without a planner: walks the equations and follows their signatures.

Greedy takes, equation by equation, the signature that moves the fewest bytes; with a random generator it
takes any signature, collective strategy and loop placement, which exercises far more of the instruction set.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.ir.collectives import between
from shardwright.ir.graph import Atom, Equation, Graph, Literal, Value
from shardwright.ir.placement import OwnRatios, Partial, Placement, R, Shard
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program, verify
from shardwright.ir.regions import boundary, inner_placement, outer_placement
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Signature, cuts, signatures
from shardwright.ir.ties import cut_by, stretches


def build(graph: Graph, inputs: Sequence[Placement], rng: random.Random | None = None) -> Program:
    """A verified program over `graph` from the given input placements; state returns as it came."""
    back = {out: inputs[inp] for out, inp in graph.state.items()}
    program = _Builder(graph, rng).program(inputs, [back.get(i, R) for i in range(len(graph.outputs))])
    verify(program, graph)
    return program


def several(program: Program, graph: Graph, devices: int, rng: random.Random) -> Program:
    """The program with most of its stretches cut by random ratios of their own, some shares empty."""
    found = stretches(program, graph)
    own: dict[int, OwnRatios] = {}
    for number in range(1, found.count):
        drawn = [rng.choice((0.0, 1.0, 2.0, 5.0)) for _ in range(devices - 1)] + [1.0]
        rng.shuffle(drawn)
        own[number] = OwnRatios(number, tuple(share / sum(drawn) for share in drawn))
    by = {cut: own[stretch] for cut, stretch in found.of.items() if stretch in own}
    program = cut_by(program, graph, by)
    verify(program, graph)
    return program


@dataclass
class _Builder:
    graph: Graph
    rng: random.Random | None
    held: dict[int, list[Placement]] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)

    def program(self, inputs: Sequence[Placement], outputs: Sequence[Placement | None]) -> Program:
        """Outputs of None end where they are, but never Partial."""
        for value, placement in zip(self.graph.inputs, inputs, strict=True):
            self.held[value.index] = [placement]
        for value in self.graph.constants:
            self.held[value.index] = [R]
        for equation in self.graph.equations:
            if equation.primitive in ("scan", "while", "cond") and not (self.rng and self.rng.random() < 0.2):
                self.loop(equation)
            elif equation.regions:
                uniform = Signature((R,) * len(equation.inputs), (R,) * len(equation.outputs))
                self.establish(equation.inputs, uniform.ins)
                self.emit(equation, Compute(equation.index, uniform))
            else:
                signature = self.choose(equation)
                self.establish(equation.inputs, signature.ins)
                self.emit(equation, Compute(equation.index, signature))
        ends = [
            self.resting(atom) if p is None else p
            for atom, p in zip(self.graph.outputs, outputs, strict=True)
        ]
        self.establish(self.graph.outputs, ends)
        return Program(tuple(inputs), tuple(self.instructions), tuple(ends))

    def emit(self, equation: Equation, instruction: Compute | Loop) -> None:
        self.instructions.append(instruction)
        for value, placement in zip(equation.outputs, instruction.signature.outs, strict=True):
            self.held[value.index] = [placement]

    def establish(self, atoms: Sequence[Atom], placements: Sequence[Placement]) -> None:
        for atom, wanted in zip(atoms, placements, strict=True):
            if isinstance(atom, Value) and wanted not in self.held[atom.index]:
                for pre, post in self.path(atom, wanted)[1]:
                    self.move(atom, pre, post)

    def move(self, value: Value, pre: Placement, post: Placement) -> None:
        if post in self.held[value.index]:
            return
        collective = between(pre, post)
        assert collective is not None, f"{pre} -> {post}"
        strategies = collective.strategies
        strategy = self.rng.choice(strategies) if self.rng else strategies[0]
        self.instructions.append(Move(collective.kind, value.index, pre, post, strategy))
        self.held[value.index].append(post)

    def path(self, value: Value, wanted: Placement) -> tuple[float, list[tuple[Placement, Placement]]]:
        """Bytes and steps to the wanted placement, over R where no single step leads there."""
        held = self.held[value.index]
        if wanted in held:
            return 0.0, []
        paths = [[(pre, wanted)] if between(pre, wanted) else [(pre, R), (R, wanted)] for pre in held]
        return min(((sum(_bytes(value, *step) for step in path), path) for path in paths), key=lambda x: x[0])

    def choose(self, equation: Equation) -> Signature:
        rule = rule_of(equation)
        units: dict[str, int] = {}
        for letter in rule.letters:
            for atom, cut in zip(equation.inputs, cuts(rule, equation, letter)[0], strict=True):
                if isinstance(atom, Value) and cut is not None:
                    for p in self.held[atom.index]:
                        if (
                            isinstance(p, Shard)
                            and p.dim == cut.dim
                            and cut.minor
                            and p.unit % cut.minor == 0
                        ):
                            units[letter] = p.unit // cut.minor
        options = [s for s in signatures(rule, equation, units) if _possible(equation, s)]
        if self.rng is not None:
            return self.rng.choice(options)

        def cost(signature: Signature) -> float:
            pairs = zip(equation.inputs, signature.ins, strict=True)
            moved = sum(self.path(atom, p)[0] for atom, p in pairs if isinstance(atom, Value))
            replicated = all(p == R for p in signature.outs)
            return moved + (0.1 if replicated else 0.0) * sum(v.type.nbytes for v in equation.outputs)

        return min(options, key=cost)

    def resting(self, atom: Atom) -> Placement:
        """A placement the atom is in, R where it is only Partial."""
        if isinstance(atom, Literal):
            return R
        return next((p for p in self.held[atom.index] if not isinstance(p, Partial)), R)

    def loop(self, equation: Equation) -> None:
        wiring = boundary(equation)
        outside: list[Placement] = [self.resting(atom) for atom in equation.inputs]
        for operand in wiring.replicated_operands:
            outside[operand] = R
        for port in wiring.ins:
            if inner_placement(outside[port.outer], port.stacked) is None:
                outside[port.outer] = R
        bodies: list[Program] = []
        ends: dict[int, Placement] = {}
        for region, graph in enumerate(equation.regions):
            inside: list[Placement] = [R] * len(graph.inputs)
            for port in wiring.ins:
                placement = inner_placement(outside[port.outer], port.stacked)
                if port.region == region and placement is not None:
                    inside[port.inner] = placement
            wanted: list[Placement | None] = [None] * len(graph.outputs)
            for of, out, to, into in wiring.carries:
                if of == region:
                    operand = next(
                        port.outer for port in wiring.ins if port.region == to and port.inner == into
                    )
                    wanted[out] = outside[operand]
            for of, out in wiring.replicated_outputs:
                if of == region:
                    wanted[out] = R
            for port in wiring.outs:
                if port.region == region and port.outer in ends:
                    wanted[port.inner] = ends[port.outer]
            bodies.append(_Builder(graph, self.rng).program(inside, wanted))
            for port in wiring.outs:
                if port.region == region:
                    ends[port.outer] = outer_placement(bodies[-1].outputs[port.inner], port.stacked)
        signature = Signature(tuple(outside), tuple(ends[i] for i in range(len(equation.outputs))))
        self.establish(equation.inputs, signature.ins)
        self.emit(equation, Loop(equation.index, signature, tuple(bodies)))


def _possible(equation: Equation, signature: Signature) -> bool:
    """Literals are never sharded; keys are never reduced."""
    atoms = zip((*equation.inputs, *equation.outputs), (*signature.ins, *signature.outs), strict=True)
    return not any(
        (isinstance(atom, Literal) and isinstance(p, Shard))
        or (isinstance(p, Partial) and "key" in atom.type.dtype)
        for atom, p in atoms
    )


def _bytes(value: Value, pre: Placement, post: Placement) -> float:
    collective = between(pre, post)
    assert collective is not None, f"{pre} -> {post}"
    factor = {"all_gather": 1.0, "all_reduce": 2.0, "reduce_scatter": 1.0, "all_to_all": 0.3}
    return factor.get(collective.kind, 0.0) * value.type.nbytes + (8.0 if not collective.local else 0.0)
