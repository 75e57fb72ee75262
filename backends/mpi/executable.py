"""One process per device: every rank compiles its own program for its own shapes; MPI moves the data.

No XLA collective is involved, so the devices need have nothing in common but MPI.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from importlib.metadata import version
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.faults import agree, check_finite, look_after, take_down, timeout_of
from shardwright.backends.layout import as_array, check_inputs, check_there, cut
from shardwright.backends.mpi.drift import Drift, resync
from shardwright.backends.mpi.link import mpi
from shardwright.backends.mpi.script import MpiMachine, Script
from shardwright.backends.run_options import RunOptions
from shardwright.backends.schedule.order import arrange
from shardwright.backends.transport_mpi import cuda_aware
from shardwright.backends.wire import on_host
from shardwright.backends.world import ShardedArray, World
from shardwright.ir.dtypes import dtype_of, is_key
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement, R, cuts, owns, region
from shardwright.ir.program import Move, Program, Property
from shardwright.ir.redundant import redundant
from shardwright.ir.serialize import program_to_json
from shardwright.ir.trace import Traced
from shardwright.ir.wiring import Seats


class MpiExecutable:
    """This rank's part of a program.

    Args:
        traced: the training step.
        program: a verified program over its graph.
        ratios: share of every device of the program.
        comm: see `World`.
        resync_every: in place of `options.resync_every`.
        seats: see `World`.
        poll: see `World`.
        options: how to run it.

    Attributes:
        drift: what replicated state had drifted apart so far, the latest last.

    Raises:
        PlanError: the communicator has neither a rank for every device nor one for every device used, or the
            ranks run different steps, plans or versions.
    """

    def __init__(
        self,
        traced: Traced,
        program: Program,
        ratios: Sequence[float],
        comm: Any = None,
        *,
        resync_every: int | None = None,
        seats: Seats | None = None,
        poll: bool | None = None,
        options: RunOptions | None = None,
    ) -> None:
        options = options or RunOptions()
        self.options = options if resync_every is None else replace(options, resync_every=resync_every)
        self.traced = traced
        self.program = program
        whole = mpi().COMM_WORLD if comm is None else comm
        self.timeout_s = timeout_of(self.options.timeout_s)
        self.watch = look_after(whole, self.timeout_s)
        agree(whole, facts(traced, program, ratios, self.options))
        self.world = World(ratios, comm, seats=seats, poll=poll)
        self.machine = MpiMachine(traced, self.world, self.watch, finite=self.options.finite)
        self.script: Script | None = None
        if not self.world.idle:
            self.world.join(i.group for i in program.all_instructions() if isinstance(i, Move))
            near = len(set(self.world.wiring.node_of)) == 1
            order = arrange(program, traced.graph, self.options.bucket_bytes, near=near)
            self.script = Script(order, self.machine, self._donated())
        self.calls = 0
        self.drift: list[Drift] = []
        graph = traced.graph
        self._replicated = {
            i: (_name(graph.output_names, i), graph.outputs[i].type) for i in redundant(program, graph)
        }
        self._ready = False
        self._wanted = [(value.type.shape, dtype_of(value.type.dtype)) for value in graph.inputs]
        self._state_inputs = frozenset(graph.state.values())

    @property
    def resync_every(self) -> int:
        return self.options.resync_every

    @property
    def resynced(self) -> int:
        """How often a tensor was sent anew."""
        return len(self.drift)

    def __call__(self, *flat: Any) -> list[ShardedArray]:
        """Flat outputs of the step.

        Args:
            flat: global arrays, the same on every rank, or what an earlier call returned.

        Raises:
            InputError: an argument is of another shape or dtype than planned for, or was donated.
            PlanError: one lies as another plan placed it.
        """
        graph, program = self.traced.graph, self.program
        if len(flat) != len(self._wanted) or not all(map(_fits, flat, self._wanted)):
            # Right all the same, or an error: numbers, and dtypes that JAX narrows.
            check_inputs(flat, graph)
        if not self._ready:
            for i, leaf in enumerate(flat):
                if isinstance(leaf, ShardedArray):
                    self._check_placed(i, leaf)
        self.warm_up()
        with self.watch.stepping(self.world.lane, self.timeout_s):
            pairs = enumerate(zip(flat, graph.inputs, program.inputs, strict=True))
            held = [self._enter(i, leaf, value.type, placement) for i, (leaf, value, placement) in pairs]
            results = [None] * len(graph.outputs) if self.script is None else self._run(self.script, held)
            ends = zip(graph.outputs, program.outputs, strict=True)
            told = [i for i, (atom, p) in enumerate(ends) if p == R and atom.type.rank == 0]
            values = self.world.tell([results[i] for i in told], [graph.outputs[i].type for i in told])
            for i, value in zip(told, values, strict=True):
                results[i] = value
            ends = enumerate(zip(results, graph.outputs, program.outputs, strict=True))
            weak = self.traced.weak_outputs
            return [ShardedArray(x, p, atom.type, self.world, i in weak) for i, (x, atom, p) in ends]

    def warm_up(self, tick: Callable[[int, int], None] | None = None) -> None:
        """Compile every segment, once; the first call does it if nobody did.

        Args:
            tick: told how many segments are compiled, and of how many; by default a line on rank 0's
            terminal.
        """
        if self._ready or self.script is None:
            return
        with self.watch.during("compiling"):
            self.script.compile(tick or _progress(self.world.rank))
        self._ready = True

    def _run(self, script: Script, held: list[Any]) -> list[Any]:
        if not self.options.donate:
            results = script(held)
        else:
            self._give_each_its_own(held)
            kept = {id(value) for i, value in enumerate(held) if i not in self._state_inputs}
            results = self._apart(script(held), kept)
        self.calls += 1
        if self.resync_every and self.calls % self.resync_every == 0:
            self.drift += resync(self.world, results, self._replicated, self.calls)
        return results

    def _donated(self) -> set[Property]:
        if not self.options.donate:
            return set()
        graph = self.traced.graph
        return {Property(graph.inputs[i].index, self.program.inputs[i]) for i in graph.state.values()}

    def _give_each_its_own(self, held: list[Any]) -> None:
        """Give every donated array memory of its own: arguments may be one and the same array."""
        seen: set[int] = set()
        for i in self.traced.graph.state.values():
            value = held[i]
            if id(value) in seen:
                held[i] = jnp.copy(value)
            seen.add(id(value))

    def _apart(self, results: list[Any], kept: Collection[int]) -> list[Any]:
        """Results of which none goes when the next step takes the memory of the state.

        Args:
            results: of a step, which may be one and the same array.
            kept: what else the caller still has, by identity.
        """
        state = self.traced.graph.state
        for o in state:
            if id(results[o]) in kept:
                results[o] = jnp.copy(results[o])
        taken = {id(results[o]) for o in state}
        return [jnp.copy(x) if o not in state and id(x) in taken else x for o, x in enumerate(results)]

    def _enter(self, number: int, leaf: Any, tensor: TensorType, placement: Placement) -> Any:
        """This rank's part of an argument; nothing is sent where it already lies as wanted."""
        check_there(leaf.local if isinstance(leaf, ShardedArray) else leaf, self.traced.graph, number)
        if isinstance(leaf, ShardedArray):
            if leaf.placement == placement and leaf.world.alike(self.world):
                return self._checked(number, leaf.local)
            self._check_placed(number, leaf)
            leaf = leaf.gather()
        if self.world.idle:
            return None
        if isinstance(leaf, np.ndarray) and cuts(placement) and owns(placement, self.world.rank):
            held = region(tensor.shape, placement, self.world.rank, self.world.ratios)
            rows = leaf[tuple(slice(start, start + length) for start, length in held)]
            return self._checked(number, jnp.array(rows, dtype=dtype_of(tensor.dtype)))
        part = cut(as_array(leaf, tensor), tensor, placement, self.world.rank, self.world.ratios)
        if self.options.donate and number in self._state_inputs and not is_key(tensor.dtype):
            part = jnp.array(part, copy=True)  # the caller's own array must stay
        return self._checked(number, part)

    def _check_placed(self, number: int, leaf: ShardedArray) -> None:
        """Gathering what another plan placed in every step would be slow, and nobody would notice.

        Raises:
            PlanError: another plan placed it.
        """
        placement, mine = self.program.inputs[number], leaf.world is self.world
        alike = leaf.world.alike(self.world) or (placement == R and leaf.world.used == self.world.used)
        if mine or (alike and (leaf.placement == placement or number not in self._state_inputs)):
            return
        raise PlanError(
            place=_name(self.traced.graph.input_names, number),
            reason=f"lies as another plan placed it, as {leaf.placement} "
            + (f"and not as {placement}" if alike else "on other devices or in other shares"),
            remedy="Convert the state on all ranks, by this plan's shard(state), or pass its gather()",
        )

    def _checked(self, number: int, local: Any) -> Any:
        if self.options.finite:
            check_finite(local, f"argument {_name(self.traced.graph.input_names, number)}")
        return local


def _fits(leaf: Any, wanted: tuple[tuple[int, ...], Any]) -> bool:
    """Whether an argument is an array of the planned shape and dtype."""
    return getattr(leaf, "shape", None) == wanted[0] and getattr(leaf, "dtype", None) == wanted[1]


def facts(traced: Traced, program: Program, ratios: Sequence[float], options: RunOptions) -> dict[str, str]:
    """What must be the same on all ranks, by name: versions, the step's jaxpr, the plan."""
    plan = json.dumps(
        [program_to_json(program), list(ratios), options.bucket_bytes, options.resync_every], sort_keys=True
    )
    return {
        "version of JAX": jax.__version__,
        "version of Shardwright": version("shardwright"),
        "training step (fingerprint)": traced.fingerprint[:16],
        "plan (hash)": hashlib.sha256(plan.encode()).hexdigest()[:16],
    }


def transport_note(aware: bool) -> str:
    """How exchanges reach the memory of devices that have their own, in words."""
    if aware:
        return (
            "exchanges go from device to device where nothing is packed or added up on the way, through host "
            "memory otherwise: this MPI is CUDA-aware"
        )
    return "exchanges pass through host memory: this MPI is not CUDA-aware"


def _name(names: Sequence[str], i: int) -> str:
    return names[i] if i < len(names) else f"leaf {i}"


def _progress(rank: int) -> Callable[[int, int], None]:
    """One line on rank 0's terminal."""
    if rank or not sys.stderr.isatty():
        return lambda done, total: None

    def tick(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        sys.stderr.write(f"\rcompiling segments: {done} of {total}{end}")
        if end and not on_host():
            sys.stderr.write(f"{transport_note(cuda_aware())}\n")
        sys.stderr.flush()

    return tick


class abort_on_error:
    """Takes the whole job down when this rank fails, after one message that names rank and instruction.

    Without it the other ranks would wait for the one that left.
    """

    def __init__(self, comm: Any = None) -> None:
        self.comm = mpi().COMM_WORLD if comm is None else comm

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self.comm.size == 1:
            return
        if isinstance(error, SystemExit) and not error.code:
            return
        take_down(self.comm, error)
