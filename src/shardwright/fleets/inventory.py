"""What other tools say of devices and hosts, parsed: nvidia-smi, JAX, Slurm, MPI host files.

Only reading is done here; `shardwright.fleets.detect` runs the tools and makes a fleet of what they say.
Names are mapped to the catalogue's by what vendors call their cards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.backends.cards import JAX_TAKES
from shardwright.ir.errors import InputError


@dataclass(frozen=True, slots=True)
class Seen:
    """A device as a tool names it.

    Attributes:
        name: what the tool calls it.
        memory_bytes: as reported; None if the tool does not say.
        host_byte_per_s: peak of its PCIe connection by the standard; None if unknown.
    """

    name: str
    memory_bytes: int | None = None
    host_byte_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """A machine and its devices.

    Attributes:
        name: of the host.
        devices: in the order in which they are numbered there.
        nvlinks: NVLinks that every pair of its devices has at least; 0 for none.
        network_byte_per_s: the fastest of its network ports; None if unknown.
    """

    name: str
    devices: tuple[Seen, ...]
    nvlinks: int = 0
    network_byte_per_s: float | None = None


#: GB/s per lane and direction by PCI Express generation: 2.5, 5, 8, 16, 32 GT/s, less the line code.
_PCIE_GBYTE_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938}

#: Bytes per second of one NVLink and direction, by what the vendor's name contains (the cards' datasheets).
_NVLINK_BYTE_PER_S = (
    ("P100", 20e9),
    ("V100", 25e9),
    ("A100", 25e9),
    ("H100", 25e9),
    ("H200", 25e9),
    ("B200", 50e9),
)

# What vendors call their cards, special names first; GB tells variants apart where the name does not.
_NAMES: tuple[tuple[str, int | None, str], ...] = (
    (r"P100-PCIE-16GB", None, "P100-PCIE-16GB"),
    (r"\bP4\b", None, "P4"),
    (r"V100-PCIE-32GB", None, "V100-PCIE-32GB"),
    (r"V100-SXM\d?-16GB", None, "V100-SXM2-16GB"),
    (r"V100-SXM\d?-32GB", None, "V100-SXM2-32GB"),
    (r"\bT4\b", None, "T4"),
    (r"RTX 2080 Ti", None, "RTX-2080Ti"),
    (r"TITAN RTX", None, "Titan-RTX"),
    (r"RTX 3090(?! Ti)", None, "RTX-3090"),
    (r"RTX 4090(?! D)", None, "RTX-4090"),
    (r"RTX A6000", None, "RTX-A6000"),
    (r"\bA10\b", None, "A10"),
    (r"\bA40\b", None, "A40"),
    (r"A100[- ]PCIE-40GB", None, "A100-PCIE-40GB"),
    (r"A100-SXM\d?-40GB", None, "A100-SXM-40GB"),
    (r"A100[- ]80GB PCIe", None, "A100-PCIE-80GB"),
    (r"A100-PCIE-80GB", None, "A100-PCIE-80GB"),
    (r"A100-SXM\d?-80GB", None, "A100-SXM-80GB"),
    (r"\bL4\b", None, "L4"),
    (r"\bL40S\b", None, "L40S"),
    (r"H100 PCIe", None, "H100-PCIE-80GB"),
    (r"H100 80GB HBM3", None, "H100-SXM-80GB"),
    (r"\bGH200\b", 96, "GH200-96GB"),
    (r"\bH200(?! NVL)", None, "H200-SXM"),
    (r"\bGB200\b", None, "GB200"),
    (r"\bB200\b", None, "B200-SXM"),
    (r"MI250X", None, "MI250X"),
    (r"MI300X", None, "MI300X"),
)


def catalogue_name(seen: Seen) -> str | None:
    """The catalogue's name of a device; None where there is none, or more than one could be meant."""
    if seen.name in {name for _, _, name in _NAMES}:
        return seen.name
    for pattern, gigabytes, name in _NAMES:
        if re.search(pattern, seen.name, re.IGNORECASE):
            about = None if seen.memory_bytes is None else seen.memory_bytes / 1e9
            if gigabytes is None or (about is not None and abs(about - gigabytes) < 0.1 * gigabytes):
                return name
    return None


def nvlink_byte_per_s(seen: Seen, links: int) -> float | None:
    """Peak of so many NVLinks of a device, one direction; None if it is not known to have any."""
    for name, each in _NVLINK_BYTE_PER_S:
        if name in seen.name:
            return links * each
    return None


# ---------------------------------------------------------------------------------------------------
# nvidia-smi


#: What `nvidia-smi` is asked for; `parse_nvidia_smi` reads the answer.
NVIDIA_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,pcie.link.gen.max,pcie.link.width.max",
    "--format=csv,noheader,nounits",
)


def parse_nvidia_smi(text: str) -> tuple[Seen, ...]:
    """The GPUs that `NVIDIA_QUERY` lists.

    Raises:
        InputError: a line is not of that form.
    """
    found: list[Seen] = []
    for line in filter(str.strip, text.splitlines()):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 5 or not fields[0].isdigit():
            raise _unreadable("nvidia-smi", line)
        mebibytes = int(fields[2]) if fields[2].isdigit() else None
        memory_bytes = None if mebibytes is None else mebibytes << 20
        found.append(Seen(fields[1], memory_bytes, _pcie(fields[3], fields[4])))
    return tuple(found)


def _pcie(generation: str, width: str) -> float | None:
    """Bytes per second of a PCI Express connection; None where the driver does not say."""
    if not generation.isdigit() or not width.isdigit():
        return None
    lane = _PCIE_GBYTE_PER_S.get(int(generation))
    return None if lane is None or not int(width) else lane * int(width) * 1e9


def parse_topology(text: str) -> int:
    """NVLinks between the GPUs of `nvidia-smi topo -m`: the least that any pair has, 0 if one has none."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the heading is underlined
    lines = [line.split() for line in plain.splitlines() if line.strip()]
    heading = next((line for line in lines if line and line[0] == "GPU0"), [])
    count = sum(1 for word in heading if re.fullmatch(r"GPU\d+", word))
    rows = [line[1 : count + 1] for line in lines if re.fullmatch(r"GPU\d+", line[0]) and line != heading]
    links: list[int] = []
    for row in rows:
        for cell in row:
            if cell != "X":
                match = re.fullmatch(r"NV(\d+)", cell)
                links.append(int(match[1]) if match else 0)
    return min(links, default=0)


# ---------------------------------------------------------------------------------------------------
# JAX


def of_jax(devices: Sequence[object], environment: Mapping[str, str] = os.environ) -> tuple[Seen, ...]:
    """Devices that JAX lists (`jax.devices()`): their kind, and the memory where the platform says.

    Of a card, JAX says how much it may take, a part of it that `environment` can set; reported is the whole.
    """
    found: list[Seen] = []
    given = environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or environment.get("XLA_CLIENT_MEM_FRACTION")
    part = float(given) if given else JAX_TAKES
    for device in devices:
        kind = str(getattr(device, "device_kind", device))
        stats = getattr(device, "memory_stats", lambda: None)()
        limit = stats.get("bytes_limit") if isinstance(stats, Mapping) else None  # pyright: ignore[reportUnknownVariableType]
        whole = None
        if isinstance(limit, int):
            whole = round(limit / part) if getattr(device, "platform", "") in ("gpu", "cuda") else limit
        found.append(Seen(kind, whole))
    return tuple(found)


# ---------------------------------------------------------------------------------------------------
# Slurm


#: What Slurm is asked for; `parse_sinfo` reads the answer.
SINFO = ("sinfo", "--Node", "--noheader", "--format=%N %G")


def parse_sinfo(text: str, nodes: Sequence[str] = ()) -> tuple[Host, ...]:
    """Hosts and their GPUs as `SINFO` lists them: `gpu01 gpu:a100:4(S:0-1)`.

    Args:
        text: the answer; a node of several partitions is listed several times.
        nodes: only these, in this order; all if there are none.

    Raises:
        InputError: a line is not of that form, or a node is not listed.
    """
    found: dict[str, Host] = {}
    for line in filter(str.strip, text.splitlines()):
        fields = line.split()
        if len(fields) != 2:
            raise _unreadable("sinfo", line)
        for name in expand_hosts(fields[0]):
            found.setdefault(name, Host(name, tuple(_gres(fields[1]))))
    missing = [name for name in nodes if name not in found]
    if missing:
        raise InputError(
            place="sinfo",
            reason=f"does not list {', '.join(missing)}",
            remedy="Name nodes that `sinfo --Node` lists",
        )
    return tuple(found[name] for name in nodes or found)


def _gres(text: str) -> Iterator[Seen]:
    """Generic resources of a node: `gpu:a100:4(S:0-1),gpu:t4:2`, `gpu:8`, `(null)`."""
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        match = re.fullmatch(r"gpu(?::([A-Za-z][\w.-]*))?:(\d+)", part)
        if match:
            yield from [Seen(match[1] or "gpu")] * int(match[2])


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of Slurm's short form: `gpu[01-03,07],login1` has five.

    Raises:
        InputError: brackets do not match or a range runs backwards.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    if ",".join(parts) != text or not text:
        raise _unreadable("the list of nodes", text)
    return tuple(name for part in parts for name in _expanded(part))


def _expanded(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    for item in inside.split(","):
        low, dash, high = item.partition("-")
        if not low.isdigit() or (dash and (not high.isdigit() or int(high) < int(low))):
            raise _unreadable("the list of nodes", part)
        for number in range(int(low), int(high or low) + 1):
            for tail in _expanded(after) if after else ("",):
                yield f"{before}{number:0{len(low)}d}{tail}"


# ---------------------------------------------------------------------------------------------------
# MPI


def parse_host_file(text: str) -> tuple[tuple[str, int], ...]:
    """Hosts and how many ranks each takes, from a host file of MPICH (`host:4`) or Open MPI (`host slots=4`).

    Raises:
        InputError: a line is of neither form, or there is none.
    """
    found: dict[str, int] = {}
    for line in text.splitlines():
        plain = line.partition("#")[0].strip()
        if not plain:
            continue
        match = re.fullmatch(r"([\w.-]+)(?::(\d+)|\s+slots\s*=\s*(\d+)(?:\s+max_slots\s*=\s*\d+)?)?", plain)
        if match is None:
            raise _unreadable("the host file", line)
        found[match[1]] = found.get(match[1], 0) + int(match[2] or match[3] or 1)
    if not found:
        raise InputError(place="the host file", reason="names no host", remedy="Write one host a line")
    return tuple(found.items())


def parse_speed(text: str) -> float | None:
    """Bytes per second of a network port, from its `speed` file (Mbit/s); None where it does not say."""
    plain = text.strip()
    return int(plain) * 1e6 / 8 if plain.isdigit() and int(plain) else None


def parse_infiniband_rate(text: str) -> float | None:
    """Bytes per second of an InfiniBand port, from its `rate` file: `100 Gb/sec (4X EDR)`."""
    match = re.match(r"([\d.]+) Gb/sec", text.strip())
    return float(match[1]) * 1e9 / 8 if match else None


def _unreadable(what: str, line: str) -> InputError:
    return InputError(
        place=what,
        reason=f"has an unexpected line: {line.strip()!r}",
        remedy="Write the fleet file by hand, or report the line",
    )
