"""A segment as one device runs it: a graph over its own shapes, to be looked at rather than run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.backends.layout import holds
from shardwright.backends.local import local_shape
from shardwright.ir.flow import find, inputs, reads, writes
from shardwright.ir.graph import Atom, Equation, Forms, Graph, Literal, TensorType, Value, value_types
from shardwright.ir.placement import Partial, Placement, Replicate
from shardwright.ir.program import Instruction, Loop, Move, Program, Property
from shardwright.ir.segments import Segment

_Env = dict[Property, Atom]


def local_type(tensor: TensorType, placement: Placement, device: int, ratios: Sequence[float]) -> TensorType:
    """What a device holds of a tensor."""
    if isinstance(placement, Replicate | Partial):
        return tensor
    return TensorType(local_shape(tensor, placement, device, ratios), tensor.dtype)


class LocalGraphs:
    """Makes the graphs of one device.

    Args:
        device: its position in the program.
        ratios: share of every device of the program.
        compiler: of segments, see `shardwright.ir.graph.Graph`.
    """

    def __init__(self, device: int, ratios: Sequence[float], compiler: str = "cpu") -> None:
        self.device, self.ratios, self.compiler = device, tuple(ratios), compiler
        self._forms = Forms()
        self._types: dict[tuple[TensorType, Placement], TensorType] = {}

    def type(self, tensor: TensorType, placement: Placement) -> TensorType:
        """What the device holds of a tensor."""
        key = (tensor, placement)
        if key not in self._types:
            self._types[key] = local_type(tensor, placement, self.device, self.ratios)
        return self._types[key]

    def segment(self, segment: Segment, graph: Graph, over: Mapping[Property, Property]) -> Graph:
        """The graph of a segment: from what it needs, what it gives, as far as the device holds it.

        Args:
            segment: what is run.
            graph: the step, or the body of a loop, that it is of.
            over: what it gives in the place of what it needs, see `shardwright.ir.donation.taken_over`.
        """
        needs = [prop for prop in segment.needs if holds(prop, self.device)]
        gives = [prop for prop in segment.gives if holds(prop, self.device)]
        maker = _Maker(self, graph)
        given = maker.enter(needs)
        maker.run(segment.instructions)
        results = tuple(maker.env[prop] for prop in gives)
        pairs = [(new, old) for new, old in over.items() if new in gives and old in needs]
        state = {gives.index(new): needs.index(old) for new, old in pairs}
        equations = tuple(maker.equations)
        return Graph(given, {}, equations, results, state=state, compiler=self.compiler)

    def body(self, body: Program, region: Graph) -> Graph:
        """The graph of a loop's body."""
        maker = _Maker(self, region)
        all_in = inputs(body, region)
        given = maker.enter(all_in[: len(region.inputs)])
        constants = maker.enter(all_in[len(region.inputs) :])
        maker.run(body.instructions)
        arrays = dict(zip(constants, region.constants.values(), strict=True))
        outs = zip(region.outputs, body.outputs, strict=True)
        results = tuple(maker.atom(atom, placement) for atom, placement in outs)
        return Graph(given, arrays, tuple(maker.equations), results)

    def equation(
        self, number: int, source: Equation, ins: tuple[Atom, ...], outs: tuple[Value, ...], loop: Loop | None
    ) -> Equation:
        """An equation on local tensors."""
        regions: tuple[Graph, ...] = ()
        if loop is not None:
            pairs = zip(loop.bodies, source.regions, strict=True)
            regions = tuple(self.body(body, region) for body, region in pairs)
        form = self._forms.of(source.primitive, source.params, ins, outs)
        return Equation(number, form, ins, outs, regions, source.source, source.part)

    def moved(self, number: int, ins: tuple[Atom, ...], outs: tuple[Value, ...]) -> Equation:
        """A local move: a stretch of what is there, or nothing to add to it."""
        form = self._forms.of("slice", {}, ins, outs)
        return Equation(number, form, ins, outs)


class _Maker:
    """Equations over what was established so far."""

    def __init__(self, graphs: LocalGraphs, graph: Graph) -> None:
        self.graphs, self.graph = graphs, graph
        self.types = value_types(graph)
        self.env: _Env = {}
        self.equations: list[Equation] = []
        self.made = 0

    def enter(self, properties: Sequence[Property]) -> tuple[Value, ...]:
        """Values that are there from the start."""
        return tuple(self._establish(prop) for prop in properties)

    def _establish(self, prop: Property) -> Value:
        value = Value(self.made, self.graphs.type(self.types[prop.value], prop.placement))
        self.made += 1
        self.env[prop] = value
        return value

    def atom(self, atom: Atom, placement: Placement) -> Atom:
        """The local operand."""
        return atom if isinstance(atom, Literal) else self.env[Property(atom.index, placement)]

    def run(self, instructions: Sequence[Instruction]) -> None:
        """Add the equations of local instructions."""
        for instruction in instructions:
            number = len(self.equations)
            if isinstance(instruction, Move):
                (wanted,) = reads(instruction, self.graph)
                source = self.env[wanted if wanted in self.env else find(wanted, self.env)]
                (made,) = writes(instruction, self.graph)
                if holds(made, self.graphs.device):
                    self.equations.append(self.graphs.moved(number, (source,), (self._establish(made),)))
                continue
            equation = self.graph.equations[instruction.equation]
            pairs = zip(equation.inputs, instruction.signature.ins, strict=True)
            ins = tuple(self.atom(atom, placement) for atom, placement in pairs)
            outs = tuple(self._establish(prop) for prop in writes(instruction, self.graph))
            loop = instruction if isinstance(instruction, Loop) else None
            self.equations.append(self.graphs.equation(number, equation, ins, outs, loop))
