"""State as shards: arguments of a plan on the ranks of an MPI job, without any rank holding the whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.launch import under_mpi, world_size
from shardwright.backends.layout import as_array, cut, type_of, typed, weak_of
from shardwright.backends.local import extents
from shardwright.backends.spmd.layout import Layout, PaddedArray, mesh_of, spec_of
from shardwright.direct import direct
from shardwright.ir.arguments import is_whole
from shardwright.ir.errors import InputError, PlanError, ReplicatedWarning
from shardwright.ir.graph import TensorType
from shardwright.ir.jaxpr import source_line
from shardwright.ir.placement import Grid, Placement, R, reduction
from shardwright.ir.program import nodes_of
from shardwright.ir.trace import Traced, trace
from shardwright.ir.wiring import Seats
from shardwright.layer_leaf import LayerLeaf

if TYPE_CHECKING:
    from shardwright.backends.world import ShardedArray, World
    from shardwright.plan import Plan


@dataclass(frozen=True, slots=True)
class Slot:
    """One flat argument of a plan's step: its name, type and placement."""

    name: str
    type: TensorType
    placement: Placement


def slots(plan: Plan, traced: Traced) -> tuple[Slot, ...]:
    """The flat arguments of a plan's step."""
    graph = traced.graph
    ends = zip(graph.input_names, graph.inputs, plan.program.inputs, strict=True)
    return tuple(Slot(name, value.type, placement) for name, value, placement in ends)


def slots_from(plan: Plan, traced: Traced, argument: int | str) -> tuple[Slot, ...]:
    """The flat arguments from the first leaf of an argument on.

    Raises:
        InputError: there is no such argument.
    """
    every = slots(plan, traced)
    counts = [child.num_leaves for child in traced.in_tree.children()]
    starts = list(accumulate(counts, initial=0))
    if isinstance(argument, int) and 0 <= argument < len(counts):
        return every[starts[argument] :]
    names = [
        every[start].name.split("[")[0].split(".")[0] if count else ""
        for start, count in zip(starts, counts, strict=False)
    ]
    if isinstance(argument, str) and argument in names:
        return every[starts[names.index(argument)] :]
    raise InputError(
        place=f"argument {argument!r}",
        reason="is none of the step's",
        remedy=f"Name one of {', '.join(filter(None, names))}, or a position below {len(counts)}",
    )


def matched(wanted: Sequence[Slot], types: Sequence[TensorType]) -> Sequence[Slot]:
    """The slots for leaves of these types.

    Raises:
        InputError: they are not the step's arguments.
    """
    for i, found in enumerate(types):
        if i >= len(wanted):
            raise InputError(
                place="arguments",
                reason=f"there are {len(types)} leaves for {len(wanted)} of the step's arguments",
                remedy="Pass the value of one argument, or a tuple of several in a row",
            )
        if found != wanted[i].type:
            raise InputError(
                place=wanted[i].name,
                reason=f"is {found}, the step was planned for {wanted[i].type}",
                remedy="Pass the step's own arguments in their order, or plan again for these",
            )
    return wanted[: len(types)]


# ---------------------------------------------------------------------------------------------------
# Ranks


@cache
def _world_of(ratios: tuple[float, ...], seats: Seats) -> World:
    from shardwright.backends.world import World

    return World(ratios, seats=seats)


def world(plan: Plan, comm: Any = None) -> World:
    """The ranks of a plan; all ranks of the job make this call, in the same order as others of its kind."""
    if comm is None:
        return _world_of(plan.used_ratios, plan.seats)
    from shardwright.backends.world import World

    return World(plan.used_ratios, comm, seats=plan.seats)


@cache
def _layout_of(ratios: tuple[float, ...], seats: Seats, nodes: tuple[int, ...] | None) -> Layout:
    return Layout(mesh_of(len(ratios), seats, None, nodes), ratios)


def moving(
    leaf: Any,
    plan: Plan,
    tensor: TensorType,
    placement: Placement,
    backend: str,
    stacks: dict[int, Any],
) -> Callable[[], Any] | None:
    """What takes a leaf that lies on several devices to where a plan wants it; None where it is there.

    Stacks of layers are gathered once for all leaves that share `stacks`, which has them by identity.
    """
    if isinstance(leaf, LayerLeaf):

        def moved() -> Any:
            found = _layer(leaf, stacks)
            return move(found, tensor, placement, world(plan)) if backend == "mpi" else found

        return moved
    if is_sharded(leaf):
        here = world(plan)
        return None if lies(leaf, placement, here) else partial(move, leaf, tensor, placement, here)
    stored = leaf.stored if isinstance(leaf, PaddedArray) else leaf
    if backend != "spmd" or not isinstance(stored, jax.Array) or stored.is_deleted():
        return None  # of what is gone the backend says what became of it
    there = _layout_of(plan.used_ratios, plan.seats, nodes_of(plan.program))
    if (stored is leaf and len(stored.sharding.device_set) == 1) or there.holds(leaf, tensor, placement):
        return None
    return partial(there.moved, leaf, tensor, placement)


def shard(plan: Plan, traced: Traced, tree: Any, argument: int | str = 0, comm: Any = None) -> Any:
    """See `Plan.shard`."""
    if comm is None and not under_mpi():
        return tree

    flat, structure = jax.tree.flatten(tree)
    here = world(plan, comm)
    own: list[ShardedArray] = []
    stacks: dict[int, Any] = {}
    for leaf, slot in zip(flat, matched(slots_from(plan, traced, argument), _types(flat)), strict=True):
        found = _layer(leaf, stacks) if isinstance(leaf, LayerLeaf) else leaf
        own.append(move(found, slot.type, slot.placement, here))
    return jax.tree.unflatten(structure, own)


def move(leaf: Any, tensor: TensorType, placement: Placement, here: World) -> ShardedArray:
    """A leaf, global or sharded, as it lies in `placement`; sharded ones are gathered, by all ranks."""
    from shardwright.backends.world import ShardedArray

    weak = weak_of(leaf)
    if isinstance(leaf, ShardedArray):
        if lies(leaf, placement, here):
            return leaf
        leaf = leaf.gather()
    if here.idle:
        local = as_array(leaf, tensor) if here.everywhere(tensor, placement) else None
    elif isinstance(leaf, np.ndarray) and reduction(placement) is None:
        # Only this rank's part is copied to its device.
        held = extents(tensor, placement, here.rank, here.ratios)
        local = as_array(leaf[tuple(slice(e.offset, e.offset + e.length) for e in held)], tensor)
    else:
        local = cut(as_array(leaf, tensor), tensor, placement, here.rank, here.ratios)
    return ShardedArray(local, placement, tensor, here, weak)


def lies(leaf: ShardedArray, placement: Placement, here: World) -> bool:
    """Whether a sharded array lies in `placement` on these ranks."""
    return leaf.world.alike(here) and leaf.placement == placement


def from_local(plan: Plan, traced: Traced, tree: Any, argument: int | str = 0, comm: Any = None) -> Any:
    """See `Plan.from_local`."""
    if comm is None and not under_mpi():
        return tree
    from shardwright.backends.world import ShardedArray

    flat, structure = jax.tree.flatten(tree)
    wanted = slots_from(plan, traced, argument)
    here = world(plan, comm)
    if len(flat) > len(wanted):
        matched(wanted, _types(flat))
    own: list[ShardedArray] = []
    for leaf, slot in zip(flat, wanted, strict=False):
        shape = held_shape(slot, here)
        found = type_of(leaf)
        if not here.idle and found != TensorType(shape, slot.type.dtype):
            raise InputError(
                place=slot.name,
                reason=f"rank {here.rank} was given {found}, and holds {TensorType(shape, slot.type.dtype)}",
                remedy="plan.local_batch(rank) says which part of it that is",
            )
        kept = not here.idle or here.everywhere(slot.type, slot.placement)
        local = as_array(leaf, slot.type) if kept else None
        own.append(ShardedArray(local, slot.placement, slot.type, here, weak_of(leaf)))
    return jax.tree.unflatten(structure, own)


def held_shape(slot: Slot, here: World) -> tuple[int, ...]:
    """Shape of what this rank holds; () on idle ranks."""
    if here.idle:
        return ()
    return tuple(e.length for e in extents(slot.type, slot.placement, here.rank, here.ratios))


def init(
    plan: Plan,
    traced: Traced,
    make: Callable[..., Any],
    args: tuple[Any, ...],
    argument: int | str = 0,
    comm: Any = None,
) -> Any:
    """See `Plan.init`."""
    made = trace(make, *args, state={})
    outputs = [atom.type for atom in made.graph.outputs]
    wanted = matched(slots_from(plan, traced, argument), outputs)
    if comm is None and not under_mpi():
        return jax.jit(make)(*args)
    from shardwright.backends.mpi.executable import MpiExecutable

    found = direct(made.graph, [slot.placement for slot in wanted])
    for line in dict.fromkeys(f"{e.primitive} ({source_line(e)})" for e in found.whole):
        warnings.warn(f"computed whole before it is cut: {line}", ReplicatedWarning, stacklevel=3)
    run = MpiExecutable(made, found.program, plan.used_ratios, comm, seats=plan.seats)
    return jax.tree.unflatten(made.out_tree, run(*jax.tree.leaves(args)))


def local_batch(
    plan: Plan, traced: Traced, rank: int, ranks: int | None = None
) -> Mapping[str, tuple[slice, ...]]:
    """See `Plan.local_batch`."""
    used, devices = len(plan.used), len(plan.ratios)
    if ranks is None:
        ranks = used if used != devices and under_mpi() and world_size() == used else devices
    if ranks not in (used, devices):
        raise InputError(
            place=f"ranks {ranks}",
            reason=f"the plan uses {used} of {devices} devices",
            remedy=f"Pass {devices}" if used == devices else f"Pass {used} or {devices}",
        )
    if not is_whole(rank) or not 0 <= rank < ranks:
        raise InputError(
            place=f"rank {rank!r}",
            reason=f"there is a rank for each of {ranks} devices",
            remedy=f"Pass one from 0 to {ranks - 1}",
        )
    seat = plan.used[rank] if ranks == used else rank
    state = set(traced.graph.state.values())
    found: dict[str, tuple[slice, ...]] = {}
    for i, slot in enumerate(slots(plan, traced)):
        if i in state:
            continue
        if seat in plan.used:
            device = plan.used.index(seat)
            held = extents(slot.type, slot.placement, device, plan.used_ratios)
            found[slot.name] = tuple(slice(e.offset, e.offset + e.length) for e in held)
        else:
            found[slot.name] = tuple(slice(0, 0) for _ in slot.type.shape)
    return found


# ---------------------------------------------------------------------------------------------------
# Whole arrays again


def is_sharded(leaf: Any) -> bool:
    """Whether a leaf is a `ShardedArray` (which is not imported where there is none)."""
    return hasattr(leaf, "placement") and hasattr(leaf, "world")


def is_on_ranks(leaf: Any) -> bool:
    """Whether a leaf is a `ShardedArray`, or one layer's of one."""
    return is_sharded(leaf.stack if isinstance(leaf, LayerLeaf) else leaf)


def gather(tree: Any) -> Any:
    """The tree with global arrays for `ShardedArray`s, `PaddedArray`s and `LayerLeaf`s; other leaves stay.

    In an MPI job all ranks make this call.
    """
    stacks: dict[int, Any] = {}

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, LayerLeaf):
            return _layer(leaf, stacks)
        return leaf.gather() if hasattr(leaf, "placement") else leaf

    return jax.tree.map(whole, tree)


def _layer(leaf: LayerLeaf, stacks: dict[int, Any]) -> jax.Array:
    """One layer's global array; its stack is gathered unless it is among `stacks`."""
    key = id(leaf.stack)
    if key not in stacks:
        stacks[key] = leaf.stack.gather()
    return leaf.of(stacks[key])


def to_global(leaf: Any) -> Any:
    """A `ShardedArray` as one `jax.Array`, without communication, where JAX can express it.

    That is where every rank has it whole, and where its stretches are equally long and the ranks are the
    processes of one JAX job (`jax.distributed.initialize`), each with one device: then its sharding is a
    `NamedSharding` over the axis "devices", or, of two mesh axes, over "nodes" and "devices", and it is typed
    strongly.

    Args:
        leaf: a `ShardedArray`; a `jax.Array` is returned as it is.

    Raises:
        PlanError: JAX cannot express it.
    """
    if not is_sharded(leaf):
        return jnp.asarray(leaf)
    placement, here, tensor = leaf.placement, leaf.world, leaf.tensor
    local: Any = leaf.local
    if local is not None and (len(here.ratios) == 1 or placement == R):
        return typed(local, leaf.weak_type)
    reason = _inexpressible(placement, tensor, here)
    if reason:
        raise PlanError(place=repr(leaf), reason=reason, remedy="Call gather() on every rank")
    by_process = {device.process_index: device for device in jax.devices()}
    nodes = placement.nodes if isinstance(placement, Grid) else None
    mesh = mesh_of(len(here.ratios), None, [by_process[rank] for rank in sorted(by_process)], nodes)
    sharding = jax.sharding.NamedSharding(mesh, spec_of(placement))
    return jax.make_array_from_single_device_arrays(tensor.shape, sharding, [cast(Any, local)])


def _inexpressible(placement: Placement, tensor: TensorType, here: World) -> str:
    """Why JAX has no array like this; "" if it has."""
    count = len(here.ratios)
    if here.idle:
        return "the plan does not use this rank's device"
    if reduction(placement):
        return f"JAX has no arrays that lie as {placement} does"
    if isinstance(placement, Grid) and len(set(placement.nodes)) > 1:
        return "its nodes are not equally large, and JAX has no uneven meshes"
    shapes = {
        tuple(e.length for e in extents(tensor, placement, device, here.ratios)) for device in range(count)
    }
    if len(shapes) > 1:
        return "its stretches are not equally long, and JAX has no uneven shards"
    if (jax.process_count(), jax.device_count()) != (count, count) or jax.process_index() != here.rank:
        return f"its ranks are not the {count} processes of one JAX job with one device each"
    return ""


def _types(flat: Sequence[Any]) -> list[TensorType]:
    return [leaf.tensor if is_sharded(leaf) else type_of(leaf) for leaf in flat]


def abstract(leaf: Any) -> Any:
    """For tracing: shape and types in place of an array, global ones of a sharded one.

    Where an array lies is no part of the step: JAX would trace it.
    """
    if isinstance(leaf, jax.Array | LayerLeaf) or hasattr(leaf, "placement"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak_of(leaf))
    return leaf
