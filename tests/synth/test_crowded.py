"""Rent for what is in memory when it is full: what is said of it, and what is found with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synth_cases import attention, fleet

from shardwright.cost.bill import bill, seconds
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.factory import load_factory
from shardwright.ir.program import verify
from shardwright.ir.rewrites.recompute import Stretch
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.ir.trace import Traced, trace
from shardwright.memory.device_memory import Looking, crowds, device_memory, peaks
from shardwright.synth.alternate import synthesize
from shardwright.synth.freely import freely
from shardwright.synth.memory import crowded
from shardwright.synth.memory.crowded import uncrowded
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer


def limited(whole: Fleet, nbytes: float) -> Fleet:
    """Every device with so much memory."""
    nodes = [
        replace(node, devices=tuple(replace(kind, memory_bytes=int(nbytes)) for kind in node.devices))
        for node in whole.nodes
    ]
    return replace(whole, nodes=tuple(nodes))


def step() -> Traced:
    function, args = attention()
    return trace(function, *args)


def test_crowds_say_whose_the_bytes_are() -> None:
    traced = step()
    graph, model = traced.graph, CostModel(fleet((4, 2, 1)))
    found = synthesize(graph, Space(graph), model, Timer(), look=Looking(traced.graph))
    program, ratios = found.program, found.ratios
    for device in range(3):
        moments = device_memory(program, graph, ratios, device).moments
        limit = 0.9 * max(moment.nbytes for moment in moments)
        full = crowds(program, graph, ratios, device, limit)
        assert [nbytes for nbytes, _ in full] == [m.nbytes for m in moments if m.nbytes > limit]
        # The rest is alignment, and gaps between buffers.
        assert all(0.9 * nbytes <= sum(mine.values()) <= nbytes for nbytes, mine in full)
    assert crowds(program, graph, ratios, 0, 1e12) == ()


@pytest.mark.parametrize("part", [0.9, 0.7])
def test_what_is_found_fits_as_it_will_run(part: float) -> None:
    traced = step()
    graph, space, look = traced.graph, Space(traced.graph), Looking(traced.graph)
    whole = fleet((4, 2, 1))
    roomy = synthesize(graph, space, CostModel(whole), Timer(), look=look)
    most = max(peaks(roomy.program, graph, roomy.ratios))
    model = CostModel(limited(whole, part * most))
    free = freely(graph, space, model, Timer(), look=look)
    large = replace(free.best, fits=False)
    found, memory = uncrowded(free.turns, large, large.memory)
    assert found is not large and found.fits
    verify(found.program, graph)
    as_run = peaks(found.program, graph, found.ratios)
    assert max(as_run) <= int(part * most)
    assert tuple(memory.peak(np.array(found.ratios))) == as_run
    assert found.cost_s == pytest.approx(seconds(bill(found.program, graph, model), model, found.ratios))
    # Nobody wants what costs no less than a rival.
    other, _ = uncrowded(free.turns, large, large.memory, found.cost_s)
    assert other is large or other.cost_s < found.cost_s


def test_steps_that_take_long_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = step()
    model = CostModel(limited(fleet((4, 2, 1)), 1 << 16))
    free = freely(traced.graph, Space(traced.graph), model, Timer(), look=Looking(traced.graph))
    monkeypatch.setattr(crowded, "MOST_CHOICES", 1)
    assert uncrowded(free.turns, free.best, free.best.memory)[0] is free.best


@pytest.mark.full
def test_a_transformer_fits_into_a_third_of_its_memory_at_a_fifth_more_time() -> None:
    function, args = load_factory("examples/gpt2.py:tiny")
    traced = trace(function, *args)
    layers = (Stretch("blocks/0", 15, 99, "nothing"), Stretch("blocks/1", 99, 183, "nothing"))
    traced = rewritten(traced, Rewriting(layers))
    graph, space, look = traced.graph, Space(traced.graph), Looking(traced.graph)
    model = CostModel(limited(Fleet.load("examples/fleets/laptop.yaml"), 351 * 1024))
    free = freely(graph, space, model, Timer(), look=look)
    large = replace(free.best, fits=False)
    assert max(peaks(large.program, graph, large.ratios)) > 1.2 * 351 * 1024
    found, _ = uncrowded(free.turns, large, large.memory)
    assert found.fits and max(peaks(found.program, graph, found.ratios)) <= 351 * 1024
    assert found.cost_s < 1.2 * free.found.cost_s
