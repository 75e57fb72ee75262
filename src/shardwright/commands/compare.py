"""`shardwright compare`: the strategies of a collective on a fleet."""

from __future__ import annotations

import click

from shardwright.commands.mpi import is_silent, one_voice, progress
from shardwright.commands.options import fleet_option, json_option
from shardwright.compare import crossovers, steps, sweep_collectives
from shardwright.console import say, say_json
from shardwright.cost.fleet import Fleet
from shardwright.cost.quantity import MEMORY, parse_quantity
from shardwright.ir.errors import InputError
from shardwright.reports.comparison import Comparison, layout, plot
from shardwright.reports.picture import check_plot


@click.command()
@click.argument("collective")
@fleet_option
@click.option("--bytes", "nbytes", metavar="SIZE", help="Size of the whole tensor.  [default: 64MiB]")
@click.option("--ratios", metavar="R,R,…", help="Share of every device.  [default: even]")
@click.option("--sweep", metavar="FROM:TO", help="Sizes instead of one, such as 1KiB:1GiB.")
@click.option("--measure", is_flag=True, help="Carry them out on MPI ranks here, beside the prediction.")
@click.option("--plot", "picture", metavar="PICTURE.svg", help="Draw the sweep.")
@json_option
def compare(
    collective: str,
    fleet_path: str,
    nbytes: str | None,
    ratios: str | None,
    sweep: str | None,
    measure: bool,
    picture: str | None,
    as_json: bool,
) -> None:
    """Compare the strategies of COLLECTIVE on a fleet.

    COLLECTIVE is all_gather, reduce_scatter, all_reduce, …
    """
    if nbytes is not None and sweep is not None:
        raise InputError(place="compare", reason="has --bytes and --sweep", remedy="Pass one of them")
    if picture is not None:
        check_plot(picture, {"--fleet": fleet_path})
    fleet = Fleet.load(fleet_path)
    shares = None if ratios is None else _numbers(ratios)
    # Measuring takes time for every size; a line needs points.
    sizes = [_bytes(nbytes or "64MiB", "--bytes")] if sweep is None else _sizes(sweep, 0.5 if measure else 1)
    with one_voice(), progress("measuring") as tick:
        rows = sweep_collectives(fleet, collective, sizes, shares, measure, tick)
    found = crossovers(fleet, collective, sizes[0], sizes[-1], shares) if len(sizes) > 1 else ()
    even = (1 / len(fleet.devices),) * len(fleet.devices)
    comparison = Comparison(collective, fleet, shares or even, tuple(sizes), rows, found)
    if is_silent():
        return
    if picture is not None:
        plot(comparison, picture)
    if as_json:
        say_json(comparison.to_dict())
    else:
        say(layout(comparison))


def _bytes(text: str, place: str) -> int:
    return int(parse_quantity(text, MEMORY, place=place))


def _sizes(text: str, per_octave: float) -> list[int]:
    low, colon, high = text.partition(":")
    if not colon:
        raise InputError(place="--sweep", reason=f"'{text}' is no range", remedy="Write 1KiB:1GiB")
    first, last = _bytes(low, "--sweep"), _bytes(high, "--sweep")
    if first == last:
        remedy = "Write two sizes, or pass one as --bytes"
        raise InputError(place="--sweep", reason=f"'{text}' is a single size", remedy=remedy)
    if first > last:
        raise InputError(place="--sweep", reason=f"'{text}' is empty", remedy="Write the smaller size first")
    return steps(first, last, per_octave)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            place="--ratios", reason=f"'{text}' is no list of numbers", remedy="Write 0.5,0.25,0.25"
        ) from None
