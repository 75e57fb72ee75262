"""`shardwright calibrate`: measure devices and links, write a fleet file."""

from __future__ import annotations

import math
import os

import click
import yaml
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.backends.launch import under_mpi
from shardwright.commands.mpi import is_silent, one_voice, progress
from shardwright.commands.options import json_option
from shardwright.console import say, say_json
from shardwright.cost.calibrate.estimate import Estimate
from shardwright.cost.fleet import Fleet
from shardwright.cost.quantity import size
from shardwright.files import check_outputs, write_whole
from shardwright.fleets.calibrate import Calibration, calibrate
from shardwright.ir.errors import InputError
from shardwright.reports.units import duration

MOST_RANKS_PER_CORE = 8


@click.command("calibrate")
@click.option(
    "--fleet", "fleet_path", metavar="FLEET.yaml", help="Keep this fleet's names, nodes, memory, prices."
)
@click.option("-n", "ranks", type=click.IntRange(min=1), help="Ranks.  [default: devices of the fleet, or 2]")
@click.option("-o", "--output", required=True, metavar="MEASURED.yaml", help="Write the fleet to this file.")
@click.option("--rounds", type=click.IntRange(min=3), default=7, show_default=True, help="Samples of each.")
@click.option("--force", is_flag=True, help="Use noisy measurements, and measure beside other work.")
@json_option
def calibrate_command(
    fleet_path: str | None, ranks: int | None, output: str, rounds: int, force: bool, as_json: bool
) -> None:
    """Measure devices and links, and write a fleet file.

    Those of this machine or, under mpiexec, of the job.
    """
    with one_voice(), progress("measuring") as tick:
        fleet = None if fleet_path is None else Fleet.load(fleet_path)
        check_outputs({"-o": output}, {"--fleet": fleet_path})
        comm, running = None, ranks or (len(fleet.devices) if fleet else 2)
        if under_mpi():
            from shardwright.backends.mpi.moves import mpi

            comm = mpi().COMM_WORLD
            if ranks is not None and ranks != comm.size:
                raise InputError(
                    place="-n",
                    reason=f"asks for {ranks} ranks, but {comm.size} MPI ranks are running",
                    remedy=f"Leave it out, or start mpiexec -n {ranks}",
                )
            running = comm.size
        elif running > (most := MOST_RANKS_PER_CORE * (os.cpu_count() or 1)):
            raise InputError(
                place="calibrate",
                reason=f"{running} ranks are too many for the {os.cpu_count()} cores of this machine",
                remedy=f"Measure at most {most} ranks here, or start it with mpiexec on your machines",
            )
        found = calibrate(running, fleet, comm=comm, force=force, rounds=rounds, tick=tick)
    if is_silent():
        return
    write_fleet(found.fleet, output)
    if as_json:
        say_json(to_dict(found))
        return
    say(layout(found))
    click.echo(f"written to {output}")


def write_fleet(fleet: Fleet, output: str) -> None:
    """Write a fleet file; it appears whole or not at all."""
    write_whole(output, yaml.safe_dump(fleet.to_dict(), sort_keys=False, allow_unicode=True, width=100))


def to_dict(found: Calibration) -> dict[str, object]:
    """What was fitted as plain data; the fleet as in a fleet file."""
    names = found.fleet.devices
    return {
        "fleet": found.fleet.to_dict(),
        "devices": [
            {
                "devices": [names[i].name for i in members],
                "launch_s": _interval(fit.launch_s),
                "matmul_flop_per_s": _interval(fit.matmul_flop_per_s),
                "vector_flop_per_s": _interval(fit.vector_flop_per_s),
                "byte_per_s": _interval(fit.byte_per_s),
                "error": fit.error,
                "spread": fit.spread,
            }
            for fit, members in found.devices
        ],
        "strategies": [
            {
                "strategy": fit.strategy,
                "error": fit.error,
                "spread": fit.spread,
                "ranges": [
                    {
                        "up_to_bytes": used.up_to_bytes,
                        "latency_s": _interval(line.latency_s),
                        "second_per_byte": _interval(line.second_per_byte),
                    }
                    for line, used in zip(fit.ranges, fit.link.ranges, strict=True)
                ],
            }
            for fit in (found.between.strategies if found.between is not None else ())
        ],
        "resume_s": None if found.resume is None else _interval(found.resume.long_s),
        "restart_s": None if found.resume is None else _interval(found.resume.short_s),
        "resume_over_s": None if found.resume is None else found.resume.over_s,
        "others": found.others,
    }


def _interval(estimate: Estimate) -> dict[str, float | None]:
    """Value and interval; an end that is unknown is null, since JSON has no infinity."""
    ends = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {name: value if math.isfinite(value) else None for name, value in ends.items()}


def layout(found: Calibration) -> Group:
    """What was fitted, with the intervals it lies in."""
    parts: list[Text | Padding] = [Text(f"calibrated {found.fleet}")]
    if found.others is not None:
        parts.append(Text(f"  other processes used {found.others:.0%} of the cores meanwhile"))
    parts.append(Padding(_devices(found), (1, 0)))
    if found.resume is not None:
        least, most = (
            _with_margin(each, duration(each.value)) for each in (found.resume.short_s, found.resume.long_s)
        )
        text = (
            f"into a segment and out of it, besides its kernels: {least}; {most} where these take "
            f"{duration(found.resume.over_s)} or longer"
        )
        parts.append(Padding(Text(text), (0, 0, 1, 0)))
    if found.between is not None:
        parts.append(Padding(_strategies(found), (0, 0, 1, 0)))
    return Group(*parts)


def _table(title: str, *columns: str, left: int) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right")
    return table


def _devices(found: Calibration) -> Table:
    columns = ("devices", "type", "launch", "products", "other", "memory", "error", "spread")
    table = _table("devices (95 % intervals)", *columns, left=2)
    everyone = found.fleet.devices
    for fit, members in found.devices:
        table.add_row(
            ", ".join(everyone[i].name for i in members),
            everyone[members[0]].type.name,
            _with_margin(fit.launch_s, duration(fit.launch_s.value)),
            _with_margin(fit.matmul_flop_per_s, f"{fit.matmul_flop_per_s.value / 1e9:.3g} GFLOP/s"),
            _with_margin(fit.vector_flop_per_s, f"{fit.vector_flop_per_s.value / 1e9:.3g} GFLOP/s"),
            _with_margin(fit.byte_per_s, f"{fit.byte_per_s.value / 1e9:.3g} GB/s"),
            f"{fit.error:.0%}",
            f"±{fit.spread:.0%}",
        )
    return table


def _strategies(found: Calibration) -> Table:
    columns = ("strategy", "up to", "latency", "bandwidth", "error", "spread")
    table = _table("exchanges, α and β (95 % intervals)", *columns, left=1)
    assert found.between is not None
    for fit in found.between.strategies:
        for number, (line, used) in enumerate(zip(fit.ranges, fit.link.ranges, strict=True)):
            table.add_row(
                "" if number else fit.strategy,
                "any size" if used.up_to_bytes is None else size(used.up_to_bytes),
                _with_margin(line.latency_s, duration(used.latency_s)),
                _with_margin(line.second_per_byte, f"{used.bandwidth_byte_per_s / 1e9:.3g} GB/s"),
                "" if number else f"{fit.error:.0%}",
                "" if number else f"±{fit.spread:.0%}",
            )
    return table


def _with_margin(estimate: Estimate, text: str) -> str:
    wide = not math.isfinite(estimate.relative) or estimate.relative > 1
    return f"{text} {'±>100%' if wide else f'±{estimate.relative:.0%}'}"
