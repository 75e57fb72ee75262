"""In how many pieces "auto" takes the batch: where a number that it knows fits, it fits and costs no more."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rewriting_cases import fleet, layered, perceptron

from shardwright.api import synthesize, synthesize_traced
from shardwright.cost.fleet import Fleet
from shardwright.ir.trace import trace
from shardwright.memory import rewritings
from shardwright.memory.microbatches import counts_of
from shardwright.memory.rivals import WORTH, overfill
from shardwright.synth.combinations import SMALL
from shardwright.synth.memory.alive import must_live, sure_bytes


def check(seed: int) -> None:
    chance = random.Random(seed)
    widths = [chance.choice((8, 16, 32)) for _ in range(chance.choice((3, 4, 6)))]
    traced = perceptron(widths, chance.choice((16, 32)) * chance.choice((1, 4, 16)))
    speeds = chance.choice(((3, 1), (5, 3, 1), (2, 2, 1, 1)))
    roomy = synthesize_traced(traced, fleet=fleet(speeds=speeds), recompute="off", microbatches=1)
    part = chance.uniform(0.25, 0.9)
    small = fleet(f"{int(part * max(roomy.memory_bytes))} B", speeds)
    found = synthesize_traced(traced, fleet=small)
    limits = [device.type.memory_bytes for device in small.devices]
    assert found.fits == all(n <= limit for n, limit in zip(found.memory_bytes, limits, strict=True))
    for pieces in (1, *counts_of(traced)):
        fixed = synthesize_traced(traced, fleet=small, microbatches=pieces)
        if fixed.fits:
            case = (seed, widths, speeds, part, pieces, fixed.cost_s, found.cost_s)
            assert found.fits, case
            # A number whose bound promises less than a hundredth is left out.
            assert found.cost_s <= fixed.cost_s / (1 - WORTH) * (1 + 1e-9), case


@pytest.mark.parametrize("seed", [2])
def test_auto_is_no_worse_than_any_number_of_pieces(seed: int) -> None:
    check(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", [n for n in range(20) if n != 2])
def test_auto_is_no_worse_than_any_number_of_pieces_in_many_cases(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("how", ["off", "all"])
@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("scan", [False, True])
def test_what_must_be_in_memory_is_there_in_every_plan(scan: bool, pieces: int, how: Any) -> None:
    """The largest memory that a bound counts on is at most what plans take, on one device and on all."""
    step, args = layered(scan, batch=256)
    for speeds in ((3,), (3, 1), (2, 2, 1, 1)):
        plan = synthesize(
            step, *args, fleet=fleet(speeds=speeds), devices="all", recompute=how, microbatches=pieces
        )
        assert plan.traced is not None
        graph = plan.traced.graph
        inputs = sum(value.type.nbytes for value in graph.inputs)
        outside = sum(value.type.nbytes for value in must_live(graph))
        assert inputs + outside <= inputs + sure_bytes(graph) <= sum(plan.memory_bytes)
        if pieces > 1 and how == "off":
            assert sure_bytes(graph) > outside, "what is within the loop counts"


def test_a_large_step_comes_in_fewer_pieces_than_fit_where_less_is_kept_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardwright.memory.rivals.in_a_moment", lambda *_: False)
    step, args = layered(False, layers=13, batch=1024)
    traced = trace(step, *args)
    assert len(traced.graph.equations) > SMALL
    scarce = fleet("1.4 MB", speeds=(20,))
    alone = synthesize_traced(traced, fleet=scarce, recompute="off")
    both = synthesize_traced(traced, fleet=scarce)
    assert alone.fits and both.fits and both.cost_s < 0.9 * alone.cost_s
    assert alone.rewriting.microbatches > both.rewriting.microbatches > 1 and both.rewriting.recompute


@pytest.mark.parametrize(
    ("whole", "lacks", "asked"),
    [
        pytest.param(4.0, {2: 3.0, 4: 2.5, 8: 2.0, 16: 1.5, 32: 1.2}, [2, 4, 8, 16, 32], id="less and less"),
        pytest.param(
            4.0, {2: 3.0, 4: 3.0, 8: 2.0, 16: 2.1, 32: 2.2, 64: 1.0}, [2, 4, 8, 16, 32], id="no less"
        ),
        # In one piece all may be computed again, which takes less memory than a few pieces do.
        pytest.param(1.7, {2: 3.0, 4: 2.0, 8: 1.5, 16: 1.1}, [2, 4, 8, 16], id="less than one in the end"),
    ],
)
def test_where_nothing_fits_pieces_are_planned_as_long_as_they_lack_less(
    whole: float, lacks: dict[int, float], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewritings, "SMALL", 0)
    monkeypatch.setattr(rewritings, "counts_of", lambda traced: iter(lacks))
    step, args = layered(False)
    traced, scarce = trace(step, *args), fleet("40 kB", speeds=(1,))
    made = synthesize_traced(traced, fleet=scarce, recompute="off", microbatches=1)
    assert not made.fits
    tried: list[int] = []

    def planned(self: Any, pieces: int, cut: Any = None, rival_s: float = 0.0) -> Any:
        tried.append(pieces)
        return made.but(memory_bytes=(int(lacks[pieces] * 40_000),))

    planner = SimpleNamespace(plan=lambda step, rival_s, briefly: made.but(bound_s=0.0))
    monkeypatch.setattr(rewritings._Asked, "plan", planned)
    search = rewritings._Asked(traced, scarce, (), False, cast(Any, planner), lambda: False)
    found = search.in_more(made.but(memory_bytes=(int(whole * 40_000),)))
    assert tried == asked and overfill(found) == min(lacks[pieces] for pieces in asked)
    assert any("more than 32 micro-batches" in note for note in found.assumptions) == (64 in lacks)


@pytest.mark.parametrize("memory", ["0.5 MB", "0.7 MB"])
def test_on_two_axes_what_one_node_does_without_a_limit_of_memory_is_known(
    monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    """The other one is slow, as is the network: pieces that fit are no cheaper than both nodes would be."""
    monkeypatch.setattr("shardwright.memory.rivals.in_a_moment", lambda *_: False)
    link = {"bandwidth": "1 GB/s", "latency": "10 us"}
    kinds = [
        {"name": f"cpu-{s}", "flops": f"{s} GFLOP/s", "memory_bandwidth": f"{s} GB/s", "memory": memory}
        for s in (20, 1)
    ]
    nodes = [{"devices": {"type": kind, "count": 2}, "link": link} for kind in kinds]
    apart = Fleet.from_dict({"name": "apart", "nodes": nodes, "network": link | {"bandwidth": "1 MB/s"}})
    step, args = layered(False, layers=12, batch=1024)
    traced = trace(step, *args)
    one, two = (synthesize_traced(traced, fleet=apart, axes=axes) for axes in (1, 2))
    assert two.fits and two.used == (0, 1) and two.bound_s > 0
    assert two.cost_s <= one.cost_s * (1 + 1e-9)
