"""A mixed fleet on one machine: processor quotas by cgroup, links by network namespaces. Needs root.

Every rank is capped, the fastest too, and pinned; ranks that share a core together have less than all of it.
Quotas have a short period, or a step would now and then fall between two of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 10_000
#: Part of a core that its ranks share; the rest is for the system.
USABLE = 0.92
#: TCP's between namespaces.
CONGESTION_CONTROL = "reno"
V1 = Path("/sys/fs/cgroup/cpu")
V2 = Path("/sys/fs/cgroup")


def why_not(shaped: bool) -> str:
    """Why the testbed cannot be set up here; "" if it can."""
    if os.geteuid() != 0:
        return "needs root (cgroups and network namespaces)"
    if not (V1 / "cpu.cfs_quota_us").exists() and not _v2():
        return "needs the cpu controller of cgroups"
    missing = [name for name in ("ip", "tc", "nsenter") if shaped and shutil.which(name) is None]
    return f"needs {' and '.join(missing)}" if missing else ""


def _v2() -> bool:
    control = V2 / "cgroup.subtree_control"
    return control.exists() and "cpu" in control.read_text().split()


def share_out(speeds: Sequence[float], cores: Sequence[int]) -> tuple[list[float], list[int]]:
    """Quotas in cores, in the ratio of `speeds`, and the core of every rank.

    The largest ranks are seated first, each on the core with most room, then all quotas are scaled so that no
    core is given out beyond `USABLE`.
    """
    load = dict.fromkeys(cores, 0.0)
    seats = [0] * len(speeds)
    for rank in sorted(range(len(speeds)), key=lambda r: -speeds[r]):
        seats[rank] = min(load, key=lambda core: load[core])
        load[seats[rank]] += speeds[rank]
    scale = USABLE / max(load.values())
    return [speed * scale for speed in speeds], seats


@contextmanager
def quotas(shares: Sequence[float]) -> Generator[list[Path]]:
    """One cgroup per rank with so many cores; their cgroup.procs files. Gone afterwards."""
    root = V1 if (V1 / "cpu.cfs_quota_us").exists() else V2
    folders = [root / f"shardwright-{os.getpid()}-{rank}" for rank in range(len(shares))]
    try:
        for folder, share in zip(folders, shares, strict=True):
            folder.mkdir()
            quota = round(share * PERIOD_US)
            if root == V1:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        yield [folder / "cgroup.procs" for folder in folders]
    finally:
        for folder in folders:
            if folder.exists():
                folder.rmdir()


@contextmanager
def links(nodes: Sequence[int], rate: str, folder: Path) -> Generator[tuple[list[str], Mapping[str, str]]]:
    """A network namespace per node, joined by a bridge, each sending at most `rate` (such as "1gbit").

    Args:
        nodes: ranks of every node.
        rate: of the links.
        folder: for a file.

    Gives:
        Arguments of mpiexec that start the ranks in their namespaces, and the environment that makes MPI use
        the links instead of shared memory between nodes.
    """
    name = f"sw{os.getpid() % 100_000}"

    def ip(*arguments: str) -> str:
        return subprocess.run(["ip", *arguments], check=True, text=True, stdout=subprocess.PIPE).stdout

    # What a run that was killed has left behind must not take the packets of this one.
    taken = ip("-4", "-o", "addr")
    bridge, subnet = f"{name}b", next(s for i in range(256) if f" {(s := f'10.83.{i}')}." not in taken)

    made: list[str] = []
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        ip("addr", "add", f"{subnet}.254/24", "dev", bridge)
        for i in range(len(nodes)):
            space, veth = f"{name}n{i}", f"{name}v{i}"
            ip("netns", "add", space)
            made.append(space)
            ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", veth, "master", bridge)
            ip("link", "set", veth, "up")
            ip("-n", space, "addr", "add", f"{subnet}.{i + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", space, "link", "set", device, "up")
            # Which every Linux has and grants; the machine's own choice would be part of what is measured.
            control = f"echo {CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
            subprocess.run(["ip", "netns", "exec", space, "sh", "-c", control], check=True)
            shaping = ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate]
            shaping += ["burst", "256kb", "latency", "50ms"]
            subprocess.run(["ip", "netns", "exec", space, "tc", *shaping], check=True)
        # Stands in for ssh: mpiexec calls it with a host, whose last number names the namespace. Not
        # `ip netns exec`, which hides the cgroups behind a /sys of its own.
        shell = folder / "into_namespace.sh"
        shell.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            "host=$1; shift\n"
            f'exec nsenter --net=/var/run/netns/{name}n$((${{host##*.}} - 1)) sh -c "$*"\n'
        )
        shell.chmod(0o755)
        hosts = ",".join(f"{subnet}.{i + 1}:{ranks}" for i, ranks in enumerate(nodes))
        arguments = ["-launcher", "ssh", "-launcher-exec", str(shell), "-iface", bridge, "-hosts", hosts]
        yield (
            arguments,
            {
                "UCX_TLS": "tcp,self",
                "UCX_NET_DEVICES": "eth0",
                "MPIR_CVAR_NOLOCAL": str(int(len(nodes) == sum(nodes))),
            },
        )
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False, stderr=subprocess.DEVNULL)
