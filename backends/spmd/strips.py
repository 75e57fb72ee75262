"""Elementwise updates of padded state, in place and a strip at a time: no switch, one code for all devices.

New state is computed of the state that it continues, element by element. In a switch every class of devices
would have a branch for that, which pads its results, and XLA copies what a branch hands out into the memory
of the state. A loop over strips needs none of it: how many a device has is looked up when it runs, and each
is written where the old one stood. The padding stays what it was.

What is made of new state (parameters of new moments) is computed in a loop of its own afterwards. XLA fuses
everything in one loop that belongs together, and then could not write over what something else still reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.backends.local import evaluate, extents, operand
from shardwright.backends.schedule.acts import Order
from shardwright.backends.spmd.layout import Layout
from shardwright.ir.flow import reads, writes
from shardwright.ir.graph import Graph, Literal, TensorType
from shardwright.ir.placement import Placement, Shard
from shardwright.ir.program import Compute, Instruction, Property
from shardwright.ir.registry import Extent
from shardwright.ir.segments import Segment

#: Strips of the longest stretch at most, and the part of all elements that may be padding computed with.
MOST_STRIPS, WASTE = 16, 1 / 16


def strips_of(lengths: Sequence[int]) -> int | None:
    """In how many equal strips the longest stretch is cut, so that all have whole ones, or nearly.

    The fewest that will do; None where none do.
    """
    longest = max(lengths)
    for count in range(2, MOST_STRIPS + 1):
        if longest % count == 0:
            strip = longest // count
            if sum(-(-n // strip) * strip for n in lengths) <= (1 + WASTE) * sum(lengths):
                return count
    return None


def levels(segment: Segment, graph: Graph, over: Mapping[Property, Property]) -> list[list[Result]] | None:
    """Results in the order of the loops that they are computed in; None where one cannot be in place.

    Args:
        segment: elementwise instructions.
        graph: what they compute.
        over: for every result, the operand whose place it takes.
    """
    makers = {prop: i for i, made in enumerate(segment.instructions) for prop in writes(made, graph)}
    found: list[list[Result]] = []
    level: dict[Property, int] = {}
    readers: dict[Property, list[Property]] = {}
    for prop in segment.gives:
        inside: set[int] = set()
        leaves: dict[Property, None] = {}
        ahead = [makers[prop]]
        while ahead:
            number = ahead.pop()
            inside.add(number)
            for wanted in reads(segment.instructions[number], graph):
                if wanted not in makers or wanted in over:
                    leaves[wanted] = None
                elif makers[wanted] not in inside:
                    ahead.append(makers[wanted])
        level[prop] = max((level[leaf] + 1 for leaf in leaves if leaf in over), default=0)
        for leaf in leaves:
            readers.setdefault(leaf, []).append(prop)
        found += [[]] * (level[prop] == len(found))
        instructions = tuple(segment.instructions[i] for i in sorted(inside))
        found[level[prop]] = [*found[level[prop]], Result(prop, over[prop], tuple(leaves), instructions)]
    # What stood in a result's place is read by the result, by those of earlier loops, and by nobody else.
    for prop, place in over.items():
        if any(level[other] >= level[prop] and other != prop for other in readers.get(place, ())):
            return None
    return found


@dataclass(frozen=True, slots=True)
class Result:
    """A result of a loop.

    Attributes:
        prop: what it is.
        place: the operand in whose place it is written.
        leaves: what it is made of, results of earlier loops as they are.
        instructions: that make it.
    """

    prop: Property
    place: Property
    leaves: tuple[Property, ...]
    instructions: tuple[Instruction, ...]


class Strips:
    """Elementwise updates for all devices, traced under `jax.shard_map`; called as `Branches` are.

    Args:
        segment: what to run, of which `levels` are known.
        within: the order that it is in.
        layout: the devices.
        lengths: of the stretches of all that is cut.
        over: for every result, the operand whose place it takes.
        primitives: JAX primitives by name.
    """

    #: All devices run the same code.
    count = 1

    def __init__(
        self,
        segment: Segment,
        within: Order,
        layout: Layout,
        lengths: Sequence[int],
        over: Mapping[Property, Property],
        primitives: Mapping[str, Any],
    ) -> None:
        self.segment, self.graph, self.layout = segment, within.graph, layout
        self.primitives = primitives
        longest, strips = max(lengths), strips_of(lengths)
        loops = levels(segment, within.graph, over)
        assert strips is not None
        assert loops is not None
        self.loops = loops
        self.strip = longest // strips
        self.strips = [-(-n // self.strip) for n in lengths]
        self.device = lengths.index(longest)

    def __call__(self, here: jax.Array, *padded: Any) -> list[Any]:
        env = dict(zip(self.segment.needs, padded, strict=True))
        count = jnp.asarray(self.strips, jnp.int32)[here]
        for results in self.loops:
            places = [env.pop(result.place) for result in results]
            body = partial(self._turn, results, dict(env))
            done = jax.lax.fori_loop(0, count, body, places)
            env.update((result.prop, array) for result, array in zip(results, done, strict=True))
        return [env[prop] for prop in self.segment.gives]

    def _turn(
        self, results: Sequence[Result], around: Mapping[Property, Any], number: Any, places: Sequence[Any]
    ) -> list[Any]:
        """One strip of all results of a loop."""
        held = {**around, **{result.place: array for result, array in zip(results, places, strict=True)}}
        start = number * self.strip
        done: list[Any] = []
        for result in results:
            env = {leaf: self._of(held[leaf], leaf.placement, start) for leaf in result.leaves}
            for instruction in result.instructions:
                self._run(instruction, env)
            axis = _dim(result.prop.placement)
            array = held[result.place]
            done.append(jax.lax.dynamic_update_slice_in_dim(array, env[result.prop], start, axis))
        return done

    def _of(self, array: Any, placement: Placement, start: Any) -> Any:
        if not isinstance(placement, Shard):
            return array
        return jax.lax.dynamic_slice_in_dim(array, start, self.strip, placement.dim)

    def _run(self, instruction: Instruction, env: dict[Property, Any]) -> None:
        assert isinstance(instruction, Compute)
        equation, signature = self.graph.equations[instruction.equation], instruction.signature
        args = [
            operand(a, p, self.device) if isinstance(a, Literal) else env[Property(a.index, p)]
            for a, p in zip(equation.inputs, signature.ins, strict=True)
        ]
        primitive = self.primitives[equation.primitive]
        ratios = self.layout.ratios
        results = evaluate(equation, signature, primitive, self.device, ratios, args, view=self._extents)
        for value, placement, result in zip(equation.outputs, signature.outs, results, strict=True):
            env[Property(value.index, placement)] = result

    def _extents(self, tensor: TensorType, placement: Placement) -> tuple[Extent, ...]:
        dims = list(extents(tensor, placement, self.device, self.layout.ratios))
        if isinstance(placement, Shard):
            dims[placement.dim] = Extent(tensor.shape[placement.dim], 0, self.strip)
        return tuple(dims)


def _dim(placement: Placement) -> int:
    assert isinstance(placement, Shard)
    return placement.dim
