"""Rent: what a placement costs for its memory, in seconds per byte (Lagrange multipliers of the budgets).

A tensor that every device holds pays for all of them, one that they hold in stretches pays once. Inputs pay
for where they lie between steps; what the forward part keeps for the backward part pays for the least of its
placements.

With multipliers a >= 0 (on the memory of all devices together) and b >= 0 (on that of the smallest device),
every program that fits satisfies

    cost_s  >=  cost_s + a (bytes on all devices - all memory) + b (bytes on the smallest - its memory),

so the least of the right hand side over all programs is a lower bound on the cost of every plan that fits. At
prices that are floors over all shares it bounds all ratios, too. The same holds for either of two moments,
with multipliers of their own: the fullest that there is in every order, and the end, when the old state and
the new one are both there, the one placed as the other.

Memory also bounds ratios directly (`most_shares`): of every tensor a device holds its share at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shardwright.cost.memory.liveness import all_bytes
from shardwright.cost.share_cost import Floats
from shardwright.ir.graph import Graph, TensorType, per_graph
from shardwright.ir.placement import Placement, Shard
from shardwright.ir.regions import boundary
from shardwright.synth.memory.alive import (
    final_values,
    kept_values,
    most_alive,
    must_live,
    nbytes_of,
    sure_bytes,
)
from shardwright.synth.space.conversions import Domain
from shardwright.synth.space.factors import Conversion, Factor, Matrices, Use
from shardwright.synth.space.frame import Frame
from shardwright.synth.space.space import Space

#: What a device holds of a tensor that is cut, as a part of it.
Part: TypeAlias = Callable[[TensorType, Shard], float]


@dataclass(frozen=True, slots=True, eq=False)
class RentFactor:
    """Bytes of what one choice holds; free by itself, see `Rents.tables`.

    Attributes:
        domain: of the choice.
        input_bytes: of inputs, which lie in the base of a holding throughout.
        kept_bytes: of what the backward part reads, in some placement of the holding.
        port: whether that is an operand or result of a loop, which lies in the base of a holding.
        returned_bytes: of results that lie as these inputs do, and are there beside them in the end.
    """

    domain: Domain
    input_bytes: int
    kept_bytes: int
    port: bool = False
    returned_bytes: int = 0
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
        base = self.input_bytes * self.everywhere()
        if not kept:
            return base
        cut = (_cut(h.base) if self.port else any(map(_cut, h.all)) for h in self.domain.holdings)
        return base + [0.0 if some else self.kept_bytes for some in cut]

    def parts(self, part: Part) -> Floats:
        """[holding]: what a device holds of what is cut; of two such placements, the first."""
        types = self.domain.type
        shards = (next((p for p in h.all if isinstance(p, Shard)), None) for h in self.domain.holdings)
        return np.array([1.0 if shard is None else part(types, shard) for shard in shards])

    def everywhere(self) -> Floats:
        """[holding]: 1.0 where every device holds inputs as a whole."""
        return np.array([0.0 if _cut(h.base) else 1.0 for h in self.domain.holdings])

    def at(self, moment: int) -> int:
        """Bytes for which the base of a holding counts at a moment of `Rents.MOMENTS`."""
        return self.input_bytes + (self.returned_bytes if moment else 0)


def _cut(placement: Placement) -> bool:
    return isinstance(placement, Shard)


class Rents:
    """The rent factors of a space.

    Attributes:
        MOMENTS: how many moments there are: the fullest, and the end.
        uses: to be given to a solver in addition to the space's factors.
    """

    MOMENTS = 2

    def __init__(self, graph: Graph, space: Space) -> None:
        held: dict[int, list[int]] = {}
        root = space.root
        for value in graph.inputs:
            held.setdefault(root.choice[value].index, [0, 0, 0])[0] += value.type.nbytes
        for value in dict.fromkeys((*kept_values(graph), *must_live(graph))):
            held.setdefault(root.held(value).index, [0, 0, 0])[1] += value.type.nbytes
        state = {graph.outputs[out]: graph.inputs[position] for out, position in graph.state.items()}
        others = 0
        for value in final_values(graph):
            if value in state:  # it comes back as that went in
                held[root.choice[state[value]].index][2] += value.type.nbytes
            else:
                others += value.type.nbytes
        made: dict[tuple[Domain, int, int, int, bool], RentFactor] = {}
        uses: list[Use] = []
        for index, (inputs, later, back) in held.items():
            domain = space.choices[index].domain
            factor = RentFactor(domain, inputs, later, returned_bytes=back)
            uses.append(Use(made.setdefault((domain, inputs, later, back, False), factor), (index,)))
        for index, nbytes in _ports(root):
            domain = space.choices[index].domain
            factor = RentFactor(domain, 0, nbytes, port=True)
            uses.append(Use(made.setdefault((domain, 0, nbytes, 0, True), factor), (index,)))
        self.uses = tuple(uses)
        self._factors = tuple(made.values())
        self._constant_bytes = sum(value.type.nbytes for value in graph.constants)
        self._sure_bytes = sure_bytes(graph)
        #: Beside the constants, what all programs hold once at least, at every moment, apart from inputs and
        #: what comes back as these.
        self._certain_bytes = (self._sure_bytes, others)

    def tables(self, all_s: float, smallest_s: float, devices: int, part: Part) -> Mapping[Factor, Floats]:
        """Rent in seconds by holding.

        Args:
            all_s: per byte on any device.
            smallest_s: per byte on the smallest device, in addition.
            devices: how many there are.
            part: what the smallest device holds.
        """
        found: dict[Factor, Floats] = {}
        for factor in self._factors:
            whole = factor.whole(kept=True)
            cut = (factor.input_bytes + factor.kept_bytes - whole) * (all_s + smallest_s * factor.parts(part))
            found[factor] = whole * (all_s * devices + smallest_s) + cut
        return found

    def floors(self, rents: Floats, devices: int) -> Mapping[Factor, Floats]:
        """Rent in seconds by holding at least, whatever the shares; what is kept is in `constant_s`.

        Args:
            rents: (moments, 2) seconds per byte at each on any device, and on the smallest in addition.
            devices: how many there are.
        """
        found: dict[Factor, Floats] = {}
        for factor in self._factors:
            whole = factor.everywhere()
            found[factor] = np.zeros(len(whole))
            for moment, (all_s, smallest_s) in enumerate(rents):
                rent = whole * (all_s * devices + smallest_s) + (1 - whole) * all_s
                found[factor] += factor.at(moment) * rent
        return found

    def constant_s(self, rents: Floats, limits: Sequence[float]) -> float:
        """Rent of what every program holds, less that of all the memory there is.

        Args:
            rents: see `floors`.
            limits: bytes of memory per device.
        """
        found = 0.0
        for (all_s, smallest_s), certain in zip(rents, self._certain_bytes, strict=True):
            found += self._constant_bytes * (all_s * len(limits) + smallest_s)
            found += all_s * (certain - sum(limits)) - smallest_s * min(limits)
        return float(found)

    def excess_bytes(self, assignment: Sequence[int], limits: Sequence[float]) -> Floats:
        """By how much an assignment exceeds all memory, and the smallest device's: the subgradient.

        Args:
            assignment: a program.
            limits: bytes of memory per device.

        Returns:
            (moments, 2).
        """
        found = np.zeros((self.MOMENTS, 2))
        for moment, certain in enumerate(self._certain_bytes):
            whole, cut = float(self._constant_bytes), 0.0
            for factor, scope in self._rented():
                everywhere = factor.everywhere()[assignment[scope[0]]]
                whole += everywhere * factor.at(moment)
                cut += (1 - everywhere) * factor.at(moment)
            together = whole * len(limits) + cut + certain
            found[moment] = together - sum(limits), whole - min(limits)
        return found

    def _rented(self) -> Iterator[tuple[RentFactor, tuple[int, ...]]]:
        for use in self.uses:
            if isinstance(use.factor, RentFactor):
                yield use.factor, use.scope


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
    beside = max(sure_bytes(graph), nbytes_of(final_values(graph)))
    certain = sum(value.type.nbytes for value in graph.inputs) + beside
    room = np.maximum(np.asarray(limits, dtype=np.float64) - constants, 0.0)
    return np.minimum(room / max(certain, 1), 1.0)


def overfull(graph: Graph, limits: Sequence[float]) -> bool:
    """Whether what a step is given and what it returns is more than all devices have.

    However many pieces it comes in and whatever it computes again, it does not fit then.
    """
    inputs = sum(value.type.nbytes for value in graph.inputs)
    return inputs + nbytes_of(final_values(graph)) > sum(limits)


def too_small(graph: Graph, limits: Sequence[float]) -> bool:
    """Whether no program can fit, whatever its ratios."""
    # Looking for the fullest moment takes time; often all tensors there are would not fill the devices.
    if overfull(graph, limits):
        return True
    return _fills(graph, limits) and bool(most_shares(graph, limits).sum() < 1 - 1e-9)


def _fills(graph: Graph, limits: Sequence[float]) -> bool:
    """Whether a step, each tensor held once, would take more than all devices have in the order as traced."""
    if all_bytes(graph) <= sum(limits):
        return False
    constants = sum(value.type.nbytes for value in graph.constants)
    return most_alive(graph) + _most_inside(graph) > sum(limits) - constants * len(limits)


@per_graph
def _most_inside(graph: Graph) -> int:
    """Bytes at most of what is in memory within a loop or branch, beside its operands and results."""
    return max((_most_stored(region) for e in graph.equations for region in e.regions), default=0)


def _most_stored(region: Graph) -> int:
    made = sum(value.type.nbytes for equation in region.equations for value in equation.outputs)
    return made + _most_inside(region)
