"""Rent: what a placement costs for its memory, in seconds per byte (Lagrange multipliers of the budgets).

A tensor that every device holds pays for all of them, one that they hold in stretches pays once. Inputs pay
for where they lie between steps; what the forward part keeps for the backward part pays for the least of its
placements.

With multipliers a >= 0 (on the memory of all devices together) and b >= 0 (on that of the smallest device),
every program that fits satisfies

    cost_s  >=  cost_s + a (bytes on all devices - all memory) + b (bytes on the smallest - its memory),

so the least of the right hand side over all programs is a lower bound on the cost of every plan that fits. At
prices that are floors over all shares it bounds all ratios, too.

Memory also bounds ratios directly (`most_shares`): of every tensor a device holds its share at least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from shardwright.cost.lines import ALIASES
from shardwright.cost.memory.liveness import all_bytes, stored
from shardwright.cost.memory.written import Written, written
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Equation, Graph, Value, per_graph
from shardwright.ir.host import is_reload
from shardwright.ir.placement import Placement, Shard
from shardwright.ir.regions import boundary
from shardwright.synth.space.conversions import Domain
from shardwright.synth.space.factors import Conversion, Factor, Matrices, Use
from shardwright.synth.space.frame import Frame
from shardwright.synth.space.space import Space

#: Moments looked at of each kind, see `must_live`.
_MOMENTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class RentFactor:
    """Bytes of what one choice holds; free by itself, see `Rents.tables`.

    Attributes:
        domain: of the choice.
        input_bytes: of inputs, which lie in the base of a holding throughout.
        kept_bytes: of what the backward part reads, in some placement of the holding.
        port: whether that is an operand or result of a loop, which lies in the base of a holding.
    """

    domain: Domain
    input_bytes: int
    kept_bytes: int
    port: bool = False
    weight: float = 1.0

    @property
    def domains(self) -> tuple[Domain, ...]:
        """Of the choice."""
        return (self.domain,)

    def table(self, matrices: Matrices) -> Floats:
        """Nothing: rent is added by whoever knows the multipliers."""
        return np.zeros(len(self.domain))

    def conversions(self, at: Sequence[int]) -> tuple[Conversion, ...]:
        """None: rent makes nothing necessary."""
        return ()

    def whole(self, *, kept: bool) -> Floats:
        """[holding]: bytes that every device holds, what is kept included or not."""
        base = np.array([0.0 if _cut(h.base) else self.input_bytes for h in self.domain.holdings])
        if not kept:
            return base
        cut = (_cut(h.base) if self.port else any(map(_cut, h.all)) for h in self.domain.holdings)
        return base + [0.0 if some else self.kept_bytes for some in cut]


def _cut(placement: Placement) -> bool:
    return isinstance(placement, Shard)


class Rents:
    """The rent factors of a space.

    Attributes:
        uses: to be given to a solver in addition to the space's factors.
    """

    def __init__(self, graph: Graph, space: Space) -> None:
        held: dict[int, list[int]] = {}
        root = space.root
        for value in graph.inputs:
            held.setdefault(root.choice[value].index, [0, 0])[0] += value.type.nbytes
        for value in dict.fromkeys((*kept_values(graph), *must_live(graph))):
            held.setdefault(root.held(value).index, [0, 0])[1] += value.type.nbytes
        made: dict[tuple[Domain, int, int, bool], RentFactor] = {}
        uses: list[Use] = []
        for index, (inputs, later) in held.items():
            domain = space.choices[index].domain
            factor = made.setdefault((domain, inputs, later, False), RentFactor(domain, inputs, later))
            uses.append(Use(factor, (index,)))
        for index, nbytes in _ports(root):
            domain = space.choices[index].domain
            factor = made.setdefault((domain, 0, nbytes, True), RentFactor(domain, 0, nbytes, port=True))
            uses.append(Use(factor, (index,)))
        self.uses = tuple(uses)
        self._factors = tuple(made.values())
        self._constant_bytes = sum(value.type.nbytes for value in graph.constants)
        self._input_bytes = sum(value.type.nbytes for value in graph.inputs)
        self._sure_bytes = sure_bytes(graph)

    def tables(self, all_s: float, smallest_s: float, devices: int, share: float) -> Mapping[Factor, Floats]:
        """Rent in seconds by holding.

        Args:
            all_s: per byte on any device.
            smallest_s: per byte on the smallest device, in addition.
            devices: how many there are.
            share: of the smallest device.
        """
        found: dict[Factor, Floats] = {}
        for factor in self._factors:
            whole = factor.whole(kept=True)
            cut = factor.input_bytes + factor.kept_bytes - whole
            found[factor] = whole * (all_s * devices + smallest_s) + cut * (all_s + smallest_s * share)
        return found

    def floors(self, all_s: float, smallest_s: float, devices: int) -> Mapping[Factor, Floats]:
        """Rent in seconds by holding at least, whatever the shares; what is kept is in `constant_s`."""
        found: dict[Factor, Floats] = {}
        for factor in self._factors:
            whole = factor.whole(kept=False)
            found[factor] = whole * (all_s * devices + smallest_s) + (factor.input_bytes - whole) * all_s
        return found

    def constant_s(self, all_s: float, smallest_s: float, limits: Sequence[float]) -> float:
        """Rent of what every program holds, less that of all the memory there is.

        Args:
            all_s, smallest_s: see `tables`.
            limits: bytes of memory per device.
        """
        everywhere = self._constant_bytes * (all_s * len(limits) + smallest_s)
        return everywhere + all_s * (self._sure_bytes - sum(limits)) - smallest_s * min(limits)

    def whole_bytes(self, assignment: Sequence[int]) -> float:
        """Bytes of inputs that every device holds."""
        whole = (use.factor.whole(kept=False)[assignment[use.scope[0]]] for use in self._rented())
        return float(sum(whole)) + self._constant_bytes

    def excess_bytes(self, assignment: Sequence[int], limits: Sequence[float]) -> tuple[float, float]:
        """By how much an assignment exceeds all memory, and the smallest device's: the subgradient."""
        whole = self.whole_bytes(assignment)
        cut = self._input_bytes + self._constant_bytes - whole
        together = whole * len(limits) + cut + self._sure_bytes
        return together - sum(limits), whole - min(limits)

    def _rented(self) -> list[_Rented]:
        return [_Rented(use.factor, use.scope) for use in self.uses if isinstance(use.factor, RentFactor)]


def _ports(frame: Frame) -> Iterator[tuple[int, int]]:
    """Operands and results of loops, which are there as long as these run: choice and bytes."""
    for equation, children in frame.children.items():
        wiring = boundary(equation)
        carried = {(region, out) for region, out, _, _ in wiring.carries}
        for port in wiring.ins:
            child = children[port.region]
            inside = child.choice[child.graph.inputs[port.inner]]
            yield inside.index, equation.input_types[port.outer].nbytes
        for port in wiring.outs:
            if (port.region, port.inner) not in carried:
                choice = frame.ports[equation][port.outer]
                yield choice.index, equation.output_types[port.outer].nbytes
        for child in children:
            yield from _ports(child)


def most_shares(graph: Graph, limits: Sequence[float]) -> Floats:
    """The largest ratio that each device can have, whatever the program; they may sum to less than one.

    Args:
        graph: the step.
        limits: bytes of memory per device.
    """
    constants = sum(value.type.nbytes for value in graph.constants)
    certain = sum(value.type.nbytes for value in graph.inputs) + sure_bytes(graph)
    room = np.maximum(np.asarray(limits, dtype=np.float64) - constants, 0.0)
    return np.minimum(room / max(certain, 1), 1.0)


def too_small(graph: Graph, limits: Sequence[float]) -> bool:
    """Whether no program can fit, whatever its ratios."""
    # Looking for the fullest moment takes time; often all tensors there are would not fill the devices.
    return _fills(graph, limits) and bool(most_shares(graph, limits).sum() < 1 - 1e-9)


def _fills(graph: Graph, limits: Sequence[float]) -> bool:
    """Whether a step, each tensor held once, would take more than all devices have in the order as traced."""
    if all_bytes(graph) <= sum(limits):
        return False
    constants = sum(value.type.nbytes for value in graph.constants)
    return most_alive(graph) + _most_inside(graph) > sum(limits) - constants * len(limits)


def _most_inside(graph: Graph) -> int:
    """Bytes at most of what is in memory within a loop or branch, beside its operands and results."""
    return max((_most_stored(region) for e in graph.equations for region in e.regions), default=0)


def _most_stored(region: Graph) -> int:
    made = sum(value.type.nbytes for equation in region.equations for value in equation.outputs)
    return made + _most_inside(region)


@per_graph
def most_alive(graph: Graph) -> int:
    """Bytes of inputs and of what is in memory at the fullest moment of the order as traced.

    What lives in every order (`must_live`) lives in this one.
    """
    held = stored(graph)
    last = {value.index: equation.index for equation in graph.equations for value in equation.input_values}
    change = [0] * (len(graph.equations) + 1)
    for equation in graph.equations:
        for value in equation.outputs:
            if value.index in held:
                change[equation.index] += value.type.nbytes
                change[last.get(value.index, equation.index) + 1] -= value.type.nbytes
    return sum(value.type.nbytes for value in graph.inputs) + max(accumulate(change))


@dataclass(frozen=True, slots=True)
class _Rented:
    factor: RentFactor
    scope: tuple[int, ...]


@per_graph
def kept_values(graph: Graph) -> tuple[Value, ...]:
    """What the forward part keeps for the backward part in memory; of tensors that share it, one."""
    return _apart(graph, [value for _, value in graph.residuals if value is not None], stored(graph))


def _apart(
    graph: Graph, values: Iterable[Value], kept: Collection[int], elsewhere: Iterable[Value] = ()
) -> tuple[Value, ...]:
    """Those that equations make and that are in memory; of tensors that share it, or that of others, one."""
    made = {value: equation for equation in graph.equations for value in equation.outputs}
    found: dict[Value, None] = {}
    roots = {_root(value, made) for value in elsewhere}
    if graph.donated:  # what continues state lies where that lay, which is counted
        state = [graph.outputs[out] for out in graph.state]
        roots.update(_root(atom, made) for atom in state if isinstance(atom, Value))
    for value in values:
        if value.index not in kept:
            continue
        root = _root(value, made)
        if root in made and root not in roots:
            roots.add(root)
            found[value] = None
    return tuple(found)


def _root(value: Value, made: Mapping[Value, Equation]) -> Value:
    """The tensor whose memory another one shares."""
    while value in made and made[value].primitive in ALIASES and made[value].input_values:
        value = made[value].input_values[0]
    return value


@per_graph
def must_live(graph: Graph) -> tuple[Value, ...]:
    """Many tensors that live at one moment in every order of the equations.

    The moment is when some value z is made: what z depends on was made, and what has a reader that depends on
    z is not freed; nor is what z is made of, unless z may be written over it. Of the moments when large
    tensors are made, or the last that the backward part needs, the fullest counts.
    """
    alive = _alive(graph, written(graph), _large_or_late(graph, written(graph)))
    return max(alive, key=_nbytes, default=())


@per_graph
def sure_bytes(graph: Graph) -> int:
    """Bytes beside the inputs in memory at some moment in every order, those within a loop included."""
    return _sure_bytes(graph, written(graph), ())


def _sure_bytes(graph: Graph, held: Written, elsewhere: Collection[Value]) -> int:
    """The same; `elsewhere` are results of a loop's body that may lie where those of the loop do."""
    loops = [equation for equation in graph.equations if equation.regions and equation.outputs]
    makers = [max(loop.outputs, key=lambda value: value.type.nbytes) for loop in loops]
    large = _large_or_late(graph, held)
    inside = [_inside(loop, held.regions[loop.index]) for loop in loops]
    alive = _alive(graph, held, (*large, *makers), elsewhere)
    found = max(map(_nbytes, alive[: len(large)]), default=0)
    for loop, own, mine in zip(loops, inside, alive[len(large) :], strict=True):
        # What a loop carries may be written over what it begins with.
        begins = _begins(loop)
        found = max(found, _nbytes(value for value in mine if value not in begins) + own)
    return found


def _inside(loop: Equation, held: Sequence[Written]) -> int:
    """Bytes that a loop's body has in memory at some moment, beside its operands and results."""
    if loop.primitive != "scan" or not loop.params["length"]:
        return 0  # of a branch it is not known whether it runs
    (body,), (own,) = loop.regions, held
    return _sure_bytes(body, own, [atom for atom in body.outputs if isinstance(atom, Value)])


def _begins(loop: Equation) -> set[object]:
    """The operands that a loop carries on."""
    wiring = boundary(loop)
    carried = {(region, into) for _, _, region, into in wiring.carries}
    return {loop.inputs[port.outer] for port in wiring.ins if (port.region, port.inner) in carried}


def _large_or_late(graph: Graph, held: Written) -> tuple[Value, ...]:
    """Values at whose making memory may be full: the largest, and the last that the backward part needs."""
    makers = {value: equation for equation in graph.equations for value in equation.outputs}
    made = _apart(graph, list(makers), held.values)
    large = sorted(made, key=lambda v: (-v.type.nbytes, v.index))[:_MOMENTS]
    backward = {v for e in graph.equations if e.part == "backward" for v in e.input_values}
    kept = (
        kept_values(graph)
        if graph.residuals
        else [v for v in made if v in backward and makers[v].part != "backward"]
    )
    late = sorted(kept, key=lambda v: makers[v].index)[-_MOMENTS:]
    return tuple(dict.fromkeys((*large, *late)))


def _nbytes(values: Iterable[Value]) -> int:
    return sum(value.type.nbytes for value in values)


def _alive(
    graph: Graph, held: Written, moments: Sequence[Value], elsewhere: Collection[Value] = ()
) -> list[tuple[Value, ...]]:
    """What lives in every order of the equations when each of some values is made.

    Args:
        graph: the step, or the body of a loop.
        held: what of it is in memory.
        moments: the values.
        elsewhere: values that do not count: their memory is another's.
    """
    equations = graph.equations
    made = {value: equation for equation in equations for value in equation.outputs}
    values = _apart(graph, list(made), held.values, elsewhere)
    makers = {value: equation.index for equation in equations for value in equation.outputs}
    before_of = [[makers[v] for v in equation.input_values if v in makers] for equation in equations]
    last_readers: dict[Value, list[int]] = {}
    for equation in equations:
        if equation.outputs and all(value.index in held.same for value in equation.outputs):
            continue  # computed already
        if is_reload(equation):
            continue  # what it reads may be in host memory until then
        for value in equation.input_values:
            last_readers.setdefault(value, []).append(equation.index)
    # Sets of moments as bits: those before which an equation must have run, and those that it waits for.
    before, over = [0] * len(equations), [0] * len(equations)
    for bit, z in enumerate(moments):
        before[makers[z]] |= 1 << bit
        if z.index in held.over:
            over[makers[z]] |= 1 << bit
    after = before.copy()
    for number in range(len(equations) - 1, -1, -1):
        if before[number]:
            for source in before_of[number]:
                before[source] |= before[number]
    for number, sources in enumerate(before_of):
        for source in sources:
            after[number] |= after[source]
    alive: list[list[Value]] = [[] for _ in moments]
    for value in values:
        waiting = 0
        for reader in last_readers.get(value, ()):
            waiting |= after[reader] & ~over[reader]
        both = before[makers[value]] & waiting
        if both:
            for bit, mine in enumerate(alive):
                if both >> bit & 1:
                    mine.append(value)
    return [tuple(mine) for mine in alive]
