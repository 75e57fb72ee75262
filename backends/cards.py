"""The CUDA cards of this machine and which rank gets which, told without opening any of them.

Imported by `pin.py`, which is started by path: nothing but the standard library is at hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

#: Part of a card's memory that JAX takes at start, unless it is told otherwise.
JAX_TAKES = 0.75


def cards(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """What `CUDA_VISIBLE_DEVICES` calls each card that this process may use; none where JAX is to use none.

    Args:
        environment: `CUDA_VISIBLE_DEVICES` says which, else all; `JAX_PLATFORMS` whether at all.
        devices: the folder in which the driver lists them.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return ()
    if not devices.is_dir():
        return ()
    count = sum(re.fullmatch(r"nvidia\d+", entry.name) is not None for entry in devices.iterdir())
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not count:
        return tuple(map(str, range(count)))
    # CUDA looks no further than the first that is none.
    names = (name.strip() for name in listed.split(","))
    return tuple(takewhile(lambda name: name not in ("", "-1"), names))


def card_variables(
    rank: int, ranks: int, environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")
) -> dict[str, str]:
    """What to set so that a rank of `ranks` on this machine opens a card of its own, or its part of one.

    Cards are numbered as `nvidia-smi` and `shardwright fleet detect` list them, which is not CUDA's own order
    where they differ. Ranks that share a card share the memory that JAX takes of it.
    """
    found = cards(environment, devices)
    if not found:
        return {}
    variables = {"CUDA_VISIBLE_DEVICES": found[rank % len(found)]}
    if "CUDA_VISIBLE_DEVICES" not in environment and "CUDA_DEVICE_ORDER" not in environment:
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    sharing = -(-ranks // len(found))
    if sharing > 1 and not {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"} & set(environment):
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{JAX_TAKES / sharing:.3f}"
    return variables
