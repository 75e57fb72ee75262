"""One jitted program for all devices: for homogeneous GPUs and TPUs, and for devices simulated on a CPU.

Where all stretches are equally long, the program is the single-device step under plain `jax.jit`, told by
`NamedSharding`s how arguments, results and what is exchanged shall lie (`whole.py`). Where they are not, it
is one `jax.shard_map` over padded stretches: segments switch on the class of the device, collectives stand
between them (`walk.py`). Here is what both have in common: what is refused, how arrays come in and go out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax

from shardwright.backends.layout import check_inputs, check_there, typed
from shardwright.backends.schedule.order import arrange
from shardwright.backends.spmd.layout import Layout, PaddedArray, mesh_of, obstacle, spec_of
from shardwright.backends.spmd.moves import lowerings
from shardwright.backends.spmd.walk import Walk
from shardwright.backends.spmd.whole import Whole
from shardwright.ir import collectives
from shardwright.ir.dtypes import dtype_of
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import Graph, TensorType, Value
from shardwright.ir.host import uses_host
from shardwright.ir.placement import Partial, Placement, R, Replicate, Shard
from shardwright.ir.program import Move, Program, Property, nodes_of
from shardwright.ir.stages import relays
from shardwright.ir.trace import Traced
from shardwright.ir.wiring import Seats

#: Exchanges are done as early as they can be, so that less often a segment ends, gathers up to so many bytes.
#: What is handed over where one ends is padded: a small GPT-2, fully sharded at 4 : 2 : 1 : 1, took 3 % more
#: processor time with a quarter of this.
BUCKET_BYTES = 16 << 20


class SpmdExecutable:
    """A program on the devices that JAX has.

    Args:
        traced: the training step.
        program: a verified program over its graph.
        ratios: share of every device of the program.
        seats: see `mesh_of`.
        devices: JAX devices to choose from; by default all of them.
        donate: results take over the memory of the state that they continue: what was passed in as state
            must not be used again.

    Attributes:
        layout: the devices and their shares.
        even: whether this is plain `jax.jit` with NamedShardings.
        walk: where it is not: the program as it is traced.
        branches: how many branches each part of a segment has, loops' included; none where all is even.

    Raises:
        PlanError: there are too few devices, a strategy has no lowering, a program on two mesh axes cuts
            unevenly, or tensors wait in host memory.
    """

    def __init__(
        self,
        traced: Traced,
        program: Program,
        ratios: Sequence[float],
        *,
        seats: Seats | None = None,
        devices: Sequence[Any] | None = None,
        donate: bool = False,
    ) -> None:
        check_program(program)
        graph = traced.graph
        if uses_host(graph):
            raise PlanError(
                place="backend spmd",
                reason="this plan lets tensors wait in host memory, which one program for all does not",
                remedy="Run it with backend='mpi', or plan with offload='off'",
            )
        if any(relays(instruction, graph) for instruction in program.instructions):
            raise PlanError(
                place="backend spmd",
                reason="this plan has layers on different devices, which one program for all does not",
                remedy="Run it with backend='mpi', or plan with stages='off'",
            )
        self.traced = traced
        self.program = program
        nodes, problem = nodes_of(program), obstacle(program, graph, ratios)
        if nodes is not None and problem:
            raise PlanError(
                place="backend spmd",
                reason=f"the plan is of two mesh axes, which have to be even here, and {problem}",
                remedy="Plan with axes=1, or run the plan with backend='mpi' or 'reference'",
            )
        self.layout = layout = Layout(mesh_of(len(ratios), seats, devices, nodes), tuple(ratios))
        self.even = not problem
        ins = enumerate(zip(graph.inputs, program.inputs, strict=True))
        outs = enumerate(zip(graph.outputs, program.outputs, strict=True))
        self._ins = [Slot(value.type, p, layout, i in traced.weak) for i, (value, p) in ins]
        self._outs = [Slot(atom.type, p, layout, i in traced.weak_outputs) for i, (atom, p) in outs]
        everywhere = layout.sharding(R)
        self._constants = [jax.device_put(array, everywhere) for array in graph.constants.values()]
        self.walk: Walk | None = None
        self.branches: tuple[int, ...] = ()
        if self.even:
            step = Whole(layout, traced.primitives).program(program, graph)
        else:
            state = _continued(program, graph) if donate else {}
            self.walk = walk = Walk(arrange(program, graph, BUCKET_BYTES), layout, traced.primitives, state)
            self.branches = tuple(part.count for found in walk.branches.values() for part in found)
            specs = [spec_of(placement) for placement in (*program.inputs, *[R] * len(self._constants))]
            step = jax.shard_map(
                walk,
                mesh=layout.mesh,
                in_specs=tuple(specs),
                out_specs=tuple(map(spec_of, program.outputs)),
                check_vma=False,
            )
        self._step = jax.jit(
            partial(_typed_step, step, [slot.weak for slot in self._outs]),
            in_shardings=(*(slot.sharding for slot in self._ins), *(everywhere for _ in self._constants)),
            out_shardings=tuple(slot.sharding for slot in self._outs),
            donate_argnums=tuple(sorted(set(graph.state.values()))) if donate else (),
        )

    def __call__(self, *flat: Any) -> list[Any]:
        """Flat outputs of the step: global arrays, or `PaddedArray` where stretches differ.

        Args:
            flat: global arrays, or what an earlier call returned; these stay on the devices.

        Raises:
            InputError: they are not of the planned shapes and dtypes, or one was donated.
            PlanError: one lies as another plan placed it.
        """
        return [slot.handed_out(x) for slot, x in zip(self._outs, self._step(*self.held(flat)), strict=True)]

    def held(self, flat: Sequence[Any]) -> list[jax.Array]:
        """What is stored of the arguments, and the constants: what the compiled program takes."""
        if len(flat) != len(self._ins) or not all(map(Slot.fits, self._ins, flat)):
            # Right all the same, or an error: numbers, and dtypes that JAX narrows.
            check_inputs(flat, self.traced.graph)
        for i, leaf in enumerate(flat):
            check_there(leaf.stored if isinstance(leaf, PaddedArray) else leaf, self.traced.graph, i)
        return [*map(Slot.stored, self._ins, flat), *self._constants]

    def lower(self, *flat: Any) -> Any:
        """The jitted program lowered for these arguments: `jax.stages.Lowered`."""
        return self._step.lower(*self.held(flat))


def _typed_step(step: Callable[..., Sequence[Any]], weak: Sequence[bool], *args: Any) -> tuple[Any, ...]:
    """The step, which knows of no weak types, with results that are typed weakly or not."""
    results = step(*(typed(x, False) for x in args))
    return tuple(map(typed, results, weak))


def _continued(program: Program, graph: Graph) -> dict[Property, Property]:
    """State that a program hands out, with what was handed in of it."""
    ends = [(o, graph.outputs[o], graph.inputs[i], program.inputs[i]) for o, i in graph.state.items()]
    return {
        Property(new.index, program.outputs[o]): Property(old.index, placement)
        for o, new, old, placement in ends
        if isinstance(new, Value)
    }


def check_program(program: Program) -> None:
    """Raises PlanError where a program does what this backend cannot: before anything is compiled."""
    if nodes_of(program) is not None:
        return  # XLA finds the exchanges of what is even; the rest is refused with its reason
    for placement in (*program.inputs, *program.outputs):
        _check_placement(placement)
    for instruction in program.all_instructions():
        if not isinstance(instruction, Move):
            for placement in (*instruction.signature.ins, *instruction.signature.outs):
                _check_placement(placement)
            continue
        _check_placement(instruction.post)
        if collectives.registry()[instruction.kind].local:
            continue
        if (instruction.kind, instruction.strategy) not in lowerings():
            name = f"{instruction.kind}.{instruction.strategy}"
            raise PlanError(
                place="backend spmd",
                reason=f"the plan exchanges by {name}, which this backend cannot run",
                remedy=f"Give {name} a lowering (shardwright.add_strategy(…, spmd=…)), plan without it, or "
                "use another backend",
            )


def _check_placement(placement: Placement) -> None:
    if type(placement) not in (Replicate, Shard, Partial):
        raise PlanError(
            place="backend spmd",
            reason=f"the plan places a tensor as {placement}, and this backend knows R, S and P alone",
            remedy="Use another backend, or plan on one mesh axis",
        )


@dataclass(frozen=True, eq=False)
class Slot:
    """Where one argument or result lies, and whether it is typed weakly."""

    tensor: TensorType
    placement: Placement
    layout: Layout
    weak: bool = False

    @cached_property
    def sharding(self) -> Any:
        """NamedSharding of what is stored."""
        return self.layout.sharding(self.placement)

    @cached_property
    def plain(self) -> bool:
        """Whether what is stored is the global array."""
        return self.layout.is_plain(self.tensor, self.placement)

    @cached_property
    def dtype(self) -> Any:
        """Of the tensor, as JAX's object."""
        return dtype_of(self.tensor.dtype)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.tensor.shape

    def fits(self, leaf: Any) -> bool:
        """Whether an argument is an array of the planned shape and dtype."""
        return getattr(leaf, "shape", None) == self.shape and getattr(leaf, "dtype", None) == self.dtype

    def stored(self, leaf: Any) -> jax.Array:
        """What is stored of an argument: the argument itself where it lies as it should, else a copy.

        It is typed weakly where results that follow a number are: else JAX would compile twice.
        """
        return typed(self._stored(leaf), self.weak)

    def _stored(self, leaf: Any) -> jax.Array:
        if self.plain and isinstance(leaf, jax.Array) and leaf.sharding == self.sharding:
            return leaf
        if isinstance(leaf, PaddedArray):
            if leaf.layout is not self.layout and leaf.layout != self.layout:
                raise PlanError(
                    place=repr(leaf),
                    reason="lies as another plan placed it, on other devices or in other shares",
                    remedy="Pass its gather()",
                )
            if leaf.placement == self.placement:
                return leaf.stored
            leaf = leaf.gather()
        return self.layout.put(leaf, self.tensor, self.placement)

    def handed_out(self, stored: jax.Array) -> Any:
        """What the caller gets."""
        return stored if self.plain else PaddedArray(stored, self.placement, self.tensor, self.layout)
