"""Runs under mpiexec: `python checkpoint_checks.py FOLDER`. One rank of three fails; all have to say so.

Problems go to `summary.json`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import orbax.checkpoint as orbax
from mpi4py import MPI

import shardwright
from shardwright import InputError, PlanError, ShardwrightError

comm = MPI.COMM_WORLD
problems: list[str] = []
STATE = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(3), "c": jnp.zeros(2)}


def fails(what: str, kind: type[ShardwrightError], pattern: str, call: Callable[[], Any]) -> None:
    """All ranks raise one error of a kind, with the same words."""
    said = "nothing"
    try:
        call()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    every = comm.allgather(said)
    if len(set(every)) > 1 or not re.match(f"{kind.__name__}: .*{pattern}", said):
        problems.append(f"{what}: {every}")


def on(rank: int, target: Any, name: str, raised: Exception) -> Any:
    """A patch that lets a function raise on one rank."""
    if comm.rank != rank:
        return nullcontext()
    return mock.patch.object(target, name, side_effect=raised)


def saving(folder: Path) -> None:
    (folder / "file").write_text("no folder")
    full = OSError(errno.ENOSPC, "No space left on device")
    fails(
        "no folder can be made",
        PlanError,
        r"file/1, rank 0: cannot be written: Not a directory\. ",
        lambda: shardwright.save(folder / "file" / "1", STATE),
    )
    with on(1, orbax.PyTreeCheckpointer, "save", ValueError("RESOURCE_EXHAUSTED: No space left on device")):
        fails(
            "a full disk",
            PlanError,
            r"/1, rank 1: cannot be written: ValueError: RESOURCE_EXHAUSTED: No space left on device\. ",
            lambda: shardwright.save(folder / "1", STATE),
        )
    with on(0, Path, "write_text", full):
        fails(
            "a full disk for the manifest",
            PlanError,
            r"/1, rank 0: cannot be written: No space left on device\. ",
            lambda: shardwright.save(folder / "1", STATE),
        )
    fails(
        "a number that is too large",
        InputError,
        r"leaf \['n'\]: holds 5000000000, which is beyond int32",
        lambda: shardwright.save(folder / "1", STATE | {"n": 5_000_000_000}),
    )
    fails(
        "a number that is too large on one rank",
        InputError,
        r"leaf \['n'\], rank 2: holds 5000000000, which is beyond int32",
        lambda: shardwright.save(folder / "1", STATE | {"n": 5_000_000_000 if comm.rank == 2 else 5}),
    )
    fails(
        "another tree",
        InputError,
        r"/1, rank 2: has another leaf \['b'\] than rank 0: float32\[2\], not float32\[3\]\. ",
        lambda: shardwright.save(folder / "1", STATE | {"b": jnp.ones(2 if comm.rank == 2 else 3)}),
    )
    fails(
        "a leaf more",
        InputError,
        r"/1, rank 1: has another leaf \['d'\] than rank 0: float32\[2\], not nothing\. ",
        lambda: shardwright.save(folder / "1", STATE | ({"d": jnp.ones(2)} if comm.rank == 1 else {})),
    )
    fails(
        "another name",
        InputError,
        r"rank 2: has another name for it than rank 0: 2, not 1\. ",
        lambda: shardwright.save(folder / ("2" if comm.rank == 2 else "1"), STATE),
    )
    # Where ranks begin in folders of their own, a relative path is another one for each of them.
    own = folder / f"own{comm.rank == 1:d}"
    own.mkdir(exist_ok=True)
    os.chdir(own)
    fails(
        "a folder of its own",
        PlanError,
        r"here/1, rank 0: what rank 1 wrote is not where rank 0 sees it\. ",
        lambda: shardwright.save("here/1", STATE),
    )
    os.chdir(folder)
    comm.Barrier()
    left = sorted(str(path) for path in folder.rglob("*unfinished*"))
    if left:
        problems.append(f"left behind: {left}")


def restoring(folder: Path) -> None:
    shardwright.save(folder / "1", STATE)
    shardwright.save(folder / "2", {name: leaf + 1 for name, leaf in STATE.items()})
    got = shardwright.restore(folder / "1", STATE)
    if any((got[name] != leaf).any() for name, leaf in STATE.items()):
        problems.append("what is restored differs")
    fails(
        "a folder that one rank does not see",
        InputError,
        r"1, rank 1: does not exist\. ",
        lambda: shardwright.restore(folder / ("away/1" if comm.rank == 1 else "1"), STATE),
    )
    fails(
        "another tree",
        InputError,
        r"1: leaf \['b'\], rank 2: is float32\[3\], wanted is float32\[2\]\. ",
        lambda: shardwright.restore(folder / "1", STATE | {"b": jnp.ones(2 if comm.rank == 2 else 3)}),
    )
    fails(
        "another checkpoint",
        InputError,
        r"1, rank 2: has another checkpoint than rank 0: ",
        lambda: shardwright.restore(folder / ("2" if comm.rank == 2 else "1"), STATE),
    )
    with on(1, orbax.PyTreeCheckpointer, "restore", MemoryError()):
        fails(
            "no memory",
            PlanError,
            r"1, rank 1: cannot be read: MemoryError\. ",
            lambda: shardwright.restore(folder / "1", STATE),
        )


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    saving(folder)
    restoring(folder)
    found = [problem for part in comm.allgather(problems) for problem in part]
    if comm.rank == 0:
        (folder / "summary.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
