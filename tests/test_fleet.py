"""Fleets: the grammar of a fleet file, classes, and that writing loses nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from fleet_cases import JOINED, LAB, SLOW_CPU, load, solo
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import MOST_RAILS, TRANSPORTS, DeviceClass, Fleet, Link, Node
from shardwright.ir.errors import InputError

EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "fleets").glob("*.yaml"))


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
