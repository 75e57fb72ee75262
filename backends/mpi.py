"""One process per device: every rank compiles its own program for its own shapes; MPI moves the data.

No XLA collective is involved, so the devices need have nothing in common but MPI.
"""

from __future__ import annotations

import os
import sys
import traceback
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.compile import Compiler, Device, Local
from shardwright.backends.layout import as_array, check_inputs, cut, holds, to_numpy
from shardwright.backends.local import filled, operand
from shardwright.backends.mpi_link import mpi
from shardwright.backends.runner import run
from shardwright.backends.segments import Exchange, Segment, schedule
from shardwright.backends.world import ShardedArray, World
from shardwright.ir.errors import ShardwrightError
from shardwright.ir.graph import Graph, Literal, TensorType, Value
from shardwright.ir.placement import Placement, R
from shardwright.ir.program import Move, Program
from shardwright.ir.trace import Traced
from shardwright.ir.wiring import Seats


class MpiExecutable:
    """This rank's part of a program.

    Args:
        traced: the training step.
        program: a verified program over its graph.
        ratios: share of every device of the program.
        comm: see `World`.
        resync_every: replicated state is computed by every rank for itself and drifts apart by rounding
            where cards are unlike. After so many calls it is compared by checksum and, where it differs,
            sent anew by device 0. 0 means never.
        seats: see `World`.
        poll: see `World`.

    Raises:
        PlanError: the communicator has neither a rank for every device nor one for every device used.
    """

    def __init__(
        self,
        traced: Traced,
        program: Program,
        ratios: Sequence[float],
        comm: Any = None,
        *,
        resync_every: int = 100,
        seats: Seats | None = None,
        poll: bool | None = None,
    ) -> None:
        self.traced = traced
        self.program = program
        self.world = World(ratios, comm, seats=seats, poll=poll)
        if not self.world.idle:
            self.world.join(i.group for i in program.all_instructions() if isinstance(i, Move))
        self.machine = MpiMachine(traced, self.world)
        self.schedule = schedule(program, traced.graph)
        self.resync_every = resync_every
        self.calls = 0
        self.resynced = 0

    def __call__(self, *flat: Any) -> list[ShardedArray]:
        """Flat outputs of the step.

        Args:
            flat: global arrays, the same on every rank, or what an earlier call returned.
        """
        graph, program = self.traced.graph, self.program
        check_inputs(flat, graph)
        pairs = zip(flat, graph.inputs, program.inputs, strict=True)
        held = [self._enter(leaf, value.type, placement) for leaf, value, placement in pairs]
        results = [None] * len(graph.outputs) if self.world.idle else self._run(held)
        ends = zip(graph.outputs, program.outputs, strict=True)
        told = [i for i, (atom, p) in enumerate(ends) if p == R and atom.type.rank == 0]
        values = self.world.tell([results[i] for i in told], [graph.outputs[i].type for i in told])
        for i, value in zip(told, values, strict=True):
            results[i] = value
        ends = zip(results, graph.outputs, program.outputs, strict=True)
        return [ShardedArray(x, placement, atom.type, self.world) for x, atom, placement in ends]

    def _run(self, held: list[Any]) -> list[Any]:
        results = run(self.schedule, held, self.machine)
        self.calls += 1
        if self.resync_every and self.calls % self.resync_every == 0:
            self._resync(results)
        return results

    def _enter(self, leaf: Any, tensor: TensorType, placement: Placement) -> Any:
        """This rank's part of an argument; nothing is sent where it already lies as wanted."""
        if isinstance(leaf, ShardedArray):
            same = leaf.world.ratios == self.world.ratios and leaf.world.used == self.world.used
            if leaf.placement == placement and same:
                return leaf.local
            leaf = leaf.gather()
        if self.world.idle:
            return None
        return cut(as_array(leaf, tensor), tensor, placement, self.world.rank, self.world.ratios)

    def _resync(self, results: list[Any]) -> None:
        """Give every rank device 0's replicated state where checksums differ."""
        graph = self.traced.graph
        outs = [i for i in graph.state if self.program.outputs[i] == R]
        sums = np.array([zlib.crc32(to_numpy(results[i]).tobytes()) for i in outs], np.int64)
        low, high = np.empty_like(sums), np.empty_like(sums)
        self.world.wait([self.world.comm.Iallreduce(sums, low, mpi().MIN)])
        self.world.wait([self.world.comm.Iallreduce(sums, high, mpi().MAX)])
        for i in (i for i, a, b in zip(outs, low, high, strict=True) if a != b):
            again = Move("broadcast", 0, R, R, "tree", None, 0)
            results[i] = self.world.move(again, graph.outputs[i].type, results[i])
            self.resynced += 1


class MpiMachine:
    """Runs schedules on one rank; a held value is its local array, None outside the value's group."""

    def __init__(self, traced: Traced, world: World) -> None:
        self.world = world
        self.device = Device(world.rank, world.ratios, traced.primitives)
        self.compiler = Compiler()
        self._functions: dict[Segment, Local] = {}
        self._constants: dict[Value, Any] = {}

    def segment(self, segment: Segment, graph: Graph, args: Sequence[Any]) -> list[Any]:
        if segment not in self._functions:
            self._functions[segment] = self.compiler.segment(segment, graph, self.device)
        mine = [arg for arg, prop in zip(args, segment.needs, strict=True) if holds(prop, self.world.rank)]
        results = iter(self._functions[segment](*mine))
        return [next(results) if holds(prop, self.world.rank) else None for prop in segment.gives]

    def exchange(self, exchange: Exchange, graph: Graph, tensor: TensorType, value: Any) -> Any:
        return self.world.move(exchange.move, tensor, value)

    def literal(self, atom: Literal, placement: Placement) -> Any:
        return operand(atom, placement, self.world.rank)

    def constant(self, value: Value, array: Any) -> Any:
        if value not in self._constants:
            self._constants[value] = jnp.asarray(array)
        return self._constants[value]

    def take(self, value: Any, iteration: int) -> Any:
        return jax.lax.dynamic_index_in_dim(value, iteration, keepdims=False)

    def stack(self, values: Sequence[Any], tensor: TensorType, placement: Placement) -> Any:
        return jnp.stack(values) if values else filled(tensor, self.device.shape(tensor, placement), 0)

    def decide(self, value: Any) -> int:
        """Device 0 decides: where cards are unlike, a comparison may fall out differently on another."""
        decision = np.array([int(value)], np.int64)
        self.world.wait([self.world.comm.Ibcast(decision, root=0)])
        return int(decision[0])


class abort_on_error:
    """Takes the whole job down when this rank fails, after one message that names rank and instruction.

    Without it the other ranks would wait forever for the one that left.
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
        where = "; ".join(getattr(error, "__notes__", []))
        message = f"rank {self.comm.rank}{' ' + where if where else ''}: {type(error).__name__}: {error}"
        if not isinstance(error, (ShardwrightError, SystemExit, KeyboardInterrupt)):
            message += "\n" + "".join(traceback.format_exception(error)).rstrip()
        sys.stderr.write(message + "\n")
        sys.stderr.flush()
        code = 2 if isinstance(error, ShardwrightError) else 1
        self.comm.Abort(code)
        os._exit(code)  # Abort may come back before the launcher has ended this process
