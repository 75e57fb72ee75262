"""Jobs that outlive a device: plans for what is left of a fleet, and ranks that are started again on it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from shardwright.backends.launch import find_mpiexec, job, rank_command
from shardwright.cost.fleet import Fleet, FleetLike
from shardwright.cost.subfleet import subfleet
from shardwright.ir.arguments import check_several
from shardwright.ir.errors import InputError, PlanError
from shardwright.ir.program import nodes_of
from shardwright.ir.trace import Traced
from shardwright.plan import Plan

#: Status of a launcher that SIGHUP, SIGINT or SIGTERM ended.
_LAUNCHER_ENDED = (129, 130, 143)

_WATCH = Path(__file__).with_name("watch.py")


def without(fleet: Fleet, devices: Collection[str | int]) -> Fleet:
    """A fleet without some of its devices, named or numbered. Devices are named by their place, there too.

    Raises:
        InputError: there is no such device, or none would be left.
    """
    names = [device.name for device in fleet.devices]
    check_several("devices", devices, f"[{names[-1]!r}]")
    lost = {names[d] if isinstance(d, int) and 0 <= d < len(names) else d for d in devices}
    unknown = sorted(str(d) for d in lost if d not in names)
    if unknown or len(lost) >= len(names):
        raise InputError(
            place=f"fleet {fleet.name}",
            reason=f"has no device {unknown[0]}" if unknown else "has no other devices",
            remedy=f"Its devices are {', '.join(names)}",
        )
    return subfleet(fleet, [d for d, name in enumerate(names) if name not in lost], fleet.name)


def replan(plan: Plan, fleet: FleetLike, *, traced: Traced | None = None, **planning: Any) -> Plan:
    """A plan of the same step for another fleet.

    It starts warm: the step is not traced again, and the search for ratios begins with the shares that the
    old plan gave devices of the same type.

    Args:
        plan: the old plan.
        fleet: the new fleet, or the path of a fleet file.
        traced: the step of a plan that was loaded from a file (see `Plan.attach`).
        planning: further arguments of `synthesize`, such as `devices`, `constraints`, `time_limit_s`.

    Raises:
        InputError: see `synthesize`.
        PlanError: the plan was loaded from a file and no step is given.
    """
    from shardwright.api import synthesize_traced

    # Two mesh axes only where the old plan has them: what ran it then runs the new one.
    planning = {"axes": 1 if nodes_of(plan.program) is None else "auto"} | planning
    fleet = Fleet.of(fleet)
    first = shares(plan, fleet)
    return synthesize_traced(
        plan.step(traced), fleet=fleet, state=plan.state_override, first=first, **planning
    )


def shares(plan: Plan, fleet: Fleet) -> tuple[float, ...] | None:
    """Shares of the devices of another fleet after a plan's: of each what its type has on average there.

    None where the plan knows none of their types, or gives them nothing.
    """
    given: dict[object, list[float]] = {}
    for device, share in zip(plan.fleet.devices, plan.ratios, strict=True):
        given.setdefault(device.type, []).append(share)
    found = [given.get(device.type) for device in fleet.devices]
    known = [sum(each) / len(each) for each in found if each]
    if not known or not sum(known):
        return None
    usual = sum(known) / len(known)
    each = [usual if of_type is None else sum(of_type) / len(of_type) for of_type in found]
    return tuple(x / sum(each) for x in each)


def train(
    plan: Plan,
    arguments: Callable[[Path], Sequence[str]],
    *,
    traced: Traced | None = None,
    lose: int | None = None,
    tell: Callable[[str], None] = lambda what: None,
    folder: str | os.PathLike[str] | None = None,
    **planning: Any,
) -> Plan:
    """Run a job to its end; when a rank is lost, plan for the other devices and start again on them.

    A rank is lost when a signal ends it that nobody here sent (it ran out of memory), or when nothing more is
    heard of it: its machine went down. A rank that fails by itself (an error in the script) ends the job: it
    would fail again. What is told names devices as the first plan does; the plans that follow name them by
    their place in what is left of the fleet.

    Args:
        plan: for all devices.
        arguments: from the path of a plan file to the arguments of Python that run a rank, for example
            `lambda path: ["train.py", str(path)]`. The script saves checkpoints and begins with the latest.
        traced: the step of a plan that was loaded from a file (see `Plan.attach`).
        lose: how many ranks may be lost at most; by default all but one.
        tell: told what happens.
        folder: where plan files lie while a job runs. On several machines all of them have to see it; by
            default it is one for temporary files on this one.
        planning: further arguments of `replan`.

    Returns:
        The plan that the job ended with.

    Raises:
        InputError: mpiexec is not installed.
        PlanError: the job failed, or lost too many ranks; or the plan was loaded from a file and no step is
            given.
        SystemExit: SIGTERM or SIGHUP ended the job, and is to end this process.
    """
    find_mpiexec()
    step = plan.step(traced)
    left = len(plan.used) - 1 if lose is None else lose
    names = [device.name for device in plan.fleet.devices]
    while True:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            path, lost_path = Path(own) / "plan.json", Path(own) / "lost"
            plan.save(path)
            status = _run(len(plan.used), arguments(path), lost_path)
            if status == 0:
                return plan
            told = lost_path.read_text().split() if lost_path.is_file() else []
        lost = _lost(told, status)
        if lost is None or left == 0:
            raise PlanError(
                place="the job",
                reason=f"ended with status {status}"
                + (f" after losing rank {lost}" if lost is not None else ""),
                remedy="See what its ranks said; checkpoints that are whole can be restored",
            )
        left -= 1
        gone = plan.used[lost]
        fleet = without(plan.fleet, [gone])
        how = "is not heard of any more" if told[1] == "silence" else f"was ended by signal {told[2]}"
        which = names.pop(gone)
        tell(f"rank {lost} ({which}) {how}; planning for {', '.join(names)}")
        plan = replan(plan, fleet, traced=step, **planning)


def _lost(told: Sequence[str], status: int) -> int | None:
    """The rank that a job has lost, None if it failed by itself.

    Args:
        told: what `watch.py` or `faults_watch.py` noted.
        status: of the launcher. Who ends it ends the ranks, of which the first then looks lost.
    """
    silent = told[1:] == ["silence"] and status > 0 and status not in _LAUNCHER_ENDED
    return int(told[0]) if silent or told[1:2] == ["signal"] else None


def _run(ranks: int, arguments: Sequence[str], lost: Path) -> int:
    """Run the ranks, each watched by a process that notes in `lost` the first one that a signal ended."""
    command = rank_command(ranks, arguments)
    at = len(command) - len(arguments) - 1
    watched = [*command[:at], sys.executable, "-S", str(_WATCH), str(lost), *command[at:]]
    # A session of its own: who interrupts this process leaves it to end the job.
    with job(watched, ranks, start_new_session=True) as process:
        return process.wait()
