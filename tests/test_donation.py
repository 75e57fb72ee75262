"""Donated state: plans count on its memory, runs take it, and both by one rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from jax import lax

import shardwright
from shardwright import Fleet, Plan, synthesize
from shardwright.cli import main
from shardwright.ir.donation import continued, donating, in_time, taken_over
from shardwright.ir.segments import Exchange, Segment, schedule
from shardwright.ir.trace import trace
from shardwright.memory.device_memory import peaks
from shardwright.synth.memory.rent import too_small

EXAMPLES = Path(__file__).parent.parent / "examples"
LAPTOP = EXAMPLES / "fleets" / "laptop.yaml"


def step(weights: Any, moments: Any, x: Any) -> Any:
    loss, gradients = jax.value_and_grad(lambda w: jnp.mean(jax.nn.relu(x @ w["a"]) @ w["b"]))(weights)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments, loss


def arguments(rows: int = 8) -> tuple[Any, Any, Any]:
    weights = {"a": jnp.ones((64, 512)), "b": jnp.ones((512, 64))}
    return weights, jax.tree.map(jnp.zeros_like, weights), jnp.ones((rows, 64))


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet.load(LAPTOP)


@pytest.fixture(scope="module")
def plans(fleet: Fleet) -> tuple[Plan, Plan]:
    kept, given = (synthesize(step, *arguments(), fleet=fleet, donate=donate) for donate in (False, True))
    return kept, given


def test_what_continues_state_takes_its_memory(plans: tuple[Plan, Plan]) -> None:
    kept, given = plans
    assert (kept.donate, given.donate) == (False, True)
    # The same program, at its fullest when new state is made: less by what the old state takes.
    program, ratios = kept.program, kept.used_ratios
    there = peaks(program, kept.step().graph, ratios)
    gone = peaks(program, donating(kept.step(), True).graph, ratios)
    assert all(less < more for less, more in zip(gone, there, strict=True))
    assert max(given.memory_bytes) < max(kept.memory_bytes)


def test_state_is_taken_over_by_the_segment_that_reads_it_last(plans: tuple[Plan, Plan]) -> None:
    _, given = plans
    graph = given.step().graph
    planned = schedule(given.program, graph)
    over = taken_over(planned)
    found = {new: old for pairs in over.values() for new, old in pairs.items()}
    assert found
    assert found.items() <= continued(given.program, graph).items()
    for number, part in enumerate(planned.steps):
        for new, old in over.get(part, {}).items():
            assert isinstance(part, Segment)
            assert new in part.gives
            assert all(old not in later.needs for later in planned.steps[number + 1 :])


def test_nothing_is_taken_over_of_state_that_an_exchange_makes_anew(fleet: Fleet) -> None:
    def gathered(w: Any, x: Any) -> Any:
        return w + x @ x.T, jnp.sum(w)

    shapes = (jnp.ones((96, 96)), jnp.ones((96, 512)))
    plan = synthesize(gathered, *shapes, fleet=fleet, donate=True, devices="all", constraints={"x": "S(0)"})
    planned = schedule(plan.program, plan.step().graph)
    made = {prop for part in planned.steps if isinstance(part, Exchange) for prop in part.gives}
    pairs = continued(plan.program, plan.step().graph)
    taken = {new for over in taken_over(planned).values() for new in over}
    assert pairs
    assert taken == set(pairs) - made


def test_nothing_lies_where_old_state_is_still_read() -> None:
    """What a segment makes on its way is beside the state that it reads in the end, as XLA has it."""

    def scanned(w: Any, x: Any) -> tuple[Any, Any]:
        def loss_of(w: Any) -> Any:
            hidden, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None), x, w)
            return jnp.mean(hidden**2)

        loss, gradients = jax.value_and_grad(loss_of)(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients), loss

    args = {"up": jnp.ones((3, 8, 32)), "down": jnp.ones((3, 32, 8))}, jnp.ones((7, 8))
    compiled = jax.jit(scanned, donate_argnums=0).lower(*args).compile()
    found = compiled.memory_analysis()
    needed = sum((found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes))
    needed -= found.alias_size_in_bytes

    def where(memory: int, *others: str) -> Fleet:
        types = [("fast", "1 MFLOP/s", memory), *((name, "100 kFLOP/s", 10**9) for name in others)]
        kinds = [
            {"name": name, "flops": flops, "memory_bandwidth": "1 MB/s", "memory": f"{nbytes} B"}
            for name, flops, nbytes in types
        ]
        network = {"bandwidth": "10 kB/s", "latency": "1 ms"}
        nodes = [{"devices": {"type": kind}} for kind in kinds]
        return Fleet.from_dict({"name": "lab", "nodes": nodes, **({"network": network} if others else {})})

    as_it_is: Any = {"donate": True, "recompute": "off", "microbatches": 1}
    alone = synthesize(scanned, *args, fleet=where(10**9), **as_it_is)
    (nbytes,) = alone.memory_bytes
    assert 0.95 * needed <= nbytes <= 1.1 * needed
    assert not too_small(alone.step().graph, [nbytes])
    both = synthesize(scanned, *args, fleet=where(nbytes, "slow"), **as_it_is)
    assert both.fits
    assert both.bound_s <= both.cost_s <= alone.cost_s * (1 + 1e-9)


def test_what_may_be_read_later_is_copied_first() -> None:
    lines: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
        (("w", "x"), ("y",)),
        (("y",), ("g",)),
        (("w", "g"), ("w'",)),
        (("v", "g"), ("v'",)),
        (("v", "y"), ("z",)),
    ]
    assert in_time(lines, {"w'": "w", "v'": "v"}) == {"w'": "w"}
    assert in_time(lines, {}) == {}


def test_without_state_or_donation_there_is_nothing_to_take(plans: tuple[Plan, Plan]) -> None:
    kept, _ = plans
    assert taken_over(schedule(kept.program, kept.step().graph)) == {}
    none = donating(trace(lambda x: jnp.sum(x), jnp.ones(8)), True)
    assert none.graph.donated
    assert none.fingerprint == trace(lambda x: jnp.sum(x), jnp.ones(8)).fingerprint


def test_plan_files_say_so_and_runs_follow(plans: tuple[Plan, Plan], tmp_path: Path) -> None:
    for plan in plans:
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded.donate == plan.donate
        assert loaded.attach(step, *arguments()).graph.donated == plan.donate
        assert ("state is donated" in str(loaded)) == plan.donate
        assert loaded.verify(step, *arguments()).ok
    old = plans[0].to_dict()
    del old["donate"]
    assert Plan.from_dict(old).donate is False


def test_the_runtime_gives_away_what_the_plan_counts_on(plans: tuple[Plan, Plan]) -> None:
    from shardwright.backends.mpi.donated import given_away
    from shardwright.backends.schedule.order import arrange

    _, plan = plans
    graph = plan.step().graph
    counted = {old for pairs in taken_over(schedule(plan.program, graph)).values() for old in pairs.values()}
    order = arrange(plan.program, graph, plan.bucket_bytes)
    state = set(continued(plan.program, graph).values())
    for rank in range(len(plan.used)):
        given = given_away(order, state, rank, len(plan.used))
        assert counted <= set().union(*given.values())


def test_donate_argnums_are_planned_for(tmp_path: Path) -> None:
    common: dict[str, Any] = {"fleet": LAPTOP, "backend": "reference", "cache": tmp_path}
    for given, donated in (((0, 1), True), ((0,), False), ((), False)):
        run = shardwright.parallelize(step, **common, donate_argnums=given)
        assert run.plan(*arguments()).donate == donated
    assert len(list(tmp_path.iterdir())) == 2


def test_the_command_takes_it(tmp_path: Path) -> None:
    code = "import jax.numpy as jnp\n\n\ndef small():\n    return (lambda w, x: (w - x.T @ x, x.sum())), "
    (tmp_path / "small.py").write_text(f"{code}(jnp.ones((32, 32)), jnp.ones((64, 32)))\n")
    path = tmp_path / "plan.json"
    given = ["plan", f"{tmp_path}/small.py:small", "--fleet", str(LAPTOP), "--donate", "-o", str(path)]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 0, result.output
    assert "state is donated" in result.output
    assert Plan.load(path).donate
