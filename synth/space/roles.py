"""What the tensors of a training step are for, found from how they are used and never from their names.

The *batch* is the leading dimension of the arguments that are no state. It is followed through the rules: an
equation that has it in an operand is *batched*, and hands it on where the axis string does; what meets it
there and is made for it (a dropout mask, zeros) has the batch, too. Forward and backward pass are the batched
equations. What they read besides, the *weights*, descends from the *parameters*; state that they do not read
(moments, averages) belongs to the *optimizer*. A contraction that runs a parameter's dimension along with
the data's (`e g d, e d f -> e g f`) has one set of weights per index of it: an *expert* axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from shardwright.ir.graph import Atom, Equation, Graph, Value
from shardwright.ir.placement import Shard
from shardwright.ir.regions import Port, boundary
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Signature, cuts
from shardwright.synth.space.fuse import kind
from shardwright.synth.space.units import Dim, Units


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of the values of a graph and its regions.

    Attributes:
        batch: dimension that is the batch, of every value that has one.
        inputs: arguments that carry the batch.
        parameters: arguments that batched equations read, themselves or what is made from them.
        contracted: parameters that a contraction with data reads.
        optimizer: the rest of the state; like the parameters, floating point and no scalars.
        stacked: inputs of loop bodies that are one layer of stacked parameters.
        weights: values without data in them that batched equations read.
        prepared: the weights and what they are made from.
        experts: dimensions tied to an expert axis, as `Units.group` names them.
        expert_parameters: parameters with one set of weights per index of an expert axis.
    """

    batch: Mapping[Value, int]
    inputs: tuple[Value, ...]
    parameters: tuple[Value, ...]
    contracted: tuple[Value, ...]
    optimizer: tuple[Value, ...]
    stacked: tuple[Value, ...]
    weights: frozenset[Value]
    prepared: frozenset[Value]
    experts: frozenset[Dim]
    expert_parameters: tuple[Value, ...]

    def batched(self, equation: Equation) -> bool:
        """Whether an operand or a result carries the batch."""
        return any(value in self.batch for value in (*equation.input_values, *equation.outputs))

    def splits_batch(self, equation: Equation, signature: Signature) -> bool:
        """Whether a signature shards anything along the batch."""
        atoms = (*equation.inputs, *equation.outputs)
        return any(
            isinstance(atom, Value) and isinstance(placement, Shard) and self.batch.get(atom) == placement.dim
            for atom, placement in zip(atoms, (*signature.ins, *signature.outs), strict=True)
        )

    def prepares(self, equation: Equation) -> bool:
        """Whether an equation makes what weights are made from: a cast of a parameter, a mask."""
        return any(value in self.prepared and value not in self.batch for value in equation.outputs)

    def splits_experts(self, equation: Equation, signature: Signature, units: Units) -> bool:
        """Whether a signature shards an operand along an expert axis."""
        return any(
            isinstance(atom, Value)
            and isinstance(placement, Shard)
            and units.group(atom, placement.dim) in self.experts
            for atom, placement in zip(equation.inputs, signature.ins, strict=True)
        )


def roles(graph: Graph, units: Units) -> Roles:
    """Roles in a step's graph. Without an argument that is no state there is no batch, and nothing else."""
    inputs = _batch_inputs(graph, units)
    flow = _Flow(dict.fromkeys(inputs, 0), set(inputs))
    for value in graph.inputs:
        if value not in flow.data:
            flow.origins[value] = {value: None}
    flow.walk(graph)
    read: dict[Value, None] = {}
    contracted: dict[Value, None] = {}
    weights: dict[Value, None] = {}
    experts: dict[Dim, None] = {}
    of_experts: dict[Value, None] = {}
    for equation in graph.all_equations():
        if equation.regions or not any(value in flow.batch for value in equation.input_values):
            continue
        for value in equation.input_values:
            if value in flow.data or value in flow.batch:
                continue
            origins = flow.origins.get(value, {})
            weights[value] = None
            read |= origins
            if kind(equation) == "contraction":
                contracted |= origins
                along = dict.fromkeys(_experts(equation, value, flow, units))
                experts |= along
                of_experts |= origins if along else {}
    tensors = [v for v in graph.inputs if v.type.is_float and v.type.rank and v not in flow.data]
    state = {graph.inputs[position] for position in graph.state.values()}
    parameters = tuple(value for value in tensors if value in read)
    return Roles(
        batch=flow.batch,
        inputs=inputs,
        parameters=parameters,
        contracted=tuple(value for value in parameters if value in contracted),
        optimizer=tuple(value for value in tensors if value not in read and value in state),
        stacked=tuple(v for v in flow.stacked if flow.origins.get(v, {}).keys() & set(parameters)),
        weights=frozenset(weights),
        prepared=frozenset(_made_from(graph, weights, flow)),
        experts=frozenset(experts),
        expert_parameters=tuple(value for value in parameters if value in of_experts),
    )


def _batch_inputs(graph: Graph, units: Units) -> tuple[Value, ...]:
    """Arguments that are no state and have the leading size that most of them share (of equals the first)."""
    state = set(graph.state.values())
    candidates = [v for i, v in enumerate(graph.inputs) if i not in state and v.type.rank]
    candidates = [value for value in candidates if units.unit(value, 0)]
    sizes = Counter(value.type.shape[0] for value in candidates)
    if not sizes:
        return ()
    ((size, _),) = sizes.most_common(1)
    return tuple(value for value in candidates if value.type.shape[0] == size)


def _experts(equation: Equation, weight: Value, flow: _Flow, units: Units) -> Iterator[Dim]:
    """Dimensions of a weight that a contraction runs along with the data's, into the result."""
    rule = rule_of(equation)
    for letter in rule.letters:
        cut_ins, cut_outs = cuts(rule, equation, letter)
        of_weight: list[int] = []
        of_data = False
        for atom, cut in zip(equation.inputs, cut_ins, strict=True):
            if cut is None or not isinstance(atom, Value):
                continue
            if atom is weight:
                of_weight.append(cut.dim)
            of_data = of_data or (atom in flow.data and flow.batch.get(atom) != cut.dim)
        if of_data and any(cut is not None for cut in cut_outs):
            yield from (units.group(weight, dim) for dim in of_weight if units.unit(weight, dim))


def _made_from(graph: Graph, weights: Collection[Value], flow: _Flow) -> set[Value]:
    """The weights and the values without data that they are made from, within each graph."""
    found = set(weights)
    for equation in reversed(graph.equations):
        for region in equation.regions:
            found |= _made_from(region, weights, flow)
        if any(value in found for value in equation.outputs):
            found.update(value for value in equation.input_values if value not in flow.data)
    return found


@dataclass(slots=True)
class _Flow:
    """Follows the batch, data and parameters through a graph and its regions.

    Attributes:
        batch: dimension that is the batch.
        data: values that depend on an argument with the batch.
        origins: of values without data, the arguments they are made from.
        stacked: inputs of loop bodies that are slices of something stacked.
    """

    batch: dict[Value, int]
    data: set[Value]
    origins: dict[Value, dict[Value, None]] = field(default_factory=dict)
    stacked: dict[Value, None] = field(default_factory=dict[Value, None])

    def walk(self, graph: Graph) -> None:
        """Down the graph, and back up to what is made for the batch."""
        for equation in graph.equations:
            if equation.regions:
                self.regions(equation)
            else:
                self.equation(equation)
        for equation in reversed(graph.equations):
            if not equation.regions:
                self.back(equation)
        self.batch = {v: dim for v, dim in self.batch.items() if v not in self.origins.get(v, {})}

    def back(self, equation: Equation) -> None:
        """Operands without data that an equation cuts along with the batch are made for it."""
        missing = [v for v in equation.input_values if v not in self.data and v not in self.batch]
        if not missing or not any(v in self.batch for v in (*equation.input_values, *equation.outputs)):
            return
        rule = rule_of(equation)
        atoms = (*equation.inputs, *equation.outputs)
        for letter in rule.letters:
            cut_ins, cut_outs = cuts(rule, equation, letter)
            places = [(a, c) for a, c in zip(atoms, (*cut_ins, *cut_outs), strict=True) if c is not None]
            if any(isinstance(a, Value) and self.batch.get(a) == c.dim for a, c in places):
                for atom, cut in places:
                    if atom in missing:
                        self.batch.setdefault(atom, cut.dim)

    def equation(self, equation: Equation) -> None:
        values = equation.input_values
        if any(value in self.data for value in values):
            self.data.update(equation.outputs)
        else:
            merged: dict[Value, None] = {}
            for value in values:
                merged |= self.origins.get(value, {})
            self.origins.update(dict.fromkeys(equation.outputs, merged))
        if not any(value in self.batch for value in values):
            return
        rule = rule_of(equation)
        for letter in rule.letters:
            cut_ins, cut_outs = cuts(rule, equation, letter)
            reads = zip(equation.inputs, cut_ins, strict=True)
            if any(c is not None and isinstance(a, Value) and self.batch.get(a) == c.dim for a, c in reads):
                for value, cut in zip(equation.outputs, cut_outs, strict=True):
                    if cut is not None:
                        self.batch.setdefault(value, cut.dim)

    def regions(self, equation: Equation) -> None:
        """The bodies of a loop, until what it carries from one iteration to the next no longer changes."""
        wiring = boundary(equation)
        for port in wiring.ins:
            inner = equation.regions[port.region].inputs[port.inner]
            self.enter(equation.inputs[port.outer], inner, port)
        changed = True
        while changed:
            for region in equation.regions:
                self.walk(region)
            changed = False
            for from_region, out, to_region, into in wiring.carries:
                target = equation.regions[to_region].inputs[into]
                changed |= self.merge(equation.regions[from_region].outputs[out], target)
        for port in wiring.outs:
            inner = equation.regions[port.region].outputs[port.inner]
            self.merge(inner, equation.outputs[port.outer], int(port.stacked))

    def enter(self, outer: Atom, inner: Value, port: Port) -> None:
        if isinstance(outer, Value) and not (port.stacked and self.batch.get(outer) == 0):
            self.merge(outer, inner, -int(port.stacked))
        elif isinstance(outer, Value) and outer in self.data:
            self.data.add(inner)
        if port.stacked:
            self.stacked[inner] = None

    def merge(self, source: Atom, target: Value, shift: int = 0) -> bool:
        """What is known of `source` holds for `target`; whether that was news."""
        if not isinstance(source, Value):
            return False
        before = (target in self.data, target in self.batch, len(self.origins.get(target, {})))
        if source in self.data:
            self.data.add(target)
        self.origins[target] = {**self.origins.get(target, {}), **self.origins.get(source, {})}
        if source in self.batch:
            self.batch.setdefault(target, self.batch[source] + shift)
        return before != (target in self.data, target in self.batch, len(self.origins[target]))
