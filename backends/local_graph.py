"""A segment as one device runs it: a graph over its own shapes, to be looked at rather than run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.backends.layout import holds
from shardwright.backends.local import local_shape
from shardwright.ir.flow import find, inputs, reads, writes
from shardwright.ir.graph import Atom, Equation, Form, Forms, Graph, Literal, TensorType, Value, value_types
from shardwright.ir.placement import Partial, Placement, Replicate, Shard
from shardwright.ir.program import Instruction, Loop, Move, Program, Property
from shardwright.ir.rewrites.graphs import fresh, renumbered
from shardwright.ir.segments import Relay, Segment
from shardwright.ir.stages import Layers, layers_of, piece_type

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

    def stage(self, step: Relay, graph: Graph) -> Graph | None:
        """The graph of what the device does with one piece of the batch; None where it has no layers.

        From constants, the piece of what is carried on and rows to what is carried on, and rows of the piece.
        """
        equation, signature = graph.equations[step.compute.equation], step.compute.signature
        layers = layers_of(equation)
        assert layers is not None, "it is one of stages"
        first, count = layers.consts + layers.carries, layers.carries
        types = [self.type(*pair) for pair in zip(equation.input_types, signature.ins, strict=True)]
        made = [self.type(*pair) for pair in zip(equation.output_types, signature.outs, strict=True)]
        length = types[first].shape[0]
        if not length:
            return None
        carried = zip(types[layers.consts : first], layers.ins[layers.consts : first], strict=True)
        carry = [piece_type(tensor, going) for tensor, going in carried]
        rows = zip(made[count:], layers.outs[count:], strict=True)
        outs = [*carry, *[piece_type(tensor, going) for tensor, going in rows]]
        given = [*types[: layers.consts], *carry, *types[first:]]
        inputs = tuple([Value(number, tensor) for number, tensor in enumerate(given)])
        results = tuple([Value(len(given) + number, tensor) for number, tensor in enumerate(outs)])
        layered = Equation(0, equation.form, inputs, results, (), equation.source)
        scan = self._in_layers(layered, length, types)
        return Graph(inputs, {}, (scan,), results, compiler=self.compiler)

    def _in_layers(self, stages: Equation, length: int, types: Sequence[TensorType]) -> Equation:
        """Stages as a scan over so many layers on one piece; operands are of these types, carry aside."""
        layers = layers_of(stages)
        assert layers is not None, "it is one of stages"
        operands = (Literal(0, TensorType((), "int32")), *stages.inputs)
        params = {"num_consts": layers.consts + 1, "num_carry": layers.carries, "length": length}
        form = self._forms.of("scan", params | {"reverse": layers.reverse}, operands, stages.outputs)
        region = _on_whole_rows(layers, types)
        return Equation(stages.index, form, operands, stages.outputs, (region,), stages.source, stages.part)

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
        found = Equation(number, form, ins, outs, regions, source.source, source.part)
        layers = layers_of(source)
        # What layers need beside their results is that of one piece, whether or not they are cut.
        return found if layers is None else self._in_layers(found, layers.length, [atom.type for atom in ins])

    def moved(self, number: int, ins: tuple[Atom, ...], outs: tuple[Value, ...]) -> Equation:
        """A local move: a stretch of what is there, or nothing to add to it."""
        form = self._forms.of("slice", {}, ins, outs)
        return Equation(number, form, ins, outs)


def _on_whole_rows(layers: Layers, types: Sequence[TensorType]) -> Graph:
    """One layer on one piece, of operands of these types: it takes the piece of what comes in all of them."""
    first = layers.consts + layers.carries
    *own, number = layers.graph.inputs
    inputs, taken = list(own), list[Equation]()
    for k, (value, going) in enumerate(zip(own, layers.ins, strict=True)):
        if isinstance(going, Shard) and not layers.consts <= k < first:
            tensor = types[k] if k < first else TensorType(types[k].shape[1:], types[k].dtype)
            inputs[k] = fresh(tensor)
            form = Form("slice", {}, (tensor,), (value.type,))
            taken.append(Equation(0, form, (inputs[k],), (value,)))
    return renumbered(layers.graph, [*taken, *layers.graph.equations], inputs=[number, *inputs])


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
