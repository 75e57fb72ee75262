"""Checkpoints of sharded state, through orbax: every rank writes what it holds, any other plan reads it.

    NAME/                      appears when everything in it is written, or not at all
      manifest.json            leaves by path: global shape, dtype, and the pieces they consist of, each with
                               the rank that wrote it, where it begins, its shape and its SHA-256; then the
                               SHA-256 of all that
      rank-0/, rank-1/, ...    orbax checkpoints of one rank's pieces

A piece is read where it overlaps what a rank is to hold, whatever the plan, the number of ranks or the
placements under which it was written. What several ranks have whole is written by one of them, in turns.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path
from numpy.typing import NDArray

from shardwright import shards
from shardwright.backends.launch import under_mpi
from shardwright.backends.layout import to_numpy, type_of
from shardwright.backends.local import extents
from shardwright.calls import hide, show
from shardwright.ir.errors import InputError, PlanError, ShardwrightError
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Grid, Placement, R, node_members, reduction
from shardwright.ir.trace import Traced
from shardwright.pieces import Bounds, Reader, Target, damaged

if TYPE_CHECKING:
    from shardwright.plan import Plan

FORMAT = 1
MANIFEST = "manifest.json"


def save(path: str | os.PathLike[str], tree: Any, *, comm: Any = None) -> None:
    """Write a tree; the folder appears when all of it is written. In an MPI job all ranks make this call.

    Args:
        path: a folder that does not exist yet, such as `checkpoints/100`; on several machines, on a file
            system that all of them see.
        tree: a pytree of `ShardedArray`s, arrays and numbers; other leaves (functions) are left out.
        comm: an mpi4py communicator; by default all ranks of the job.

    Raises:
        InputError: something stands at `path`, or orbax is not installed.
        PlanError: a rank cannot write.
    """
    ranks = _Ranks(comm)
    target = Path(path)
    orbax = _orbax()
    ranks.agree(
        InputError(place=str(path), reason="exists already", remedy="Name another folder")
        if target.exists()
        else None
    )
    leaves = {name: leaf for name, leaf in _named(tree) if shards.is_sharded(leaf) or _is_data(leaf)}
    leaves = {name: _writable(leaf) for name, leaf in leaves.items()}
    # The name is the same for every rank, and one that a crash left behind is in nobody's way.
    unfinished = target.with_name(ranks.first(f".{target.name}.{os.getpid()}.unfinished"))
    error: PlanError | None = None
    pieces: list[dict[str, Any]] = []
    try:
        if ranks.rank == 0:
            unfinished.mkdir(parents=True)
        ranks.wait()
        pieces = _write(orbax, unfinished, leaves, ranks)
    except OSError as problem:
        error = PlanError(
            place=f"{path}, rank {ranks.rank}",
            reason=f"cannot be written: {problem.strerror or problem}",
            remedy="Choose another folder, one that all ranks see",
        )
    every = ranks.all((pieces, error is None))
    whole = all(fine for _, fine in every)
    if whole and ranks.rank == 0:
        content = {
            "format": FORMAT,
            "leaves": {
                name: {"shape": list(_type(leaf).shape), "dtype": _type(leaf).dtype}
                for name, leaf in leaves.items()
            },
            "pieces": [piece for part, _ in every for piece in part],
        }
        text = json.dumps(content, sort_keys=True)
        signed = json.dumps({"content": content, "sha256": hashlib.sha256(text.encode()).hexdigest()})
        (unfinished / MANIFEST).write_text(signed, encoding="utf-8")
        _sync(unfinished)
        unfinished.rename(target)
        _sync_folder(target.parent)
    elif ranks.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    ranks.agree(error)


def restore(
    path: str | os.PathLike[str],
    like: Any,
    plan: Plan | None = None,
    *,
    argument: int | str = 0,
    traced: Traced | None = None,
    comm: Any = None,
) -> Any:
    """Read a tree. Every rank reads what it is to hold, and checks the hash of every piece that it reads.

    Args:
        path: a folder that `save` wrote.
        like: a tree of the structure that was saved: arrays, `jax.ShapeDtypeStruct`s or `ShardedArray`s, of
            which types are read; leaves that are neither are returned.
        plan: where the tree is to lie: its leaves are the plan's arguments from `argument` on. Without a
            plan, or outside of an MPI job, leaves are global arrays; a `ShardedArray` is restored as it lies.
        argument: position or name of the first argument.
        traced: the step of a plan that was loaded from a file (see `Plan.attach`).
        comm: an mpi4py communicator; by default all ranks of the job.

    Raises:
        InputError: there is no checkpoint, or it is of another tree; orbax is not installed.
        PlanError: the checkpoint is damaged.
    """
    folder = Path(path)
    orbax = _orbax()
    content = _manifest(folder)
    hidden = hide(like, "the tree")
    flat, structure = jax.tree.flatten(hidden)
    types = [leaf.tensor if shards.is_sharded(leaf) else type_of(leaf) for leaf in flat]
    names = [name for name, _ in _named(hidden)]
    _same_tree(folder, content["leaves"], dict(zip(names, types, strict=True)))
    ends = list(zip(names, types, strict=True))
    if plan is not None and (comm is not None or under_mpi()):
        here = shards.world(plan, comm)
        wanted = shards.matched(shards.slots_from(plan, plan.step(traced), argument), types)
        pairs = zip(ends, wanted, strict=True)
        targets = [Target(name, tensor, slot.placement, here) for (name, tensor), slot in pairs]
    else:
        lying = ((leaf.placement, leaf.world) if shards.is_sharded(leaf) else () for leaf in flat)
        targets = [Target(*end, *where) for end, where in zip(ends, lying, strict=True)]
    error: PlanError | None = None
    made: list[Any] = []
    try:
        made = list(Reader(orbax, folder, content["pieces"]).leaves(targets))
    except PlanError as problem:
        error = problem
    _Ranks(comm).agree(error)
    return show(jax.tree.unflatten(structure, made))


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint of a folder with the greatest number for a name, such as `folder/100`; None for none.

    Unfinished checkpoints have other names.
    """
    found = [p for p in Path(folder).glob("*") if p.name.isdigit() and (p / MANIFEST).is_file()]
    return max(found, key=lambda p: int(p.name), default=None)


# ---------------------------------------------------------------------------------------------------
# Ranks


class _Ranks:
    """The ranks that write together; a process by itself is one of one."""

    def __init__(self, comm: Any) -> None:
        if comm is None and under_mpi():
            from shardwright.backends.mpi.link import mpi

            comm = mpi().COMM_WORLD
        self.comm = comm
        self.rank: int = 0 if comm is None else comm.rank
        self.size: int = 1 if comm is None else comm.size

    def first(self, value: Any) -> Any:
        """The first rank's value."""
        return value if self.comm is None else self.comm.bcast(value)

    def all(self, value: Any) -> list[Any]:
        return [value] if self.comm is None else self.comm.allgather(value)

    def wait(self) -> None:
        if self.comm is not None:
            self.comm.Barrier()

    def agree(self, error: ShardwrightError | None) -> None:
        """Raises on every rank what one of them has to say."""
        said = self.all(None if error is None else (type(error), error.place, error.reason, error.remedy))
        for kind, place, reason, remedy in filter(None, said):
            raise kind(place=place, reason=reason, remedy=remedy) from error


# ---------------------------------------------------------------------------------------------------
# Writing


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex)) or (
        hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    )


def _type(leaf: Any) -> TensorType:
    return leaf.tensor if shards.is_sharded(leaf) else type_of(leaf)


def _writable(leaf: Any) -> Any:
    """The leaf, or, where it is a sum over ranks, its global array; a collective call."""
    return leaf.gather() if shards.is_sharded(leaf) and reduction(leaf.placement) else leaf


def _write(orbax: Any, folder: Path, leaves: Mapping[str, Any], ranks: _Ranks) -> list[dict[str, Any]]:
    """This rank's pieces, written."""
    arrays: dict[str, NDArray[Any]] = {}
    pieces: list[dict[str, Any]] = []
    written = [0] * ranks.size
    for name, leaf in leaves.items():
        for owner, bounds in _owners(leaf, written, ranks):
            if owner != ranks.rank:
                continue
            array = np.ascontiguousarray(to_numpy(leaf.local if shards.is_sharded(leaf) else _array(leaf)))
            key = f"p{len(arrays)}"
            # Orbax is given bytes: it then need not know dtypes, and what comes back is what was there.
            arrays[key] = np.frombuffer(array.tobytes(), np.uint8)
            pieces.append(
                {
                    "leaf": name,
                    "rank": ranks.rank,
                    "key": key,
                    "start": [start for start, _ in bounds],
                    "shape": [length for _, length in bounds],
                    "sha256": hashlib.sha256(arrays[key].data).hexdigest(),
                }
            )
    if arrays:
        with orbax.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(folder.absolute() / f"rank-{ranks.rank}", arrays)
    return pieces


def _owners(leaf: Any, written: list[int], ranks: _Ranks) -> Iterator[tuple[int, Bounds]]:
    """Which rank writes which part of a leaf, the same on every rank; none that has no elements."""
    tensor = _type(leaf)
    if tensor.size == 0:
        return
    if not shards.is_sharded(leaf):
        owner = min(range(ranks.size), key=written.__getitem__)
        written[owner] += tensor.nbytes
        yield owner, tuple((0, size) for size in tensor.shape)
        return
    # Ranks of the job by device: a job may have ranks that the plan does not use.
    here = leaf.world
    ranks_of = here.used if ranks.size > len(here.used) else range(len(here.used))
    holders: dict[Bounds, list[int]] = {}
    for device in _once(leaf.placement, [written[rank] for rank in ranks_of]):
        rank = ranks_of[device]
        held = extents(tensor, leaf.placement, device, here.ratios)
        if all(e.length for e in held):
            holders.setdefault(tuple((e.offset, e.length) for e in held), []).append(rank)
    for bounds, some in holders.items():
        owner = min(some, key=written.__getitem__)
        written[owner] += tensor.nbytes
        yield owner, bounds


def _once(placement: Placement, written: Sequence[int]) -> range:
    """Devices that have all of a tensor together, and no two of them stretches that overlap in part.

    Nodes that each have it all may cut it at different points: the one that has written least is taken.
    """
    if isinstance(placement, Grid) and placement.across == R:
        return min(node_members(placement.nodes), key=lambda node: sum(written[d] for d in node))
    return range(len(written))


def _array(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else jax.numpy.asarray(leaf)


def _sync(folder: Path) -> None:
    """Everything below a folder is on the disk, not only on its way there."""
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            _sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------------
# Reading


def _manifest(folder: Path) -> Any:
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            place=str(folder),
            reason="is no checkpoint" if folder.exists() else "does not exist",
            remedy="Name a folder that shardwright.save wrote; latest(folder) finds the newest",
        ) from error
    except ValueError as error:
        raise damaged(folder, "its manifest is no JSON") from error
    content = data.get("content") if isinstance(data, dict) else None
    text = json.dumps(content, sort_keys=True)
    if not isinstance(content, dict) or data.get("sha256") != hashlib.sha256(text.encode()).hexdigest():
        raise damaged(folder, "its manifest is not the one that was written")
    if content.get("format") != FORMAT:
        raise InputError(
            place=str(folder),
            reason=f"is of format {content.get('format')!r}, this version of Shardwright reads {FORMAT}",
            remedy="Restore it with the version that wrote it",
        )
    return content


def _same_tree(folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, TensorType]) -> None:
    found = {name: TensorType(tuple(entry["shape"]), entry["dtype"]) for name, entry in saved.items()}
    for name in (*wanted, *found):
        if found.get(name) != wanted.get(name):
            raise InputError(
                place=f"{folder}: leaf {name}",
                reason=f"is {found.get(name, 'not there')}, wanted is {wanted.get(name, 'no such leaf')}",
                remedy="Pass a tree like the one that was saved",
            )


def _orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise InputError(
            place="checkpoints",
            reason=f"orbax cannot be imported ({error})",
            remedy="pip install 'shardwright[checkpoint]'",
        ) from error
    return orbax
