"""Stages: what they cost and what memory they take, by the model and as XLA has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rewriting_cases import layered
from stages_cases import apart, on_three, staged

from shardwright import Plan, synthesize
from shardwright.backends.compile import Compiler, Device
from shardwright.backends.local_graph import LocalGraphs
from shardwright.backends.relay import Stage
from shardwright.cost.lines import beats_of, kernels_in
from shardwright.cost.memory.buffers import scratch_bytes
from shardwright.cost.memory.written import written
from shardwright.cost.model import CostModel
from shardwright.cost.stages import Crews, Scans, relays_s
from shardwright.factory import load_factory
from shardwright.ir.placement import R
from shardwright.ir.rewrites.rewriting import Rewriting
from shardwright.ir.segments import Relay, Segment, schedule
from shardwright.ir.stages import layers_of
from shardwright.ir.trace import trace
from shardwright.memory.walk import Walk

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def plan() -> Plan:
    return on_three()


# -- prices and memory ---------------------------------------------------------------------------------


def test_a_beat_is_what_the_slowest_stage_takes() -> None:
    """With M pieces and S stages there are M + S - 1 of them, and in each a piece is handed on."""
    step, args = layered(scan=True, layers=6)
    forward, _ = (e for e in staged(trace(step, *args), 4).graph.equations if layers_of(e))
    layers = layers_of(forward)
    assert layers is not None
    model = CostModel(apart((2, 1, 1)))
    kernels = {kernel for _, kernel, _ in kernels_in(layers.graph)}
    priced = beats_of(layers, sharded=True).kernels
    # Beside those of a layer one that adds up, of a sum over the batch: here a number per layer.
    (adding,) = {kernel for kernel, _ in priced} - kernels
    assert adding.whole_bytes == 3 * 4
    layer = sum(times * model.cost(kernel).constant.max(axis=0) for kernel, times in priced)
    shares = np.array([0.5, 0.25])
    cut, whole = (model.cost(beats_of(layers, sharded=sharded)) for sharded in (True, False))
    piece_bytes = 64 // 4 * 16 * 4
    handed_s = model.move("send", "direct", piece_bytes, R, R).exact(shares)
    assert cut.exact(shares) == pytest.approx((4 + 3 - 1) * ((6 * shares * layer).max() + handed_s))
    assert whole.exact(shares) == pytest.approx(4 * 6 * np.max(layer))
    # What they take at least, before any program is made: no more than that, of whole layers.
    scans, graph = Scans(trace(step, *args).graph, model), staged(trace(step, *args), 4).graph
    crews = Crews.of(model, (0, 1, 2), model, nodes=False)
    assert 0 < scans.least_s(4, crews) <= relays_s(graph, model, [crews])
    found = [beats_of(each, sharded=True) for e in graph.equations if (each := layers_of(e)) is not None]
    best = sum(min(model.cost(line).exact(np.array([a, b])) for a, b in WHOLE) for line in found)
    assert relays_s(graph, model, [crews]) <= best * (1 + 1e-9)


#: Shares of six layers, of one device and each of two others, that are whole layers.
WHOLE = [((6 - 2 * k) / 6, k / 6) for k in range(4)]


def test_memory_of_a_stage_is_what_xla_takes(plan: Plan) -> None:
    """Scratch of a device for one piece beside what XLA allocates for it, and none without layers."""
    assert plan.traced is not None
    graph, ratios = plan.traced.graph, (0.4, 0.0, 0.6)
    for step in schedule(plan.program, graph).steps:
        if isinstance(step, Relay):
            assert LocalGraphs(1, ratios).stage(step, graph) is None
            local = LocalGraphs(2, ratios).stage(step, graph)
            assert local is not None
            equation = graph.equations[step.compute.equation]
            stage = Stage(equation, step.compute.signature, 2, ratios, Compiler(), now=True)
            compiled: Any = stage.run
            taken, said = compiled.memory_analysis(), scratch_bytes(local)
            assert 0.5 * taken.temp_size_in_bytes <= said <= 2 * taken.temp_size_in_bytes + 4096


@pytest.mark.parametrize("pieces", [2, 4])
def test_memory_of_all_layers_on_one_device_is_what_xla_takes(pieces: int) -> None:
    """What is in them is counted, beside what is handed from one scan to the other."""
    step, args = load_factory(f"{EXAMPLES / 'gpt2.py'}:tiny_scan")
    alone = apart((1, 10000), "1 Mbit/s")
    plan = synthesize(step, *args, fleet=alone, recompute=Rewriting(stages=pieces))
    assert plan.traced is not None
    graph, ratios = plan.traced.graph, plan.used_ratios
    assert len(ratios) == 1
    device = Device(0, ratios, plan.traced.primitives)
    (segment,) = (s for s in schedule(plan.program, graph).steps if isinstance(s, Segment))
    compiled: Any = Compiler().ahead(segment, graph, device, ())
    said = scratch_bytes(LocalGraphs(0, ratios).segment(segment, graph, {}))
    assert said == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.04)


def test_pieces_under_way_are_in_the_walk(plan: Plan) -> None:
    """Those in the middle have one that arrives and one that leaves, beside what goes in and comes out."""
    assert plan.traced is not None
    graph, ratios = plan.traced.graph, (0.2, 0.4, 0.4)
    walk, piece_bytes = Walk(plan.program, graph), 64 // 4 * 128 * 4
    for step in walk.planned.steps:
        if isinstance(step, Relay):
            found: list[int] = []
            for device in range(3):
                graphs = LocalGraphs(device, ratios)
                moment = next(
                    m
                    for m in walk.of_device(ratios, device).moments
                    if (m.what, m.first) == ("stages", step.first)
                )
                stage = graphs.stage(step, graph)
                assert stage is not None
                gives = sum(graphs.type(walk.planned.types[p.value], p.placement).nbytes for p in step.gives)
                found.append(moment.own_bytes - scratch_bytes(stage) - gives)
            assert found == [3 * piece_bytes, 4 * piece_bytes, 3 * piece_bytes]


def test_the_model_of_memory_has_about_what_stages_take(plan: Plan) -> None:
    """Beside what they read and make: what the walk says of a stage in the middle, within a factor of 2."""
    assert plan.traced is not None
    graph, ratios = plan.traced.graph, (0.2, 0.4, 0.4)
    walk, found = Walk(plan.program, graph), written(graph).temporaries
    moments = [moment for moment in walk.of_device(ratios, 1).moments if moment.what == "stages"]
    relays = [step for step in walk.planned.steps if isinstance(step, Relay)]
    for moment, step in zip(moments, relays, strict=True):
        equation = graph.equations[step.compute.equation]
        (taken,) = found[equation.index]
        graphs = LocalGraphs(1, ratios)
        gives = sum(graphs.type(walk.planned.types[p.value], p.placement).nbytes for p in step.gives)
        assert taken.like is None and 0.5 < taken.part / (moment.own_bytes - gives) < 2


def test_stages_are_in_the_walk(plan: Plan) -> None:
    assert plan.traced is not None
    walk = Walk(plan.program, plan.traced.graph)
    some, none = (walk.of_device((0.5, 0.5, 0.0), device) for device in (0, 2))
    assert [moment.what for moment in some.moments].count("stages") == 2
    assert none.peak_bytes < some.peak_bytes
