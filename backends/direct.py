"""Exchanges from and into the memory of devices, for an MPI that reads and writes it (CUDA-aware).

What has nothing to pack or to add up on the way (gathers and scatters along the first dimension, broadcasts,
sends) needs no host: MPI is given addresses of device memory. Everything else passes through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.schedule.ops import Routine
from shardwright.backends.transport import Transport
from shardwright.ir.dtypes import dtype_of


class DeviceBytes:
    """Memory of a device, as mpi4py takes it (CUDA array interface).

    Args:
        address: where it begins.
        nbytes: how long it is.
        owner: keeps it alive.
    """

    __slots__ = ("address", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.address, self.nbytes, self.owner = address, nbytes, owner

    @staticmethod
    def of(array: jax.Array) -> DeviceBytes:
        """The memory of an array on one device, which must be computed."""
        return DeviceBytes(array.unsafe_buffer_pointer() if array.nbytes else 0, array.nbytes, array)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # No stream: whoever made the memory has waited for it.
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "strides": None,
        }

    def __getitem__(self, piece: slice) -> DeviceBytes:
        start, stop, step = piece.indices(self.nbytes)
        assert step == 1, "memory is taken in stretches"
        return DeviceBytes(self.address + start, max(0, stop - start), self.owner)


def is_direct(routine: Routine) -> bool:
    """Whether a routine moves whole operands into whole results, and nothing else."""
    whole = all(
        view.contiguous() and view.offset == 0 and prod(view.shape) == routine.buffers[view.buffer].count
        for view in routine.outputs
    )
    packs = any(stage.locals for stage in routine.stages) or any(b.role == "temp" for b in routine.buffers)
    return whole and not packs


class DirectExchanger:
    """A direct routine, prepared to run step after step; operands and results are JAX's arrays."""

    def __init__(self, routine: Routine, transport: Transport) -> None:
        self.routine = routine
        names = [buffer.dtype for buffer in routine.buffers]
        self.dtypes = [np.dtype(dtype_of(name)) for name in names]
        for group in routine.groups():
            transport.join(group)
        self.stages: list[tuple[list[Any], list[Any]]] = [
            ([], [transport.prepare(transfer, names) for transfer in stage.transfers])
            for stage in routine.stages
        ]
        self.operands = [i for i, buffer in enumerate(routine.buffers) if buffer.role == "in"]
        self.received = {view.buffer: view.shape for view in routine.outputs}
        #: Results that are their operands: nothing moved, nothing is copied.
        self.same = [routine.buffers[view.buffer].role == "in" for view in routine.outputs]

    def memory(self, operands: Sequence[Any]) -> list[DeviceBytes]:
        """Buffers for one run: those of the operands, and fresh ones."""
        found = [DeviceBytes(0, 0, None)] * len(self.routine.buffers)
        fresh = {i: jnp.zeros(shape, self.dtypes[i]) for i, shape in self.received.items()}
        jax.block_until_ready(([x for x in operands if x is not None], list(fresh.values())))
        for i, array in fresh.items():
            found[i] = DeviceBytes.of(array)
        for i, array in zip(self.operands, operands, strict=True):
            if array is not None:  # a rank without a part of it sends nothing
                found[i] = DeviceBytes.of(array)
        return found

    def results(self, memory: Sequence[DeviceBytes]) -> list[Any]:
        """The results of a finished run."""
        return [memory[view.buffer].owner for view in self.routine.outputs]
