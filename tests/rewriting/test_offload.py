"""What waits in host memory: the same results, less on the devices, priced, and carried out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from rewriting_cases import fleet, layered, on_reference

from shardwright import Plan, synthesize
from shardwright.api import synthesize_traced
from shardwright.backends.reference import ReferenceExecutable
from shardwright.cost.model import CostModel
from shardwright.ir.errors import InputError, PlanError
from shardwright.ir.host import is_reload, spilled_bytes
from shardwright.ir.rewrites.graphs import saved
from shardwright.ir.rewrites.recompute import gains, recomputing
from shardwright.ir.rewrites.rewriting import Rewriting
from shardwright.ir.segments import Away, Back, schedule
from shardwright.ir.trace import trace
from shardwright.memory.device_memory import device_memory
from shardwright.synth.combinations import combinations
from shardwright.synth.stretches import BOTH, OFFLOADING, RECOMPUTING, ladder, stretches

STEP, ARGS = layered(False)
TRACED = trace(STEP, *ARGS)


def checked(plan: Plan) -> None:
    """The arrays that a device holds are those that the plan counts, step by step."""
    assert plan.traced is not None
    run = ReferenceExecutable(plan.traced, plan.program, plan.used_ratios)
    run(*jax.tree.leaves(ARGS))
    for position, device in enumerate(plan.used):
        found = device_memory(plan.program, plan.traced.graph, plan.used_ratios, position)
        assert found.peak_bytes == plan.memory_bytes[device]
        for held, moment in zip(run.held_bytes, found.moments, strict=True):
            assert moment.held_bytes <= held[position] <= moment.nbytes


@pytest.mark.parametrize("again", ["off", "all"])
def test_what_waits_in_host_memory_is_not_on_the_devices(again: Any) -> None:
    """Results are the same to the bit: nothing else is computed, and nothing in another way."""
    small = fleet(host="4 GB/s")
    plain = synthesize_traced(TRACED, fleet=small, recompute=again, offload="off", devices="all")
    plan = synthesize_traced(TRACED, fleet=small, recompute=again, offload="all", devices="all")
    assert all(stretch.host for stretch in plan.rewriting.recompute) and plan.host_s > 0 == plain.host_s
    # With layers computed again the peak is within one of them, whether what they are handed waits or not.
    assert max(plan.memory_bytes) < max(plain.memory_bytes) * (1 if again == "off" else 1 + 1e-9)
    assert plan.traced is not None
    steps = schedule(plan.program, plan.traced.graph).steps
    kinds = [type(step) for step in steps]
    assert Away in kinds and Back in kinds
    if again == "off":  # layer by layer, there and back
        assert kinds.count(Away) >= 3 and kinds.count(Back) >= 3
        assert kinds.index(Away) + 1 < kinds.index(Back)
    checked(plan)
    assert plan.verify(STEP, *ARGS).ok
    for got, wanted in zip(on_reference(plan, ARGS), on_reference(plain, ARGS), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)


def test_gains_are_what_the_changed_step_keeps_less() -> None:
    def kept(graph: Any) -> int:
        return sum(value.type.nbytes for value in saved(graph))

    layers = stretches(TRACED.graph)
    for keep, host in BOTH:
        every = [replace(each, keep=keep, host=host) for each in layers]
        for stretch, gain in zip(every, gains(TRACED.graph, every), strict=True):
            changed = recomputing(TRACED.graph, [stretch])
            if gain.freed_bytes > 0 and any(e.copy for e in changed.equations):
                assert kept(TRACED.graph) - kept(changed) == gain.freed_bytes
                assert spilled_bytes(changed.equations) == gain.spilled_bytes
    sizes = [kept(recomputing(TRACED.graph, rung)) for rung in ladder(TRACED.graph, CostModel(fleet()), BOTH)]
    assert sizes == sorted(sizes, reverse=True)


def test_where_combinations_are_too_many_all_without_host_memory_are_tried() -> None:
    model = CostModel(fleet(host="1 GB/s"))
    layers = len(stretches(TRACED.graph))
    without, complete = combinations(TRACED.graph, model, RECOMPUTING)
    assert complete and len(without) == 3**layers - 1
    some, complete = combinations(TRACED.graph, model, BOTH)
    assert not complete and set(without) < set(some)
    waiting = [each for each in some if any(stretch.host for stretch in each)]
    assert {len(each) for each in waiting} == set(range(1, layers + 1))
    assert all(len({(stretch.keep, stretch.host) for stretch in each}) == 1 for each in waiting)


def test_what_has_too_many_combinations_without_host_memory_or_none_has_a_ladder() -> None:
    step, args = layered(False, layers=8)
    graph, model = trace(step, *args).graph, CostModel(fleet(host="1 GB/s"))
    for policies in (RECOMPUTING, OFFLOADING, BOTH):
        assert combinations(graph, model, policies) == ((), True)
        assert ladder(graph, model, policies)


@pytest.mark.full
def test_the_link_decides_between_computing_again_and_waiting() -> None:
    """Over a slow link nothing waits that can be computed again; what may wait makes no plan dearer."""
    free = synthesize_traced(TRACED, fleet=fleet(), devices="all")
    budget = f"{int(0.6 * max(free.memory_bytes))} B"

    def planned(host: str, **how: Any) -> Plan:
        where = fleet(budget, host=host)
        return synthesize_traced(TRACED, fleet=where, devices="all", microbatches=1, **how)

    fast, slow = planned("1 TB/s"), planned("1 MB/s")
    assert fast.fits and slow.fits and fast.cost_s <= slow.cost_s
    assert slow.host_s < 1e-3 * slow.cost_s
    for plan, host in ((fast, "1 TB/s"), (slow, "1 MB/s")):
        assert plan.cost_s <= planned(host, offload="off").cost_s * (1 + 1e-9)
    waiting = planned("1 TB/s", recompute="off")
    assert waiting.fits and any(stretch.host for stretch in waiting.rewriting.recompute)
    # Without a link nothing waits, whatever is asked for by itself.
    none = synthesize_traced(TRACED, fleet=fleet(budget), devices="all", microbatches=1)
    assert not any(stretch.host for stretch in none.rewriting.recompute)


def test_trips_are_priced_by_bytes_over_the_link_both_ways() -> None:
    prices = {}
    for host in ("1 GB/s", "2 GB/s"):
        plan = synthesize_traced(
            TRACED, fleet=fleet(speeds=(3,), host=host), recompute="off", offload="all", axes=1
        )
        assert plan.traced is not None
        back = [e for e in plan.traced.graph.equations if is_reload(e)]
        nbytes = spilled_bytes(back)
        start_s = len(back) * 2 * (10e-6 + plan.fleet.devices[0].type.launch_s)
        prices[host] = plan.host_s - start_s
        assert prices[host] == pytest.approx(2 * nbytes / (1e9 if host == "1 GB/s" else 2e9))


def test_a_plan_file_has_it_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    plan = synthesize(STEP, *ARGS, fleet=fleet(host="4 GB/s"), recompute="off", offload="all")
    assert "in host memory for the backward pass" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.rewriting == plan.rewriting and loaded.host_s == plan.host_s
    assert loaded.text(loaded.attach(STEP, *ARGS)) == plan.text()
    with pytest.raises(InputError, match=r"no host link for n0\.d0, n0\.d1.*Add host_link"):
        synthesize_traced(TRACED, fleet=fleet(), offload="all")
    with pytest.raises(InputError, match="no host link"):
        synthesize_traced(TRACED, fleet=fleet(), recompute=plan.rewriting)
    with pytest.raises(InputError, match="Pass 'auto', 'off' or 'all'"):
        synthesize_traced(TRACED, fleet=fleet(), offload=cast(Any, "some"))
    with pytest.raises(PlanError, match="plan with offload='off'"):
        plan.compile(STEP, "spmd")(*ARGS)


def test_a_rewriting_says_all_of_it_and_nothing_beside_it_may_contradict() -> None:
    """Numbers beside it were ignored once; what is only repeated, or left to it, is not refused."""
    host = fleet(host="4 GB/s")
    plan = synthesize_traced(TRACED, fleet=host, recompute="off", offload="all", microbatches=2)
    assert plan.rewriting.microbatches == 2 and plan.rewriting.recompute
    for pieces, away in (("auto", "auto"), (2, "all")):
        again = synthesize_traced(
            TRACED, fleet=host, recompute=plan.rewriting, microbatches=pieces, offload=away
        )
        assert again.rewriting == plan.rewriting
    with pytest.raises(InputError, match=r"microbatches: is 4, and the Rewriting .* has 1\. Leave it out"):
        synthesize_traced(TRACED, fleet=host, recompute=Rewriting(), microbatches=4)
    with pytest.raises(InputError, match=r"is 1, and the Rewriting .* has 2"):
        synthesize_traced(TRACED, fleet=host, recompute=plan.rewriting, microbatches=1)
    with pytest.raises(InputError, match=r"offload: is 'off', and .* waits in host memory\. Leave it out"):
        synthesize_traced(TRACED, fleet=host, recompute=plan.rewriting, offload="off")
    whole = synthesize_traced(TRACED, fleet=host, recompute=Rewriting(), microbatches=1, offload="off")
    assert not whole.rewriting


def test_within_pieces_of_the_batch_it_waits_as_well() -> None:
    step, args = layered(False, layers=6, batch=1024)
    small = fleet(host="4 GB/s")
    plan = synthesize(step, *args, fleet=small, recompute="off", offload="all", microbatches=2, devices="all")
    assert plan.rewriting.microbatches == 2 and plan.host_s > 0
    plain = synthesize(step, *args, fleet=small, recompute="off", microbatches=2, devices="all")
    assert max(plan.memory_bytes) < max(plain.memory_bytes)
    for got, wanted in zip(on_reference(plan, args), on_reference(plain, args), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


#: Micro-batches, and bytes of a bucket.
RUN = [(1, 1 << 16), (2, None)]


def test_mpi_moves_it_and_back(tmp_path: Path) -> None:
    from shardwright.backends.launch import find_mpiexec

    for number, (pieces, _) in enumerate(RUN):
        plan = synthesize(
            STEP, *ARGS, fleet=fleet(host="4 GB/s"), devices="all", recompute="off", offload="all",
            microbatches=pieces,
        )  # fmt: skip
        plan.save(tmp_path / f"{number}.json")
        np.savez(tmp_path / f"{number}.npz", *on_reference(plan, ARGS))
    script = tmp_path / "run.py"
    script.write_text(_SCRIPT.format(tests=str(Path(__file__).parent), cases=RUN))
    command = [str(find_mpiexec()), "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


_SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import jax
import numpy as np
from rewriting_cases import layered
from shardwright import Plan
from shardwright.backends import host_memory
from shardwright.backends.mpi import script as mpi_script
gone = []
def noted(array):
    found = host_memory.to_host(array)
    assert host_memory.is_away(found) and not host_memory.is_away(array)
    gone.append(found.nbytes)
    return found
mpi_script.to_host = noted
step, args = layered(False)
for number, (_, bucket) in enumerate({cases!r}):
    run = Plan.load(f"{{number}}.json").compile(step, "mpi", bucket_bytes=bucket)
    gone.clear()
    leaves = jax.tree.leaves(run(*args), is_leaf=lambda x: hasattr(x, "gather"))
    got = [np.asarray(x.gather()) for x in leaves]
    assert gone
    with np.load(f"{{number}}.npz") as wanted:
        for a, b in zip(got, wanted.values(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
"""
