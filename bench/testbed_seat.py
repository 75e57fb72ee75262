"""`python testbed_seat.py SEATS.json COMMAND…`: take the cores of this rank, then become the command.

SEATS.json lists the cores of every rank; its quota it takes later, when all is compiled. Started by path: a
rank must be pinned before its libraries start threads. Nothing but the standard library is at hand.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    seat = json.loads(Path(sys.argv[1]).read_text())[int(os.environ["PMI_RANK"])]
    os.sched_setaffinity(0, seat["cores"])
    os.execv(sys.argv[2], sys.argv[2:])
