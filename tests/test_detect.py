"""Finding devices: every parser on what its tool prints, and the fleets that come out of it."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from shardwright.backends.launch import RANK_VARIABLES, find_mpiexec, rank_environment
from shardwright.cli import main
from shardwright.cost.catalogue import catalogue, device_type
from shardwright.cost.fleet import Fleet
from shardwright.fleets import inventory
from shardwright.fleets.detect import assemble, detect, fastest_port, merged
from shardwright.fleets.inventory import Host, Seen
from shardwright.ir.errors import InputError

ROOT = Path(__file__).resolve().parent.parent

# What vendors' tools call the cards of the catalogue, and the memory they report (MiB).
CALLED = {
    "P100-PCIE-16GB": ("Tesla P100-PCIE-16GB", 16280),
    "P4": ("Tesla P4", 7611),
    "V100-PCIE-32GB": ("Tesla V100-PCIE-32GB", 32510),
    "V100-SXM2-16GB": ("Tesla V100-SXM2-16GB", 16160),
    "V100-SXM2-32GB": ("Tesla V100-SXM2-32GB", 32510),
    "T4": ("Tesla T4", 15360),
    "RTX-2080Ti": ("NVIDIA GeForce RTX 2080 Ti", 11264),
    "Titan-RTX": ("NVIDIA TITAN RTX", 24576),
    "RTX-3090": ("NVIDIA GeForce RTX 3090", 24576),
    "RTX-4090": ("NVIDIA GeForce RTX 4090", 24564),
    "RTX-A6000": ("NVIDIA RTX A6000", 49140),
    "A10": ("NVIDIA A10", 23028),
    "A40": ("NVIDIA A40", 46068),
    "A100-PCIE-40GB": ("NVIDIA A100-PCIE-40GB", 40960),
    "A100-SXM-40GB": ("NVIDIA A100-SXM4-40GB", 40960),
    "A100-PCIE-80GB": ("NVIDIA A100 80GB PCIe", 81920),
    "A100-SXM-80GB": ("NVIDIA A100-SXM4-80GB", 81920),
    "L4": ("NVIDIA L4", 23034),
    "L40S": ("NVIDIA L40S", 46068),
    "H100-PCIE-80GB": ("NVIDIA H100 PCIe", 81559),
    "H100-SXM-80GB": ("NVIDIA H100 80GB HBM3", 81559),
    "H200-SXM": ("NVIDIA H200", 143771),
    "GH200-96GB": ("NVIDIA GH200 480GB", 97871),
    "B200-SXM": ("NVIDIA B200", 183359),
    "GB200": ("NVIDIA GB200", 189471),
    "MI250X": ("AMD Instinct MI250X", None),
    "MI300X": ("AMD Instinct MI300X", None),
}
SMI = """\
0, Tesla V100-SXM2-16GB, 16160, 3, 16
1, Tesla V100-SXM2-16GB, 16160, 3, 16
2, Tesla T4, 15360, 3, 16
3, Tesla T4, [N/A], [N/A], [N/A]
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV2\tNV1\tPXB\t0-15\t0\t\tN/A
GPU1\tNV2\t X \tNV2\tPXB\t0-15\t0\t\tN/A
GPU2\tNV1\tNV2\t X \tSYS\t16-31\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
APART = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPHB\t0-31\t0
GPU1\tPHB\t X \t0-31\t0
"""
SINFO = """\
gpu01 gpu:a100:4(S:0-1)
gpu02 gpu:a100:4(S:0-1)
gpu02 gpu:a100:4(S:0-1)
gpu10 gpu:t4:2(S:0),mps:200
login1 (null)
old01 gpu:8
"""


# ---------------------------------------------------------------------------------------------------
# Parsers


def test_every_type_of_the_catalogue_is_recognised() -> None:
    assert CALLED.keys() == catalogue().keys()
    for name, (called, mebibytes) in CALLED.items():
        seen = Seen(called, None if mebibytes is None else mebibytes << 20)
        assert inventory.catalogue_name(seen) == name, called
        assert inventory.catalogue_name(Seen(name)) == name


@pytest.mark.parametrize(
    "called",
    ["cpu", "NVIDIA A100", "a100", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA H200 NVL", "NVIDIA GeForce GTX 1080",
     "NVIDIA RTX 4090 D", "gpu"],
)  # fmt: skip
def test_others_are_not_taken_for_them(called: str) -> None:
    assert inventory.catalogue_name(Seen(called)) is None


def test_grace_hopper_is_told_by_its_memory() -> None:
    assert inventory.catalogue_name(Seen("NVIDIA GH200 480GB", 97871 << 20)) == "GH200-96GB"
    assert inventory.catalogue_name(Seen("NVIDIA GH200 144G HBM3e", 147836 << 20)) is None


def test_nvidia_smi() -> None:
    found = inventory.parse_nvidia_smi(SMI)
    assert [seen.name for seen in found] == ["Tesla V100-SXM2-16GB"] * 2 + ["Tesla T4"] * 2
    assert found[0].memory_bytes == 16160 << 20
    assert found[0].host_byte_per_s == pytest.approx(15.76e9)
    assert found[3] == Seen("Tesla T4", None, None)
    assert inventory.parse_nvidia_smi("\n") == ()
    with pytest.raises(InputError, match="nvidia-smi: has an unexpected line: 'No devices were found'"):
        inventory.parse_nvidia_smi("No devices were found\n")


def test_topology() -> None:
    assert inventory.parse_topology(TOPOLOGY) == 1, "the weakest pair"
    assert inventory.parse_topology(TOPOLOGY.replace("NV1", "NV2")) == 2
    assert inventory.parse_topology(APART) == 0
    assert inventory.parse_topology("") == 0


@dataclass
class JaxDevice:
    device_kind: str
    limit: int | None = None
    platform: str = "cpu"

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.limit is None else {"bytes_limit": self.limit, "bytes_in_use": 0}


def test_jax() -> None:
    found = inventory.of_jax([JaxDevice("NVIDIA L4", 17 << 30), JaxDevice("cpu")])
    assert found == (Seen("NVIDIA L4", 17 << 30), Seen("cpu"))
    # JAX tells how much of a card it may take.
    for part, environment in ((0.75, {}), (0.3, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"})):
        (seen,) = inventory.of_jax([JaxDevice("A100-SXM4-80GB", int(part * (80 << 30)), "gpu")], environment)
        assert seen == Seen("A100-SXM4-80GB", 80 << 30)
        assert inventory.catalogue_name(seen) == "A100-SXM-80GB"


def test_sinfo() -> None:
    found = inventory.parse_sinfo(SINFO)
    assert {host.name: [seen.name for seen in host.devices] for host in found} == {
        "gpu01": ["a100"] * 4,
        "gpu02": ["a100"] * 4,
        "gpu10": ["t4"] * 2,
        "login1": [],
        "old01": ["gpu"] * 8,
    }
    assert [host.name for host in inventory.parse_sinfo(SINFO, ("gpu10", "gpu01"))] == ["gpu10", "gpu01"]
    with pytest.raises(InputError, match="does not list gpu77"):
        inventory.parse_sinfo(SINFO, ("gpu77",))
    with pytest.raises(InputError, match="unexpected line"):
        inventory.parse_sinfo("slurm_load_partitions: Unable to contact slurm controller\n")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("n[8-10]", ["n8", "n9", "n10"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("r[1]-x", ["r1-x"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert list(inventory.expand_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["", "a[", "a]", "a[3-1]", "a[x]", "a,,b", "a[1-]"])
def test_lists_of_hosts_that_are_none(text: str) -> None:
    with pytest.raises(InputError):
        inventory.expand_hosts(text)


def test_host_files() -> None:
    mpich = "# ours\nalpha:4\nbeta:2  # the old one\n\nalpha:1\ngamma\n"
    assert inventory.parse_host_file(mpich) == (("alpha", 5), ("beta", 2), ("gamma", 1))
    openmpi = "alpha slots=4 max_slots=8\nbeta slots = 2\n10.0.0.7\n"
    assert inventory.parse_host_file(openmpi) == (("alpha", 4), ("beta", 2), ("10.0.0.7", 1))
    for text in ("# nothing\n", "alpha beta\n", "alpha:x\n"):
        with pytest.raises(InputError):
            inventory.parse_host_file(text)


def test_ports(tmp_path: Path) -> None:
    assert inventory.parse_speed("10000\n") == 1.25e9
    assert inventory.parse_speed("-1\n") is None and inventory.parse_speed("") is None
    assert inventory.parse_infiniband_rate("100 Gb/sec (4X EDR)\n") == 12.5e9
    assert inventory.parse_infiniband_rate("") is None
    assert fastest_port(tmp_path) is None
    for name, text in (("net/eth0", "1000"), ("net/eth1", "25000"), ("net/lo", "99999"), ("net/down", "-1")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "speed").write_text(text)
    (tmp_path / "net/odd/speed").mkdir(parents=True)  # what cannot be read is passed over
    assert fastest_port(tmp_path) == 3.125e9
    (tmp_path / "infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (tmp_path / "infiniband/mlx5_0/ports/1/rate").write_text("200 Gb/sec (4X HDR)")
    assert fastest_port(tmp_path) == 25e9


# ---------------------------------------------------------------------------------------------------
# Fleets


def v100s(count: int, name: str = "a", **more: Any) -> Host:
    return Host(name, (Seen("Tesla V100-SXM2-16GB", None, 15.76e9),) * count, **more)


def test_a_fleet_of_one_host() -> None:
    found = assemble((v100s(4, nvlinks=2),), "nvidia-smi", name="lab")
    assert str(found.fleet) == "lab: 4 × V100-SXM2-16GB in 1 node"
    node = found.fleet.nodes[0]
    assert node.link is not None and node.link.bandwidth_byte_per_s == 50e9
    assert all(link is not None and link.bandwidth_byte_per_s == 15.76e9 for link in node.host_links)
    assert any("NVLink" in text for text in found.assumed)
    apart = assemble((v100s(2),), "nvidia-smi", name="lab").fleet.nodes[0].link
    assert apart is not None and apart.bandwidth_byte_per_s == 15.76e9
    unknown = assemble((Host("a", (Seen("Tesla T4"),) * 2),), "jax", name="lab")
    assert unknown.fleet.nodes[0].link is not None and any("assumed as 12 GB/s" in t for t in unknown.assumed)
    assert not unknown.fleet.nodes[0].host_links


def test_several_hosts_need_a_network() -> None:
    hosts = (v100s(2, "a", network_byte_per_s=12.5e9), v100s(1, "b", network_byte_per_s=1.25e9))
    found = assemble(hosts, "mpi", name="lab").fleet
    assert found.network is not None and found.network.bandwidth_byte_per_s == 1.25e9
    given = assemble(hosts, "mpi", name="lab", network="40 Gbit/s").fleet
    assert given.network is not None and given.network.bandwidth_byte_per_s == 5e9
    with pytest.raises(InputError, match=r"how fast the network of b is\. Say so with --network"):
        assemble((hosts[0], v100s(1, "b")), "mpi", name="lab")


def test_what_a_name_stands_for_can_be_said() -> None:
    hosts = inventory.parse_sinfo(SINFO, ("gpu01",))
    with pytest.raises(InputError, match=r"'a100' is no type.*--type 'a100=NAME'.*shardwright calibrate"):
        assemble(hosts, "slurm", name="lab")
    found = assemble(hosts, "slurm", name="lab", types={"a100": "A100-40GB"})
    assert found.fleet.devices[0].type == device_type("A100-SXM-40GB", place="")
    with pytest.raises(InputError, match="--type a100: 'A1000' is not in the catalogue"):
        assemble(hosts, "slurm", name="lab", types={"a100": "A1000"})


def test_ranks_of_one_host_are_one_node() -> None:
    a, b = v100s(2, "a", nvlinks=2), Host("b", (Seen("Tesla T4"),))
    assert merged((a, a, b, b)) == (a, b)
    one, other = Host("a", (Seen("Tesla T4", 1),)), Host("a", (Seen("Tesla T4", 2),))
    assert [len(host.devices) for host in merged((one, other))] == [2], "each rank sees a card of its own"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a tool on the path that prints something; there are no others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in (*RANK_VARIABLES, "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)

    def add(name: str, script: str) -> None:
        (folder / name).write_text(f"#!{sys.executable} -S\nimport sys\n{script}\n")
        (folder / name).chmod(0o755)

    return add


SMI_SCRIPT = f"print({TOPOLOGY!r} if 'topo' in sys.argv else {SMI[: SMI.index('2, ')]!r})"


def test_nvidia_smi_is_run(tools: Callable[[str, str], None]) -> None:
    tools("nvidia-smi", SMI_SCRIPT)
    found = detect()
    assert found.source == "nvidia-smi" and str(found.fleet) == "detected: 2 × V100-SXM2-16GB in 1 node"
    assert found.hosts[0].name == socket.gethostname() and found.hosts[0].nvlinks == 1


def test_a_tool_that_fails_or_is_not_there(tools: Callable[[str, str], None]) -> None:
    with pytest.raises(InputError, match=r"nvidia-smi: is not installed\. Look elsewhere with --from"):
        detect("nvidia-smi")
    tools("nvidia-smi", "sys.exit('NVIDIA-SMI has failed')")
    with pytest.raises(InputError, match="nvidia-smi: failed: NVIDIA-SMI has failed"):
        detect("nvidia-smi")
    with pytest.raises(InputError, match="this is no rank"):
        detect("mpi")


def test_a_slurm_job(tools: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    tools("sinfo", f"print({SINFO!r})")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[01-02],login1")
    found = detect(types={"a100": "A100-40GB"}, network="100 Gbit/s")
    assert found.source == "slurm" and [host.name for host in found.hosts] == ["gpu01", "gpu02"]
    assert str(found.fleet) == "detected: 8 × A100-SXM-40GB in 2 nodes"


def test_jax_lists_what_is_here(tools: Callable[[str, str], None]) -> None:
    with pytest.raises(InputError, match="'cpu' is no type of the catalogue"):
        detect()
    assert len(detect(types={"cpu": "T4"}).fleet.devices) >= 1


def test_ranks_look_for_themselves(tmp_path: Path) -> None:
    """Two ranks on this machine are one node."""
    command = [find_mpiexec(), "-n", "2", sys.executable, "-m", "shardwright", "fleet", "detect", "--json"]
    done = subprocess.run(
        [*command, "--type", "cpu=T4"],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300, env=rank_environment(2),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["source"] == "mpi" and [h["name"] for h in found["hosts"]] == [socket.gethostname()]


# ---------------------------------------------------------------------------------------------------
# The command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("fleet", *arguments))


def test_detect_writes_a_fleet_file_that_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("alpha slots=4\nbeta slots=2\n")
    where = tmp_path / "lab.yaml"
    options = (
        "--hosts",
        str(tmp_path / "hosts"),
        "--device",
        "T4",
        "--network",
        "10 Gbit/s",
        "--name",
        "lab",
    )
    shown = run("detect", *options, "-o", str(where))
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "assumed, not measured:" in shown.stdout and shown.stdout.endswith(f"written to {where}\n")
    fleet = Fleet.load(where)
    assert str(fleet) == "lab: 6 × T4 in 2 nodes"
    text = where.read_text()
    assert "#   n1 is beta" in text and "nothing here was measured" in text and "# - the latency" in text
    printed = run("detect", *options)
    assert printed.stdout == text and yaml.safe_load(printed.stdout)["name"] == "lab"
    data = json.loads(run("detect", *options, "--json").stdout)
    assert Fleet.from_dict(data["fleet"]) == fleet and data["source"] == "hosts" and data["assumed"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hosts", "lab.yaml"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--from", "hosts"), "needs a host file"),
        (("--hosts", "none", "--device", "T4"), "none: cannot be read"),
        (("--hosts", "none", "--device", "T5"), "cannot be read"),
        (("--type", "a100"), "is no FOUND=TYPE"),
        (("-o", "none/fleet.yaml"), "its folder cannot be written"),
    ],
)
def test_detect_refuses(options: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("detect", *options)
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1


def test_show() -> None:
    path = str(ROOT / "examples/fleets/hap_testbed.yaml")
    shown = run("show", path).stdout
    for wanted in ("16 × V100-SXM2-16GB + 48", "698 TFLOP/s in float32", "954 GiB", "n2 … n7"):
        assert wanted in shown
    assert "narrowest link  the network between the nodes, 1.3 GB/s, 30 µs" in shown
    data = json.loads(run("show", path, "--json").stdout)
    assert data["narrowest"]["bandwidth_byte_per_s"] == 1.3e9 and len(data["devices"]) == 64
    assert Fleet.from_dict(data["fleet"]) == Fleet.load(path)
    assert run("show", "none.yaml").exit_code == 2


def test_catalogue() -> None:
    shown = run("catalogue").stdout
    assert all(name in shown for name in catalogue())
    data = json.loads(run("catalogue", "--json").stdout)["types"]
    assert [entry["name"] for entry in data] == list(catalogue())
    assert "A100-40GB" in next(e for e in data if e["name"] == "A100-SXM-40GB")["aliases"]
