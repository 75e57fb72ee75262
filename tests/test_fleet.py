"""Fleets: the grammar of a fleet file, every way to get it wrong, classes, and that writing loses nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.device import DeviceType
from shardwright.cost.document import DEEPEST_NESTING, LARGEST_FILE_BYTES
from shardwright.cost.fleet import MOST_DEVICES, MOST_RAILS, TRANSPORTS, DeviceClass, Fleet, Link, Node
from shardwright.ir.errors import InputError

EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "fleets").glob("*.yaml"))

LAB = """
name: lab
nodes:
  - {count: 2, devices: {type: V100-16GB, count: 8}, link: {bandwidth: 130 GB/s, latency: 5 us}}
  - {count: 6, devices: {type: P100-16GB, count: 8}, link: {bandwidth: 16 GB/s, latency: 10 us}}
network: {bandwidth: 10.4 Gbit/s, latency: 30 us}      # between nodes, per node
"""
SLOW_CPU = "{name: slow-cpu, flops: 20 GFLOP/s, memory_bandwidth: 8 GB/s, memory: 4 GB}"


def load(tmp_path: Path, text: str | bytes) -> Fleet:
    path = tmp_path / "lab.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Fleet.load(path)


def solo(type_text: str) -> str:
    """A fleet of one device."""
    return f"name: solo\nnodes: [{{devices: {{type: {type_text}}}}}]"


def test_reads_the_lab(tmp_path: Path) -> None:
    fleet = load(tmp_path, LAB)
    assert fleet.name == "lab"
    assert [node.name for node in fleet.nodes] == [f"n{i}" for i in range(8)]
    assert len(fleet.devices) == 64
    assert [device.index for device in fleet.devices] == list(range(64))
    third = fleet.devices[2 * 8 + 3]
    assert (third.name, third.node, third.type.name) == ("n2.d3", 2, "P100-PCIE-16GB")
    assert fleet.nodes[0].link == Link(130e9, 5e-6)
    assert fleet.network == Link(1.3e9, 30e-6)
    assert str(fleet) == "lab: 16 × V100-SXM2-16GB + 48 × P100-PCIE-16GB in 8 nodes"


def test_reads_inline_types(tmp_path: Path) -> None:
    (device,) = load(tmp_path, solo(SLOW_CPU)).devices
    assert device.type == DeviceType("slow-cpu", 20e9, 8e9, 4_000_000_000)
    assert device.type.flop_rate("float32") == (20e9, None)


def test_count_defaults_to_one_and_links_may_be_absent_where_nothing_is_joined(tmp_path: Path) -> None:
    fleet = load(tmp_path, solo("T4"))
    assert fleet.nodes[0].link is None
    assert fleet.network is None


def test_classes_are_devices_of_one_type_in_one_kind_of_node() -> None:
    link = {"bandwidth": "16 GB/s", "latency": "5 us"}
    pair = [{"type": "T4"}, {"type": "P4"}]
    fleet = Fleet.from_dict(
        {
            "name": "classes",
            "nodes": [
                {"devices": pair, "link": link},
                {"devices": {"type": "T4", "count": 2}, "link": link},
                {"devices": pair[::-1], "link": link},
                {"devices": pair, "link": link | {"latency": "6 us"}},
            ],
            "network": link,
        }
    )
    t4, p4 = (device.type for device in fleet.devices[:2])
    assert fleet.classes == (
        DeviceClass(0, t4, (0, 5)),
        DeviceClass(1, p4, (1, 4)),
        DeviceClass(2, t4, (2, 3)),
        DeviceClass(3, t4, (6,)),
        DeviceClass(4, p4, (7,)),
    )


JOINED = (
    LAB
    + """
oversubscription: 1.5
transport: nccl
"""
)


def test_reads_how_nodes_are_joined(tmp_path: Path) -> None:
    text = """
    name: joined
    nodes:
      - count: 2
        devices: [{type: T4, count: 2}, {type: P4, host_link: {bandwidth: 3 GB/s, latency: 9 us}}]
        link: {bandwidth: 12 GB/s, latency: 5 us}
        host_link: {bandwidth: 6 GB/s, latency: 8 us}
        uplink: {bandwidth: 100 Gbit/s, latency: 3 us}
        rails: 2
      - devices: {type: T4}
    network: {bandwidth: 10 Gbit/s, latency: 30 us}
    """
    fleet = load(tmp_path, text)
    first, _, last = fleet.nodes
    own, of_node = Link(3e9, 9e-6), Link(6e9, 8e-6)
    assert (first.uplink, first.rails, first.host_links) == (Link(12.5e9, 3e-6), 2, (of_node, of_node, own))
    assert (last.uplink, last.rails, last.host_links) == (None, 1, ())
    assert [device.host_link for device in fleet.devices[:3]] == [of_node, of_node, own]
    assert (fleet.oversubscription, fleet.transport) == (1.0, "host-mpi")
    assert [len(c.members) for c in fleet.classes] == [4, 2, 1]
    joined = load(tmp_path, JOINED)
    assert (joined.oversubscription, joined.transport) == (1.5, "nccl")
    assert joined.fingerprint() != load(tmp_path, LAB).fingerprint()


def test_uplinks_of_all_nodes_stand_for_the_network(tmp_path: Path) -> None:
    fleet = load(
        tmp_path,
        LAB.partition("network")[0].replace("link:", "uplink: {bandwidth: 1 GB/s, latency: 9 us}, link:"),
    )
    assert fleet.network is None and all(node.uplink == Link(1e9, 9e-6) for node in fleet.nodes)


def test_old_fleets_keep_their_fingerprint(tmp_path: Path) -> None:
    """Plan files carry it: what has its default must not enter."""
    assert set(load(tmp_path, LAB).to_dict()) == {"name", "nodes", "network"}
    assert load(tmp_path, LAB).to_dict()["nodes"][0].keys() == {"count", "devices", "link"}  # type: ignore[index]


@pytest.mark.parametrize("what", ["uplink", "rails", "host_links", "link", "devices"])
def test_devices_of_a_class_are_joined_alike(what: str) -> None:
    link, other = Link(1e9, 1e-5), Link(1e9, 2e-5)
    kind, second = (Fleet.from_dict(solo_of(name)).devices[0].type for name in ("T4", "P4"))
    plain = Node("n0", (kind, kind), link)
    changed = {
        "uplink": replace(plain, uplink=other),
        "rails": replace(plain, rails=2),
        "host_links": replace(plain, host_links=(link, link)),
        "link": replace(plain, link=other),
        "devices": replace(plain, devices=(kind, second)),
    }[what]
    assert len(Fleet("same", (plain, replace(plain, name="n1")), link).classes) == 1
    assert Fleet("other", (plain, changed), link).classes[0].members == (0, 1)


def solo_of(name: str) -> dict[str, object]:
    return {"name": "solo", "nodes": [{"devices": {"type": name}}]}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_fleets_load_and_round_trip(path: Path) -> None:
    fleet = Fleet.load(path)
    assert Fleet.from_dict(fleet.to_dict()) == fleet
    assert sorted(i for group in fleet.classes for i in group.members) == [d.index for d in fleet.devices]
    assert len({device.name for device in fleet.devices}) == len(fleet.devices)


def test_fingerprint_follows_the_numbers_behind_a_name() -> None:
    def fleet(type_or_name: object) -> Fleet:
        return Fleet.from_dict({"name": "one", "nodes": [{"devices": {"type": type_or_name}}]})

    t4 = fleet("T4").devices[0].type
    assert fleet("T4").fingerprint() == fleet(t4.to_dict()).fingerprint()
    assert fleet("T4").fingerprint() != fleet(t4.to_dict() | {"launch": "6 us"}).fingerprint()
    assert len(fleet("T4").fingerprint()) == 64


names = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=12)
amounts = st.floats(min_value=1e-12, max_value=1e18)
fractions = st.floats(min_value=0, max_value=1, exclude_min=True)
rates = st.none() | amounts
links = st.builds(Link, amounts, amounts)
types = st.builds(
    DeviceType,
    name=names,
    float32_flop_per_s=amounts,
    memory_bandwidth_byte_per_s=amounts,
    memory_bytes=st.integers(1, 2**53),
    tf32_flop_per_s=rates,
    float16_flop_per_s=rates,
    bfloat16_flop_per_s=rates,
    float64_flop_per_s=rates,
    launch_s=amounts,
    matmul_efficiency=fractions,
    tensor_efficiency=fractions,
    bandwidth_efficiency=fractions,
    measured=st.booleans(),
    source=names,
)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    known = draw(st.lists(types, min_size=1, max_size=3, unique_by=lambda kind: kind.name))
    boxes = st.lists(st.sampled_from(known), min_size=1, max_size=4).map(tuple)
    kinds = [
        Node("", devices, draw(links), draw(st.none() | links), draw(st.integers(1, MOST_RAILS)), hosts)
        for devices in draw(st.lists(boxes, min_size=1, max_size=3))
        for hosts in [tuple(draw(st.none() | links) for _ in devices)]
    ]
    kinds = [node if any(node.host_links) else replace(node, host_links=()) for node in kinds]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    nodes = tuple(replace(node, name=f"n{i}") for i, node in enumerate(chosen))
    narrowing = draw(st.floats(1, 100))
    return Fleet(draw(names), nodes, draw(links), narrowing, draw(st.sampled_from(TRANSPORTS)))


@given(fleets())
def test_what_is_written_reads_back(fleet: Fleet) -> None:
    again = Fleet.from_dict(fleet.to_dict())
    assert again == fleet
    assert again.fingerprint() == fleet.fingerprint()


old_keys = ("name", "nodes", "network", "count", "devices", "link", "type", "bandwidth", "latency")
new_keys = ("uplink", "rails", "host_link", "oversubscription", "transport")
keys = st.sampled_from(old_keys + new_keys)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("1 GB/s"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


@given(plain)
def test_any_data_is_a_fleet_or_one_input_error(data: object) -> None:
    try:
        fleet = Fleet.from_dict(data)  # type: ignore[arg-type]
    except InputError as error:
        problem = error
    else:
        assert fleet.devices
        return
    assert problem.place.startswith("fleet")
    assert problem.reason
    assert problem.remedy


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
