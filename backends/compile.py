"""The local function of a segment: what one device runs between two exchanges, compiled once.

A segment is traced equation by equation with the device's own shapes. Executables are shared by what
they compute: two segments whose lowered text is equal (repeated layers, devices with equal extents
whose offsets do not matter) are compiled once. The text says all there is to say, so nothing needs to
be guessed about parameters or positions.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from shardwright.backends.layout import abstract, holds, members, stretches
from shardwright.backends.local import evaluate, local_shape, neutral, operand
from shardwright.ir.collectives import step
from shardwright.ir.flow import find, inputs, reads
from shardwright.ir.graph import Atom, Equation, Graph, Literal, TensorType, value_type
from shardwright.ir.placement import Grid, Placement, Shard, region, seat
from shardwright.ir.program import Compute, Instruction, Loop, Move, Program, Property
from shardwright.ir.regions import scan_counts
from shardwright.ir.segments import Segment

Local: TypeAlias = Callable[..., tuple[Any, ...]]
Env: TypeAlias = dict[Property, Any]


#: XLA options that compile several times faster and run slower: nothing is optimised, nothing is fused.
QUICK: Mapping[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    # Later versions of XLA no longer have it.
    **({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}),
}


class Device:
    """One device's view of a plan: its index, the ratios, and how it runs local instructions.

    Args:
        fence: keep the compiler from fusing or simplifying across instructions, so that each reads what
            the one before it handed out, to the last bit.
        separate: results never share memory with operands.
    """

    def __init__(
        self,
        index: int,
        ratios: Sequence[float],
        primitives: Mapping[str, Any],
        *,
        fence: bool = False,
        separate: bool = False,
    ) -> None:
        self.index = index
        self.ratios = tuple(ratios)
        self.primitives = primitives
        self.fence = fence
        self.separate = separate

    def run(self, instruction: Instruction, graph: Graph, env: Env) -> None:
        """Add what a local instruction establishes to `env`."""
        if isinstance(instruction, Move):
            self._move(instruction, graph, env)
            return
        equation = graph.equations[instruction.equation]
        signature = instruction.signature
        args = [self.atom(a, p, env) for a, p in zip(equation.inputs, signature.ins, strict=True)]
        if isinstance(instruction, Compute):
            primitive = self.primitives[equation.primitive]
            results = evaluate(equation, signature, primitive, self.index, self.ratios, args)
        else:
            results = self._loop(instruction, graph, args)
        for value, placement, result in zip(equation.outputs, signature.outs, results, strict=True):
            env[Property(value.index, placement)] = (
                jax.lax.optimization_barrier(result) if self.fence else result
            )

    def atom(self, atom: Atom, placement: Placement, env: Env) -> Any:
        """The local array of an operand."""
        if isinstance(atom, Literal):
            return operand(atom, placement, self.index)
        return env[Property(atom.index, placement)]

    def shape(self, tensor: TensorType, placement: Placement) -> tuple[int, ...]:
        """Local shape of a tensor that all devices hold."""
        return local_shape(tensor, placement, self.index, self.ratios)

    def _move(self, move: Move, graph: Graph, env: Env) -> None:
        """The free moves: this device's part of what it holds whole."""
        participants = members(move.group, len(self.ratios))
        if self.index not in participants:
            return
        (wanted,) = reads(move, graph)
        held = env[wanted if wanted in env else find(wanted, env)]
        found = step(move.pre, move.post)
        assert found is not None, f"no single move turns {move.pre} into {move.post}"
        position = participants.index(self.index)
        if found.axis != "all":
            node, place = seat(self.index, _nodes(move))
            position = node if found.axis == "across" else place
        if isinstance(found.post, Shard):
            part = self._slice(move, held, value_type(graph, move.value), position)
        elif position > 0:
            part = neutral(TensorType(held.shape, str(held.dtype)), held.shape, found.post)
        else:
            part = held
        env[Property(move.value, move.post, move.group)] = part

    def _slice(self, move: Move, held: Any, tensor: TensorType, position: int) -> Any:
        """What a device keeps of what it has whole, on all devices or on one axis of two."""
        if move.group is not None:
            assert isinstance(move.post, Shard)
            lengths = stretches(tensor, move.post, move.group, self.ratios)
            start = sum(lengths[:position])
            return jax.lax.slice_in_dim(held, start, start + lengths[position], axis=move.post.dim)
        before = region(tensor.shape, move.pre, self.index, self.ratios)
        after = region(tensor.shape, move.post, self.index, self.ratios)
        starts = [b - a for (a, _), (b, _) in zip(before, after, strict=True)]
        ends = [start + length for start, (_, length) in zip(starts, after, strict=True)]
        return jax.lax.slice(held, starts, ends)

    # -- loops ------------------------------------------------------------------------------------

    def _loop(self, loop: Loop, graph: Graph, args: Sequence[Any]) -> list[Any]:
        equation = graph.equations[loop.equation]
        runs = [self._body(body, region) for body, region in zip(loop.bodies, equation.regions, strict=True)]
        return controlled(equation, runs, args)

    def _body(self, body: Program, region: Graph) -> Local:
        def run(*args: Any) -> tuple[Any, ...]:
            constants = [jnp.asarray(array) for array in region.constants.values()]
            env = dict(zip(inputs(body, region), [*args, *constants], strict=True))
            for instruction in body.instructions:
                self.run(instruction, region, env)
            return tuple(self.atom(a, p, env) for a, p in zip(region.outputs, body.outputs, strict=True))

        return run


def controlled(equation: Equation, runs: Sequence[Local], args: Sequence[Any]) -> list[Any]:
    """Results of control flow from its operands; `runs` compute the equation's regions, in their order."""
    params = equation.params
    if equation.primitive == "scan":
        consts, carries = scan_counts(params)
        fixed, start, scanned = args[:consts], args[consts : consts + carries], args[consts + carries :]

        def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = runs[0](*fixed, *carry, *xs)
            return list(results[:carries]), list(results[carries:])

        last, stacked = jax.lax.scan(step, list(start), list(scanned), params["length"], params["reverse"])
        return [*last, *stacked]
    if equation.primitive == "while":
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        for_cond, for_body, start = (
            args[:of_cond],
            args[of_cond : of_cond + of_body],
            args[of_cond + of_body :],
        )
        return jax.lax.while_loop(
            lambda carry: runs[0](*for_cond, *carry)[0],
            lambda carry: list(runs[1](*for_body, *carry)),
            list(start),
        )
    assert equation.primitive == "cond", f"{equation.primitive} is no control flow"
    return list(jax.lax.switch(args[0], runs, *args[1:]))


def _nodes(move: Move) -> tuple[int, ...]:
    return next(p.nodes for p in (move.pre, move.post) if isinstance(p, Grid))


def local_function(segment: Segment, graph: Graph, device: Device) -> Local:
    """What a device does in a segment.

    Returns:
        A function of the arrays of `segment.needs` that the device holds, in order, giving the arrays
        of `segment.gives` that it holds.
    """
    needs = [prop for prop in segment.needs if holds(prop, device.index)]
    gives = [prop for prop in segment.gives if holds(prop, device.index)]

    def run(*args: Any) -> tuple[Any, ...]:
        env: Env = dict(zip(needs, args, strict=True))
        for instruction in segment.instructions:
            device.run(instruction, graph, env)
        results = tuple(env[prop] for prop in gives)
        return _separated(results, args) if device.separate else results

    return run


def _separated(results: Sequence[Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """The results, with a copy in place of each that is an operand or stands there twice.

    jax.jit hands such results out as the very array that came in; whoever donates one deletes the other.
    """
    seen = {id(arg) for arg in args}
    found: list[Any] = []
    for result in results:
        found.append(jnp.copy(result) if id(result) in seen else result)
        seen.add(id(result))
    return tuple(found)


class Compiler:
    """Compiles functions and keeps the executables, by the text of what they compute.

    Args:
        options: XLA's, such as `QUICK`.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})
        self._by_text: dict[bytes, Local] = {}

    def __len__(self) -> int:
        return len(self._by_text)

    def segment(
        self, segment: Segment, graph: Graph, device: Device, donated: Collection[Property] = ()
    ) -> Local:
        """`local_function`, compiled when it is first called.

        Args:
            donated: needs whose memory the results may take.
        """
        return self.share(*self._traced(segment, graph, device, donated))

    def ahead(
        self, segment: Segment, graph: Graph, device: Device, donated: Collection[Property] = ()
    ) -> Local:
        """`local_function`, compiled now."""
        return self.share(*self._traced(segment, graph, device, donated), now=True)

    def _traced(
        self, segment: Segment, graph: Graph, device: Device, donated: Collection[Property]
    ) -> tuple[Local, list[Any], tuple[int, ...]]:
        types = {value.index: value.type for value in graph.values()}
        # Only R is held by some devices alone, and it is never cut.
        needs = [prop for prop in segment.needs if holds(prop, device.index)]
        avals = [abstract(types[p.value], device.shape(types[p.value], p.placement)) for p in needs]
        # XLA reuses memory for results of the same shape and dtype, and warns of what it cannot use.
        gives = (prop for prop in segment.gives if holds(prop, device.index))
        room = Counter((device.shape(types[p.value], p.placement), types[p.value].dtype) for p in gives)
        given: list[int] = []
        for i, prop in enumerate(needs):
            form = device.shape(types[prop.value], prop.placement), types[prop.value].dtype
            if prop in donated and room[form]:
                room[form] -= 1
                given.append(i)
        return local_function(segment, graph, device), avals, tuple(given)

    def share(
        self,
        function: Callable[..., Any],
        avals: Sequence[Any],
        donated: tuple[int, ...] = (),
        *,
        now: bool = False,
    ) -> Callable[..., Any]:
        """`function` compiled for arguments such as these, or an equal one that was compiled before."""
        # Unused arguments stay: without them, functions that read different operands would look alike.
        jitted = jax.jit(function, keep_unused=True, compiler_options=self.options, donate_argnums=donated)
        lowered = jitted.lower(*avals)
        digest = hashlib.sha256(lowered.as_text().encode())
        # Not `avals`, which may be arrays: it is their types that count, not what they hold.
        digest.update(f"{lowered.args_info}{lowered.out_info}{now}".encode())
        key = digest.digest()
        if key not in self._by_text:
            self._by_text[key] = lowered.compile() if now else jitted
        return self._by_text[key]
