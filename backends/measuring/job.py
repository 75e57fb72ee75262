"""Measuring from a plain process: starts the ranks, shows how far they are, reads what they found.

python -m shardwright.backends.measuring.job REQUEST.json MEASURED.json     one rank
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.backends.cards import cards
from shardwright.backends.launch import job, rank_command
from shardwright.backends.measuring.timing import Measured, RankInfo, Request, Resumed, Tick, measure
from shardwright.ir.errors import InputError


def on_cards() -> bool:
    """Whether ranks that are started here would compute on cards.

    JAX may be installed without CUDA where there are some. A process is asked, which has left when the ranks
    start: whoever asks JAX holds a card, and most of its memory, for as long as it lives.
    """
    if not cards():
        return False
    command = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout.strip() not in ("", "cpu")


def measure_on(ranks: int, request: Request, tick: Tick = lambda done, total: None) -> Measured:
    """Start `ranks` ranks on this machine and let them measure.

    Raises:
        InputError: mpiexec is not installed, or a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, found, said = (Path(folder, name) for name in ("request.json", "measured.json", "errors.txt"))
        asked.write_text(json.dumps(asdict(request)))
        command = rank_command(ranks, ["-m", "shardwright.backends.measuring.job", str(asked), str(found)])
        with (
            said.open("w") as errors,
            job(command, ranks, stdout=subprocess.PIPE, stderr=errors, text=True) as running,
        ):
            assert running.stdout is not None
            for line in running.stdout:
                done, _, total = line.strip().partition("/")
                if done.isdigit() and total.isdigit():  # else the launcher speaks
                    tick(int(done), int(total))
        if running.returncode or not found.is_file():
            lines = said.read_text().strip().splitlines() or [f"exit status {running.returncode}"]
            raise InputError(
                place=f"measuring on {ranks} ranks",
                reason=f"the ranks failed: {lines[-1]}",
                remedy="See whether `shardwright run --backend mpi` works here",
            )
        return _measured(json.loads(found.read_text()))


def _measured(data: dict[str, Any]) -> Measured:
    return Measured(
        exchange_s=tuple(tuple(samples) for samples in data["exchange_s"]),
        resumed=tuple(
            None if each is None else Resumed(**{name: tuple(times) for name, times in each.items()})
            for each in data["resumed"]
        ),
        kernel_s=tuple(tuple(tuple(samples) for samples in rank) for rank in data["kernel_s"]),
        ranks=tuple(RankInfo(**info) for info in data["ranks"]),
        others=data["others"],
    )


def _rank(asked: str, found: str) -> None:
    from shardwright.backends.mpi.executable import abort_on_error
    from shardwright.backends.mpi.moves import mpi

    comm = mpi().COMM_WORLD
    with abort_on_error(comm):
        shown = -1

        def tick(done: int, total: int) -> None:
            nonlocal shown
            if comm.rank == 0 and 100 * done // total > shown:
                shown = 100 * done // total
                print(f"{done}/{total}", flush=True)

        request = Request.from_dict(json.loads(Path(asked).read_text()))
        measured = measure(request, comm, tick)
        if comm.rank == 0:
            Path(found).write_text(json.dumps(asdict(measured)))


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2])
