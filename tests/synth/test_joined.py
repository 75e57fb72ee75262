"""Less is handed on between compiled segments: exchanges side by side, and cheap results computed anew."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from baseline_cases import STEPS, arguments, draw, slow, trained

from shardwright.backends.verify import verify_program
from shardwright.cost.bill import bill, seconds
from shardwright.cost.model import CostModel
from shardwright.ir.program import Compute, Move, Program, verify
from shardwright.ir.segments import Segment, schedule
from shardwright.ir.trace import Traced, trace
from shardwright.memory.device_memory import device_memory, peaks
from shardwright.synth.baselines import Workshop
from shardwright.synth.memory.anew import anew
from shardwright.synth.memory.joined import joined
from shardwright.synth.memory.sparing import Sparing
from shardwright.synth.space.space import Space

EVEN = slow(20, 20, 20)
EVEN_RATIOS = (1 / 3,) * 3


def programs(traced: Traced) -> dict[str, Program]:
    """Baselines on three equal devices, in the order that needs least."""
    graph, model = traced.graph, CostModel(EVEN)
    found = {b.name: Sparing(b.program, graph) for b in Workshop(graph, Space(graph), model).all()}
    return {name: sparing.again(0) for name, sparing in found.items() if sparing.possible}


def segments(program: Program, traced: Traced) -> int:
    return sum(isinstance(step, Segment) for step in schedule(program, traced.graph).steps)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) if name == "mixture" else name for name in sorted(STEPS)],
)
def test_every_baseline_rearranged_computes_the_same(name: str) -> None:
    step, args = STEPS[name]()
    traced = trace(step, *args)
    leaves = jax.tree.leaves(args)
    moved = again = 0
    for program in programs(traced).values():
        one = joined(program, traced.graph, 1 / 3)
        two = anew(one, traced.graph, 1 / 3)
        moved += one != program
        again += len(two.instructions) > len(one.instructions)
        assert sorted(map(str, one.instructions)) == sorted(map(str, program.instructions))
        assert set(two.instructions) == set(one.instructions)
        # Nothing is exchanged more often than before.
        assert [i for i in two.instructions if isinstance(i, Move)] == [
            i for i in one.instructions if isinstance(i, Move)
        ]
        verify(one, traced.graph)
        verify(two, traced.graph)
        if two != program:
            assert verify_program(traced, two, EVEN_RATIOS, leaves).ok
    if name != "layers":  # what is exchanged there is within the scan
        assert moved
        assert again


def classified(p: Any, x: Any) -> Any:
    """A loss that is summed over devices, behind logits that are many times as large as what makes them."""
    logits = jnp.tanh(x @ p["in"]) @ p["out"]
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


def gated(p: Any, x: Any) -> Any:
    """Experts whose activation is made of more tensors than one."""
    sent = jnp.einsum("gsd,de->egsd", x, p["router"])
    hidden = jax.nn.gelu(jnp.einsum("egsd,edf->egsf", sent, p["up"]), approximate=False)
    back = jnp.einsum("egsf,efd->gsd", hidden, p["down"])
    return jnp.mean((x + back) ** 2)


def test_the_sum_of_a_loss_does_not_cut_what_is_between_the_logits_and_their_gradient() -> None:
    params = {"in": draw(8, 8), "out": draw(8, 600, seed=1)}
    args = arguments(params, draw(300, 8, seed=2))
    traced = trace(trained(classified), *args)
    program = programs(traced)["even data parallelism"]
    changed = joined(program, traced.graph, 1 / 3)
    model = CostModel(EVEN)
    assert segments(changed, traced) < segments(program, traced)
    # Neither is held when an exchange runs. XLA needs 544,944 bytes for the one, 545,196 for the other.
    found = [device_memory(each, traced.graph, EVEN_RATIOS, 0) for each in (program, changed)]
    before, after = (max(moment.held_bytes for moment in each.moments) for each in found)
    assert after < 0.4 * before
    assert found[1].peak_bytes < 1.01 * found[0].peak_bytes
    costs = [seconds(bill(each, traced.graph, model), model, EVEN_RATIOS) for each in (program, changed)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-12)


def test_what_is_computed_anew_ends_a_segment_that_computed_it_already() -> None:
    params = {"router": draw(8, 6), "up": draw(6, 8, 64), "down": draw(6, 64, 8)}
    args = arguments(params, draw(30, 6, 8, seed=1))
    traced = trace(trained(gated), *args)
    program = programs(traced)["ZeRO-2"]
    changed = anew(program, traced.graph, 1 / 3)
    more = len(changed.instructions) - len(program.instructions)
    assert more > 0
    for step in schedule(changed, traced.graph).steps:
        if isinstance(step, Segment):
            here = [i for i in step.instructions if isinstance(i, Compute)]
            assert len(set(here)) == len(here)
    before, after = (max(peaks(each, traced.graph, EVEN_RATIOS)) for each in (program, changed))
    assert after < 0.9 * before
    assert verify_program(traced, changed, EVEN_RATIOS, jax.tree.leaves(args)).ok
