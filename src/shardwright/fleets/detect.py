"""From what is found on machines to a fleet: device types from the catalogue, links from their standards.

Nothing is measured here. What the tools do not say is assumed, and every assumption is listed; `shardwright
calibrate` measures.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.backends.launch import under_mpi
from shardwright.cost.catalogue import device_type
from shardwright.cost.fleet import Fleet
from shardwright.cost.quantity import BANDWIDTH, format_quantity
from shardwright.fleets import inventory
from shardwright.fleets.inventory import Host, Seen
from shardwright.ir.errors import InputError

#: Between devices of one node and to the host, and between nodes: assumed where nothing says.
NODE_LATENCY, NETWORK_LATENCY = "10 us", "30 us"
#: Between devices of a node of which nothing is known: PCIe 3.0 x16 as copies reach it.
NODE_BANDWIDTH = "12 GB/s"

SOURCES = ("auto", "nvidia-smi", "jax", "mpi", "slurm", "hosts")


@dataclass(frozen=True, slots=True)
class Detected:
    """A fleet, and how it came about.

    Attributes:
        fleet: of the hosts.
        hosts: in the order of its nodes.
        source: one of `SOURCES`, not "auto".
        assumed: what was assumed, in words.
    """

    fleet: Fleet
    hosts: tuple[Host, ...]
    source: str
    assumed: tuple[str, ...]


def detect(
    source: str = "auto",
    *,
    name: str = "detected",
    types: Mapping[str, str] | None = None,
    network: str | None = None,
    host_file: str | None = None,
    device: str | None = None,
) -> Detected:
    """Find devices and make a fleet of them.

    Args:
        source: where to look; "auto" takes the first that is there: MPI ranks, a Slurm job, nvidia-smi, JAX.
        name: of the fleet.
        types: names as found -> names of the catalogue, for what it cannot map by itself.
        network: bandwidth between nodes, such as "10 Gbit/s", where their ports do not say.
        host_file: an MPI host file, for "hosts".
        device: the catalogue's name of the devices of those hosts.

    Raises:
        InputError: there is nothing to be found, or something that cannot be told by itself.
    """
    used = _choose(source, host_file)
    if used == "hosts":
        hosts = _from_host_file(host_file, device)
    else:
        hosts = {"nvidia-smi": _this_host, "jax": _of_jax, "mpi": _of_ranks, "slurm": _of_slurm}[used]()
    hosts = tuple(host for host in hosts if host.devices)
    if not hosts:
        raise InputError(
            place="fleet detect",
            reason=f"{used} lists no device",
            remedy="Look elsewhere with --from, or write the fleet file by hand",
        )
    return assemble(hosts, used, name=name, types=types or {}, network=network)


def assemble(
    hosts: Sequence[Host],
    source: str,
    *,
    name: str,
    types: Mapping[str, str] | None = None,
    network: str | None = None,
) -> Detected:
    """The fleet of hosts; see `detect`."""
    assumed: dict[str, None] = {}
    named = {seen: _type(seen, types or {}) for host in hosts for seen in host.devices}
    nodes = [_node(host, named, assumed) for host in hosts]
    data: dict[str, Any] = {"name": name, "nodes": nodes}
    if len(hosts) > 1:
        data["network"] = {"bandwidth": _network(hosts, network), "latency": NETWORK_LATENCY}
        assumed[f"the latency between nodes is assumed as {NETWORK_LATENCY}"] = None
        if network is None:
            assumed["the network is as fast as its slowest host's fastest port, by the port's own word"] = (
                None
            )
    fleet = Fleet.from_dict(data)
    return Detected(Fleet.from_dict(fleet.to_dict()), tuple(hosts), source, tuple(assumed))


def _choose(source: str, host_file: str | None) -> str:
    if source not in SOURCES:
        raise InputError(
            place="--from", reason=f"{source!r} is unknown", remedy=f"Choose from {', '.join(SOURCES)}"
        )
    if source != "auto":
        return source
    if host_file is not None:
        return "hosts"
    if under_mpi():
        return "mpi"
    if "SLURM_JOB_NODELIST" in os.environ and shutil.which("sinfo"):
        return "slurm"
    return "nvidia-smi" if shutil.which("nvidia-smi") else "jax"


def _type(seen: Seen, types: Mapping[str, str]) -> str:
    given = types.get(seen.name)
    found = given or inventory.catalogue_name(seen)
    if found is None:
        say = f"Say which with --type '{seen.name}=NAME' (names: `shardwright fleet catalogue`)"
        raise InputError(
            place="fleet detect",
            reason=f"'{seen.name}' is no type of the catalogue, or could be several",
            remedy=f"{say}, or measure it with `shardwright calibrate -o FLEET.yaml`",
        )
    return device_type(found, place=f"--type {seen.name}" if given else seen.name).name


def _node(host: Host, named: Mapping[Seen, str], assumed: dict[str, None]) -> dict[str, Any]:
    devices: list[dict[str, Any]] = []
    for seen in host.devices:
        device: dict[str, Any] = {"type": named[seen]}
        if seen.host_byte_per_s is not None:
            bandwidth = format_quantity(seen.host_byte_per_s, BANDWIDTH)
            device["host_link"] = {"bandwidth": bandwidth, "latency": NODE_LATENCY}
            assumed[f"host links are as fast as PCI Express allows, with a latency of {NODE_LATENCY}"] = None
        devices.append(device)
    node: dict[str, Any] = {"devices": devices}
    if len(devices) > 1:
        node["link"] = {"bandwidth": _inside(host, assumed), "latency": NODE_LATENCY}
    return node


def _inside(host: Host, assumed: dict[str, None]) -> str:
    """Bandwidth between the devices of a host."""
    lines = [inventory.nvlink_byte_per_s(seen, host.nvlinks) for seen in host.devices] if host.nvlinks else []
    if lines and all(lines):
        assumed[f"devices of a node talk over NVLink at its peak, with a latency of {NODE_LATENCY}"] = None
        return format_quantity(min(line for line in lines if line), BANDWIDTH)
    ports = [seen.host_byte_per_s for seen in host.devices]
    if all(ports):
        assumed[f"devices of a node talk over PCI Express at its peak, with a latency of {NODE_LATENCY}"] = (
            None
        )
        return format_quantity(min(port for port in ports if port), BANDWIDTH)
    assumed[f"the link between devices of a node is assumed as {NODE_BANDWIDTH}, {NODE_LATENCY}"] = None
    return NODE_BANDWIDTH


def _network(hosts: Sequence[Host], given: str | None) -> str:
    if given is not None:
        return given
    ports = [host.network_byte_per_s for host in hosts]
    if not all(ports):
        silent = next(host.name for host in hosts if not host.network_byte_per_s)
        raise InputError(
            place="fleet detect",
            reason=f"nothing says how fast the network of {silent} is",
            remedy="Say so with --network '10 Gbit/s', with your number",
        )
    return format_quantity(min(port for port in ports if port), BANDWIDTH)


# ---------------------------------------------------------------------------------------------------
# Where to look


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except FileNotFoundError:
        reason = "is not installed"
    except subprocess.TimeoutExpired:
        reason = "does not answer"
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip().splitlines()
        reason = f"failed: {said[-1] if said else f'exit code {error.returncode}'}"
    else:
        return done.stdout
    raise InputError(place=command[0], reason=reason, remedy="Look elsewhere with --from")


def _this_host() -> tuple[Host, ...]:
    devices = inventory.parse_nvidia_smi(_run(inventory.NVIDIA_QUERY))
    links = inventory.parse_topology(_run(("nvidia-smi", "topo", "-m"))) if len(devices) > 1 else 0
    return (Host(socket.gethostname(), devices, links, fastest_port()),)


def _of_jax() -> tuple[Host, ...]:
    import jax

    return (Host(socket.gethostname(), inventory.of_jax(jax.local_devices()), 0, fastest_port()),)


def _of_ranks() -> tuple[Host, ...]:
    """Every rank looks at its own machine; each machine counts once, in the order of ranks."""
    if not under_mpi():
        raise InputError(
            place="--from mpi",
            reason="this is no rank of an MPI job",
            remedy="Start it with mpiexec, one rank per machine is enough",
        )
    from shardwright.backends.mpi.moves import mpi

    here = _this_host() if shutil.which("nvidia-smi") else _of_jax()
    return merged(mpi().COMM_WORLD.allgather(here[0]))


def merged(found: Sequence[Host]) -> tuple[Host, ...]:
    """Hosts that ranks report, each once; ranks of one host that see different devices add them up."""
    hosts: dict[str, list[Host]] = {}
    for host in found:
        if host not in hosts.setdefault(host.name, []):
            hosts[host.name].append(host)
    return tuple(
        Host(
            name,
            tuple(seen for host in some for seen in host.devices),
            min(host.nvlinks for host in some),
            some[0].network_byte_per_s,
        )
        for name, some in hosts.items()
    )


def _of_slurm() -> tuple[Host, ...]:
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    nodes = inventory.expand_hosts(listed) if listed else ()
    return inventory.parse_sinfo(_run(inventory.SINFO), nodes)


def _from_host_file(path: str | None, device: str | None) -> tuple[Host, ...]:
    if path is None or device is None:
        raise InputError(
            place="--from hosts",
            reason="needs a host file, and what devices its hosts have",
            remedy="Pass --hosts FILE --device TYPE, or start it with mpiexec: ranks look for themselves",
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            place=path, reason=f"cannot be read: {error.strerror}", remedy="Name a host file"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(place=path, reason="is no text in UTF-8", remedy="Name a host file") from error
    name = device_type(device, place="--device").name
    # The catalogue's own name maps to itself.
    return tuple(Host(host, (Seen(name),) * slots) for host, slots in inventory.parse_host_file(text))


def fastest_port(root: Path = Path("/sys/class")) -> float | None:
    """Bytes per second of this machine's fastest network port that is up; None if none says."""

    def read(paths: Sequence[Path], parse: Callable[[str], float | None]) -> list[float]:
        found: list[float] = []
        for path in paths:
            try:
                speed = parse(path.read_text())
            except OSError:  # a port that is down refuses to be read
                continue
            if speed is not None:
                found.append(speed)
        return found

    ports = sorted(p for p in root.glob("net/*/speed") if p.parent.name != "lo")
    rates = sorted(root.glob("infiniband/*/ports/*/rate"))
    found = read(ports, inventory.parse_speed) + read(rates, inventory.parse_infiniband_rate)
    return max(found, default=None)
