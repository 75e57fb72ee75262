"""`shardwright fleet`: find out what there is, show a fleet file, list device types."""

from __future__ import annotations

from collections.abc import Sequence

import click
import yaml
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.commands.mpi import is_silent, one_voice
from shardwright.commands.options import json_option
from shardwright.console import say, say_json
from shardwright.cost.catalogue import ALIASES, catalogue
from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet, Link
from shardwright.cost.quantity import size
from shardwright.files import check_outputs, write_whole
from shardwright.fleets.detect import SOURCES, Detected, detect
from shardwright.fleets.summary import Narrowest, NodeRun, Summary, matrix_rate, summary
from shardwright.ir.errors import InputError
from shardwright.reports.units import bandwidth, duration, flop_rate


@click.group()
def fleet() -> None:
    """Find devices, show a fleet file, list device types."""


@fleet.command("detect")
@click.option("--from", "source", type=click.Choice(SOURCES), default="auto", show_default=True)
@click.option("--hosts", "host_file", metavar="FILE", help="An MPI host file, with --device.")
@click.option("--device", metavar="TYPE", help="What devices the hosts of --hosts have.")
@click.option("--type", "types", multiple=True, metavar="FOUND=TYPE", help="What a name stands for.")
@click.option("--network", metavar="BANDWIDTH", help="Between nodes, such as '10 Gbit/s'.")
@click.option("--name", default="detected", show_default=True, help="Of the fleet.")
@click.option("-o", "--output", metavar="FLEET.yaml", help="Write the fleet to this file.")
@json_option
def detect_command(
    source: str,
    host_file: str | None,
    device: str | None,
    types: tuple[str, ...],
    network: str | None,
    name: str,
    output: str | None,
    as_json: bool,
) -> None:
    """Find devices and links, and make a fleet file of them.

    Looks at this machine (nvidia-smi, or what JAX lists), at the nodes of a Slurm job, or, under mpiexec, at
    the machine of every rank. Rates are the catalogue's and links the standards'; nothing is measured:
    `shardwright calibrate` does that.
    """
    with one_voice():
        check_outputs({"-o": output}, {"--hosts": host_file})
        given = _types(types)
        found = detect(source, name=name, types=given, network=network, host_file=host_file, device=device)
    if is_silent():
        return
    if output is not None:
        write_whole(output, as_yaml(found))
    if as_json:
        say_json(
            {
                "fleet": found.fleet.to_dict(),
                "source": found.source,
                "hosts": [{"name": h.name, "devices": [d.name for d in h.devices]} for h in found.hosts],
                "assumed": list(found.assumed),
            }
        )
    elif output is None:
        click.echo(as_yaml(found), nl=False)
    else:
        say(layout(found.fleet, found.assumed))
        click.echo(f"written to {output}")


@fleet.command("show")
@click.argument("path", metavar="FLEET.yaml")
@json_option
def show(path: str, as_json: bool) -> None:
    """Show a fleet, its speed and memory added up, and its narrowest link."""
    found = Fleet.load(path)
    if as_json:
        say_json(to_dict(found))
    else:
        say(layout(found))


@fleet.command("catalogue")
@json_option
def catalogue_command(as_json: bool) -> None:
    """List the device types that a fleet file can name."""
    short = {full: [alias for alias, name in ALIASES.items() if name == full] for full in catalogue()}
    if as_json:
        types = [_type_dict(kind) | {"aliases": short[kind.name]} for kind in catalogue().values()]
        say_json({"types": types})
        return
    table = _table("device types", "type", "also", left=2)
    for column in ("float32", "TF32", "16-bit", "memory", "bandwidth"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("rates reached")
    for kind in catalogue().values():
        tf32 = "" if kind.tf32_flop_per_s is None else flop_rate(kind.tf32_flop_per_s)
        table.add_row(
            kind.name,
            ", ".join(short[kind.name]),
            flop_rate(kind.float32_flop_per_s),
            tf32,
            flop_rate(matrix_rate(kind)),
            size(kind.memory_bytes),
            bandwidth(kind.memory_bandwidth_byte_per_s),
            "measured" if kind.measured else "typical",
        )
    say(Group(table, Text("\nPeaks of datasheets. What is reached is measured, or the median of what was.")))


def _types(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        seen, equals, name = text.rpartition("=")
        if not equals or not seen or not name:
            raise InputError(
                place=f"--type {text}", reason="is no FOUND=TYPE", remedy="Write --type 'a100=A100-SXM-40GB'"
            )
        found[seen] = name
    return found


def as_yaml(found: Detected) -> str:
    """A fleet file: where it comes from and what was assumed, then the fleet."""
    lines = [f"# Found by `shardwright fleet detect` ({found.source}); nothing here was measured."]
    lines += [f"# - {text}" for text in found.assumed]
    lines += ["# `shardwright calibrate` measures devices and links.", "# Nodes, in order:"]
    lines += [f"#   n{number} is {host.name}" for number, host in enumerate(found.hosts)]
    body = yaml.safe_dump(found.fleet.to_dict(), sort_keys=False, allow_unicode=True, width=100)
    return "\n".join(lines) + "\n" + body


def to_dict(found: Fleet) -> dict[str, object]:
    """A fleet added up, as plain data."""
    added = summary(found)
    return {
        "name": found.name,
        "devices": [device.name for device in found.devices],
        "types": [
            _type_dict(each.type) | {"count": each.count, "prices_per_hour": list(each.prices_per_hour)}
            for each in added.types
        ],
        "float32_flop_per_s": added.float32_flop_per_s,
        "matrix_flop_per_s": added.matrix_flop_per_s,
        "memory_bytes": added.memory_bytes,
        "memory_bandwidth_byte_per_s": added.memory_bandwidth_byte_per_s,
        "price_per_hour": added.price_per_hour,
        "transport": found.transport,
        "narrowest": None
        if added.narrowest is None
        else {name: getattr(added.narrowest, name) for name in Narrowest.__slots__},
        "fleet": found.to_dict(),
    }


def _type_dict(kind: DeviceType) -> dict[str, object]:
    return {
        "name": kind.name,
        "float32_flop_per_s": kind.float32_flop_per_s,
        "tf32_flop_per_s": kind.tf32_flop_per_s,
        "float16_flop_per_s": kind.float16_flop_per_s,
        "bfloat16_flop_per_s": kind.bfloat16_flop_per_s,
        "memory_bytes": kind.memory_bytes,
        "memory_bandwidth_byte_per_s": kind.memory_bandwidth_byte_per_s,
        "measured": kind.measured,
        "source": kind.source,
    }


def layout(found: Fleet, assumed: Sequence[str] = ()) -> Group:
    """The printout of a fleet."""
    added = summary(found)
    parts: list[Text | Padding] = [_head(found, added)]
    table = _table("devices", "type", left=1)
    for column in ("count", "float32", "16-bit", "memory", "bandwidth"):
        table.add_column(column, justify="right", no_wrap=True)
    priced = any(each.prices_per_hour for each in added.types)
    if priced:
        table.add_column("per hour", justify="right", no_wrap=True)
    table.add_column("rates")
    for each in added.types:
        table.add_row(
            each.type.name,
            str(each.count),
            flop_rate(each.type.float32_flop_per_s),
            flop_rate(matrix_rate(each.type)),
            size(each.type.memory_bytes),
            bandwidth(each.type.memory_bandwidth_byte_per_s),
            *([" or ".join(f"{price:g}" for price in each.prices_per_hour)] if priced else []),
            each.type.source,
        )
    parts.append(Padding(table, (0, 0, 1, 0)))
    nodes = _table("nodes", "", "devices of each", "inside", "outward", left=4)
    for run in added.nodes:
        nodes.add_row(*_node_row(run))
    parts.append(Padding(nodes, (0, 0, 1 if assumed else 0, 0)))
    if assumed:
        parts.append(Text("assumed, not measured:", style="bold"))
        parts += [Text(f"  - {text}") for text in assumed]
    return Group(*parts)


def _head(found: Fleet, added: Summary) -> Text:
    narrowest = added.narrowest
    link = (
        "none: there is one device"
        if narrowest is None
        else f"{narrowest.where}, {_link(Link(narrowest.bandwidth_byte_per_s, narrowest.latency_s))}"
    )
    hourly = added.price_per_hour
    lines = (
        str(found),
        f"  together        {flop_rate(added.float32_flop_per_s)} in float32, "
        f"{flop_rate(added.matrix_flop_per_s)} in 16-bit products",
        f"  memory          {size(added.memory_bytes)} at {bandwidth(added.memory_bandwidth_byte_per_s)}",
        *([] if hourly is None else [f"  price per hour  {hourly:g}"]),
        f"  narrowest link  {link}",
        f"  transport       {found.transport}",
        "",
    )
    return Text("\n".join(lines))


def _node_row(run: NodeRun) -> tuple[str, str, str, str]:
    names = run.names[0] if len(run.names) == 1 else f"{run.names[0]} … {run.names[-1]}"
    devices = " + ".join(f"{each.count} × {each.type.name}" for each in run.devices)
    rails = f", {run.rails} rails" if run.rails > 1 else ""
    return names, devices, _link(run.link), _link(run.uplink) + rails


def _link(link: Link | None) -> str:
    return "none" if link is None else f"{bandwidth(link.bandwidth_byte_per_s)}, {duration(link.latency_s)}"


def _table(title: str, *columns: str, left: int) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right")
    return table
