"""`python testbed_seat.py SEATS.json COMMAND…`: take the seat of this rank, then become the command.

SEATS.json lists, per rank, the cgroup.procs file of its quota and its cores. Started by path: a rank must sit
before its libraries start threads. Nothing but the standard library is at hand.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    seat = json.loads(Path(sys.argv[1]).read_text())[int(os.environ["PMI_RANK"])]
    Path(seat["procs"]).write_text(str(os.getpid()))
    os.sched_setaffinity(0, seat["cores"])
    os.execv(sys.argv[2], sys.argv[2:])
