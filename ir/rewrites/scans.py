"""Scans whose operands, results and bodies change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardwright.ir.graph import Atom, Equation, Form, Graph, TensorType, Value
from shardwright.ir.regions import scan_counts
from shardwright.ir.rewrites.graphs import fresh, renumbered, with_inputs


class Body:
    """A scan whose operands, results and body change."""

    def __init__(self, loop: Equation) -> None:
        self.loop = loop
        (self.region,) = loop.regions
        self.consts, self.carries = scan_counts(loop.params)
        self.operands = list(loop.inputs)
        self.inputs = list(self.region.inputs)
        self.results = list(loop.outputs)
        self.outputs = list(self.region.outputs)
        self.constants = dict(self.region.constants)
        self.equations = list(self.region.equations)

    def constant(self, value: Value, array: object) -> Value:
        """An array that the other body closes over."""
        self.constants[value] = array
        return value

    def shared(self, operand: Atom) -> Value:
        """An operand that every iteration has as it is."""
        for there, inner in zip(self.operands[: self.consts], self.inputs, strict=False):
            if there is operand:
                return inner
        inner = fresh(operand.type)
        self.operands.insert(self.consts, operand)
        self.inputs.insert(self.consts, inner)
        self.consts += 1
        return inner

    def sliced(self, operand: Atom, tensor: TensorType) -> Value:
        """An operand of which every iteration has its slice."""
        first = self.consts + self.carries
        for there, inner in zip(self.operands[first:], self.inputs[first:], strict=True):
            if there is operand:
                return inner
        inner = fresh(tensor)
        self.operands.append(operand)
        self.inputs.append(inner)
        return inner

    def stacked(self, value: Value) -> Value:
        """A result that has a value of every iteration."""
        for there, inner in zip(self.results[self.carries :], self.outputs[self.carries :], strict=True):
            if inner is value:
                return there
        result = fresh(TensorType((self.loop.params["length"], *value.type.shape), value.type.dtype))
        self.results.append(result)
        self.outputs.append(value)
        return result

    def forget(self, results: Iterable[Value]) -> None:
        """Results that are not made any more."""
        gone = set(results)
        pairs = [(r, o) for r, o in zip(self.results, self.outputs, strict=True) if r not in gone]
        self.results, self.outputs = [r for r, _ in pairs], [o for _, o in pairs]

    def begin_with(
        self, equations: Sequence[Equation], instead: Mapping[Value, Atom], *, shared: bool = False
    ) -> None:
        """Run these first; what they make takes the place of operands that are not handed in any more.

        With `shared` of those alone that every iteration has as they are: the same value may be where the
        carry begins, or walked over, too.
        """
        last = self.consts if shared else len(self.operands)
        inner = {
            own: instead[operand]
            for operand, own in zip(self.operands[:last], self.inputs, strict=False)
            if isinstance(operand, Value) and operand in instead
        }

        def name(atom: Atom) -> Atom:
            return inner.get(atom, atom) if isinstance(atom, Value) else atom

        kept = [
            (operand, own)
            for operand, own in zip(self.operands, self.inputs, strict=True)
            if own not in inner
        ]
        self.consts -= sum(own in inner for own in self.inputs[: self.consts])
        self.operands, self.inputs = [operand for operand, _ in kept], [own for _, own in kept]
        rest = [with_inputs(equation, map(name, equation.inputs)) for equation in self.equations]
        self.equations = [*equations, *rest]
        self.outputs = [name(atom) for atom in self.outputs]

    def equation(self) -> Equation:
        """The changed scan."""
        region = renumbered(
            self.region,
            self.equations,
            inputs=self.inputs,
            outputs=self.outputs,
            constants=self.constants,
        )
        return scan_of(region, self.loop, self.operands, self.results, self.consts, self.carries)


def scan_of(
    region: Graph,
    like: Equation,
    operands: Sequence[Atom],
    results: Sequence[Value],
    consts: int,
    carries: int,
) -> Equation:
    """A scan with another body than `like`, which has its length and direction."""
    params = {
        "num_consts": consts,
        "num_carry": carries,
        "length": like.params["length"],
        "reverse": like.params["reverse"],
    }
    types = tuple(atom.type for atom in operands), tuple(value.type for value in results)
    # A form of its own: another body makes it another equation.
    form = Form("scan", params, *types)
    return replace(like, form=form, inputs=tuple(operands), outputs=tuple(results), regions=(region,))


def broadcasting_inside(graph: Graph) -> Graph:
    """A step whose scans broadcast what every iteration has as it is, in place of having it handed in.

    JAX's differentiation has a scan's constants made before it, masks as large as all scores of attention
    among them. In an iteration a broadcast takes nothing, and that of a piece is no larger than the piece.
    """
    makers: dict[Atom, Equation] = {}
    for equation in graph.equations:
        if equation.primitive == "broadcast_in_dim":
            makers.update(dict.fromkeys(equation.outputs, equation))
    equations = [_broadcasting(e, makers) if e.primitive == "scan" else e for e in graph.equations]
    changed = any(new is not old for new, old in zip(equations, graph.equations, strict=True))
    return renumbered(graph, equations) if changed else graph


def _broadcasting(loop: Equation, makers: Mapping[Atom, Equation]) -> Equation:
    body, copies, instead = Body(loop), list[Equation](), dict[Atom, Value]()
    wide = {atom for atom in loop.inputs[: body.consts] if isinstance(atom, Value) and atom in makers}
    for atom in sorted(wide, key=lambda atom: makers[atom].index):
        (operand,) = makers[atom].inputs
        inner: Atom = operand
        if isinstance(operand, Value):  # it may be a broadcast itself
            inner = instead.get(operand) or body.shared(operand)
        instead[atom] = made = fresh(atom.type)
        copies.append(replace(makers[atom], inputs=(inner,), outputs=(made,), after=None))
    if not copies:
        return loop
    body.begin_with(copies, {atom: instead[atom] for atom in wide}, shared=True)
    return body.equation()
