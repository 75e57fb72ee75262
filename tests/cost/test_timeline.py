"""The timeline: closed forms, a naive twin, laws over random schedules and programs, and its trace events."""

import itertools
import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from greedy import build
from hypothesis import given
from hypothesis import strategies as st
from steps import STEPS, starts

from shardwright.cost.bill import Item, Shares, bill, bill_as_run, seconds
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import ShareCost
from shardwright.cost.timeline import Timeline, predict, timeline
from shardwright.cost.trace_events import COMPUTE, EXCHANGE, trace_events
from shardwright.ir.graph import Graph, TensorType
from shardwright.ir.placement import Partial, R
from shardwright.ir.program import Move
from shardwright.ir.trace import trace

SUM = Partial("sum")
LATENCY_S, BYTE_PER_S = 1e-4, 1e8


@cache
def model_of(devices: int) -> CostModel:
    def kind(speed: int) -> dict[str, Any]:
        flops, bandwidth = f"{20 * speed} GFLOP/s", f"{10 * speed} GB/s"
        return {"name": f"cpu{speed}", "flops": flops, "memory_bandwidth": bandwidth, "memory": "4 GB"}

    link = {"bandwidth": "100 MB/s", "latency": "100 us"}
    types = [{"type": kind(1 + device % 2)} for device in range(devices)]
    return CostModel(Fleet.from_dict({"name": "test", "nodes": [{"devices": types, "link": link}]}))


@cache
def two_nodes() -> CostModel:
    """Three devices of two kinds, two of them in one node: every strategy makes sense here."""
    fleet, link = model_of(3).fleet, {"bandwidth": "100 MB/s", "latency": "100 us"}
    types = [{"type": kind.to_dict()} for kind in fleet.nodes[0].devices]
    parts = [{"devices": some, "link": link} for some in (types[:2], types[2:])]
    return CostModel(Fleet.from_dict({"name": "test", "nodes": parts, "network": link}))


def kernel(
    label: str, times: Sequence[float], reads: Sequence[int], writes: int, weight: float = 1.0
) -> Item:
    """A kernel with these seconds on the two classes."""
    return Item(label, ShareCost.fixed(times), weight, None, False, tuple(reads), (writes,))


def all_reduce(model: CostModel, nbytes: int, read: int, writes: int, weight: float = 1.0) -> Item:
    cost = model.move("all_reduce", "ring", TensorType((nbytes,), "uint8"), SUM, R)
    move = Move("all_reduce", read, SUM, R, "ring")
    reads = (read,) if read >= 0 else ()
    return Item("all_reduce.ring", cost, weight, None, True, reads, (writes,), move, nbytes)


def reduce_s(nbytes: int) -> float:
    """Two devices on a ring."""
    return 2 * (LATENCY_S + nbytes / 2 / BYTE_PER_S)


EVEN = (0.5, 0.5)


def backward(model: CostModel, sizes: Sequence[int]) -> list[Item]:
    """A kernel of 5 and 4 ms for each gradient, then for each an all-reduce and an update of 1 ms."""
    count = len(sizes)
    grads = [kernel(f"grad{i}", (5e-3, 4e-3), (), i) for i in range(count)]
    tail: list[Item] = []
    for i, nbytes in enumerate(sizes):
        tail.append(all_reduce(model, nbytes, i, count + i))
        tail.append(kernel(f"update{i}", (1e-3, 1e-3), (count + i,), 2 * count + i))
    return grads + tail


def test_a_step_without_instructions_takes_every_device_no_time() -> None:
    for found in (timeline([], model_of(3), (0.5, 0.3, 0.2)), predict([], model_of(3), (0.5, 0.3, 0.2))):
        assert found.iteration_s == 0 and found.compute_s == found.exposed_s == (0.0, 0.0, 0.0)


def test_without_overlap_devices_stop_for_every_exchange() -> None:
    model = model_of(2)
    found = timeline(backward(model, [100_000, 100_000]), model, EVEN)
    assert found.iteration_s == pytest.approx(10e-3 + 2 * (reduce_s(100_000) + 1e-3))
    assert found.compute_s == pytest.approx((12e-3, 10e-3))
    assert found.exposed_s == pytest.approx((2 * reduce_s(100_000),) * 2)
    assert found.idle_s == pytest.approx((0.0, 2e-3))


def test_with_overlap_an_exchange_runs_beside_the_next_gradient() -> None:
    model = model_of(2)
    one = reduce_s(100_000)
    assert one < 5e-3
    found = timeline(backward(model, [100_000, 100_000]), model, EVEN, overlap=True)
    # The first all-reduce hides behind the second gradient; the update of the first hides part of the second.
    assert found.iteration_s == pytest.approx(10e-3 + max(one, 1e-3) + 1e-3)
    assert found.exposed_s[0] == pytest.approx(one - 1e-3)
    assert found.idle_s[0] == pytest.approx(0.0)
    assert found.exchange_s == pytest.approx(2 * one)


def test_messages_gather_what_fits_and_save_its_latency() -> None:
    model = model_of(2)
    items = backward(model, [1000] * 4)
    each, pair = 4 * reduce_s(1000), 2 * reduce_s(2000)
    assert timeline(items, model, EVEN).exchange_s == pytest.approx(each)
    assert timeline(items, model, EVEN, bucket_bytes=2000).exchange_s == pytest.approx(pair)
    assert timeline(items, model, EVEN, bucket_bytes=1999).exchange_s == pytest.approx(each)
    whole = timeline(items, model, EVEN, bucket_bytes=1 << 20)
    assert whole.exchange_s == pytest.approx(reduce_s(4000))
    assert whole.iteration_s == pytest.approx(24e-3 + reduce_s(4000))
    (message,) = [span for span in whole.spans if span.exchange]
    assert (message.label, message.nbytes) == ("all_reduce.ring × 4", 4000)


def test_a_kernel_that_needs_a_member_closes_its_message() -> None:
    model = model_of(2)
    items = [
        kernel("a", (1e-3, 1e-3), (), 0),
        all_reduce(model, 1000, 0, 1),
        kernel("b", (1e-3, 1e-3), (1,), 2),
        all_reduce(model, 1000, 2, 3),
        kernel("c", (1e-3, 1e-3), (3,), 4),
    ]
    found = timeline(items, model, EVEN, overlap=True, bucket_bytes=1 << 20)
    assert [span.label for span in found.spans] == ["a", "all_reduce.ring", "b", "all_reduce.ring", "c"]
    assert found.iteration_s == pytest.approx(3e-3 + 2 * reduce_s(1000))


def test_an_exchange_of_what_was_exchanged_waits_for_it() -> None:
    model = model_of(2)
    items = [
        kernel("a", (1e-3, 1e-3), (), 0),
        all_reduce(model, 1000, 0, 1),
        all_reduce(model, 1000, 1, 2),
        kernel("b", (1e-3, 1e-3), (2,), 3),
    ]
    for bucket in (0, 1 << 20):
        found = timeline(items, model, EVEN, overlap=True, bucket_bytes=bucket)
        assert found.iteration_s == pytest.approx(2e-3 + 2 * reduce_s(1000))


def test_another_name_for_a_result_stops_no_kernel() -> None:
    """What costs nothing waits for an exchange without holding up what does not read it."""
    model = model_of(2)
    items = [
        kernel("a", (1e-3, 1e-3), (), 0),
        all_reduce(model, 100_000, 0, 1),
        kernel("reshape", (0.0, 0.0), (1,), 2),
        kernel("b", (5e-3, 5e-3), (0,), 3),
        kernel("c", (1e-3, 1e-3), (2, 3), 4),
    ]
    found = timeline(items, model, EVEN, overlap=True)
    assert found.iteration_s == pytest.approx(7e-3)
    assert timeline(items, model, EVEN).iteration_s == pytest.approx(7e-3 + reduce_s(100_000))


# ---------------------------------------------------------------------------------------------------
# Laws


def naive(items: Sequence[Item], model: CostModel, ratios: Sequence[float]) -> float:
    """What the backends do: run up to the exchange, meet, exchange."""
    shares = Shares(ratios, model.class_of)
    resume_s = np.array([model.types[c].resume_s for c in model.class_of])
    clock, outside = np.zeros(len(model.class_of)), True
    for item in items:
        times = item.weight * shares.per_device(item.cost, item.cut)
        if item.exchange:
            outside = True
        elif outside and times.any():
            times, outside = times + resume_s, False
        clock = np.full_like(clock, clock.max() + times.max()) if item.exchange else clock + times
    return float(clock.max())


@st.composite
def schedules(draw: st.DrawFn) -> list[Item]:
    """Kernels and exchanges that read what stands before them, or what was there from the start."""
    model, items = model_of(2), list[Item]()
    for token in range(draw(st.integers(1, 14))):
        weight = draw(st.sampled_from([1.0, 1.0, 3.0]))
        if draw(st.booleans()):
            items.append(
                all_reduce(
                    model, draw(st.integers(1, 10**6)), draw(st.integers(-1, token - 1)), token, weight
                )
            )
        else:
            times = draw(st.tuples(*[st.sampled_from([0.0, 1e-4, 1e-3, 7e-3])] * 2))
            reads = draw(st.lists(st.integers(0, token - 1), max_size=3)) if token else []
            items.append(kernel("k", times, reads, token, weight))
    return items


def check(items: Sequence[Item], model: CostModel, ratios: Sequence[float]) -> None:
    today = timeline(items, model, ratios)
    assert today.iteration_s == pytest.approx(naive(items, model, ratios))
    assert today.iteration_s <= seconds(items, model, ratios) * (1 + 1e-9)
    quick = predict(items, model, ratios)
    assert quick.iteration_s == pytest.approx(today.iteration_s)
    assert quick.exchange_s == pytest.approx(today.exchange_s)
    for mine, whole in ((quick.compute_s, today.compute_s), (quick.exposed_s, today.exposed_s)):
        assert mine == pytest.approx(whole)
    assert quick.idle_s == pytest.approx(today.idle_s, abs=1e-12)
    for bucket in (0, 1000, 300_000, 1 << 40):
        apart = timeline(items, model, ratios, bucket_bytes=bucket)
        beside = timeline(items, model, ratios, overlap=True, bucket_bytes=bucket)
        assert beside.iteration_s <= apart.iteration_s * (1 + 1e-9)
        for found in (apart, beside):
            assert found.compute_s == pytest.approx(today.compute_s)
            assert found.exchange_s <= today.exchange_s * (1 + 1e-9)
            assert found.iteration_s >= max((found.exchange_s, *found.compute_s)) * (1 - 1e-9)
            assert sum(s.nbytes for s in found.spans) == sum(i.nbytes for i in items if i.exchange)
            for parts in zip(found.compute_s, found.exposed_s, found.idle_s, strict=True):
                assert sum(parts) == pytest.approx(found.iteration_s, abs=1e-12)
            check_events(found, model)


def check_events(found: Timeline, model: CostModel) -> None:
    """The structure that Perfetto reads; no two events of a track at once; the end is the iteration's."""
    names = [device.name for device in model.fleet.devices]
    written = json.loads(json.dumps(trace_events(found, names, "test")))
    events = written["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    shown = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert sorted(", ".join(shown).split(", ")) == sorted(names)
    assert set(named.values()) <= {"compute", "exchange"}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["tid"] == {"compute": COMPUTE, "exchange": EXCHANGE}[event["cat"]]
            assert event["ts"] >= 0 and event["dur"] > 0
            track = tracks.setdefault((event["pid"], event["tid"]), [])
            track.append((event["ts"], event["ts"] + event["dur"]))
    assert set(tracks) <= set(named)
    for track in tracks.values():
        track.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(track))
    end = max((end for track in tracks.values() for _, end in track), default=0.0)
    assert end * 1e-6 == pytest.approx(found.iteration_s) == written["otherData"]["iteration_s"]


@given(schedules())
def test_random_schedules(items: list[Item]) -> None:
    check(items, model_of(2), EVEN)


@cache
def graph_of(name: str) -> Graph:
    step, args = STEPS[name]()
    return trace(step, *args).graph


@pytest.mark.parametrize("start", ["replicated", "data", "zero", "last"])
@pytest.mark.parametrize("name", sorted(STEPS))
def test_random_programs(name: str, start: str) -> None:
    """Loops, branches and all: every option keeps the laws, and every exchange has a place in time."""
    graph = graph_of(name)
    placements = starts(graph)[start]
    for seed in range(4):
        program = build(graph, placements, random.Random(seed) if seed else None)
        for ratios in ((0.5, 0.25, 0.25), (1.0, 0.0, 0.0)):
            model = two_nodes()
            items = bill_as_run(program, graph, model) if seed == 1 else bill(program, graph, model)
            read = [token for item in items for token in item.reads]
            written = [token for item in items for token in item.writes]
            assert len(set(written)) == len(written) and set(read) <= set(written)
            check(items, model, ratios)


def test_what_a_loop_exchanges_depends_on_what_it_computes() -> None:
    """The bill's tokens lead through the boundary of a scan: into its body, and out of it."""
    graph = graph_of("scanned")
    items = bill(build(graph, starts(graph)["data"]), graph, model_of(3))
    position = {token: at for at, item in enumerate(items) for token in item.writes}
    crossings = {(items[position[token]].weight, item.weight) for item in items for token in item.reads}
    weights = {item.weight for item in items}
    assert len(weights) == 2
    assert {(w, v) for w in weights for v in weights if w != v} <= crossings
