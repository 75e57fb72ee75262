"""State by ratios of its own beside what computes in stretches: what is sent, that it runs, when it wins."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from synth_cases import fleet

import shardwright
from shardwright.backends.reference import ReferenceExecutable
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.factory import load_factory
from shardwright.ir.graph import Value, value_types
from shardwright.ir.placement import OwnRatios, Shard
from shardwright.ir.program import Move, Program, own_ratios, verify
from shardwright.ir.registry import is_contraction
from shardwright.ir.rewrites.rewriting import Rewriting, rewritten
from shardwright.ir.ties import stretches
from shardwright.ir.trace import Traced, trace
from shardwright.ir.wires import Key, keys_made, keys_read
from shardwright.synth import apart
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.search.priced import SpaceSolver
from shardwright.synth.space.pins import is_shard, pin, shardable
from shardwright.synth.space.space import Space
from shardwright.synth.untied import untied

EXPERTS, TOKENS, WIDTH = 6, 4, 8
EXAMPLES = Path(__file__).parents[2] / "examples"
#: Of three devices: even, uneven, and with nothing on some.
SHARES = [(1 / 3, 1 / 3, 1 / 3), (0.7, 0.2, 0.1), (0.5, 0.5, 0.0), (0.0, 0.0, 1.0)]


def experts(w: Any, m: Any, v: Any, x: Any) -> tuple[Any, ...]:
    """Every expert's product with its own rows, and Adam with weight decay."""
    loss, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(jnp.einsum("ted,edf->tef", x, w)) ** 2))(w)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - 1e-2 * (m / (jnp.sqrt(v) + 1e-8) + 0.01 * w), m, v, loss


def given(experts: int = EXPERTS, tokens: int = TOKENS, width: int = WIDTH) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    w, m, v = (rng.normal(size=(experts, width, width)).astype(np.float32) ** 2 for _ in range(3))
    return w, m, v, rng.normal(size=(tokens, experts, width)).astype(np.float32)


@cache
def by_experts() -> tuple[Traced, CostModel, Program]:
    """The step, and its program in which all state lies by experts."""
    traced, model = trace(experts, *given()), CostModel(fleet((4, 2, 1)))
    return traced, model, in_stretches(traced, model)


def in_stretches(traced: Traced, model: CostModel, cheapest: bool = False) -> Program:
    """The cheapest program of a step in which as much of its state as may be is sharded."""
    space = Space(traced.graph)
    prices = Prices.at(model, (1 / 3,) * 3)
    some = [space.root.choice[traced.graph.inputs[at]] for at in traced.graph.state.values()]
    uses = [] if cheapest else [pin(choice, is_shard) for choice in some if shardable(choice)]
    return emit(space, SpaceSolver(space, uses).solve(prices).assignment, prices)


def sent(program: Program, graph: Any) -> int:
    """Bytes of the gathers of a program."""
    types = value_types(graph)
    moves = [i for i in program.instructions if isinstance(i, Move) and i.kind == "all_gather"]
    return sum(types[move.value].nbytes for move in moves)


def test_an_update_where_its_state_lies_is_sent_the_gradient_and_sends_what_is_added() -> None:
    traced, model, program = by_experts()
    graph = traced.graph
    before = sent(program, graph)
    assert {str(p) for p in program.inputs[:3]} == {"S(2)"}
    found = untied(program, graph, model, (0.2, 0.3, 0.5))
    assert found is not None
    verify(found, graph)
    assert own_ratios(found) == {1: OwnRatios(1, (0.2, 0.3, 0.5))}
    assert [str(p) for p in found.inputs[:3]] == ["S(2)", "S(2)@1", "S(2)@1"]
    assert [str(p) for p in found.outputs[:3]] == ["S(2)", "S(2)@1", "S(2)@1"]
    assert sent(found, graph) == before + 2 * graph.inputs[0].type.nbytes
    assert len(stretches(program, graph).of) < len(stretches(found, graph).of)


def test_no_other_sides_send_less() -> None:
    """All ways to put the elementwise instructions of the update on one side or the other."""
    traced, model, program = by_experts()
    graph, types = traced.graph, value_types(traced.graph)
    found = untied(program, graph, model, (1 / 3,) * 3)
    assert found is not None
    makers: dict[Key, int] = {}
    readers: dict[Key, list[int]] = {}
    free: list[int] = []
    for number, instruction in enumerate(program.instructions):
        fixed = isinstance(instruction, Move) or is_contraction(
            graph.equations[instruction.equation].primitive
        )
        keys = [*keys_read(instruction, graph), *keys_made(instruction, graph)]
        if not fixed and any(types[value].nbytes == graph.inputs[0].type.nbytes for value, _ in keys):
            free.append(number)
        for key in keys_made(instruction, graph):
            makers[key] = number
        for key in keys_read(instruction, graph):
            readers.setdefault(key, []).append(number)
    # State comes in and goes out on its side, all else on the other.
    state = {number: number in (-2, -3, -102, -103) for number in (-1, -2, -3, -4, -101, -102, -103, -104)}
    for number, (value, placement) in enumerate(zip(graph.inputs, program.inputs, strict=True)):
        makers[value.index, placement] = -1 - number
    for number, (atom, placement) in enumerate(zip(graph.outputs, program.outputs, strict=True)):
        assert isinstance(atom, Value)
        readers.setdefault((atom.index, placement), []).append(-101 - number)
    cut = {key: some for key, some in readers.items() if isinstance(key[1], Shard)}
    assert 8 < len(free) < 20
    least = float("inf")
    for sides in itertools.product((False, True), repeat=len(free)):
        side = {**state, **dict(zip(free, sides, strict=True))}
        passing = (
            k for k, some in cut.items() if {side.get(n, False) for n in some} - {side.get(makers[k], False)}
        )
        least = min(least, sum(types[value].nbytes for value, _ in passing))
    assert sent(found, graph) == sent(program, graph) + least > 0


@pytest.mark.parametrize("own", SHARES)
@pytest.mark.parametrize("ratios", SHARES)
def test_it_computes_the_step_whatever_the_ratios(ratios: tuple[float, ...], own: tuple[float, ...]) -> None:
    traced, model, program = by_experts()
    found = untied(program, traced.graph, model, own)
    assert found is not None
    got = ReferenceExecutable(traced, found, ratios)(*given())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(experts)(*given())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("example", "pieces"), [("bert_moe.py:tiny", 2), ("llama3.py:tiny_scan", 1), ("llama3.py:tiny_scan", 2)]
)
def test_examples_run_with_their_state_untied(example: str, pieces: int) -> None:
    """Whole steps, with loops over layers and over micro-batches."""
    step, args = load_factory(f"{EXAMPLES / example}")
    traced = rewritten(trace(step, *args), Rewriting(microbatches=pieces))
    model = CostModel(fleet((4, 2, 1)))
    program = in_stretches(traced, model)
    found = untied(program, traced.graph, model, (0.1, 0.2, 0.7))
    assert found is not None, "some of the state is tied to what computes"
    verify(found, traced.graph)
    assert sent(found, traced.graph) > sent(program, traced.graph)
    got = ReferenceExecutable(traced, found, (0.6, 0.4, 0.0))(*jax.tree.leaves(args))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-2, atol=2e-3)


def test_updates_come_one_after_the_other() -> None:
    """Of what is sent from side to side, no more than one tensor is whole at a time."""

    def two(ws: Any, ms: Any, vs: Any, x: Any) -> Any:
        ends = [experts(w, m, v, x) for w, m, v in zip(ws, ms, vs, strict=True)]
        return tuple([[end[k] for end in ends] for k in range(4)])

    w, m, v, x = given()
    traced, model = trace(two, [w] * 3, [m] * 3, [v] * 3, x), CostModel(fleet((4, 2, 1)))
    program = in_stretches(traced, model)
    found = untied(program, traced.graph, model, (1 / 3,) * 3)
    assert found is not None
    verify(found, traced.graph)
    large = {value.index for value in traced.graph.values() if value.type.nbytes == w.nbytes}
    kinds = [
        instruction.kind if isinstance(instruction, Move) else ""
        for instruction in found.instructions
        if large.intersection(value for value, _ in keys_made(instruction, traced.graph))
    ]
    assert kinds.count("all_gather") == kinds.count("slice") == 6
    gathers = [n for n, kind in enumerate(kinds) if kind == "all_gather"]
    assert all(kinds[n + 1] == "slice" for n in gathers)
    # The update of a parameter stands between its two gathers, and before those of the next.
    apart = [after - before for before, after in itertools.pairwise(gathers)]
    assert min(apart[::2]) > 5


def test_what_the_step_gathers_anyway_is_gathered_once() -> None:
    """The gradient goes to where the state lies, and whole into a sum that runs along it."""

    def looks(w: Any, m: Any, v: Any, x: Any) -> tuple[Any, ...]:
        g = jax.grad(lambda w: jnp.mean(jnp.einsum("ted,edf->tef", x, w) ** 2))(w)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return w - 1e-2 * m / (jnp.sqrt(v) + 1e-8), m, v, jnp.cumsum(g.reshape(-1))

    traced, model = trace(looks, *given()), CostModel(fleet((4, 2, 1)))
    program = in_stretches(traced, model)
    found = untied(program, traced.graph, model, (0.2, 0.0, 0.8))
    assert found is not None
    verify(found, traced.graph)
    gathers = [i.value for i in found.instructions if isinstance(i, Move) and i.kind == "all_gather"]
    assert len(set(gathers)) == len(gathers)
    assert any(isinstance(i, Move) and i.kind == "all_gather" for i in program.instructions)
    got = ReferenceExecutable(traced, found, (0.7, 0.2, 0.1))(*given())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(looks)(*given())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_nothing_ties_stays_as_it_is() -> None:
    _, model, _ = by_experts()
    whole = trace(lambda w, x: (w - 0.1 * x.mean(), x.sum()), *given()[2:])
    assert untied(in_stretches(whole, model, cheapest=True), whole.graph, model, (1 / 3,) * 3) is None
    chain = trace(lambda w, m: (w - 0.1 * m, 0.9 * m), *given()[:2])
    assert untied(in_stretches(chain, model), chain.graph, model, (1 / 3,) * 3) is None


# ---------------------------------------------------------------------------------------------------
# Plans


def fast_and_large(memory: str) -> Fleet:
    """A fast device with room for what it computes with, beside a slow one with room for the rest."""
    fast = {"name": "fast", "flops": "20 GFLOP/s", "memory_bandwidth": "40 GB/s", "memory": memory}
    large = {"name": "large", "flops": "1 GFLOP/s", "memory_bandwidth": "20 GB/s", "memory": "8 MB"}
    node = {
        "devices": [{"type": fast}, {"type": large}],
        "link": {"bandwidth": "2 GB/s", "latency": "1 us"},
    }
    return Fleet.from_dict({"name": "fast and large", "nodes": [node]})


@cache
def planned(apart_too: bool) -> shardwright.Plan:
    with pytest.MonkeyPatch.context() as patch:
        if not apart_too:
            patch.setattr(apart, "untied", lambda *_: None)
        return shardwright.synthesize(
            experts,
            *given(16, 256, 64),
            fleet=fast_and_large("1500 kB"),
            axes=1,
            devices="all",
            recompute="off",
            microbatches=8,
        )


def test_a_fast_device_computes_with_more_experts_than_it_has_room_for_the_state_of() -> None:
    tied, loose = planned(False), planned(True)
    assert tied.fits and loose.fits
    assert loose.cost_s < 0.6 * tied.cost_s
    own = list(own_ratios(loose.program).values())
    assert any(each.shares[0] < 0.7 * loose.ratios[0] for each in own)
    assert loose.bound_s <= loose.cost_s


def test_the_plan_agrees_with_the_step_and_comes_back_from_its_file(tmp_path: Path) -> None:
    plan, args = planned(True), given(16, 256, 64)
    plan.verify(experts, *args)
    plan.save(tmp_path / "plan.json")
    assert shardwright.Plan.load(tmp_path / "plan.json") == plan
