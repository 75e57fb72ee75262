"""Even programs: instructions on global arrays, and XLA is told by NamedShardings how these shall lie.

XLA has no word for `Partial`: what is summed in parts it adds up among the devices at once, whatever the
program does next. Where that is to add the parts of many (the squares of all gradients, to clip them by), it
would exchange each by itself; with GPT-2 of two layers, 28 times in place of twice. There the parts are held
*stacked*: as a global array with a dimension in front that has an element for every device and lies cut along
it. Adding works on such arrays, and the exchange is the sum over their first dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.backends.compile import Device, Env, Local
from shardwright.backends.local import evaluate, operand
from shardwright.backends.spmd.layout import Layout
from shardwright.ir.collectives import identity
from shardwright.ir.flow import Flow, find, inputs, reads
from shardwright.ir.graph import Atom, Graph, Literal
from shardwright.ir.placement import Partial, Placement, R, Shard, reduction
from shardwright.ir.program import Instruction, Loop, Move, Program, Property, nodes_of
from shardwright.ir.repeated import begins_again

#: What makes parts and adds them up that are stacked: with a dimension in front these are as they were to
#: XLA, which cannot be said of multiplications of matrices and of scatters.
_STACKED = frozenset({
    "reduce_sum", "reduce_max", "reduce_min", "add", "add_any", "sub", "neg", "mul", "div", "max", "min",
})  # fmt: skip


_REDUCE = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}


class Whole(Device):
    """All devices as one.

    Args:
        layout: the devices; their shares are equal.
        primitives: JAX primitives by name.
    """

    def __init__(self, layout: Layout, primitives: Mapping[str, Any]) -> None:
        super().__init__(0, (1.0,), primitives)
        self.layout = layout

    def run(self, instruction: Instruction, graph: Graph, env: Env) -> None:
        if isinstance(instruction, Loop):
            super().run(instruction, graph, env)
            return
        if isinstance(instruction, Move):
            (wanted,) = reads(instruction, graph)
            value = env[wanted if wanted in env else find(wanted, env)]
            env[Property(instruction.value, instruction.post)] = self._placed(value, instruction.post)
            return
        equation, signature = graph.equations[instruction.equation], instruction.signature
        args = [self.atom(a, p, env) for a, p in zip(equation.inputs, signature.ins, strict=True)]
        primitive = self.primitives[equation.primitive]
        results = primitive.bind(*args, **equation.params)
        results = results if primitive.multiple_results else [results]
        for value, placement, result in zip(equation.outputs, signature.outs, results, strict=True):
            env[Property(value.index, placement)] = self._placed(result, placement)

    def _placed(self, value: Any, placement: Placement) -> Any:
        """Parts that nothing else is added to XLA keeps as long as it likes."""
        if reduction(placement):
            return value
        return jax.lax.with_sharding_constraint(value, self.layout.sharding(placement))

    def program(self, program: Program, graph: Graph) -> Local:
        """The program as a function of the global arrays of its inputs and constants."""
        stacked = joined(program, graph)

        def run(*args: Any) -> tuple[Any, ...]:
            env = dict(zip(inputs(program, graph), args, strict=True))
            for position, instruction in enumerate(program.instructions):
                if begins_again(instruction, graph, program.instructions[max(0, position - 1) : position]):
                    _hold_back(program.instructions[position:], graph, env)
                if position in stacked:
                    self._run_stacked(instruction, graph, env)
                else:
                    self.run(instruction, graph, env)
            return tuple(self.atom(a, p, env) for a, p in zip(graph.outputs, program.outputs, strict=True))

        return run

    # -- parts that are stacked --------------------------------------------------------------------

    def _run_stacked(self, instruction: Instruction, graph: Graph, env: Env) -> None:
        """An instruction that makes, adds up or exchanges stacked parts."""
        assert not isinstance(instruction, Loop), "parts that come out of loops are not stacked"
        if isinstance(instruction, Move):
            (wanted,) = reads(instruction, graph)
            value = env[wanted if wanted in env else find(wanted, env)]
            op, post = reduction(instruction.pre), instruction.post
            if op is None:
                result = self._owned(value, post)
            else:
                result = self._placed(_REDUCE[op](value, axis=0), post)
            env[Property(instruction.value, post)] = result
            return
        equation, signature = graph.equations[instruction.equation], instruction.signature
        args = [self._stacked(a, p, env) for a, p in zip(equation.inputs, signature.ins, strict=True)]
        primitive, ratios = self.primitives[equation.primitive], self.layout.ratios

        def one(*held: Any) -> list[Any]:
            return evaluate(equation, signature, primitive, 0, ratios, held)

        results = jax.vmap(one, in_axes=[None if p == R else 0 for p in signature.ins])(*args)
        for value, placement, result in zip(equation.outputs, signature.outs, results, strict=True):
            env[Property(value.index, placement)] = self._in_front(result)

    def _stacked(self, atom: Atom, placement: Placement, env: Env) -> Any:
        """An operand with the devices in front, but for what all of them have."""
        if isinstance(placement, Partial):
            if isinstance(atom, Literal):
                return self._owned(operand(atom, placement, 0), placement)
            return env[Property(atom.index, placement)]
        value = self.atom(atom, placement, env)
        if not isinstance(placement, Shard):
            return value
        dim, count = placement.dim, self.layout.count
        apart = value.reshape(*value.shape[:dim], count, value.shape[dim] // count, *value.shape[dim + 1 :])
        return self._in_front(jnp.moveaxis(apart, dim, 0))

    def _owned(self, value: Any, placement: Placement) -> Any:
        """Parts of which the first device has all."""
        op = reduction(placement)
        assert op is not None
        rest = jnp.asarray(identity(op, value.dtype), value.dtype)
        owner = jnp.arange(self.layout.count).reshape(-1, *(1 for _ in value.shape)) == 0
        return self._in_front(jnp.where(owner, value[None], rest))

    def _in_front(self, value: Any) -> Any:
        """Cut along the dimension of the devices."""
        return jax.lax.with_sharding_constraint(value, self.layout.sharding(Shard(0)))


def joined(program: Program, graph: Graph) -> frozenset[int]:
    """Positions of the instructions whose parts are stacked.

    What makes parts, adds them up and exchanges them hangs together: all of it is stacked, or nothing.
    Nothing is where no two parts are added, on two mesh axes, where parts come out of loops, and where
    something else is done with them than `_STACKED`.
    """
    if nodes_of(program) is not None:
        return frozenset()
    flow = Flow(program, graph)
    made_by = {prop: i for i, gives in enumerate(flow.gives) for prop in gives if _is_part(prop)}
    found: set[int] = set()
    seen: set[int] = set()
    for start in made_by.values():
        if start in seen:
            continue
        together, rest = set[int](), [start]
        while rest:
            if (position := rest.pop()) in together:
                continue
            together.add(position)
            rest += [made_by[prop] for prop in flow.needs[position] if prop in made_by]
            parts = set(filter(_is_part, flow.gives[position]))
            rest += [i for i in flow.consumers[position] if parts.intersection(flow.needs[i])]
        seen |= together
        made = [{made_by[prop] for prop in flow.needs[i] if prop in made_by} for i in together]
        if any(len(some) > 1 for some in made) and all(_stacks(program, graph, flow, i) for i in together):
            found |= together
    return frozenset(found)


def _is_part(prop: Property) -> bool:
    return isinstance(prop.placement, Partial)


def _stacks(program: Program, graph: Graph, flow: Flow, position: int) -> bool:
    """Whether an instruction can work on stacked parts."""
    instruction = program.instructions[position]
    if isinstance(instruction, Move):
        lone = instruction.group is None and instruction.root is None
        return lone and (flow.exchange[position] or isinstance(instruction.post, Partial))
    if isinstance(instruction, Loop):
        return False
    simple = graph.equations[instruction.equation].primitive in _STACKED
    return simple and all(isinstance(p, Partial) for p in instruction.signature.outs)


def _hold_back(instructions: Sequence[Instruction], graph: Graph, env: Env) -> None:
    """Make what the first of some instructions computes again wait for the gradient it is to wait for.

    Compilers that keep barriers (XLA's for CPUs does not) then compute it no earlier, and not as one with the
    first time.
    """
    first = next(i for i in instructions if not isinstance(i, Move))
    number, after = graph.equations[first.equation].copy, graph.equations[first.equation].after
    again = [
        i for i in instructions if not isinstance(i, Move) and graph.equations[i.equation].copy == number
    ]
    read = {prop.value for instruction in again for prop in reads(instruction, graph)}
    waiting = [
        prop for prop in env if prop.value in read or (after is not None and prop.value == after.index)
    ]
    env.update(zip(waiting, jax.lax.optimization_barrier([env[prop] for prop in waiting]), strict=True))
