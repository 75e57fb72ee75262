"""A program's bill: every instruction with its cost, as search, LP and re-costing see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import CostStack, Floats, ShareCost
from shardwright.cost.traffic import Traffic, through_memory, traffic
from shardwright.ir.collectives import registry as collectives
from shardwright.ir.graph import Atom, Equation, Graph, TensorType, Value, value_types
from shardwright.ir.placement import OwnRatios, Placement, Shard, deal
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program
from shardwright.ir.record import record
from shardwright.ir.regions import boundary
from shardwright.ir.rules import Signature
from shardwright.ir.segments import Away, Back, Exchange, Relay, Segment, schedule


class Cut(NamedTuple):
    """A sharded axis: its size and unit, and the ratios that cut it (None: those of the plan)."""

    size: int
    unit: int
    by: OwnRatios | None = None

    @property
    def units(self) -> int:
        return self.size // self.unit


#: A tensor in a placement, as some instruction leaves it: a number of its own.
Token: TypeAlias = int
_Held: TypeAlias = dict[tuple[int, Placement], Token]


@record(frozen=True, slots=True)
class Item:
    """One line of a bill.

    Attributes:
        label: primitive, or collective and strategy.
        cost: seconds by shares, for one execution.
        weight: executions per step.
        cut: the axis whose shares matter, None where none is cut.
        exchange: whether devices talk to each other.
        reads: what it needs, as tokens of the lines that leave it (others are there from the start).
        writes: what it leaves.
        move: the instruction, where it is a move.
        nbytes: bytes of the tensor that is moved.
    """

    label: str
    cost: ShareCost
    weight: float
    cut: Cut | None
    exchange: bool
    reads: tuple[Token, ...] = ()
    writes: tuple[Token, ...] = ()
    move: Move | None = None
    nbytes: int = 0

    def seconds(self, model: CostModel, ratios: Sequence[float]) -> float:
        """Seconds per step at the rounded shares."""
        return self.weight * Shares(ratios, model.class_of).seconds(self.cost, self.cut)


class Pricing(Protocol):
    """What a bill asks for: `CostModel`, or what prices at given ratios."""

    def kernel(self, equation: Equation, signature: Signature, traffic: Traffic) -> ShareCost:
        """Cost of one equation on local shards."""
        ...

    def move(
        self, kind: str, strategy: str, tensor: TensorType, pre: Placement, post: Placement
    ) -> ShareCost:
        """Cost of one move of a tensor over all devices."""
        ...


def bill(program: Program, graph: Graph, model: Pricing, weight: float = 1.0) -> list[Item]:
    """All items of a program in execution order, loops unrolled into weights."""
    return list(_items(program, graph, model, weight, {}, count(), _as_written))


def charges(program: Program, graph: Graph, model: Pricing) -> list[Item]:
    """The items of `bill` without what they read and write: equal computations are one object."""
    return list(_items(program, graph, model, 1.0, {}, None, _as_written))


def bill_as_run(program: Program, graph: Graph, model: Pricing) -> list[Item]:
    """All items of a program in the order and the segments in which the backends run it.

    See `shardwright.ir.segments`. What one segment leaves to another goes through memory; what is computed in
    several is in the bill as often.
    """
    return list(_items(program, graph, model, 1.0, {}, count(), _as_run))


#: Instructions of a program in an order, each with what of its graph's tensors goes through memory.
_Order: TypeAlias = Callable[[Program, Graph], Iterator[tuple[Instruction, Mapping[Equation, Traffic]]]]


def _as_written(program: Program, graph: Graph) -> Iterator[tuple[Instruction, Mapping[Equation, Traffic]]]:
    stored = traffic(graph)
    return ((instruction, stored) for instruction in program.instructions)


def _as_run(program: Program, graph: Graph) -> Iterator[tuple[Instruction, Mapping[Equation, Traffic]]]:
    for step in schedule(program, graph).steps:
        if isinstance(step, Segment | Back):
            made = [i.equation for i in step.instructions if not isinstance(i, Move)]
            stored = through_memory(graph, made, [prop.value for prop in step.gives])
            yield from ((instruction, stored) for instruction in step.instructions)
        elif isinstance(step, Relay):
            yield step.compute, traffic(graph)
        elif not isinstance(step, Away):  # it costs what it takes to come back
            yield (step.move if isinstance(step, Exchange) else step.loop), {}


def _items(
    program: Program,
    graph: Graph,
    model: Pricing,
    weight: float,
    held: _Held,
    tokens: Iterator[Token] | None,
    order: _Order,
) -> Iterator[Item]:
    """Items of a program whose inputs are `held`; what it establishes is added to them.

    Without `tokens` nobody asks for what items read and write.
    """
    types = value_types(graph)
    # By what is computed how, of which there are few: one bill sees one object for equal signatures mostly.
    known: dict[tuple[int, int, Traffic], Item] = {}

    def leave(values: Sequence[Value], placements: Sequence[Placement]) -> tuple[Token, ...]:
        if tokens is None:
            return ()
        new = {(v.index, p): next(tokens) for v, p in zip(values, placements, strict=True)}
        held.update(new)
        return tuple(new.values())

    def moved(move: Move) -> tuple[Token, ...]:
        if tokens is None:
            return ()
        token = held[move.value, move.post] = next(tokens)
        return (token,)

    def need(atoms: Sequence[Atom], placements: Sequence[Placement]) -> tuple[Token, ...]:
        keys = [(a.index, p) for a, p in zip(atoms, placements, strict=True) if isinstance(a, Value)]
        return tuple([held[key] for key in keys if key in held])

    for instruction, stored in order(program, graph):
        if isinstance(instruction, Move):
            tensor = types[instruction.value]
            cost = model.move(
                instruction.kind, instruction.strategy, tensor, instruction.pre, instruction.post
            )
            cut = cut_of((tensor, tensor), (instruction.pre, instruction.post))
            if _recuts(instruction):
                cost, cut = _whole(cost), None
            before = instruction.value, instruction.pre
            reads = (held[before],) if before in held else ()
            yield Item(
                label=f"{instruction.kind}.{instruction.strategy}".rstrip("."),
                cost=cost,
                weight=weight,
                # The share that varies is that of what is sent in stretches: before, or else after.
                cut=cut,
                exchange=not collectives()[instruction.kind].local,
                reads=reads,
                writes=moved(instruction),
                move=instruction,
                nbytes=tensor.nbytes,
            )
            continue
        equation = graph.equations[instruction.equation]
        signature = instruction.signature
        if isinstance(instruction, Loop):
            yield from _loop_items(instruction, equation, model, weight, held, tokens, order)
            continue
        assert isinstance(instruction, Compute)
        key = (id(equation.form), id(signature), stored[equation])
        item = known.get(key)
        if item is None:
            cost = model.kernel(equation, signature, key[2])
            tensors = (*equation.input_types, *equation.output_types)
            cut = cut_of(tensors, (*signature.ins, *signature.outs))
            item = known[key] = Item(equation.primitive, cost, weight, cut, exchange=False)
        if tokens is not None:
            reads, writes = need(equation.inputs, signature.ins), leave(equation.outputs, signature.outs)
            item = Item(item.label, item.cost, weight, item.cut, False, reads, writes)
        yield item


def _recuts(move: Move) -> bool:
    """Whether a move goes from stretches by some ratios to stretches by others."""
    pre, post = move.pre, move.post
    return isinstance(pre, Shard) and isinstance(post, Shard) and pre.by != post.by


def _whole(cost: ShareCost) -> ShareCost:
    """What an exchange costs at most: one device sends or receives all of the tensor."""
    most = cost.constant + np.maximum(cost.linear, 0.0) + cost.product
    return ShareCost.fixed([float(each) for each in most.max(axis=0)])


def _loop_items(
    loop: Loop,
    equation: Equation,
    model: Pricing,
    weight: float,
    held: _Held,
    tokens: Iterator[Token] | None,
    order: _Order,
) -> Iterator[Item]:
    """Items of the bodies of a loop, which read what the loop reads and leave what it leaves."""
    wiring = boundary(equation)
    for number, (body, region, trip) in enumerate(
        zip(loop.bodies, equation.regions, wiring.trips, strict=True)
    ):
        inside: _Held = {}
        for port in wiring.ins:
            atom = equation.inputs[port.outer]
            if port.region == number and isinstance(atom, Value):
                outside = _key(atom, loop.signature.ins[port.outer])
                if outside in held:
                    inside[_key(region.inputs[port.inner], body.inputs[port.inner])] = held[outside]
        times = weight * (1 if trip is None else trip)
        yield from _items(body, region, model, times, inside, tokens, order)
        for port in wiring.outs:
            atom = region.outputs[port.inner] if port.region == number else None
            if isinstance(atom, Value) and (made := _key(atom, body.outputs[port.inner])) in inside:
                held[_key(equation.outputs[port.outer], loop.signature.outs[port.outer])] = inside[made]


def _key(value: Value, placement: Placement) -> tuple[int, Placement]:
    return value.index, placement


def cut_of(tensors: Sequence[TensorType], placements: Sequence[Placement]) -> Cut | None:
    """The axis that an instruction cuts: that of the first sharded tensor."""
    for tensor, placement in zip(tensors, placements, strict=True):
        if isinstance(placement, Shard):
            return Cut(tensor.shape[placement.dim], placement.unit, placement.by)
    return None


class Shares:
    """Shares per device after rounding, for every axis that is cut, and what instructions cost at them."""

    def __init__(self, ratios: Sequence[float], class_of: NDArray[np.int64]) -> None:
        self.ratios = tuple(float(r) for r in ratios)
        self.class_of = class_of
        self._known: dict[int, Floats] = {}
        self._seconds: dict[tuple[ShareCost, int], float] = {}
        self._apart: dict[int, tuple[Floats, NDArray[np.int64]]] = {}
        self._others: dict[OwnRatios, Shares] = {}

    def by(self, own: OwnRatios | None) -> Shares:
        """Shares by other ratios than the plan's."""
        if own is None:
            return self
        if own not in self._others:
            self._others[own] = Shares(own.shares, self.class_of)
        return self._others[own]

    def of(self, cut: Cut | None) -> Floats:
        """Share of every device of an axis; only its number of units and its ratios matter."""
        if cut is None:
            return np.asarray(self.ratios)
        if cut.by is not None:
            return self.by(cut.by).of(cut._replace(by=None))
        units = cut.units
        if units not in self._known:
            self._known[units] = deal(units, np.asarray(self.ratios)) / max(units, 1)
        return self._known[units]

    def held(self, cut: Cut | None) -> Floats:
        """Part of a tensor that every device holds: its share where it is cut, else all."""
        return np.ones(len(self.ratios)) if cut is None else self.of(cut)

    def stack(self, costs: CostStack, units: NDArray[np.int64]) -> Floats:
        """Seconds of the slowest device for many instructions, each of an axis of so many units (0: none)."""
        seconds = np.empty(len(units))
        for number in np.unique(units):
            which = np.flatnonzero(units == number)
            shares, class_of = self._distinct(int(number))
            seconds[which] = costs.take(which).exact(shares, class_of)
        return seconds

    def _distinct(self, units: int) -> tuple[Floats, NDArray[np.int64]]:
        """Distinct shares of an axis by class: devices of one class and share take equally long."""
        if units not in self._apart:
            shares = self.of(Cut(units, 1) if units else None)
            found = [np.unique(shares[self.class_of == c]) for c in range(int(self.class_of.max()) + 1)]
            class_of = np.repeat(np.arange(len(found)), [len(f) for f in found])
            self._apart[units] = np.concatenate(found), class_of
        return self._apart[units]

    def per_device(self, cost: ShareCost, cut: Cut | None) -> Floats:
        """Seconds of every device."""
        return cost.per_device(self.of(cut), self.class_of)

    def seconds(self, cost: ShareCost, cut: Cut | None) -> float:
        """Seconds of the slowest device."""
        if cut is not None and cut.by is not None:
            return self.by(cut.by).seconds(cost, cut._replace(by=None))
        key = (cost, cut.units if cut is not None else 0)
        if key not in self._seconds:
            self._seconds[key] = float(self.per_device(cost, cut).max())
        return self._seconds[key]


def counted(items: Sequence[Item]) -> Iterator[tuple[Item, int]]:
    """The items of a bill that are objects of their own, and how often it has each; see `charges`."""
    times = Counter(map(id, items))
    known = {id(item): item for item in items}
    return ((known[which], count) for which, count in times.items())


class Tally:
    """A bill added up, ready to be priced at many ratios."""

    def __init__(self, items: Sequence[Item], model: CostModel) -> None:
        self._class_of = model.class_of
        by_ratios: dict[OwnRatios | None, dict[tuple[int, int], float]] = {}
        costs: dict[int, ShareCost] = {}
        for item, times in counted(items):
            cut = item.cut if item.cost.varies else None
            key = (id(item.cost), 0 if cut is None else cut.units)
            costs[key[0]] = item.cost
            weights = by_ratios.setdefault(None if cut is None else cut.by, {})
            weights[key] = weights.get(key, 0.0) + item.weight * times
        self._parts = [
            (
                own,
                CostStack.of([costs[which] for which, _ in weights]),
                np.array([units for _, units in weights], dtype=np.int64),
                np.array(list(weights.values())),
            )
            for own, weights in by_ratios.items()
        ]

    def seconds(self, ratios: Sequence[float]) -> float:
        """cost_s: the sum over instructions of the maximum over devices, at the rounded shard sizes."""
        shares = Shares(ratios, self._class_of)
        parts = (weights @ shares.by(own).stack(stack, units) for own, stack, units, weights in self._parts)
        return float(sum(parts, start=0.0))


def seconds(items: Sequence[Item], model: CostModel, ratios: Sequence[float]) -> float:
    """cost_s of a bill at some ratios; see `Tally`."""
    return Tally(items, model).seconds(ratios)
