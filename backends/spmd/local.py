"""Segments in one program for all devices: a branch for every class of devices that have equal lengths.

What a device computes depends on the lengths of its stretches, which decide shapes, and sometimes on where
they begin. Lengths are static: devices of one class share a branch. Where a stretch begins is looked up by
the device's number when the branch runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.compile import Device, Env
from shardwright.backends.layout import holds, members, shares, stretches
from shardwright.backends.local import evaluate, extents, filled, neutral, operand
from shardwright.backends.schedule.acts import Order
from shardwright.backends.spmd.layout import Layout, starts
from shardwright.ir.flow import find, reads
from shardwright.ir.graph import Atom, Equation, Graph, Literal, TensorType
from shardwright.ir.placement import OwnRatios, Partial, Placement, Shard, lengths
from shardwright.ir.program import Compute, Group, Instruction, Loop, Move, Property
from shardwright.ir.registry import Extent
from shardwright.ir.rules import Signature
from shardwright.ir.segments import Segment


class NeedsNumberError(Exception):
    """A localizer wants to know where a stretch begins while it is traced, not when it runs."""


class Offset:
    """Where this device's stretch begins, known when the program runs.

    It stands for an integer array and can be added to, subtracted from and compared with arrays, or scaled by
    a number; whatever else a localizer does with it needs a number.

    Args:
        value: traced.
        largest: of all devices.
        factor: what it is multiplied by.
    """

    def __init__(self, value: jax.Array, largest: int, factor: int = 1) -> None:
        self.value = value
        self.largest = largest
        self.factor = factor

    def __jax_array__(self) -> jax.Array:
        if self.factor == 1:
            return self.value
        return self.value.astype(jnp.uint32) * jnp.uint32(self.factor)

    def __mul__(self, factor: int) -> Offset:
        if self.largest * self.factor * factor >= 2**32:
            raise NeedsNumberError
        return Offset(self.value, self.largest, self.factor * factor)

    def __eq__(self, other: object) -> Any:
        return self.__jax_array__() == other

    __hash__ = None  # type: ignore[assignment]

    def _refuse(self, *other: Any) -> Any:
        raise NeedsNumberError

    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = __floordiv__ = __mod__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __rshift__ = __and__ = __int__ = __index__ = __bool__ = _refuse


class Class(Device):
    """What devices of one class do, in the one branch that they share.

    Args:
        alike: the devices, two or more.
        here: traced, the number of the device that runs the branch.
    """

    def __init__(
        self, alike: Sequence[int], here: jax.Array, ratios: Sequence[float], primitives: Mapping[str, Any]
    ) -> None:
        super().__init__(alike[0], ratios, primitives)
        self.alike = tuple(alike)
        self.here = here

    def run(self, instruction: Instruction, graph: Graph, env: Env) -> None:
        if not isinstance(instruction, Compute):
            super().run(instruction, graph, env)
            return
        equation, signature = graph.equations[instruction.equation], instruction.signature
        args = [self.atom(a, p, env) for a, p in zip(equation.inputs, signature.ins, strict=True)]
        results = self._evaluate(equation, signature, args)
        for value, placement, result in zip(equation.outputs, signature.outs, results, strict=True):
            env[Property(value.index, placement)] = result

    def atom(self, atom: Atom, placement: Placement, env: Env) -> Any:
        if isinstance(atom, Literal) and isinstance(placement, Partial) and 0 in self.alike:
            whole = operand(atom, placement, 0)
            return jnp.where(self.here == 0, whole, neutral(atom.type, (), placement))
        return super().atom(atom, placement, env)

    def _evaluate(self, equation: Equation, signature: Signature, args: Sequence[Any]) -> list[Any]:
        primitive = self.primitives[equation.primitive]
        try:
            return evaluate(equation, signature, primitive, self.index, self.ratios, args, view=self._extents)
        except NeedsNumberError:
            pass
        # One branch more for each, around this equation alone.

        def of(device: int, *args: Any) -> list[Any]:
            return evaluate(equation, signature, primitive, device, self.ratios, args)

        each = [partial(of, device) for device in self.alike]
        return list(jax.lax.switch(self._own(range(len(each))), each, *args))

    def _extents(self, tensor: TensorType, placement: Placement) -> tuple[Extent, ...]:
        """Extents, of which offsets that differ within the class are looked up."""
        dims = extents(tensor, placement, self.index, self.ratios)
        if not isinstance(placement, Shard):
            return dims
        every = starts(stretches(tensor, placement, None, self.ratios))
        at = [every[d] for d in self.alike]
        if len(set(at)) == 1:
            return dims
        offset = Offset(self._own(at), max(at))
        old = dims[placement.dim]
        changed = Extent(old.size, cast(int, offset), old.length)
        return (*dims[: placement.dim], changed, *dims[placement.dim + 1 :])

    def _move(self, move: Move, graph: Graph, env: Env) -> None:
        participants = members(move.group, len(self.ratios))
        if self.index not in participants:
            return
        (wanted,) = reads(move, graph)
        whole = env[wanted if wanted in env else find(wanted, env)]
        tensor = TensorType(whole.shape, str(whole.dtype))
        place = {device: position for position, device in enumerate(participants)}
        if isinstance(move.post, Shard):
            cut = stretches(tensor, move.post, move.group, self.ratios)
            at = starts(cut)
            first = self._own([at[place[d]] for d in self.alike])
            part = jax.lax.dynamic_slice_in_dim(whole, first, cut[place[self.index]], axis=move.post.dim)
        else:
            rest = neutral(tensor, tensor.shape, move.post)
            part = jnp.where(self.here == participants[0], whole, rest)
        env[Property(move.value, move.post, move.group)] = part

    def _own(self, values: Sequence[int]) -> jax.Array:
        """Of numbers, one for each device of the class, that of the device that runs the branch."""
        every = np.zeros(len(self.ratios), np.int32)
        every[list(self.alike)] = values
        return jnp.asarray(every)[self.here]


#: Devices by class.
Classes: TypeAlias = tuple[tuple[int, ...], ...]


def classes(segment: Segment, graph: Graph, layout: Layout) -> Classes:
    """Devices of equal lengths in a segment, which one branch can be for; in order of appearance."""
    parts = set(_cuts(segment.instructions, graph))
    groups: dict[tuple[object, ...], list[int]] = {}
    props = (*segment.needs, *segment.gives)
    for device in range(layout.count):
        key = (
            *(_length(*part, device, layout) for part in sorted(parts, key=str)),
            *(holds(prop, device) for prop in props),
        )
        groups.setdefault(key, []).append(device)
    return tuple(map(tuple, groups.values()))


def _length(units: int, by: OwnRatios | None, group: Group, device: int, layout: Layout) -> int | None:
    own = members(group, layout.count)
    ratios = layout.ratios if by is None else by.shares
    return lengths(units, 1, shares(group, ratios))[own.index(device)] if device in own else None


def _cuts(instructions: Sequence[Instruction], graph: Graph) -> Iterator[tuple[int, OwnRatios | None, Group]]:
    """In how many units the dimensions are cut that instructions deal with, by which ratios, among whom."""
    types = {value.index: value.type for value in graph.values()}
    for instruction in instructions:
        if isinstance(instruction, Move):
            yield *_units(types[instruction.value], instruction.post), instruction.group
            continue
        equation, signature = graph.equations[instruction.equation], instruction.signature
        tensors = (*equation.input_types, *equation.output_types)
        for tensor, placement in zip(tensors, (*signature.ins, *signature.outs), strict=True):
            yield *_units(tensor, placement), None
        if isinstance(instruction, Loop):
            for body, region in zip(instruction.bodies, equation.regions, strict=True):
                yield from _cuts(body.instructions, region)


def _units(tensor: TensorType, placement: Placement) -> tuple[int, OwnRatios | None]:
    if not isinstance(placement, Shard):
        return 0, None
    return tensor.shape[placement.dim] // placement.unit, placement.by


class Branches:
    """A segment for all devices, traced under `jax.shard_map`.

    Called with this device's number and what it holds of `segment.needs`, padded, it gives what the device
    holds of `segment.gives`, padded; of what it does not hold, zeros.

    Args:
        segment: what to run.
        within: the order that it is in.
        layout: the devices.
        classes: devices of equal lengths. Where there is one class alone, all devices run its branch, whether
            they are in it or not.
        primitives: JAX primitives by name.
    """

    def __init__(
        self, segment: Segment, within: Order, layout: Layout, classes: Classes, primitives: Mapping[str, Any]
    ) -> None:
        self.segment = segment
        self.within = within
        self.layout = layout
        self.primitives = primitives
        self.classes = classes

    @property
    def count(self) -> int:
        """How many branches there are."""
        return len(self.classes)

    def __call__(self, here: jax.Array, *padded: Any) -> list[Any]:
        branches = [partial(self._run, alike, here) for alike in self.classes]
        if len(branches) == 1:
            return branches[0](*padded)
        number = [next(i for i, c in enumerate(self.classes) if d in c) for d in range(self.layout.count)]
        return list(jax.lax.switch(jnp.asarray(number)[here], branches, *padded))

    def _run(self, alike: tuple[int, ...], here: jax.Array, *padded: Any) -> list[Any]:
        """One branch."""
        ratios, types = self.layout.ratios, self.within.types
        one = alike[0]
        device = (
            Class(alike, here, ratios, self.primitives) if alike[1:] else Device(one, ratios, self.primitives)
        )
        env: Env = {}
        for prop, array in zip(self.segment.needs, padded, strict=True):
            if holds(prop, one):
                env[prop] = _cut(array, types[prop.value], prop, one, self.layout)
        for instruction in self.segment.instructions:
            device.run(instruction, self.within.graph, env)
        results: list[Any] = []
        for prop in self.segment.gives:
            tensor = types[prop.value]
            shape = self.layout.padded(tensor, prop.placement, prop.group)
            results.append(_padded(env[prop], shape) if holds(prop, one) else filled(tensor, shape, 0))
        return results


def _cut(array: Any, tensor: TensorType, prop: Property, device: int, layout: Layout) -> Any:
    """A device's stretch without its padding."""
    if not isinstance(prop.placement, Shard):
        return array
    length = layout.lengths(tensor, prop.placement, prop.group)[device]
    return jax.lax.slice_in_dim(array, 0, length, axis=prop.placement.dim)


def _padded(array: Any, shape: tuple[int, ...]) -> Any:
    """A device's stretch in the shape that all have."""
    if array.shape == shape:
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return jnp.zeros(shape, array.dtype).at[tuple(map(slice, array.shape))].set(array)
    widths = [(0, wanted - have, 0) for wanted, have in zip(shape, array.shape, strict=True)]
    return jax.lax.pad(array, jnp.zeros((), array.dtype), widths)
