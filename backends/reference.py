"""All devices in one process: the living definition of what a distributed program means.

A held value is a list of local arrays, one per device (None where the device is not in the group). A
computation is `evaluate` on every device's arrays; a collective is its own `reference` on numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.compile import QUICK, Compiler, Device, Local
from shardwright.backends.host_memory import is_away, to_device, to_host
from shardwright.backends.layout import (
    as_array,
    check_inputs,
    cut,
    from_numpy,
    gather,
    holds,
    members,
    stretches,
    to_numpy,
    typed,
)
from shardwright.backends.local import filled, operand, written
from shardwright.backends.relay import Stage
from shardwright.backends.runner import run
from shardwright.ir import collectives
from shardwright.ir.collectives import Array, step
from shardwright.ir.collectives import Step as MeshStep
from shardwright.ir.donation import taken_over
from shardwright.ir.flow import inputs
from shardwright.ir.graph import Graph, Literal, TensorType, Value
from shardwright.ir.placement import (
    Grid,
    Partial,
    Placement,
    Shard,
    by_node,
    components,
    lengths,
    node_members,
    region,
)
from shardwright.ir.program import Move, Program, Property
from shardwright.ir.segments import Exchange, Relay, Segment, Step, schedule
from shardwright.ir.trace import Traced

#: One local array per device; None on devices that are not in the value's group.
Locals: TypeAlias = list[Any]

#: Called after every segment and exchange with its graph and the values that it read and wrote.
Observer: TypeAlias = Callable[[Step, Graph, Mapping[Property, Locals]], None]


class ReferenceExecutable:
    """A program on all devices of this process: global arrays in, global arrays out.

    Args:
        traced: the training step.
        program: a verified program over its graph.
        ratios: share of every device.

    Attributes:
        held_bytes: after a call, what every device held after each step of the schedule, arguments included:
            counted on the arrays themselves.
    """

    def __init__(self, traced: Traced, program: Program, ratios: Sequence[float]) -> None:
        self.held_bytes: list[tuple[int, ...]] = []
        self.traced = traced
        self.program = program
        self.machine = ReferenceMachine(traced, ratios)
        self.schedule = schedule(program, traced.graph)

    def __call__(self, *flat: Any) -> list[jax.Array]:
        """Flat outputs of the step from its flat arguments."""
        graph = self.traced.graph
        ratios = self.machine.ratios
        check_inputs(flat, graph)
        held = [
            scatter(leaf, value.type, placement, ratios)
            for leaf, value, placement in zip(flat, graph.inputs, self.program.inputs, strict=True)
        ]
        self.held_bytes.clear()
        given = frozenset(inputs(self.program, graph))
        whole = [*held, *(self.machine.constant(value, array) for value, array in graph.constants.items())]
        outside = _count(whole, len(ratios))
        over = taken_over(self.schedule)
        there: set[Property] = set(given)

        def seen(step: Step, env: Mapping[Property, Locals]) -> None:
            there.update(over.get(step, ()))  # what lies where donated state lay counts as that
            made = _count((locals_ for prop, locals_ in env.items() if prop not in there), len(ratios))
            self.held_bytes.append(tuple(map(sum, zip(outside, made, strict=True))))

        results = run(self.schedule, held, self.machine, seen)
        weak = self.traced.weak_outputs
        ends = zip(results, graph.outputs, self.program.outputs, strict=True)
        return [typed(gather(x, a.type, p), i in weak) for i, (x, a, p) in enumerate(ends)]


def _count(values: Iterable[Locals], devices: int) -> list[int]:
    """Bytes of local arrays per device; what is held twice counts twice."""
    found = [0] * devices
    for value in values:
        for device, array in enumerate(value):
            if array is not None and not is_away(array):
                found[device] += array.size * array.dtype.itemsize
    return found


class ReferenceMachine:
    """Runs schedules on all devices, one after another.

    Args:
        observe: is shown every step; instructions are then kept apart, so that what is shown is what the
            next one read. The schedule should have been made with `inspect=True`.
    """

    def __init__(self, traced: Traced, ratios: Sequence[float], observe: Observer | None = None) -> None:
        self.ratios = tuple(ratios)
        fence = observe is not None
        self.devices = [Device(i, ratios, traced.primitives, fence=fence) for i in range(len(ratios))]
        self.compiler = Compiler(QUICK)
        self.observe = observe
        self._functions: dict[tuple[Segment, int], Local] = {}
        self._stages: dict[Relay, list[Stage]] = {}
        self._constants: dict[Value, Locals] = {}

    def segment(self, segment: Segment, graph: Graph, args: Sequence[Locals]) -> list[Locals]:
        results: list[Locals] = [[None] * len(self.devices) for _ in segment.gives]
        seen: list[tuple[Local, list[Any], Sequence[Any]]] = []
        for device in self.devices:
            own = [
                arg[device.index]
                for arg, p in zip(args, segment.needs, strict=True)
                if holds(p, device.index)
            ]
            function = self._function(segment, graph, device)
            # Devices that run the same function on the very same arrays are run once.
            again = (
                r for f, a, r in seen if f is function and all(x is y for x, y in zip(a, own, strict=True))
            )
            values = next(again, None)
            if values is None:
                values = function(*own)
                seen.append((function, own, values))
            held = [i for i, p in enumerate(segment.gives) if holds(p, device.index)]
            for i, value in zip(held, values, strict=True):
                results[i][device.index] = value
        self._show(segment, graph, args, results)
        return results

    def _show(self, step: Step, graph: Graph, args: Sequence[Locals], results: Sequence[Locals]) -> None:
        if self.observe is not None:
            self.observe(step, graph, dict(zip((*step.needs, *step.gives), (*args, *results), strict=True)))

    def _function(self, segment: Segment, graph: Graph, device: Device) -> Local:
        key = (segment, device.index)
        if key not in self._functions:
            self._functions[key] = self.compiler.segment(segment, graph, device)
        return self._functions[key]

    def exchange(self, exchange: Exchange, graph: Graph, tensor: TensorType, value: Locals) -> Locals:
        result = collective(exchange.move, tensor, value, self.ratios)
        self._show(exchange, graph, [value], [result])
        return result

    def relay(self, step: Relay, graph: Graph, args: Sequence[Locals]) -> list[Locals]:
        """One device after another, each with all pieces."""
        equation, signature = graph.equations[step.compute.equation], step.compute.signature
        if step not in self._stages:
            self._stages[step] = [
                Stage(equation, signature, device, self.ratios, self.compiler)
                for device in range(len(self.devices))
            ]
        stages = self._stages[step]
        given = [[arg[device] for arg in args] for device in range(len(stages))]
        room = (stage.room(own) for stage, own in zip(stages, given, strict=True))
        made = [[*carry, *rows] for carry, rows in room]
        pieces: dict[int, list[Any]] = {}
        for device in stages[0].course.turns:
            stage = stages[device]
            begin, fixed = stage.split(given[device])
            carries = stage.layers.carries
            carry, rows = made[device][:carries], made[device][carries:]
            for piece, number in stage.turns:
                came = stage.begin(begin, number) if stage.is_first else pieces[piece]
                pieces[piece], rows = stage.run(came, fixed, rows, number)
                if stage.is_last:
                    carry = stage.keep(carry, pieces[piece], number)
            made[device] = [*carry, *rows]
        results = [list(values) for values in zip(*made, strict=True)]
        self._show(step, graph, [args[k] for k in self._read(step, graph)], results)
        return results

    def _read(self, step: Relay, graph: Graph) -> list[int]:
        """Of what a step needs, which operand of its equation each is."""
        wanted = zip(graph.equations[step.compute.equation].inputs, step.compute.signature.ins, strict=True)
        known = {Property(a.index, p): k for k, (a, p) in enumerate(wanted) if isinstance(a, Value)}
        return [known[prop] for prop in step.needs]

    def away(self, value: Locals) -> Locals:
        return [None if x is None else to_host(x) for x in value]

    def back(self, value: Locals) -> Locals:
        return [None if x is None else to_device(x) for x in value]

    def literal(self, atom: Literal, placement: Placement) -> Locals:
        return [operand(atom, placement, device.index) for device in self.devices]

    def constant(self, value: Value, array: Any) -> Locals:
        if value not in self._constants:
            self._constants[value] = [jnp.asarray(array)] * len(self.devices)
        return self._constants[value]

    def take(self, value: Locals, iteration: int) -> Locals:
        return [jax.lax.dynamic_index_in_dim(x, iteration, keepdims=False) for x in value]

    def rows(self, tensor: TensorType, placement: Placement) -> Locals:
        return [filled(tensor, device.shape(tensor, placement), 0) for device in self.devices]

    def put(self, rows: Sequence[Locals], iteration: int, values: Sequence[Locals]) -> list[Locals]:
        pairs = zip(zip(*rows, strict=True), zip(*values, strict=True), strict=True)
        by_device = [written(mine, iteration, new) for mine, new in pairs]
        return [list(row) for row in zip(*by_device, strict=True)]

    def decide(self, value: Locals) -> int:
        return int(value[0])


def scatter(leaf: Any, tensor: TensorType, placement: Placement, ratios: Sequence[float]) -> Locals:
    """What every device holds of a global array."""
    whole = as_array(leaf, tensor)
    return [cut(whole, tensor, placement, device, ratios) for device in range(len(ratios))]


def collective(move: Move, tensor: TensorType, value: Locals, ratios: Sequence[float]) -> Locals:
    """A move on the local arrays of all devices, by the collective's own definition."""
    found = step(move.pre, move.post)
    assert found is not None, f"no single move turns {move.pre} into {move.post}"
    if found.axis == "within":
        after = _within(move, found, [to_numpy(x) for x in value], tensor, ratios)
    elif found.axis == "across":
        after = _across(move, found, [to_numpy(x) for x in value], tensor, ratios)
    else:
        after = _of_all(move, found, tensor, value, ratios)
    # What the definition returns once for several devices is converted once.
    arrays = {id(x): from_numpy(x, tensor.dtype) for x in after.values()}
    return [arrays[id(after[d])] if d in after else None for d in range(len(ratios))]


def _of_all(
    move: Move, found: MeshStep, tensor: TensorType, value: Locals, ratios: Sequence[float]
) -> dict[int, Array]:
    """By device, what a move over all devices of its group leaves there."""
    devices = members(move.group, len(ratios))
    lengths_ = stretches(tensor, move.post, move.group, ratios)
    root = None if move.root is None else devices.index(move.root)
    shards = [to_numpy(value[d if root is None else devices[root]]) for d in devices]
    after = collectives.registry()[move.kind].reference(shards, found.pre, found.post, lengths_, root)
    return dict(zip(devices, after, strict=True))


def _within(
    move: Move, found: MeshStep, shards: Sequence[Array], tensor: TensorType, ratios: Sequence[float]
) -> dict[int, Array]:
    """The same for a move within every node: there the tensor is what the node holds of it."""
    nodes, across = _grid(move).nodes, components(move.pre)[0]
    of_nodes, inside = by_node(ratios, nodes)
    result: dict[int, Array] = {}
    for node, (devices, own) in enumerate(zip(node_members(nodes), inside, strict=True)):
        shape = region(tensor.shape, across, node, of_nodes)
        after_ = found.post
        parts = lengths(shape[after_.dim][1], after_.unit, own) if isinstance(after_, Shard) else ()
        held = [shards[d] for d in devices]
        after = collectives.registry()[move.kind].reference(held, found.pre, found.post, parts, None)
        result.update(zip(devices, after, strict=True))
    return result


def _across(
    move: Move, found: MeshStep, shards: Sequence[Array], tensor: TensorType, ratios: Sequence[float]
) -> dict[int, Array]:
    """The same for a move across the nodes: each puts together what it has, and cuts what it gets again.

    What a node has reduced only in part stays so, device by device; such moves are free ones (`step`).
    """
    nodes, within = _grid(move).nodes, components(move.pre)[1]
    of_nodes, inside = by_node(ratios, nodes)
    groups = node_members(nodes)
    after_ = found.post
    parts = lengths(tensor.shape[after_.dim], after_.unit, of_nodes) if isinstance(after_, Shard) else ()
    collective_ = collectives.registry()[move.kind]
    result: dict[int, Array] = {}
    if isinstance(within, Partial):
        assert collective_.local, "what is Partial within the nodes cannot be exchanged between them"
        for node, devices in enumerate(groups):
            for d in devices:
                mine = collective_.reference([shards[d]] * len(nodes), found.pre, found.post, parts, None)
                result[d] = mine[node]
        return result
    whole = [
        np.concatenate([shards[d] for d in devices], axis=within.dim)
        if isinstance(within, Shard)
        else shards[devices[0]]
        for devices in groups
    ]
    after = collective_.reference(whole, found.pre, found.post, parts, None)
    for devices, own, array in zip(groups, inside, after, strict=True):
        if isinstance(within, Shard):
            pieces = collectives.split(array, within.dim, lengths(array.shape[within.dim], within.unit, own))
        else:
            pieces = [array] * len(devices)
        result.update(zip(devices, pieces, strict=True))
    return result


def _grid(move: Move) -> Grid:
    return next(p for p in (move.pre, move.post) if isinstance(p, Grid))
