"""Whether a rank runs on the card that its plan is for: shares that suit one card are wrong for another."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import jax

from shardwright.backends.launch import under_mpi
from shardwright.fleets.inventory import Seen, catalogue_name, of_jax
from shardwright.ir.errors import OtherDeviceWarning
from shardwright.ir.wiring import Seats


def warn_of_other_card(types: Sequence[str], seats: Seats) -> None:
    """Warn where this rank of an MPI job runs on another card than its device of the plan is.

    Args:
        types: by device of the fleet, the name of its type.
        seats: which of them are used.
    """
    if under_mpi():
        from shardwright.backends.mpi.link import mpi

        comm = mpi().COMM_WORLD
        (seen,) = of_jax(jax.devices()[:1])
        if (said := other_card(comm.rank, comm.size, types, seats, seen)) is not None:
            warnings.warn(said, OtherDeviceWarning, stacklevel=4)


def other_card(rank: int, ranks: int, types: Sequence[str], seats: Seats, seen: Seen) -> str | None:
    """What is to be said of a rank whose card is another than that of its device; None if nothing is.

    Only of cards that the catalogue knows: plans for cards are tried out on processors, too. There is a rank
    for every device of the fleet, or for every one that is used.
    """
    if ranks not in (len(types), len(seats.used)):
        return None
    device = rank if ranks == len(types) else seats.used[rank]
    # Types that `calibrate` measured are named after what was measured.
    planned = catalogue_name(Seen(re.sub(r"-measured(-\d+)?$", "", types[device])))
    found = catalogue_name(seen)
    if planned is None or found is None or planned == found:
        return None
    return (
        f"rank {rank} is device {device} of the plan ({planned}), but runs on {found}, for which its share "
        "was not made: order ranks, or CUDA_VISIBLE_DEVICES, as the fleet file has its devices"
    )
