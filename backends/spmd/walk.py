"""Uneven programs: an order as the code that all devices share, traced under `jax.shard_map`.

segment      its parts (`parts.py`), each a switch on the class of the device (`local.py`), a loop over
             strips of state (`strips.py`), or code without either
message      XLA's collectives, on padded stretches (`moves.py`)
loop         a loop of the program, whose body is an order again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.backends.local import neutral, operand
from shardwright.backends.runner import At
from shardwright.backends.schedule.acts import Land, Launch, Order, Repeat
from shardwright.backends.spmd.layout import AXIS, Layout
from shardwright.backends.spmd.local import Branches
from shardwright.backends.spmd.moves import moved
from shardwright.backends.spmd.parts import parts
from shardwright.backends.spmd.strips import Strips
from shardwright.ir.flow import inputs
from shardwright.ir.graph import Atom, Graph, Literal
from shardwright.ir.placement import Partial, Placement, R
from shardwright.ir.program import Property
from shardwright.ir.regions import scan_counts
from shardwright.ir.repeated import begins_again
from shardwright.ir.segments import Segment


class Walk:
    """An order in the code that all devices share, traced under `jax.shard_map`.

    A held value is what this device holds, padded. A loop that exchanges is a loop of the program: which way
    it goes is decided by device 0, so that devices whose branches round differently never part.

    Args:
        steps: the order.
        layout: the devices.
        primitives: JAX primitives by name.
        state: results that may take the place of the arguments that they continue, with these.
    """

    def __init__(
        self,
        steps: Order,
        layout: Layout,
        primitives: Mapping[str, Any],
        state: Mapping[Property, Property],
    ) -> None:
        self.order = steps
        self.layout = layout
        self.branches = {
            segment: [
                Strips(part.segment, within, layout, part.lengths, part.over, primitives)
                if part.over
                else Branches(part.segment, within, layout, part.classes, primitives)
                for part in parts(segment, within, layout, state if within is steps else None)
            ]
            for segment, within in _segments(steps)
        }

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        program = self.order.program
        here = jax.lax.axis_index(AXIS)
        placements = (*program.inputs, *[R] * (len(args) - len(program.inputs)))
        held = [x[0] if isinstance(p, Partial) else x for x, p in zip(args, placements, strict=True)]
        results = self._run(self.order, held, here)
        ends = zip(results, program.outputs, strict=True)
        return tuple(x[None] if isinstance(p, Partial) else x for x, p in ends)

    def _run(self, steps: Order, args: Sequence[Any], here: Any) -> list[Any]:
        """Outputs from inputs and constants."""
        graph, program = steps.graph, steps.program
        env = dict(zip(inputs(program, graph), args, strict=True))
        flying: dict[int, list[Any]] = {}

        def read(atom: Atom, placement: Placement) -> Any:
            if isinstance(atom, Literal):
                return _literal(atom, placement, here)
            return env[Property(atom.index, placement)]

        for step in steps.steps:
            with At(steps, step):
                results: Sequence[Any] = ()
                if isinstance(step, Segment):
                    made = {prop: env[prop] for prop in step.needs}
                    if any(begins_again(instruction, graph, ()) for instruction in step.instructions):
                        # What is computed again waits for the gradient among what the segment needs.
                        made = dict(zip(made, jax.lax.optimization_barrier([*made.values()]), strict=True))
                    for part in self.branches[step]:
                        found = part(here, *[made[prop] for prop in part.segment.needs])
                        made.update(zip(part.segment.gives, found, strict=True))
                    results = [made[prop] for prop in step.gives]
                elif isinstance(step, Launch):
                    sent = [env[need] for need in step.message.needs]
                    flying[step.message.number] = moved(
                        step.message.moves, steps.types, self.layout, here, sent
                    )
                elif isinstance(step, Land):
                    results = flying.pop(step.message.number)
                else:
                    assert isinstance(step, Repeat), "nothing waits in host memory here"
                    equation = graph.equations[step.loop.equation]
                    ins = zip(equation.inputs, step.loop.signature.ins, strict=True)
                    results = self._loop(step, graph, [read(a, p) for a, p in ins], here)
                env.update(zip(step.gives, results, strict=True))
                for prop in step.drops:
                    del env[prop]
        return [read(a, p) for a, p in zip(graph.outputs, program.outputs, strict=True)]

    def _body(self, steps: Order, here: Any) -> Any:
        """A region as a function of its inputs."""

        def run(*args: Any) -> list[Any]:
            constants = [jnp.asarray(array) for array in steps.graph.constants.values()]
            return self._run(steps, [*args, *constants], here)

        return run

    def _loop(self, step: Repeat, graph: Graph, args: Sequence[Any], here: Any) -> list[Any]:
        equation = graph.equations[step.loop.equation]
        params = equation.params
        runs = [self._body(body, here) for body in step.bodies]
        if equation.primitive == "cond":
            return jax.lax.switch(_agreed(args[0], here), runs, *args[1:])
        if equation.primitive == "while":
            of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
            for_cond, for_body = args[:of_cond], args[of_cond : of_cond + of_body]

            def goes_on(carry: Sequence[Any]) -> Any:
                return _agreed(runs[0](*for_cond, *carry)[0], here) != 0

            def turn(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
                carry = runs[1](*for_body, *state[1])
                return goes_on(carry), carry

            # The condition may exchange: it is computed where everything is, not where XLA decides.
            start = list(args[of_cond + of_body :])
            return jax.lax.while_loop(lambda state: state[0], turn, (goes_on(start), start))[1]
        consts, carries = scan_counts(params)
        fixed, start, scanned = args[:consts], args[consts : consts + carries], args[consts + carries :]

        def iteration(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = runs[0](*fixed, *carry, *xs)
            return results[:carries], results[carries:]

        last, stacked = jax.lax.scan(
            iteration, list(start), list(scanned), params["length"], params["reverse"]
        )
        return [*last, *stacked]


def _segments(steps: Order) -> Iterator[tuple[Segment, Order]]:
    """All segments, loops' included, each with the schedule that it is in."""
    for step in steps.steps:
        if isinstance(step, Segment):
            yield step, steps
        elif isinstance(step, Repeat):
            for body in step.bodies:
                yield from _segments(body)


def _literal(atom: Literal, placement: Placement, here: Any) -> Any:
    whole = operand(atom, placement, 0)
    return jnp.where(here == 0, whole, neutral(atom.type, (), placement)) if placement != R else whole


def _agreed(value: Any, here: Any) -> Any:
    """Device 0's value of a replicated number or boolean."""
    return jax.lax.psum(jnp.where(here == 0, value.astype(jnp.int32), 0), AXIS)
