"""Plans that differ: models × programs × ratios × strategies, each priced on a calibrated fleet."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from bench.record import EXAMPLES
from shardwright import Fleet, Plan, synthesize
from shardwright.api import data_parallel
from shardwright.cost.model import CostModel
from shardwright.cost.timeline import Timeline, timed_bill, timeline
from shardwright.ir.collectives import registry
from shardwright.ir.program import Instruction, Loop, Move, Program

#: Variants of the examples whose steps take tens of milliseconds on a core.
SIZES: Mapping[str, dict[str, int]] = {
    "gpt2": {"batch": 16, "vocabulary": 512, "sequence": 64, "layers": 2, "d": 256, "heads": 4},
    "vit": {"batch": 32, "pixels": 32, "patch": 4, "classes": 10, "layers": 2, "d": 192, "heads": 4},
    "bert_moe": {
        "batch": 16,
        "sequence": 64,
        "vocabulary": 512,
        "positions": 64,
        "layers": 2,
        "d": 192,
        "heads": 4,
        "experts": 4,
    },
}


@dataclass(frozen=True)
class Case:
    """A plan to run, and what was predicted of it."""

    name: str
    model: str
    plan: Plan
    predicted: Timeline


def step_of(model: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The training step of a model of `SIZES` and concrete arguments."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module(model)
    return example.train_step, jax.jit(partial(example.arguments, **SIZES[model]))()


def cases(fleet: Fleet, model: str) -> Iterator[Case]:
    """Plans of one model on one fleet: the planner's, data parallelism, other shares, other strategies."""
    step, args = step_of(model)
    devices = len(fleet.devices)
    skewed = (3,) + (1,) * (devices - 1)
    plan = synthesize(step, *args, fleet=fleet)
    assert plan.traced is not None
    # What the planner would do for devices of which one were three times as fast, or on a slow link.
    uneven = synthesize(step, *args, fleet=_weighted(fleet, skewed))
    parallel = next(iter(data_parallel(plan.traced, fleet)))

    def case(name: str, program: Program, ratios: tuple[float, ...]) -> Case:
        assert plan.traced is not None
        model_of = CostModel(fleet)
        items = timed_bill(program, plan.traced.graph, model_of, model_of)
        found = timeline(items, model_of, ratios)
        changed = replace(plan, program=program, ratios=ratios, iteration_s=found.iteration_s)
        return Case(f"{model}, {devices} ranks: {name}", model, changed, found)

    shares = tuple(part / sum(skewed) for part in skewed)
    yield case("planned", plan.program, plan.ratios)
    yield case("data parallel", parallel.program, parallel.ratios)
    if devices > (os.cpu_count() or 1):
        # Ranks that share cores have the rates that were measured only while all of them are busy.
        return
    yield case("data parallel, 3:1", parallel.program, shares)
    yield case("planned for 3:1", uneven.program, uneven.ratios)
    yield case(
        "planned for 3:1, other strategies",
        _with_other_strategies(uneven.program, CostModel(uneven.fleet)),
        uneven.ratios,
    )


def _weighted(fleet: Fleet, weights: tuple[int, ...]) -> Fleet:
    """The fleet with devices slowed down to these relative speeds."""
    (node,) = fleet.nodes
    slower = tuple(
        replace(
            kind,
            name=f"{kind.name}-{i}",
            float32_flop_per_s=kind.float32_flop_per_s * w / max(weights),
            memory_bandwidth_byte_per_s=kind.memory_bandwidth_byte_per_s * w / max(weights),
        )
        for i, (kind, w) in enumerate(zip(node.devices, weights, strict=True))
    )
    return replace(fleet, nodes=(replace(node, devices=slower),))


def _with_other_strategies(program: Program, model: CostModel) -> Program:
    """Every exchange by the strategy after its own among those that make sense on the fleet."""

    def other(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Loop):
            bodies = tuple(_with_other_strategies(body, model) for body in instruction.bodies)
            return replace(instruction, bodies=bodies)
        if not isinstance(instruction, Move) or registry()[instruction.kind].local:
            return instruction
        known = model.strategies(instruction.kind, instruction.pre, instruction.post)
        following = known[(known.index(instruction.strategy) + 1) % len(known)]
        return replace(instruction, strategy=following)

    return replace(program, instructions=tuple(map(other, program.instructions)))
