"""`python watch.py FILE COMMAND…`: run a command as this rank of a job; note in FILE how it failed.

    RANK signal N    a signal ended it that nobody here sent
    RANK status N    it ended itself
    RANK silence     it is gone, and nobody here to say how: `faults_watch.py` writes that

Only the first rank writes the file: the launcher ends the others. Started by path, with nothing but the
standard library at hand.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

#: Tells `faults_watch.py`, which rank 0 starts, of the file.
LOST = "SHARDWRIGHT_LOST"

#: Rank in the job, as the launchers of MPICH, Open MPI and PMIx state it.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def _end_with_parent() -> None:
    """Nothing can catch SIGKILL: who watches is ended by it, and the rank with it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Run the command.

    Args:
        arguments: the file, then the command.
        environment: which has this rank's number.

    Returns:
        The command's exit status, as a shell has it.
    """
    # The launcher talks to the rank through a socket that the rank inherits.
    process = subprocess.Popen(
        arguments[1:], close_fds=False, preexec_fn=_end_with_parent, env={**environment, LOST: arguments[0]}
    )
    ended = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ended
        ended = True
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    status = process.wait()
    if status and not ended:
        rank = next((environment[name] for name in RANK_VARIABLES if name in environment), "0")
        try:
            with open(arguments[0], "x", encoding="utf-8") as file:
                file.write(f"{rank} {'signal' if status < 0 else 'status'} {abs(status)}\n")
        except FileExistsError:
            pass
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
