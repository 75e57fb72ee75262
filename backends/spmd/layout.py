"""How tensors lie in the memory of JAX devices: padded where stretches differ, plain arrays where not.

    R      replicated                                     NamedSharding(mesh, P())
    S(d)   every device's stretch, padded to the longest  NamedSharding(mesh, P(…, "devices", …))
    P(op)  every device's part, stacked                   NamedSharding(mesh, P("devices"))
    a/b    on two mesh axes, where all is even            NamedSharding(mesh, P(…, ("nodes", "devices"), …))

Where all stretches are equally long nothing is padded, and what lies there is the global array itself.
What padding holds is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from shardwright.backends.layout import as_array, members, stretches, to_numpy, typed, weak_of
from shardwright.backends.local import neutral
from shardwright.ir.collectives import combine
from shardwright.ir.dtypes import dtype_of, is_key, key_implementation
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import Graph, TensorType
from shardwright.ir.placement import Grid, Partial, Placement, R, Shard, reduction, region
from shardwright.ir.program import Group, Loop, Move, Program, nodes_of
from shardwright.ir.wiring import Seats

#: Name of the one mesh axis: the devices that the plan uses, in its order; of two, those in a node.
AXIS = "devices"

#: Name of the other one.
NODES = "nodes"


def starts(lengths: Sequence[int]) -> list[int]:
    """Where consecutive stretches begin."""
    return [sum(lengths[:i]) for i in range(len(lengths))]


def mesh_of(
    count: int,
    seats: Seats | None = None,
    devices: Sequence[Any] | None = None,
    nodes: Sequence[int] | None = None,
) -> Mesh:
    """The devices of a program as a mesh, in the plan's order.

    Args:
        count: devices of the program.
        seats: which devices of a fleet these are. Where JAX has just as many devices as the fleet, device i
            of JAX is device i of the fleet; else the first ones are taken.
        devices: JAX devices to choose from; by default all of them.
        nodes: devices of every node, equally many, for a program on two mesh axes.

    Raises:
        PlanError: there are too few.
    """
    found = list(jax.devices() if devices is None else devices)
    if seats is not None and len(found) == seats.devices:
        found = [found[i] for i in seats.used]
    if len(found) < count:
        kind = found[0].platform if found else "no"
        remedy = f"Run it where JAX has {count} devices"
        if kind == "cpu":
            remedy = (
                f"Set XLA_FLAGS=--xla_force_host_platform_device_count={count} before JAX is imported, "
                "or use another backend"
            )
        raise PlanError(
            place="backend spmd",
            reason=f"the plan uses {count} device{'s' * (count > 1)}, JAX has {len(found)} ({kind})",
            remedy=remedy,
        )
    if nodes is not None:
        return Mesh(np.array(found[:count]).reshape(len(nodes), -1), (NODES, AXIS))
    return Mesh(np.array(found[:count]), (AXIS,))


def spec_of(placement: Placement) -> PartitionSpec:
    """The PartitionSpec that says the same as a placement, of even stretches if it is sharded."""
    if isinstance(placement, Grid):
        axes: dict[int, tuple[str, ...]] = {}
        for part, axis in ((placement.across, NODES), (placement.within, AXIS)):
            if isinstance(part, Shard):
                axes[part.dim] = (*axes.get(part.dim, ()), axis)
        return PartitionSpec(*(axes.get(dim) for dim in range(max(axes, default=-1) + 1)))
    if isinstance(placement, Shard):
        return PartitionSpec(*[None] * placement.dim, AXIS)
    return PartitionSpec(AXIS) if isinstance(placement, Partial) else PartitionSpec()


@dataclass(frozen=True)
class Layout:
    """The shares of a plan on a mesh.

    Attributes:
        mesh: the devices of the program.
        ratios: share of each.
    """

    mesh: Mesh
    ratios: tuple[float, ...]
    _compiled: dict[tuple[str, TensorType, Placement], Any] = field(
        default_factory=dict[tuple[str, TensorType, Placement], Any], compare=False, repr=False
    )

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.ratios)

    def lengths(self, tensor: TensorType, placement: Placement, group: Group = None) -> tuple[int, ...]:
        """Elements of the sharded dimension on every device, 0 outside `group`; () if nothing is sharded."""
        own = stretches(tensor, placement, group, self.ratios)
        if not own or group is None:
            return own
        every = [0] * self.count
        for device, length in zip(members(group, self.count), own, strict=True):
            every[device] = length
        return tuple(every)

    def padded(self, tensor: TensorType, placement: Placement, group: Group = None) -> tuple[int, ...]:
        """Shape in which every device holds its part."""
        shape = list(tensor.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] = max(self.lengths(tensor, placement, group))
        return tuple(shape)

    def is_plain(self, tensor: TensorType, placement: Placement) -> bool:
        """Whether what is stored is the global array itself."""
        return not isinstance(placement, Partial) and len(set(self.lengths(tensor, placement))) <= 1

    def stored(self, tensor: TensorType, placement: Placement) -> tuple[int, ...]:
        """Shape of what is stored, over all devices."""
        shape = list(self.padded(tensor, placement))
        if isinstance(placement, Partial):
            return (self.count, *shape)
        if isinstance(placement, Shard):
            shape[placement.dim] *= self.count
        return tuple(shape)

    def sharding(self, placement: Placement) -> NamedSharding:
        """Where it is stored."""
        return NamedSharding(self.mesh, spec_of(placement))

    # -- in and out ----------------------------------------------------------------------------------

    def put(self, leaf: Any, tensor: TensorType, placement: Placement) -> jax.Array:
        """Store a global array (of the planned type) as it is placed.

        Every device is sent its own part alone. An array that is already on these devices stays on them.
        """
        sharding = self.sharding(placement)
        if not hasattr(leaf, "dtype") or str(leaf.dtype) != tensor.dtype:
            leaf = as_array(leaf, tensor)
        if self.is_plain(tensor, placement):
            return jax.device_put(leaf, sharding)
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == sharding.device_set:
            return self._jitted("spread", tensor, placement, sharding)(leaf)
        data = to_numpy(leaf)
        stored = (*self.stored(tensor, placement), *data.shape[tensor.rank :])
        part = self._parts(data, tensor, placement)
        array = jax.make_array_from_callback(stored, sharding, part, dtype=data.dtype)
        if is_key(tensor.dtype):
            return jax.random.wrap_key_data(array, impl=key_implementation(tensor.dtype))
        return array

    def _spread(self, whole: jax.Array, tensor: TensorType, placement: Placement) -> jax.Array:
        """What is stored of a global array, in terms of JAX."""
        if isinstance(placement, Shard):
            lengths = self.lengths(tensor, placement)
            index = np.concatenate(
                [start + np.arange(max(lengths)) for start in starts(lengths)]
            )  # past the end of a stretch: whatever lies there
            return jnp.take(whole, index, axis=placement.dim, mode="clip")
        rest = neutral(tensor, (self.count - 1, *tensor.shape), placement)
        return jnp.concatenate([whole[None], rest])

    def _parts(
        self, whole: NDArray[Any], tensor: TensorType, placement: Placement
    ) -> Callable[[Any], NDArray[Any]]:
        """What a device stores of a global array, by the place it has in what all of them store."""
        if not isinstance(placement, Shard):
            rest = np.broadcast_to(np.asarray(neutral(tensor, (), placement)), tensor.shape)
            return lambda index: (rest if index[0].start else whole)[None]
        dim, lengths = placement.dim, self.lengths(tensor, placement)
        block, at = max(lengths), starts(lengths)

        def part(index: Any) -> NDArray[Any]:
            device = (index[dim].start or 0) // block
            result = np.zeros((*whole.shape[:dim], block, *whole.shape[dim + 1 :]), whole.dtype)
            own = (slice(None),) * dim
            piece = whole[(*own, slice(at[device], at[device] + lengths[device]))]
            result[(*own, slice(0, lengths[device]))] = piece
            return result

        return part

    def holds(self, leaf: Any, tensor: TensorType, placement: Placement) -> bool:
        """Whether an array lies so on these devices."""
        if isinstance(leaf, PaddedArray):
            return leaf.placement == placement and leaf.layout == self
        return self.is_plain(tensor, placement) and leaf.sharding == self.sharding(placement)

    def moved(self, leaf: Any, tensor: TensorType, placement: Placement) -> jax.Array | PaddedArray:
        """An array that lies otherwise, as it is placed on these devices."""
        whole = leaf.gather() if isinstance(leaf, PaddedArray) else leaf
        stored = typed(self.put(whole, tensor, placement), weak_of(leaf))
        return stored if self.is_plain(tensor, placement) else PaddedArray(stored, placement, tensor, self)

    def take(self, stored: jax.Array, tensor: TensorType, placement: Placement) -> jax.Array:
        """The global array, on every device, from what is stored."""
        return self._jitted("joined", tensor, placement, self.sharding(R))(stored)

    def _jitted(self, what: str, tensor: TensorType, placement: Placement, sharding: NamedSharding) -> Any:
        key = what, tensor, placement
        if key not in self._compiled:
            function = self._spread if what == "spread" else self._joined
            bound = partial(function, tensor=tensor, placement=placement)
            self._compiled[key] = jax.jit(bound, out_shardings=sharding)
        return self._compiled[key]

    def _joined(self, stored: jax.Array, tensor: TensorType, placement: Placement) -> jax.Array:
        if isinstance(placement, Shard):
            lengths = self.lengths(tensor, placement)
            pieces = [
                jax.lax.slice_in_dim(stored, i * max(lengths), i * max(lengths) + n, axis=placement.dim)
                for i, n in enumerate(lengths)
            ]
            return jnp.concatenate(pieces, axis=placement.dim)
        if not isinstance(placement, Partial):
            return stored
        if placement.op == "sum":
            return stored.sum(0, dtype=stored.dtype)
        return stored.max(0) if placement.op == "max" else stored.min(0)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PaddedArray:
    """A tensor that lies on JAX devices in a way that no `jax.Array` can say; a leaf of JAX's pytrees.

    Attributes:
        stored: what all devices hold, padded: see the module.
        placement: how the tensor lies on the devices.
        tensor: its global shape and dtype.
        layout: the devices and their shares.
    """

    stored: jax.Array
    placement: Placement
    tensor: TensorType
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.tensor.shape

    @property
    def dtype(self) -> Any:
        return dtype_of(self.tensor.dtype)

    @property
    def ndim(self) -> int:
        return self.tensor.rank

    @property
    def weak_type(self) -> bool:
        """Whether it is typed weakly, see `jax.Array.weak_type`."""
        return weak_of(self.stored)

    def gather(self) -> jax.Array:
        """The global array, on every device."""
        return typed(self.layout.take(self.stored, self.tensor, self.placement), self.weak_type)

    def block_until_ready(self) -> PaddedArray:
        """Wait until it is computed."""
        self.stored.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """The global array on the host, put together there: the devices need no room for it."""
        shards = sorted(self.stored.addressable_shards, key=lambda shard: self._number(shard.device))
        if len(shards) < self.layout.count:
            raise PlanError(
                place=repr(self),
                reason="parts of it lie on devices of other processes",
                remedy="Call gather() in every process",
            )
        parts = [np.asarray(shard.data) for shard in shards]
        if isinstance(self.placement, Shard):
            dim, lengths = self.placement.dim, self.layout.lengths(self.tensor, self.placement)
            held = [part[(*[slice(None)] * dim, slice(n))] for part, n in zip(parts, lengths, strict=True)]
            whole = np.concatenate(held, axis=dim)
        else:
            assert isinstance(self.placement, Partial)
            whole = combine(self.placement.op, [part[0] for part in parts])
        return whole if dtype is None else whole.astype(dtype)

    def _number(self, device: Any) -> int:
        return self.layout.mesh.devices.tolist().index(device)

    def __jax_array__(self) -> jax.Array:
        return self.gather()

    def __repr__(self) -> str:
        return f"PaddedArray({self.tensor}, {self.placement}, stored {self.stored.shape})"


# ---------------------------------------------------------------------------------------------------
# Even plans


def obstacle(program: Program, graph: Graph, ratios: Sequence[float]) -> str:
    """The first thing of a program that NamedShardings cannot say; "" if there is none.

    Args:
        program: a verified program.
        graph: what it is over.
        ratios: share of every device.
    """
    nodes = nodes_of(program)
    if nodes is not None and len(set(nodes)) > 1:
        return f"its nodes have {', '.join(map(str, nodes))} devices"
    named = [
        *zip(graph.input_names, graph.inputs, program.inputs, strict=False),
        *(
            (f"output{n}", a, p)
            for n, a, p in zip(graph.output_names, graph.outputs, program.outputs, strict=False)
        ),
    ]
    for name, atom, placement in named:
        if reduction(placement):
            return f"{name} is {placement}: parts that nobody adds up"
        if problem := _uneven(atom.type, placement, ratios):
            return f"{name} is {problem}"
    return next(_obstacles(program, graph, ratios), "")


def _uneven(tensor: TensorType, placement: Placement, ratios: Sequence[float]) -> str:
    if isinstance(placement, Grid):
        held = {tuple(n for _, n in region(tensor.shape, placement, d, ratios)) for d in range(len(ratios))}
        return f"{placement} in stretches that differ" if len(held) > 1 else ""
    lengths = stretches(tensor, placement, None, ratios)
    return f"{placement} in stretches of {', '.join(map(str, lengths))}" if len(set(lengths)) > 1 else ""


def _obstacles(program: Program, graph: Graph, ratios: Sequence[float]) -> Iterator[str]:
    types = {value.index: value.type for value in graph.values()}
    for instruction in program.instructions:
        if isinstance(instruction, Move):
            if instruction.group is not None or instruction.root is not None:
                yield f"{instruction.kind} of %{instruction.value} is among some of the devices"
            if problem := _uneven(types[instruction.value], instruction.post, ratios):
                yield f"%{instruction.value} is {problem}"
            continue
        equation, signature = graph.equations[instruction.equation], instruction.signature
        for value, placement in zip(equation.outputs, signature.outs, strict=True):
            if problem := _uneven(value.type, placement, ratios):
                yield f"%{value.index} ({equation.primitive}) is {problem}"
        if isinstance(instruction, Loop):
            for body, region in zip(instruction.bodies, equation.regions, strict=True):
                yield from _obstacles(body, region, ratios)
