"""The space of programs of one step, as choices and factors.

Built once per step, whatever the prices: fused classes, the choices of every graph and region, and the
factors that tie them. See `shardwright.synth.space.factors` for what they mean. Repeated layers share their
factors, so that most of the work is done once per distinct layer.
"""

from __future__ import annotations

from typing import TypeAlias

import shardwright.ir.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (rules, before planning begins)
from shardwright.cost.lines import Traffic
from shardwright.cost.traffic import traffic
from shardwright.ir.graph import Atom, Equation, Graph, Value
from shardwright.ir.pairs import pairs
from shardwright.ir.placement import Partial, ReduceOp, Shard
from shardwright.ir.regions import Boundary, boundary
from shardwright.ir.registry import registry, rule_of
from shardwright.ir.rules import Signature, signatures
from shardwright.synth.space.conversions import Domain, Domains, Routes
from shardwright.synth.space.factors import Choice, EquationFactor, LinkFactor, Slot, Use
from shardwright.synth.space.frame import Frame
from shardwright.synth.space.fuse import FusedClass, alike, fuse, same_shape
from shardwright.synth.space.units import Units, places
from shardwright.synth.space.vocabulary import Vocabulary

#: Signatures of an equation, what its results may have outstanding, and numbers that stand for the results.
_Found: TypeAlias = tuple[tuple[Signature, ...], tuple[frozenset[ReduceOp], ...], tuple[int, ...]]


class Space:
    """All choices and factors of a step.

    Attributes:
        root: the frame of the step itself.
        choices: all choices, numbered.
        uses: all factors, with the choices they tie.
        replicated: primitives without a rule, which run replicated, with one equation of each.
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
        self.choices: list[Choice] = []
        self.uses: list[Use] = []
        self.replicated: dict[str, Equation] = {}
        self.assumptions: dict[str, None] = {}
        words = Vocabulary(Domains(nodes)) if vocabulary is None else vocabulary
        self.domains, self._signatures, self._arising = words.domains, words.signatures, words.arising
        self._pairs, self._links, self._factors = words.pairs, words.links, words.factors
        self._partials: dict[Value, frozenset[ReduceOp]] = {}
        self._of_equation: dict[Equation, tuple[Signature, ...]] = {}
        known = registry()
        for equation in graph.all_equations():
            if equation.primitive not in known and not equation.regions:
                self.replicated.setdefault(equation.primitive, equation)
        self.units = Units()
        self.units.add(graph)
        self._find_partials(graph, frozenset())
        self.root = self._frame(graph, 1.0)
        for out, atom in enumerate(graph.outputs):
            if isinstance(atom, Value):
                self._add_output(self.root, out, atom)

    # -- what may be Partial -----------------------------------------------------------------------

    def signatures(self, equation: Equation) -> tuple[Signature, ...]:
        """The signatures of an equation whose letters can be cut; one object for equal equations."""
        found = self._of_equation.get(equation)
        if found is not None:
            return found
        atoms = (*equation.inputs, *equation.outputs)
        where = places(equation)
        units: list[int] = []
        for position, dim, minor in where.first:
            unit = self.units.of(atoms[position])[dim]  # pyright: ignore[reportArgumentType]  (no literal)
            units.append(unit // minor if minor else 0)
        key = (equation.form, *units)
        found = self._signatures.get(key)
        if found is None:
            rule = rule_of(equation)
            by_letter = dict.fromkeys(rule.letters, 0) | dict(zip(where.letters, units, strict=True))
            listed = signatures(rule, equation, by_letter)
            # Forms that differ in what does not matter here share one list, which no others have: factors
            # compare it by identity.
            same = (equation.primitive, equation.input_types, equation.output_types, id(listed))
            same = (*same, rule.axes, rule.flop_per_point, str(equation.params.get("precision")))
            found = self._signatures.get(same)
            if found is None:
                found = self._signatures[same] = tuple(signature for signature in listed)
            self._signatures[key] = found
        self._of_equation[equation] = found
        return found

    def _on_mesh(self, found: tuple[Signature, ...]) -> tuple[Signature, ...]:
        """Signatures on the space's mesh axes: these, or all pairs of them."""
        if self.nodes is None:
            return found
        if id(found) not in self._pairs:
            self._pairs[id(found)] = pairs(found, found, self.nodes)
        return self._pairs[id(found)]

    def routes(self, value: Value) -> Routes:
        """The placements between which a value is converted."""
        return self.domains.routes(value.type, self.units.of(value), self._partials[value])

    def _find_partials(self, graph: Graph, carried: frozenset[Value]) -> None:
        """Which reductions each value may have outstanding; carries of a loop may, if they are sums."""
        none: frozenset[ReduceOp] = frozenset()
        sums: frozenset[ReduceOp] = frozenset(("sum",))
        partials, units = self._partials, self.units
        for value in (*graph.inputs, *graph.constants):
            partials[value] = sums if value in carried and value.type.is_float else none
        # Equations of one form whose tensors have the same units and the same reductions outstanding are one.
        known: dict[tuple[object, ...], _Found] = {}
        numbers: dict[tuple[tuple[int, ...], frozenset[ReduceOp]], int] = {}

        def numbered(value: Value) -> int:
            return numbers.setdefault((units.of(value), partials[value]), len(numbers))

        code = {value: numbered(value) for value in (*graph.inputs, *graph.constants)}
        of_equation, unit = self._of_equation, units.numbers()
        for equation in graph.equations:
            if equation.regions:
                self._find_region_partials(equation)
                code.update((value, numbered(value)) for value in equation.outputs)
                continue
            outs = equation.outputs
            key = (
                equation.form,
                *[code[value] for value in equation.input_values],
                *[unit[value] for value in outs],
            )
            found = known.get(key)
            if found is None:
                mine = self.signatures(equation)
                coming = tuple([partials[a] if isinstance(a, Value) else none for a in equation.inputs])
                ops = self._arise(mine, coming, len(outs))
                partials.update(zip(outs, ops, strict=True))
                found = known[key] = mine, ops, tuple(map(numbered, outs))
            of_equation[equation] = found[0]
            for value, some, number in zip(outs, found[1], found[2], strict=True):
                partials[value] = some
                code[value] = number

    def _arise(
        self, found: tuple[Signature, ...], coming: tuple[frozenset[ReduceOp], ...], results: int
    ) -> tuple[frozenset[ReduceOp], ...]:
        """Which reductions the results may have outstanding, if operands come with these."""
        key = (id(found), coming)
        if key not in self._arising:
            self._arising[key] = tuple(
                frozenset(
                    placement.op
                    for signature in found
                    if isinstance(placement := signature.outs[k], Partial)
                    and _arises(signature, placement, coming)
                )
                for k in range(results)
            )
        return self._arising[key]

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
        frame = Frame(graph, weight, fuse(graph, lambda v: "sum" in self._partials[v]))
        for value in graph.inputs:
            self._add_input(frame, value)
        for value in graph.constants:
            frame.choice[value] = self._choice(value, self.domains.whole(value.type, self.units.of(value)))
        through_memory = traffic(graph)
        for equation in graph.equations:
            for value in equation.outputs:
                self._add_result(frame, value)
            if equation.regions:
                self._add_regions(frame, equation)
            else:
                frame.uses[equation] = self._use(frame, equation, through_memory[equation])
        return frame

    def _use(self, frame: Frame, equation: Equation, through: Traffic) -> Use:
        """The equation's factor with its choices, added to `uses`."""
        inside, choices, exits = frame.fusion.of_value, frame.choice, frame.exits
        fused = frame.fusion.of_equation.get(equation)
        together = () if fused is None else alike(equation)
        scope: dict[Choice, int] = {}
        #: Of every slot its place in the scope, twice, and whether its mode is "exact"; -1 for a literal.
        slots: list[int] = []
        for position, atom in enumerate(equation.inputs):
            if type(atom) is not Value:
                slots.append(-1)
            elif position in together and inside.get(atom) is fused:
                slots.append(2 * scope.setdefault(choices[atom], len(scope)) + 1)
            else:
                slots.append(2 * scope.setdefault(exits.get(atom) or choices[atom], len(scope)))
        for value in equation.outputs:
            slots.append(2 * scope.setdefault(choices[value], len(scope)) + (fused is not None))
        found = self._of_equation[equation]
        found = found if self.nodes is None else self._on_mesh(found)
        domains = [choice.domain for choice in scope]
        key = (id(found), through, frame.weight, *slots, *domains)
        factor = self._factors.get(key)
        if factor is None:
            modes = ["use"] * len(equation.inputs) + ["derive"] * len(equation.outputs)
            made = tuple(
                [
                    None if slot < 0 else Slot(slot >> 1, "exact" if slot & 1 else mode)
                    for slot, mode in zip(slots, modes, strict=True)
                ]
            )
            rule = rule_of(equation)
            factor = EquationFactor(equation, rule, through, found, made, tuple(domains), frame.weight)
            self._factors[key] = factor
        use = Use(factor, tuple([choice.index for choice in scope]))
        self.uses.append(use)
        return use

    def _choice(self, value: Value, domain: Domain) -> Choice:
        choice = Choice(len(self.choices), str(value), domain)
        self.choices.append(choice)
        return choice

    def link(self, kind: str, *scope: Choice, weight: float = 1.0, stacked: bool = False) -> Use:
        """A link factor with its choices; equal links share their factor."""
        domains = tuple([choice.domain for choice in scope])
        key = (kind, domains, weight, stacked)
        factor = self._links.get(key)
        if factor is None:
            factor = self._links[key] = LinkFactor(kind, domains, weight, stacked)
        return Use(factor, tuple([choice.index for choice in scope]))

    def _link(self, kind: str, *scope: Choice, weight: float = 1.0, stacked: bool = False) -> None:
        if len(set(scope)) == len(scope):
            self.uses.append(self.link(kind, *scope, weight=weight, stacked=stacked))

    def _single(self, value: Value) -> Domain:
        return self.domains.single(value.type, self.units.of(value), self._partials[value])

    def _multiple(self, value: Value) -> Domain:
        return self.domains.multiple(value.type, self.units.of(value), self._partials[value])

    def _class_choice(self, frame: Frame, fused: FusedClass, value: Value) -> Choice:
        """The placement in which a class is computed, made when the first of its values is met."""
        first = fused.equations[0].outputs[0]
        found = frame.choice.get(first)
        if found is None:
            may_sum = fused.passes and any(
                "sum" in self._partials[v] for e in fused.equations for v in (*same_shape(e), *e.outputs)
            )
            partials: tuple[ReduceOp, ...] = ("sum",) if may_sum else ()
            domain = self.domains.single(value.type, self.units.of(value), partials)
            found = frame.choice[first] = self._choice(first, domain)
        return found

    def _add_input(self, frame: Frame, value: Value) -> None:
        fused = frame.fusion.of_value.get(value)
        if fused is not None:
            frame.choice[value] = self._class_choice(frame, fused, value)
            if not self._partials[value]:
                self._link("not partial", frame.choice[value])
        elif len(frame.fusion.users.get(value, ())) > 1:
            domain = self.domains.given(value.type, self.units.of(value), self._partials[value])
            frame.choice[value] = self._choice(value, domain)
            self._link("hold", frame.choice[value], weight=frame.weight)
        else:
            frame.choice[value] = self._choice(value, self._single(value))

    def _add_result(self, frame: Frame, value: Value) -> None:
        fusion = frame.fusion
        users, fused = fusion.users.get(value, ()), fusion.of_value.get(value)
        if fused is None:
            domain = self._multiple(value) if len(users) > 1 else self._single(value)
            frame.choice[value] = self._choice(value, domain)
            return
        frame.choice[value] = self._class_choice(frame, fused, value)
        if len(users) > 1 and len(users) - users.count(fused) > 1:
            frame.exits[value] = self._choice(value, self._multiple(value))
            self._link("exit", frame.choice[value], frame.exits[value], weight=frame.weight)

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
        return self.domains.whole(inner.type, (0,) * inner.type.rank)


def _arises(signature: Signature, result: Partial, coming: tuple[frozenset[ReduceOp], ...]) -> bool:
    """Whether a signature makes a new Partial, or passes one that may come in."""
    return any(
        isinstance(placement, Shard) or (placement == result and result.op in ops)
        for placement, ops in zip(signature.ins, coming, strict=True)
    )
