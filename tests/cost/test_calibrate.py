"""Fits of links and devices: known parameters come back, hopeless data are refused."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost.bill import Item
from shardwright.cost.calibrate.devices import Kernel, KernelTimes, fit_device, group_devices
from shardwright.cost.calibrate.estimate import margins, refuse, spread
from shardwright.cost.calibrate.links import ExchangeTimes, fit_line, fit_strategies
from shardwright.cost.device import DeviceType
from shardwright.cost.document import Entry
from shardwright.cost.fleet import Fleet, Link, Node
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import ShareCost
from shardwright.cost.strategy_links import SizeRange, StrategyLink, read_strategy_links
from shardwright.cost.timeline import resuming_s, timeline
from shardwright.ir.errors import InputError

SIZES = tuple(1 << power for power in range(10, 25))


def exchanges(
    seconds_of: list[tuple[float, float, float]],
    noise: float = 0.0,
    seed: int = 0,
    strategy: str = "all_gather.exact",
) -> list[ExchangeTimes]:
    """Exchanges of four ranks at three shares; `seconds_of` are (up to bytes, α, β) ascending."""
    draw = np.random.default_rng(seed)
    times: list[ExchangeTimes] = []
    for nbytes in SIZES:
        alpha, beta = next((a, b) for limit, a, b in seconds_of if nbytes <= limit)
        for part in (0.75, 0.875, 0.9):
            exact = 3 * alpha + part * nbytes * beta
            samples = exact * np.exp(noise * draw.standard_normal(7))
            times.append(ExchangeTimes(strategy, nbytes, 3.0, part * nbytes, tuple(map(float, samples))))
    return times


def kernels(
    launch_s: float, product: float, vector: float, bandwidth: float, noise: float = 0.0, seed: int = 0
) -> list[KernelTimes]:
    """Products and chains of elementwise operations of several sizes, by the roofline."""
    draw = np.random.default_rng(seed)
    times: list[KernelTimes] = []

    def add(op_class: str, flop: float, nbytes: float, rate: float, turned: float = 0.0) -> None:
        exact = launch_s + max(flop / rate + turned * 16 / bandwidth, nbytes / bandwidth)
        samples = exact * np.exp(noise * draw.standard_normal(7))
        kernel = Kernel(op_class, flop, nbytes, turned=turned)
        times.append(KernelTimes((kernel,), tuple(map(float, samples))))

    for n in (16, 64, 128, 256, 512, 1024):
        add("product", 2.0 * n**3, 12.0 * n**2, product)
        add("product", 2.0 * n**3, 12.0 * n**2, product, n**2)
    for elements in (1 << power for power in range(8, 23, 2)):
        add("other", elements, 8.0 * elements, vector)
        add("other", 200.0 * elements, 8.0 * elements, vector)
    return times


@given(alpha=st.floats(1e-6, 1e-2), byte_per_s=st.floats(1e7, 1e11))
def test_a_line_without_noise_comes_back(alpha: float, byte_per_s: float) -> None:
    line = fit_line(exchanges([(math.inf, alpha, 1 / byte_per_s)]))
    assert line.latency_s.value == pytest.approx(alpha, rel=1e-6)
    assert 1 / line.second_per_byte.value == pytest.approx(byte_per_s, rel=1e-6)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30)
def test_noise_moves_the_fit_by_little_and_the_intervals_say_so(seed: int) -> None:
    times = exchanges([(math.inf, 2e-4, 1 / 3e9)], noise=0.1, seed=seed)
    line = fit_line(times)
    assert line.latency_s.value == pytest.approx(2e-4, rel=0.08)
    assert 1 / line.second_per_byte.value == pytest.approx(3e9, rel=0.15)
    assert 0 < line.latency_s.relative < 0.1 and 0 < line.second_per_byte.relative < 0.2
    (fit,) = fit_strategies(times)
    assert fit.complaint() is None and fit.error < 0.1


def test_intervals_of_95_percent_hold_the_truth_that_often() -> None:
    held = [
        line.latency_s.low <= 2e-4 <= line.latency_s.high
        for line in (fit_line(exchanges([(math.inf, 2e-4, 1 / 3e9)], 0.1, seed)) for seed in range(300))
    ]
    assert 0.9 <= np.mean(held) <= 0.99


def test_a_change_of_protocol_becomes_a_range() -> None:
    truth = [(1 << 15, 5e-5, 1e-10), (math.inf, 4e-4, 4e-10)]
    (fit,) = fit_strategies(exchanges(truth, noise=0.05))
    assert len(fit.link.ranges) == 2
    first, second = fit.link.ranges
    assert first.up_to_bytes is not None and 1 << 15 < first.up_to_bytes < 1 << 16
    assert first.latency_s == pytest.approx(5e-5, rel=0.1)
    assert second.latency_s == pytest.approx(4e-4, rel=0.1)
    assert second.bandwidth_byte_per_s == pytest.approx(2.5e9, rel=0.1)


def test_one_line_stays_one_range() -> None:
    for seed in range(20):
        (fit,) = fit_strategies(exchanges([(math.inf, 2e-4, 1 / 3e9)], noise=0.1, seed=seed))
        assert len(fit.link.ranges) == 1


@given(
    pieces=st.lists(st.tuples(st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8)), min_size=3, max_size=3),
    seed=st.integers(0, 100),
)
@settings(max_examples=40)
def test_more_bytes_never_cost_less(pieces: list[tuple[float, float]], seed: int) -> None:
    """Even where the measurements say so."""
    limits = (1 << 14, 1 << 19, math.inf)
    truth = [(limit, a, b) for limit, (a, b) in zip(limits, pieces, strict=True)]
    (fit,) = fit_strategies(exchanges(truth, noise=0.1, seed=seed))

    def seconds(nbytes: float, part: float) -> float:
        found = fit.link.at(nbytes)
        return 3 * found.latency_s + part * nbytes / found.bandwidth_byte_per_s

    sizes = sorted({*SIZES, *(r.up_to_bytes + d for r in fit.link.ranges if r.up_to_bytes for d in (0, 1))})
    for part in (0.75, 0.875, 0.9):
        times = [seconds(size, part) for size in sizes]
        assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))


def test_hopeless_times_are_refused_with_the_reason() -> None:
    noisy = fit_strategies(exchanges([(math.inf, 2e-4, 1 / 3e9)], noise=1.5))
    with pytest.raises(InputError, match=r"repeated runs of all_gather\.exact differ by ±"):
        refuse(noisy)
    draw = np.random.default_rng(0)
    wild = [
        ExchangeTimes(t.strategy, t.nbytes, t.rounds, t.link_bytes, (float(s),) * 7)
        for t, s in zip(exchanges([(math.inf, 1, 1)]), np.exp(2 * draw.standard_normal(45)), strict=True)
    ]
    with pytest.raises(InputError, match=r"lines in the size miss the times of all_gather\.exact by"):
        refuse(fit_strategies(wild))


@given(
    launch_us=st.floats(0.5, 20),
    product=st.floats(1e10, 1e14),
    vector=st.floats(1e9, 1e11),
    bandwidth=st.floats(5e9, 1e11),
)
@settings(max_examples=25)
def test_a_roofline_comes_back(launch_us: float, product: float, vector: float, bandwidth: float) -> None:
    # Each of the three must be what some of the kernels wait for.
    product, vector = min(product, 50 * bandwidth), float(np.clip(vector, bandwidth / 4, 20 * bandwidth))
    fit = fit_device(kernels(launch_us * 1e-6, product, vector, bandwidth, noise=0.03))
    assert fit.launch_s.value == pytest.approx(launch_us * 1e-6, rel=0.2)
    assert fit.matmul_flop_per_s.value == pytest.approx(product, rel=0.2)
    assert fit.vector_flop_per_s.value == pytest.approx(vector, rel=0.2)
    assert fit.byte_per_s.value == pytest.approx(bandwidth, rel=0.2)
    assert fit.complaint() is None


def test_noisy_kernels_are_refused() -> None:
    with pytest.raises(InputError, match="repeated runs of the same kernel differ by ±"):
        refuse([fit_device(kernels(3e-6, 2e11, 5e9, 3e10, noise=1.5))])


def test_too_few_kernels_are_refused() -> None:
    with pytest.raises(InputError, match="too few kernels"):
        fit_device(kernels(3e-6, 2e11, 5e9, 3e10)[:6])


def test_alike_devices_are_one_type_and_unlike_ones_are_not() -> None:
    fast = kernels(3e-6, 2e11, 5e9, 3e10, noise=0.05, seed=1)
    same = kernels(3e-6, 2e11, 5e9, 3e10, noise=0.05, seed=2)
    slow = kernels(3e-6, 1e11, 2.5e9, 1.5e10, noise=0.05, seed=3)
    groups = group_devices([fast, slow, same, slow], lambda a, b: True)
    assert [members for _, members in groups] == [(0, 2), (1, 3)]
    apart = group_devices([fast, same], lambda a, b: False)
    assert [members for _, members in apart] == [(0,), (1,)]


def test_a_measured_type_survives_a_fleet_file() -> None:
    fit = fit_device(kernels(3e-6, 2e11, 5e9, 3e10, noise=0.02))
    kind = fit.as_type("cpu-measured", 10**9, "a test")
    assert kind.measured and kind.flop_rate("float32", "highest")[0] == pytest.approx(2e11, rel=0.1)
    assert kind.vector_rate() == pytest.approx(5e9, rel=0.2)
    assert kind.turned_per_s == pytest.approx(3e10 / 16, rel=0.1)
    assert DeviceType.from_entry(Entry(json.loads(json.dumps(kind.to_dict())), "x")) == kind


def test_only_a_gain_makes_tf32() -> None:
    """And that of one product in both: rates that are fitted to many say less than their best."""
    plain = kernels(3e-6, 2e11, 5e9, 3e10)
    highest = next(t for t in plain if t.kernels[0].flop == 2.0 * 1024**3)
    slower, faster = (
        KernelTimes(
            (replace(highest.kernels[0], arithmetic="default"),), tuple(s / gain for s in highest.seconds)
        )
        for gain in (1.05, 5.0)
    )
    assert fit_device([*plain, slower]).as_type("a", 1, "x").tf32_flop_per_s is None
    assert fit_device([*plain, faster]).as_type("a", 1, "x").tf32_flop_per_s == pytest.approx(1e12, rel=0.1)


def test_links_with_strategies_survive_a_fleet_file() -> None:
    ranges = (SizeRange(65536.0, 1.8e-4, 9e8), SizeRange(None, 3.5e-4, 4e9))
    link = Link(5e9, 2e-4, (StrategyLink("all_gather.exact", ranges),))
    data = {
        "name": "measured",
        "nodes": [
            {
                "devices": {"type": "T4", "count": 2},
                "link": {
                    "bandwidth": "5 GB/s",
                    "latency": "200 us",
                    "strategies": {
                        "all_gather.exact": [
                            {"up_to": "64 KiB", "latency": "180 us", "bandwidth": "900 MB/s"},
                            {"latency": "350 us", "bandwidth": "4 GB/s"},
                        ]
                    },
                },
            }
        ],
    }
    fleet = Fleet.from_dict(data)
    assert fleet.nodes[0].link == link
    assert Fleet.from_dict(fleet.to_dict()) == fleet
    seen = fleet.under("all_gather.exact", 65536).nodes[0].link
    assert seen == Link(9e8, 1.8e-4)
    assert fleet.under("all_gather.exact", 65537).nodes[0].link == Link(4e9, 3.5e-4)
    assert fleet.under("all_reduce.ring", 65536).nodes[0].link == link


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        ({"all_gather.exat": []}, "is no strategy of a collective. Did you mean all_gather.exact"),
        ({"all_gather.exact": []}, "is empty"),
        ({"all_gather.exact": [{"latency": "1 us"}]}, "lacks the key 'bandwidth'"),
        (
            {"all_gather.exact": [{"up_to": "1 kB", "latency": "1 us", "bandwidth": "1 GB/s"}]},
            "does not continue the ranges",
        ),
        (
            {"all_gather.exact": [{"latency": "1 us", "bandwidth": "1 GB/s"}] * 2},
            "does not continue the ranges",
        ),
    ],
)
def test_wrong_strategies_are_one_clear_error(strategies: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_strategy_links(Entry(strategies, "lab.yaml", "link.strategies"))
    assert message in str(caught.value)


def test_spread_and_margins() -> None:
    assert spread([1.0, 1.0, 1.0]) == 0
    assert spread([0.9, 0.95, 1.0, 1.05, 1.1]) == pytest.approx(0.05)
    assert np.isinf(margins(np.ones((1, 1)), np.zeros(1))).all()
    unseen = margins(np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]), np.array([0.1, -0.1, 0.0]))
    assert np.isfinite(unseen[0]) and np.isinf(unseen[1])


def test_every_segment_takes_what_it_takes_to_resume() -> None:
    """Two segments and an exchange: the timeline adds it twice, and not for segments without kernels."""

    def seconds(resume_s: float, segments: int) -> float:
        kind = DeviceType("x", 1e9, 1e9, 10**9, launch_s=1e-6, measured=True, resume_s=resume_s)
        fleet = Fleet("two", (Node("n0", (kind, kind), Link(1e9, 1e-5)),), None)
        model = CostModel(fleet)
        kernel = Item("kernel", ShareCost.fixed([1e-3]), 1.0, None, False)
        exchange = Item("exchange", ShareCost.fixed([1e-4]), 1.0, None, True)
        items = [exchange, kernel, kernel, exchange, kernel, exchange][: 4 if segments == 1 else 6]
        return timeline(items, model, (0.5, 0.5)).iteration_s

    assert seconds(2e-4, 1) - seconds(0.0, 1) == pytest.approx(2e-4)
    assert seconds(2e-4, 2) - seconds(0.0, 2) == pytest.approx(4e-4)


def test_short_segments_take_less_to_resume() -> None:
    """In proportion to how long their kernels take, up to what the longest take."""
    kind = DeviceType("x", 1e9, 1e9, 1, resume_s=1e-3, restart_s=1e-4, resume_over_s=2e-3)
    slow = DeviceType("y", 1e9, 1e9, 1, resume_s=1e-3)
    kernels_s = np.array([[0.0, 0.0], [1e-3, 1e-3], [2e-3, 2e-3], [9e-3, 9e-3]])
    found = resuming_s(kernels_s, [kind, slow])
    assert found[:, 0] == pytest.approx([1e-4, 5.5e-4, 1e-3, 1e-3])
    assert found[:, 1] == pytest.approx([1e-3] * 4)
