"""The space of programs of one step, as choices and factors.

Built once per step, whatever the prices: fused classes, the choices of every graph and region, and the
factors that tie them. See `shardwright.synth.space.factors` for what they mean. Repeated layers share their
factors, so that most of the work is done once per distinct layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import shardwright.ir.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (rules, before planning begins)
from shardwright.ir.graph import Atom, Equation, Graph, Value
from shardwright.ir.pairs import in_turn
from shardwright.ir.regions import Boundary, boundary
from shardwright.ir.registry import registry, rule_of
from shardwright.ir.rules import Signature, signatures, signatures_of_both
from shardwright.ir.stages import layers_of
from shardwright.synth.space.conversions import Domain, Domains, Routes
from shardwright.synth.space.factors import Choice
from shardwright.synth.space.frame import Frame
from shardwright.synth.space.framing import Framing
from shardwright.synth.space.making import Made
from shardwright.synth.space.outstanding import Outstanding
from shardwright.synth.space.units import Units, places
from shardwright.synth.space.vocabulary import Vocabulary


class Space:
    """All choices and factors of a step.

    Attributes:
        root: the frame of the step itself.
        choices: all choices, numbered.
        uses: all factors, with the choices they tie.
        replicated: primitives without a rule, which run replicated though they have dimensions that a rule
            might cut, with one equation of each.
        assumptions: what prices assume about loops, in words.

    Args:
        graph: the step.
        nodes: devices of every node, for programs on two mesh axes; None for programs on one.
        vocabulary: of a space with the same nodes, to have factors in common with.
    """

    def __init__(
        self, graph: Graph, nodes: tuple[int, ...] | None = None, vocabulary: Vocabulary | None = None
    ) -> None:
        self.nodes = nodes
        self.replicated: dict[str, Equation] = {}
        self.assumptions: dict[str, None] = {}
        words = Vocabulary(Domains(nodes)) if vocabulary is None else vocabulary
        self.domains, self._made = words.domains, Made(words)
        self.choices, self.uses = self._made.choices, self._made.uses
        known = registry()
        for equation in graph.all_equations():
            if equation.form.primitive not in known and not equation.regions and _has_dimensions(equation):
                self.replicated.setdefault(equation.primitive, equation)
        self.units = Units(mesh=nodes is not None)
        self.units.add(graph)
        self._outstanding = Outstanding(graph, self.units, words, self.signatures)
        self.root = self._frame(graph, 1.0)
        for out, atom in enumerate(graph.outputs):
            if isinstance(atom, Value):
                self._add_output(self.root, out, atom)

    def signatures(self, equation: Equation) -> tuple[Signature, ...]:
        """The signatures of an equation whose letters can be cut; one object for equal equations."""
        known = self._made.words.signatures
        atoms = (*equation.inputs, *equation.outputs)
        where = places(equation, mesh=self.nodes is not None)
        units: list[int] = []
        for position, dim, minor in where.first:
            unit = self.units.of(atoms[position])[dim]  # pyright: ignore[reportArgumentType]  (no literal)
            units.append(unit // minor if minor else 0)
        key = (equation.form, *units)
        found = known.get(key)
        if found is None:
            found = known[key] = self._listed(equation, dict(zip(where.letters, units, strict=True)))
        return found

    def _listed(self, equation: Equation, units: Mapping[str, int]) -> tuple[Signature, ...]:
        """The signatures of an equation, given the units of the letters that cut a tensor."""
        known, rule = self._made.words.signatures, rule_of(equation)
        by_letter = {**dict.fromkeys(rule.all_letters, 0), **units}
        if self.nodes is not None and rule.across:
            return in_turn(*signatures_of_both(rule, equation, by_letter), self.nodes)
        listed = signatures(rule, equation, by_letter)
        # Forms that differ in what does not matter here share one list, which no others have: factors
        # compare it by identity.
        same = (equation.primitive, equation.input_types, equation.output_types, id(listed))
        same = (*same, rule.axes, rule.flop_per_point, str(equation.params.get("precision")))
        same = (*same, layers_of(equation))
        found = known.get(same)
        if found is None:
            found = known[same] = tuple(signature for signature in listed)
        return found

    def routes(self, value: Value) -> Routes:
        """The placements between which a value is converted."""
        return self.domains.routes(value.type, self.units.of(value), self._outstanding.partials[value])

    # -- choices and factors -----------------------------------------------------------------------

    def _frame(self, graph: Graph, weight: float) -> Frame:
        frame = Frame(graph, weight)
        framing = Framing(self._made, frame, self._outstanding)
        for value in graph.inputs:
            framing.add_input(value)
        for value in graph.constants:
            framing.add_constant(value)
        for equation in graph.equations:
            for value in equation.outputs:
                framing.add_result(value)
            if equation.regions:
                self._add_regions(frame, equation)
            else:
                framing.add_use(equation)
        framing.close()
        return frame

    def _add_output(self, frame: Frame, out: int, value: Value) -> None:
        held = frame.held(value)
        if out in frame.graph.state:
            self._made.tie("return", held, frame.choice[frame.graph.inputs[frame.graph.state[out]]])
        else:
            self._made.tie("hand out whole" if value.type.rank == 0 else "hand out", held)

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
                self._made.tie("hand out whole", frame.held(atom), weight=frame.weight)
        for region, out in wiring.replicated_outputs:
            atom = frames[region].graph.outputs[out]
            if isinstance(atom, Value):
                self._made.tie("hand out whole", frames[region].held(atom), weight=frames[region].weight)

    def _enter(self, frame: Frame, equation: Equation, wiring: Boundary, frames: tuple[Frame, ...]) -> None:
        first: dict[int, Choice] = {}
        for port in wiring.ins:
            child = frames[port.region]
            inner = child.choice[child.graph.inputs[port.inner]]
            outer = equation.inputs[port.outer]
            if port.outer in first:
                self._made.tie("same", first[port.outer], inner)
                continue
            first[port.outer] = inner
            if isinstance(outer, Value):
                self._made.tie("enter", frame.held(outer), inner, weight=frame.weight, stacked=port.stacked)

    def _carry_and_leave(
        self, frame: Frame, equation: Equation, wiring: Boundary, frames: tuple[Frame, ...]
    ) -> None:
        carried: dict[tuple[int, int], Choice] = {}
        for from_region, out, to_region, into in wiring.carries:
            source, target = frames[from_region], frames[to_region]
            choice = target.choice[target.graph.inputs[into]]
            atom = source.graph.outputs[out]
            if isinstance(atom, Value):
                self._made.tie("return", source.held(atom), choice, weight=source.weight)
            else:
                self._made.tie("whole", choice)
            carried.setdefault((from_region, out), choice)
        ports = frame.ports.setdefault(equation, {})
        for port in wiring.outs:
            child, result = frames[port.region], equation.outputs[port.outer]
            atom = child.graph.outputs[port.inner]
            if (port.region, port.inner) in carried:
                ports[port.outer] = carried[port.region, port.inner]
            else:
                if port.outer not in ports:
                    ports[port.outer] = self._made.choice(self._port_domain(atom, result))
                if isinstance(atom, Value):
                    self._made.tie("return", child.held(atom), ports[port.outer], weight=child.weight)
                else:
                    self._made.tie("whole", ports[port.outer])
            self._made.tie(
                "leave" if port.stacked else "exit",
                ports[port.outer],
                frame.choice[result],
                weight=frame.weight,
            )

    def _port_domain(self, inner: Atom, result: Value) -> Domain:
        if isinstance(inner, Value):
            return self.domains.single(inner.type, self.units.of(inner), self._outstanding.partials[inner])
        return self.domains.whole(inner.type, (0,) * inner.type.rank)


def _has_dimensions(equation: Equation) -> bool:
    """Whether a rule could have anything cut: what is scalar lies whole on every device in any case."""
    return any(tensor.rank for tensor in (*equation.input_types, *equation.output_types))
