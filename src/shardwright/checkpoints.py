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
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardwright import shards
from shardwright.backends.launch import under_mpi
from shardwright.backends.layout import weak_of
from shardwright.calls import hide, show
from shardwright.ir.errors import InputError, PlanError, ShardwrightError
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Grid, Placement, R, node_members, reduction
from shardwright.ir.trace import Traced
from shardwright.layer_leaf import LayerLeaf
from shardwright.leaves import data_leaves, leaf_type, named, numbers_of
from shardwright.pieces import Bounds, Reader, Target, damaged
from shardwright.ranks import Ranks

if TYPE_CHECKING:
    from shardwright.backends.world import World
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
        InputError: something stands at `path`, JAX does not hold a leaf, ranks save different trees, or orbax
            is not installed.
        PlanError: a rank cannot write.
    """
    ranks = Ranks(comm, str(path), "written", "Choose another folder, one that all ranks see")
    target = Path(path)

    def looked() -> tuple[Any, Mapping[str, Any]]:
        if target.exists():
            raise InputError(place=str(path), reason="exists already", remedy="Name another folder")
        return _orbax(), data_leaves(tree)

    orbax, leaves = ranks.attempt(looked)
    ranks.same(
        {"name for it": target.name} | {f"leaf {name}": _described(leaf) for name, leaf in leaves.items()},
        "Save the same tree, under the same name, on every rank",
    )
    leaves = {name: _writable(leaf) for name, leaf in leaves.items()}
    # The name is the same for every rank, and one that a crash left behind is in nobody's way.
    unfinished = target.with_name(ranks.first(f".{target.name}.{os.getpid()}.unfinished"))
    begins = ranks.rank == 0
    try:
        ranks.attempt(lambda: unfinished.mkdir(parents=True) if begins else None)
        every = ranks.all(ranks.attempt(lambda: _write(orbax, unfinished, leaves, ranks)))
        ranks.attempt(lambda: _finish(unfinished, target, leaves, every) if begins else None)
    except ShardwrightError:
        # Every rank, as it may be another folder for one that does not see this one.
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


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
        like: a tree of the structure that was saved: arrays, numbers, `jax.ShapeDtypeStruct`s or
            `ShardedArray`s, of which types are read, weak types included; leaves that are none of these are
            returned.
        plan: where the tree is to lie: its leaves are the plan's arguments from `argument` on. Without a
            plan, or outside of an MPI job, leaves are global arrays; a `ShardedArray` is restored as it lies.
        argument: position or name of the first argument.
        traced: the step of a plan that was loaded from a file (see `Plan.attach`).
        comm: an mpi4py communicator; by default all ranks of the job.

    Raises:
        InputError: there is no checkpoint, it is of another tree, or ranks ask for different ones; orbax is
            not installed.
        PlanError: the checkpoint is damaged.
    """
    ranks = Ranks(comm, str(path), "read", "See that every rank may read it, or go back to an earlier one")
    folder = Path(path)
    on_ranks = plan is not None and (comm is not None or under_mpi())

    def looked() -> _Wanted:
        return _Wanted.of(folder, like, plan if on_ranks else None, argument, traced)

    orbax = ranks.attempt(_orbax)
    wanted = ranks.attempt(looked)
    ranks.same(wanted.facts(), "Restore one checkpoint, of one tree, by one plan on every rank")
    here = shards.world(plan, comm) if plan is not None and on_ranks else None
    reader = Reader(orbax, folder, wanted.content["pieces"])
    made = ranks.attempt(lambda: list(reader.leaves(wanted.targets(here))))
    return show(jax.tree.unflatten(wanted.structure, made))


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint of a folder with the greatest number for a name, such as `folder/100`; None for none.

    Unfinished checkpoints have other names.

    Raises:
        InputError: the folder cannot be read. If it does not exist there is no checkpoint.
    """
    try:
        found = [path for path in Path(folder).iterdir() if _is_number(path.name) and _is_whole(path)]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            place=str(folder),
            reason=f"cannot be read for checkpoints: {error.strerror or error}",
            remedy="Name a folder that this user may read",
        ) from error
    return max(found, key=lambda path: int(path.name), default=None)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _is_whole(checkpoint: Path) -> bool:
    """Raises OSError where that cannot be seen: not to know is not to have none."""
    try:
        return stat.S_ISREG((checkpoint / MANIFEST).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


# ---------------------------------------------------------------------------------------------------
# Writing


def _described(leaf: Any) -> str:
    """What of a leaf must be the same on all ranks."""
    lying = _stack(leaf) if shards.is_on_ranks(leaf) else None
    return f"{leaf_type(leaf)}" + (f" as {lying.placement}" if lying is not None else "")


def _stack(leaf: Any) -> Any:
    """What lies on the ranks: the leaf, or all layers' of which it is one."""
    return leaf.stack if isinstance(leaf, LayerLeaf) else leaf


def _writable(leaf: Any) -> Any:
    """The leaf, or, where it is a sum over ranks, its global array; a collective call."""
    return leaf.gather() if shards.is_on_ranks(leaf) and reduction(_stack(leaf).placement) else leaf


def _write(orbax: Any, folder: Path, leaves: Mapping[str, Any], ranks: Ranks) -> list[dict[str, Any]]:
    """This rank's pieces, written."""
    arrays: dict[str, NDArray[Any]] = {}
    pieces: list[dict[str, Any]] = []
    written = [0] * ranks.size
    for name, leaf in leaves.items():
        for owner, bounds in _owners(leaf, written, ranks):
            if owner != ranks.rank:
                continue
            key = f"p{len(arrays)}"
            # Orbax is given bytes: it then need not know dtypes, and what comes back is what was there.
            arrays[key] = np.frombuffer(numbers_of(leaf).tobytes(), np.uint8)
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
            checkpointer.save(_folder_of(folder.absolute(), ranks.rank), arrays)
    return pieces


def _finish(
    unfinished: Path, target: Path, leaves: Mapping[str, Any], every: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """The list of what every rank wrote; then all of it is on the disk, and appears under its name."""
    for rank, pieces in enumerate(every):
        if pieces and not _folder_of(unfinished, rank).is_dir():
            raise PlanError(
                place=str(target),
                reason=f"what rank {rank} wrote is not where rank 0 sees it",
                remedy="Choose another folder, one that all ranks see under this path",
            )
    types = {name: leaf_type(leaf) for name, leaf in leaves.items()}
    content = {
        "format": FORMAT,
        "leaves": {name: {"shape": list(found.shape), "dtype": found.dtype} for name, found in types.items()},
        "pieces": [piece for part in every for piece in part],
    }
    text = json.dumps(content, sort_keys=True)
    signed = json.dumps({"content": content, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    (unfinished / MANIFEST).write_text(signed, encoding="utf-8")
    _sync(unfinished)
    unfinished.rename(target)
    _sync_folder(target.parent)


def _folder_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def _owners(leaf: Any, written: list[int], ranks: Ranks) -> Iterator[tuple[int, Bounds]]:
    """Which rank writes which part of a leaf, the same on every rank; none that has no elements."""
    tensor = leaf_type(leaf)
    if tensor.size == 0:
        return
    if not shards.is_on_ranks(leaf):
        owner = min(range(ranks.size), key=written.__getitem__)
        written[owner] += tensor.nbytes
        yield owner, tuple((0, size) for size in tensor.shape)
        return
    # Ranks of the job by device: a job may have ranks that the plan does not use.
    here, placement = _stack(leaf).world, _stack(leaf).placement
    ranks_of = here.used if ranks.size > len(here.used) else range(len(here.used))
    holders: dict[Bounds, list[int]] = {}
    for device in _once(placement, [written[rank] for rank in ranks_of]):
        bounds = leaf.held_by(device)
        if bounds is not None:
            holders.setdefault(bounds, []).append(ranks_of[device])
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


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is read from where.

    Attributes:
        content: of the manifest.
        flat, structure: of the tree that says how leaves are to be.
        leaves: names and types.
        slots: the plan's arguments that they are; None without a plan.
        cut: at which shares, on which devices.
    """

    content: Mapping[str, Any]
    flat: Sequence[Any]
    structure: Any
    leaves: Mapping[str, TensorType]
    slots: Sequence[shards.Slot] | None
    cut: str = ""

    @classmethod
    def of(
        cls, folder: Path, like: Any, plan: Plan | None, argument: int | str, traced: Traced | None
    ) -> _Wanted:
        """From the arguments of `restore`, which also says what is raised."""
        content = _manifest(folder)
        hidden = hide(like, "the tree")
        flat, structure = jax.tree.flatten(hidden)
        leaves = {name: leaf_type(leaf) for name, leaf in named(hidden)}
        _same_tree(folder, content["leaves"], leaves)
        if plan is None:
            return cls(content, flat, structure, leaves, None)
        found = shards.matched(shards.slots_from(plan, plan.step(traced), argument), list(leaves.values()))
        return cls(content, flat, structure, leaves, found, f"{plan.used_ratios} on {plan.used_devices}")

    def facts(self) -> dict[str, str]:
        """What must be the same on all ranks, by name."""
        written = hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()
        lying = [slot.placement for slot in self.slots or ()]
        lying = lying or [leaf.placement if shards.is_sharded(leaf) else None for leaf in self.flat]
        ends = zip(self.leaves.items(), lying, strict=True)
        return {"checkpoint": written[:12], "plan": self.cut} | {
            f"leaf {name}": f"{tensor}" + (f" as {placement}" if placement else "")
            for (name, tensor), placement in ends
        }

    def targets(self, here: World | None) -> list[Target]:
        """The leaves and where they are to lie: by the plan on its ranks, or as they are given."""
        lying: list[tuple[Placement | None, World | None]]
        if self.slots is not None:
            lying = [(slot.placement, here) for slot in self.slots]
        else:
            lying = [(x.placement, x.world) if shards.is_sharded(x) else (None, None) for x in self.flat]
        ends = zip(self.leaves.items(), lying, self.flat, strict=True)
        return [Target(*end, *where, weak_of(leaf)) for end, where, leaf in ends]


def _manifest(folder: Path) -> Any:
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
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
