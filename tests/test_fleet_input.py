"""Every way to get a fleet file wrong is one clear error."""

from pathlib import Path

import pytest
from fleet_cases import JOINED, LAB, SLOW_CPU, load, solo

from shardwright.cost.document import DEEPEST_NESTING, LARGEST_FILE_BYTES
from shardwright.cost.fleet import MOST_DEVICES, Fleet
from shardwright.ir.errors import InputError

LINK = "link: {bandwidth: 16 GB/s, latency: 5 us}"
PAIR = "{type: T4, count: 2}"


@pytest.mark.parametrize(
    ("text", "place", "reason", "remedy"),
    [
        # types
        (solo("V100-16G"), "nodes[0].devices.type", "'V100-16G' is not in the catalogue", "V100-16GB"),
        (solo("a100"), "nodes[0].devices.type", "is not in the catalogue", "A100-40GB"),
        (solo("zx-spectrum"), "nodes[0].devices.type", "is not in the catalogue", "{name, flops,"),
        (solo("[T4]"), "nodes[0].devices.type", "is a list, not text", "Write text"),
        (solo("4090"), "nodes[0].devices.type", "is the number 4090, not text", "quotes"),
        (solo("''"), "nodes[0].devices.type", "is the text ''", "printable"),
        (solo("{name: x}"), "nodes[0].devices.type", "lacks the keys 'flops', 'memory_bandwidth'", "Add"),
        (
            solo(SLOW_CPU.replace("memory: ", "memry: ")),
            "nodes[0].devices.type.memry",
            "is an unknown key",
            "Did you mean 'memory'?",
        ),
        (
            solo(SLOW_CPU.replace("20 GFLOP/s", "20 GFLOPS")),
            "nodes[0].devices.type.flops",
            "'GFLOPS' is not a unit of compute rate",
            "Did you mean 'GFLOP/s'?",
        ),
        (solo(SLOW_CPU.replace("4 GB", "0 GB")), "nodes[0].devices.type.memory", "is zero", "above zero"),
        (
            solo(SLOW_CPU.replace("4 GB", "1e-3 B")),
            "nodes[0].devices.type.memory",
            "less than a byte",
            "16 GB",
        ),
        (
            solo(SLOW_CPU.replace("}", ", matmul_efficiency: 1.5}")),
            "nodes[0].devices.type.matmul_efficiency",
            "is the number 1.5",
            "at most 1",
        ),
        (
            solo(SLOW_CPU.replace("}", ", tensor_efficiency: .nan}")),
            "nodes[0].devices.type.tensor_efficiency",
            "not a finite number",
            "at most 1",
        ),
        (
            solo(SLOW_CPU.replace("}", ", measured: 1}")),
            "nodes[0].devices.type.measured",
            "number 1",
            "true or false",
        ),
        (
            f"name: x\nnodes: [{{devices: [{{type: slow-cpu}}, {{type: {SLOW_CPU}}}], {LINK}}}]".replace(
                "slow-cpu", "T4"
            ),
            "nodes",
            "two different types as 'T4'",
            "a name of its own",
        ),
        # counts
        (LAB.replace("count: 8", "count: 0", 1), "nodes[0].devices.count", "is zero", "from 1 to"),
        (LAB.replace("count: 6", "count: -6"), "nodes[1].count", "is negative", "from 1 to"),
        (LAB.replace("count: 6", "count: 1.5"), "nodes[1].count", "is the number 1.5", "a whole number"),
        (LAB.replace("count: 6", "count: six"), "nodes[1].count", "is the text 'six'", "a whole number"),
        (LAB.replace("count: 6", "count: yes"), "nodes[1].count", "is true", "a whole number"),
        (LAB.replace("count: 6", "count:"), "nodes[1].count", "is empty", "a whole number"),
        (
            LAB.replace("count: 6", "count: 1" + "0" * 30),
            "nodes[1].count",
            "is too large",
            f"to {MOST_DEVICES}",
        ),
        (LAB.replace("count: 6", "count: 4000"), "nodes[1].devices", "beyond", f"at most {MOST_DEVICES}"),
        # links
        (LAB.replace("130 GB/s", "-1 GB/s"), "nodes[0].link.bandwidth", "is negative", "above zero"),
        (LAB.replace("130 GB/s", "0 GB/s"), "nodes[0].link.bandwidth", "is zero", "above zero"),
        (LAB.replace("130 GB/s", "1e-320 B/s"), "nodes[0].link.bandwidth", "is too small", "from 1e-30 to"),
        (
            solo(SLOW_CPU.replace("4 GB", "1e300 B")),
            "nodes[0].devices.type.memory",
            "is too large",
            "1e+30 B",
        ),
        (LAB.replace("130 GB/s", "130"), "nodes[0].link.bandwidth", "130 has no unit", "known units: B/s"),
        (LAB.replace("130 GB/s", ".nan"), "nodes[0].link.bandwidth", "not a finite number", "finite"),
        (LAB.replace("130 GB/s", "nan GB/s"), "nodes[0].link.bandwidth", "not a finite number", "finite"),
        (LAB.replace("130 GB/s", "130 GB"), "nodes[0].link.bandwidth", "not a unit of bandwidth", "'GB/s'"),
        (LAB.replace("30 us", "inf us"), "network.latency", "not a finite number", "finite"),
        (LAB.replace("30 us", "30 furlongs"), "network.latency", "not a unit of duration", "s, ms, us"),
        (
            LAB.replace(", latency: 5 us", ""),
            "nodes[0].link",
            "lacks the key 'latency'",
            "'bandwidth', 'latency'",
        ),
        (LAB.replace("5 us", "5 us, latncy: 1 us"), "nodes[0].link.latncy", "unknown key", "'latency'"),
        (f"name: x\nnodes: [{{devices: {PAIR}}}]", "nodes[0]", "lacks the key 'link'", "Add link:"),
        (LAB.partition("network")[0], "", "lacks the key 'network'", "Add network:"),
        (JOINED.replace("nccl", "ncl"), "transport", "'ncl' is not known here", "Did you mean 'nccl'?"),
        (JOINED.replace("nccl", "4"), "transport", "not text", "Write text"),
        (JOINED.replace("1.5", "0.5"), "oversubscription", "is the number 0.5", "from 1 to"),
        (JOINED.replace("1.5", ".inf"), "oversubscription", "not a finite number", "from 1 to"),
        (JOINED.replace("1.5", "two"), "oversubscription", "the text 'two'", "from 1 to"),
        (LAB.replace("count: 2,", "count: 2, rails: 0,"), "nodes[0].rails", "is zero", "1 to 64"),
        (LAB.replace("count: 2,", "count: 2, uplink: 3,"), "nodes[0].uplink", "not a mapping", "bandwidth"),
        (
            LAB.replace("{bandwidth: 10.4 Gbit/s, latency: 30 us}", "10 Gbit/s"),
            "network",
            "not a mapping",
            "'latency'",
        ),
        # structure
        ("name: x\nnodes: []", "nodes", "is empty", "at least one"),
        ("name: x\nnodes: [{devices: []}]", "nodes[0].devices", "is empty", "at least one"),
        ("name: x\nnodes:", "nodes", "is empty, not a list", "Write a list"),
        ("name: x\nnodes: {devices: T4}", "nodes", "is a mapping, not a list", "Write a list"),
        (
            "name: x\nnodes: [{devices: {type: {name: a, flops: 1 GFLOP/s, memory_bandwidth: 1 GB/s, "
            "memory: 1 GB, class_efficiencies: []}}}]",
            "nodes[0].devices.type.class_efficiencies",
            "not a mapping",
            "the keys 'product'",
        ),
        (
            "name: x\nnodes: [{devices: {type: {name: a, flops: 1 GFLOP/s, memory_bandwidth: 1 GB/s, "
            "memory: 1 GB, host_link: {bandwidth: 1 GB/s, latency: 1 us}}}}]",
            "nodes[0].devices.type.host_link",
            "unknown key",
            "It goes beside 'type', not into it",
        ),
        ("name: x\nnodes: [T4]", "nodes[0]", "not a mapping", "'devices'"),
        ("name: x\nnodes: [{devices: T4}]", "nodes[0].devices", "not a mapping", "'type'"),
        ("name: x", "", "lacks the key 'nodes'", "Add 'nodes'"),
        ("nodes: [{devices: {type: T4}}]", "", "lacks the key 'name'", "Add 'name'"),
        (LAB.replace("name: lab", "name: 7"), "name", "is the number 7", "quotes"),
        (LAB.replace("network", "netwrok"), "netwrok", "is an unknown key", "Did you mean 'network'?"),
        (
            LAB.replace("devices", "device", 1),
            "nodes[0].device",
            "is an unknown key",
            "Did you mean 'devices'?",
        ),
        ("7: x", "7", "is an unknown key", "'name', 'nodes', 'network'"),
        ("- a", "", "is a list, not a mapping", "'name', 'nodes'"),
        ("T4", "", "is the text 'T4', not a mapping", "'name', 'nodes'"),
        # YAML
        ("", "", "is empty", "Write a document"),
        ("# nothing", "", "is empty", "Write a document"),
        ("name: [", "line 1", "is not valid YAML", "Correct the syntax"),
        ("name: x\n\tnodes: y", "line 2", "is not valid YAML", "Correct the syntax"),
        ("name: \x07", "", "is not valid YAML", "Correct the syntax"),
        ("name: x\n---\nname: y", "line 2", "second document", "one document"),
        ("name: x\nname: y", "line 2", "repeats the key 'name'", "Keep one"),
        ("name: x\nnodes: [{count: 010}]", "line 2", "'010' is no decimal number", "zeros in front"),
        ("name: x\nnodes: [{count: 1:30}]", "line 2", "'1:30' is no decimal number", "colons"),
        ("? [a]\n: b", "line 1", "has a key that is no text", "a word"),
        ("name: !!python/object/apply:os.system [ls]", "line 1", "uses the tag", "without tags"),
        ("name: !!str 7", "line 1", "uses the tag", "without tags"),
        ("a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]", "line 1", "uses the anchor &a", "`count`"),
        ("name: *a", "line 1", "uses the alias *a", "`count`"),
        ("[" * (DEEPEST_NESTING + 1), "line 1", f"more than {DEEPEST_NESTING} deep", "Flatten"),
        ("[" * 50_000, "line 1", f"more than {DEEPEST_NESTING} deep", "Flatten"),
        ('"a\\nb": x', r"'a\nb'", "is an unknown key", "'name'"),
        (LAB.replace("130 GB/s", '"130 G\\n"'), "nodes[0].link.bandwidth", "'G' is not a unit", "GB/s"),
        (LAB.replace("130 GB/s", '"13 G\\nB"'), "nodes[0].link.bandwidth", r"'G\nB' is not a unit", "GB/s"),
        ("<<: {name: x}", "<<", "is an unknown key", "'name'"),
        ("#" * (LARGEST_FILE_BYTES + 1), "", "is larger than", "`count`"),
        (b"name: \xff", "", "is not UTF-8", "UTF-8"),
    ],
)
def test_bad_input_is_one_clear_error(
    tmp_path: Path, text: str | bytes, place: str, reason: str, remedy: str
) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    error = caught.value
    assert error.place == f"{tmp_path / 'lab.yaml'}{': ' if place else ''}{place}"
    assert reason in error.reason
    assert remedy in error.remedy
    assert "\n" not in str(error)


def test_a_file_that_cannot_be_read_is_an_input_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.yaml", tmp_path / "a\0b"):
        with pytest.raises(InputError, match="cannot be read"):
            Fleet.load(path)


@pytest.mark.parametrize(
    ("data", "place", "reason"),
    [
        (
            {"name": "x", "nodes": [{"devices": {"type": "T4", "count": float("nan")}}]},
            "nodes[0].devices.count",
            "finite",
        ),
        ({"name": "x", "nodes": [{"devices": {"type": object()}}]}, "nodes[0].devices.type", "type object"),
        ({"name": "x", "nodes": "T4"}, "nodes", "is the text 'T4'"),
        ({"name": "x\n", "nodes": []}, "nodes", "is empty"),
        ({3: "x"}, "3", "unknown key"),
    ],
)
def test_bad_data_is_one_clear_error(data: dict[str, object], place: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        Fleet.from_dict(data)
    assert caught.value.place == f"fleet: {place}"
    assert reason in caught.value.reason
