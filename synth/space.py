"""The space of programs of one step, as choices and factors.

Built once per step, whatever the prices: fused classes, the choices of every graph and region, and the
factors that tie them. See `shardwright.synth.factors` for what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.cost.traffic import traffic
from shardwright.ir.graph import Atom, Equation, Graph, Literal, Value
from shardwright.ir.placement import Partial, ReduceOp, Shard
from shardwright.ir.regions import Boundary, boundary
from shardwright.ir.rules import Rule, Signature, cuts, registry, rule_of, signatures
from shardwright.synth.conversions import Domain, Domains
from shardwright.synth.factors import Choice, EquationFactor, Factor, LinkFactor, Slot
from shardwright.synth.fuse import FusedClass, Fusion, fuse, same_shape
from shardwright.synth.units import Units


@dataclass(slots=True)
class Frame:
    """One graph of the space (the step itself, or the body of a region) and its choices.

    Attributes:
        graph: the graph.
        weight: how often it runs per step.
        fusion: its fused classes.
        choice: what each value is held in, for a value of a class that class's placement.
        exits: values computed in a class that have a holding of their own for users outside of it.
        factors: the factor of every equation without regions.
        children: frames of an equation's regions.
        ports: placement in which each result of an equation with regions leaves them, by result;
            carries leave as they are carried.
    """

    graph: Graph
    weight: float
    fusion: Fusion
    choice: dict[Value, Choice] = field(default_factory=dict[Value, Choice])
    exits: dict[Value, Choice] = field(default_factory=dict[Value, Choice])
    factors: dict[Equation, EquationFactor] = field(default_factory=dict[Equation, EquationFactor])
    children: dict[Equation, tuple[Frame, ...]] = field(default_factory=dict)
    ports: dict[Equation, dict[int, Choice]] = field(default_factory=dict[Equation, dict[int, Choice]])

    def held(self, value: Value) -> Choice:
        """The choice from which users outside of its class get a value."""
        return self.exits.get(value) or self.choice[value]


class Space:
    """All choices and factors of a step.

    Attributes:
        root: the frame of the step itself.
        choices: all choices, numbered.
        factors: all factors.
        replicated: primitives without a rule, which run replicated, with one equation of each.
        assumptions: what prices assume about loops, in words.
    """

    def __init__(self, graph: Graph) -> None:
        self.choices: list[Choice] = []
        self.factors: list[Factor] = []
        self.replicated: dict[str, Equation] = {}
        self.assumptions: dict[str, None] = {}
        self._domains = Domains()
        self._partials: dict[Value, frozenset[ReduceOp]] = {}
        self._known: dict[tuple[object, ...], tuple[Signature, ...]] = {}
        self._rules: dict[Equation, Rule] = {}
        for equation in graph.all_equations():
            if equation.regions:
                continue
            self._rules[equation] = rule_of(equation)
            if equation.primitive not in registry():
                self.replicated.setdefault(equation.primitive, equation)
        self.units = Units()
        self.units.add(graph, self._rules)
        self._find_partials(graph, frozenset())
        self.root = self._frame(graph, 1.0)
        for out, atom in enumerate(graph.outputs):
            if isinstance(atom, Value):
                self._add_output(self.root, out, atom)

    # -- what may be Partial -----------------------------------------------------------------------

    def signatures(self, equation: Equation) -> tuple[Signature, ...]:
        """The signatures of an equation whose letters can be cut; one object for equal equations."""
        rule = self._rules[equation]
        units: dict[str, int] = {}
        for letter in rule.letters:
            cut_ins, cut_outs = cuts(rule, equation, letter)
            for cut, atom in zip((*cut_ins, *cut_outs), (*equation.inputs, *equation.outputs), strict=True):
                if cut is not None and isinstance(atom, Value):
                    unit = self.units.unit(atom, cut.dim)
                    units[letter] = unit // cut.minor if cut.minor else 0
                    break
        key = (rule.axes, rule.reduce, rule.linear, rule.monotone, rule.upper, rule.lower, rule.accumulator)
        key = (*key, equation.input_types, equation.output_types, tuple(units.items()))
        if key not in self._known:
            found = signatures(rule, equation, {letter: max(1, unit) for letter, unit in units.items()})
            cuttable = {letter for letter, unit in units.items() if unit}
            names = iter(rule.letters)
            kept: list[Signature] = []
            for position, signature in enumerate(found):
                letter = next(names, None) if position else None
                if letter is None or letter in cuttable:
                    kept.append(signature)
            self._known[key] = tuple(kept)
        return self._known[key]

    def _find_partials(self, graph: Graph, carried: frozenset[Value]) -> None:
        """Which reductions each value may have outstanding; carries of a loop may, if they are sums."""
        none: frozenset[ReduceOp] = frozenset()
        sums: frozenset[ReduceOp] = frozenset(("sum",))
        for value in (*graph.inputs, *graph.constants):
            self._partials[value] = sums if value in carried and value.type.is_float else none
        for equation in graph.equations:
            if equation.regions:
                self._find_region_partials(equation)
                continue
            found = self.signatures(equation)
            for k, value in enumerate(equation.outputs):
                self._partials[value] = frozenset(
                    placement.op
                    for signature in found
                    if isinstance(placement := signature.outs[k], Partial)
                    and self._arises(equation, signature, placement)
                )

    def _arises(self, equation: Equation, signature: Signature, result: Partial) -> bool:
        """Whether a signature makes a new Partial, or passes one that may come in."""
        for atom, placement in zip(equation.inputs, signature.ins, strict=True):
            if isinstance(placement, Shard):
                return True
            if placement == result and isinstance(atom, Value) and result.op in self._partials[atom]:
                return True
        return False

    def _find_region_partials(self, equation: Equation) -> None:
        wiring = boundary(equation)
        for r, region in enumerate(equation.regions):
            carried = {region.inputs[into] for _, _, to, into in wiring.carries if to == r}
            self._find_partials(region, frozenset(carried))
        for port in wiring.outs:
            inner = equation.regions[port.region].outputs[port.inner]
            found: frozenset[ReduceOp] = self._partials[inner] if isinstance(inner, Value) else frozenset()
            self._partials[equation.outputs[port.outer]] = found

    # -- choices and factors -----------------------------------------------------------------------

    def _frame(self, graph: Graph, weight: float) -> Frame:
        frame = Frame(graph, weight, fuse(graph, self._rules, lambda v: "sum" in self._partials[v]))
        for value in graph.inputs:
            self._add_input(frame, value)
        for value in graph.constants:
            frame.choice[value] = self._choice(value, self._domains.whole(value.type, self.units.of(value)))
        through_memory = traffic(graph)
        for equation in graph.equations:
            for value in equation.outputs:
                self._add_result(frame, value)
            if equation.regions:
                self._add_regions(frame, equation)
                continue
            ins = (self._operand(frame, equation, atom) for atom in equation.inputs)
            outs = (self._result(frame, equation, value) for value in equation.outputs)
            factor = EquationFactor(
                equation=equation,
                rule=self._rules[equation],
                traffic=through_memory[equation],
                signatures=self.signatures(equation),
                slots=(*ins, *outs),
                weight=weight,
            )
            frame.factors[equation] = factor
            self.factors.append(factor)
        return frame

    def _choice(self, value: Value, domain: Domain) -> Choice:
        choice = Choice(len(self.choices), str(value), domain)
        self.choices.append(choice)
        return choice

    def _link(self, kind: str, *scope: Choice, weight: float = 1.0, stacked: bool = False) -> None:
        if len(set(scope)) == len(scope):
            self.factors.append(LinkFactor(kind, scope, weight, stacked))

    def _single(self, value: Value) -> Domain:
        return self._domains.single(value.type, self.units.of(value), self._partials[value])

    def _multiple(self, value: Value) -> Domain:
        return self._domains.multiple(value.type, self.units.of(value), self._partials[value])

    def _class_choice(self, frame: Frame, fused: FusedClass, value: Value) -> Choice:
        """The placement in which a class is computed, made when the first of its values is met."""
        first = fused.equations[0].outputs[0]
        if first not in frame.choice:
            members = {v for e in fused.equations for v in (*same_shape(e), *e.outputs)}
            may_sum = fused.passes and any("sum" in self._partials[v] for v in members)
            partials: tuple[ReduceOp, ...] = ("sum",) if may_sum else ()
            domain = self._domains.single(value.type, self.units.of(value), partials)
            frame.choice[first] = self._choice(first, domain)
        return frame.choice[first]

    def _add_input(self, frame: Frame, value: Value) -> None:
        fused = frame.fusion.of_value.get(value)
        if fused is not None:
            frame.choice[value] = self._class_choice(frame, fused, value)
            if not self._partials[value]:
                self._link("not partial", frame.choice[value])
        elif len(frame.fusion.users.get(value, ())) > 1:
            domain = self._domains.given(value.type, self.units.of(value), self._partials[value])
            frame.choice[value] = self._choice(value, domain)
            self._link("hold", frame.choice[value], weight=frame.weight)
        else:
            frame.choice[value] = self._choice(value, self._single(value))

    def _add_result(self, frame: Frame, value: Value) -> None:
        users = frame.fusion.users.get(value, ())
        fused = frame.fusion.of_value.get(value)
        if fused is None:
            domain = self._multiple(value) if len(users) > 1 else self._single(value)
            frame.choice[value] = self._choice(value, domain)
            return
        frame.choice[value] = self._class_choice(frame, fused, value)
        if sum(user is not fused for user in users) > 1:
            frame.exits[value] = self._choice(value, self._multiple(value))
            self._link("exit", frame.choice[value], frame.exits[value], weight=frame.weight)

    def _operand(self, frame: Frame, equation: Equation, atom: Atom) -> Slot | None:
        if isinstance(atom, Literal):
            return None
        fused = frame.fusion.of_equation.get(equation)
        inside = (
            fused is not None and frame.fusion.of_value.get(atom) is fused and atom in same_shape(equation)
        )
        return Slot(frame.choice[atom], "exact") if inside else Slot(frame.held(atom), "use")

    def _result(self, frame: Frame, equation: Equation, value: Value) -> Slot:
        inside = equation in frame.fusion.of_equation
        return Slot(frame.choice[value], "exact" if inside else "derive")

    def _add_output(self, frame: Frame, out: int, value: Value) -> None:
        held = frame.held(value)
        if out in frame.graph.state:
            self._link("return", held, frame.choice[frame.graph.inputs[frame.graph.state[out]]])
        else:
            self._link("hand out whole" if value.type.rank == 0 else "hand out", held)

    # -- regions -----------------------------------------------------------------------------------

    def _add_regions(self, frame: Frame, equation: Equation) -> None:
        wiring = boundary(equation)
        trips = [1 if trip is None else trip for trip in wiring.trips]
        if None in wiring.trips:
            what = "one iteration" if equation.primitive == "while" else "if every branch ran"
            self.assumptions[f"{equation.primitive} (equation {equation.index}) is priced as {what}"] = None
        pairs = zip(equation.regions, trips, strict=True)
        frames = tuple(self._frame(region, frame.weight * trip) for region, trip in pairs)
        frame.children[equation] = frames
        self._enter(frame, equation, wiring, frames)
        self._carry_and_leave(frame, equation, wiring, frames)
        for operand in wiring.replicated_operands:
            atom = equation.inputs[operand]
            if isinstance(atom, Value):
                self._link("hand out whole", frame.held(atom), weight=frame.weight)
        for region, out in wiring.replicated_outputs:
            atom = frames[region].graph.outputs[out]
            if isinstance(atom, Value):
                self._link("hand out whole", frames[region].held(atom), weight=frames[region].weight)

    def _enter(self, frame: Frame, equation: Equation, wiring: Boundary, frames: tuple[Frame, ...]) -> None:
        first: dict[int, Choice] = {}
        for port in wiring.ins:
            child = frames[port.region]
            inner = child.choice[child.graph.inputs[port.inner]]
            outer = equation.inputs[port.outer]
            if port.outer in first:
                self._link("same", first[port.outer], inner)
                continue
            first[port.outer] = inner
            if isinstance(outer, Value):
                self._link("enter", frame.held(outer), inner, weight=frame.weight, stacked=port.stacked)

    def _carry_and_leave(
        self, frame: Frame, equation: Equation, wiring: Boundary, frames: tuple[Frame, ...]
    ) -> None:
        carried: dict[tuple[int, int], Choice] = {}
        for from_region, out, to_region, into in wiring.carries:
            source, target = frames[from_region], frames[to_region]
            choice = target.choice[target.graph.inputs[into]]
            atom = source.graph.outputs[out]
            if isinstance(atom, Value):
                self._link("return", source.held(atom), choice, weight=source.weight)
            else:
                self._link("whole", choice)
            carried.setdefault((from_region, out), choice)
        ports = frame.ports.setdefault(equation, {})
        for port in wiring.outs:
            child, result = frames[port.region], equation.outputs[port.outer]
            atom = child.graph.outputs[port.inner]
            if (port.region, port.inner) in carried:
                ports[port.outer] = carried[port.region, port.inner]
            else:
                if port.outer not in ports:
                    ports[port.outer] = self._choice(result, self._port_domain(atom, result))
                if isinstance(atom, Value):
                    self._link("return", child.held(atom), ports[port.outer], weight=child.weight)
                else:
                    self._link("whole", ports[port.outer])
            self._link(
                "leave" if port.stacked else "exit",
                ports[port.outer],
                frame.choice[result],
                weight=frame.weight,
            )

    def _port_domain(self, inner: Atom, result: Value) -> Domain:
        if isinstance(inner, Value):
            return self._single(inner)
        return self._domains.whole(inner.type, (0,) * inner.type.rank)
