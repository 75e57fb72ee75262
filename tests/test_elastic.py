"""Plans for what is left of a fleet, and what watches over ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright
from shardwright import Fleet, InputError, Plan, PlanError, elastic
from shardwright.backends.verify import verify_program
from shardwright.synth import freely
from shardwright.synth.shares.turns import starting_ratios

WATCH = Path(elastic.__file__).with_name("watch.py")


def step(params: Any, x: jax.Array) -> Any:
    loss, gradient = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(x @ p["w1"]) @ p["w2"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss


ARGS = ({"w1": jnp.full((16, 60), 0.1), "w2": jnp.full((60, 4), 0.1)}, jnp.ones((40, 16)))


def fleet(*speeds: float) -> Fleet:
    kinds = [
        {"name": f"d{s:g}", "flops": f"{s} MFLOP/s", "memory_bandwidth": f"{2 * s} MB/s", "memory": "1 GB"}
        for s in speeds
    ]
    node: dict[str, Any] = {"devices": [{"type": kind} for kind in kinds]}
    if len(kinds) > 1:
        node["link"] = {"bandwidth": "400 GB/s", "latency": "100 ns"}
    return Fleet.from_dict({"name": "slow", "nodes": [node]})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return shardwright.synthesize(step, *ARGS, fleet=fleet(50, 20, 20, 10), devices="all")


def test_a_new_plan_is_as_good_as_one_from_scratch_and_starts_from_the_old_shares(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[float, ...] | None] = []

    def noted(model: Any, first: Any, *, alone: bool) -> Any:
        begun.append(first)
        return starting_ratios(model, first, alone=alone)

    smaller = elastic.without(plan.fleet, ["n0.d1"])
    scratch = shardwright.synthesize(step, *ARGS, fleet=smaller, devices="all")
    monkeypatch.setattr(freely, "starting_ratios", noted)
    again = shardwright.replan(plan, smaller, devices="all")
    assert again.fleet == smaller and len(again.ratios) == 3 and again.fingerprint == plan.fingerprint
    assert again.cost_s <= scratch.cost_s * 1.01 and again.bound_s <= again.cost_s
    kept = [plan.ratios[d] for d in (0, 2, 3)]
    assert begun == [pytest.approx([share / sum(kept) for share in kept])]
    assert again.traced is plan.traced is not None
    result = verify_program(
        plan.traced, again.program, again.used_ratios, jax.tree.leaves(ARGS),
        lambda *flat: jax.tree.leaves(step(*jax.tree.unflatten(plan.traced.in_tree, flat))),
    )  # fmt: skip
    assert result.ok, result


def test_shares_for_devices_that_are_new(plan: Plan) -> None:
    larger = fleet(50, 50, 10, 70)
    first = elastic.shares(plan, larger)
    assert first is not None and sum(first) == pytest.approx(1)
    assert first[0] == first[1] and first[2] / first[0] == pytest.approx(plan.ratios[3] / plan.ratios[0])
    assert first[3] == pytest.approx(sum(first[:3]) / 3), "of a type that nobody knows: the mean"
    assert elastic.shares(plan, fleet(1, 2)) is None


def test_a_loaded_plan_asks_for_its_step(plan: Plan) -> None:
    loaded = Plan.from_dict(plan.to_dict())
    with pytest.raises(PlanError, match=r"plan\.attach"):
        shardwright.replan(loaded, fleet(50, 20))


def test_devices_that_are_not_there(plan: Plan) -> None:
    assert [d.type.name for d in elastic.without(plan.fleet, [0, "n0.d3"]).devices] == ["d20", "d20"]
    with pytest.raises(InputError, match=r"has no device n7\.d0. Its devices are n0\.d0, "):
        elastic.without(plan.fleet, ["n7.d0"])
    with pytest.raises(InputError, match="has no other devices"):
        elastic.without(plan.fleet, range(4))


@pytest.mark.parametrize(
    ("code", "status", "noted"),
    [
        ("pass", 0, None),
        ("raise SystemExit(3)", 3, "5 status 3\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "5 signal 9\n"),
    ],
)
def test_it_is_noted_how_a_rank_failed(code: str, status: int, noted: str | None, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    command = [sys.executable, "-S", str(WATCH), str(lost), sys.executable, "-S", "-c", code]
    assert subprocess.run(command, env={"PMI_RANK": "5"}, check=False).returncode == status
    assert (lost.read_text() if lost.exists() else None) == noted


def test_the_launcher_ending_a_rank_is_not_a_loss(tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    code = "import time; print('there', flush=True); time.sleep(60)"
    command = [sys.executable, "-S", str(WATCH), str(lost), sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert not lost.exists()


def test_a_rank_ends_with_who_watches_it(tmp_path: Path) -> None:
    code = "import time; print('there', flush=True); time.sleep(60); print('done')"
    command = [sys.executable, "-S", str(WATCH), str(tmp_path / "lost"), sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.kill()
        assert process.stdout.read() == "", "the pipe closes when the rank is gone, long before it is done"


LIVES = """
import os, signal, time
from mpi4py import MPI
from shardwright.backends.faults import look_after_job

look_after_job()
comm = MPI.COMM_WORLD
comm.barrier()
if comm.size == {ranks} and comm.rank == 1:
    {end}
if comm.size == {ranks}:
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by signal 9"),
        (
            "open(os.environ['SHARDWRIGHT_LOST'], 'x').write('1 silence'); os._exit(3)",
            "is not heard of any more",
        ),
        ("os._exit(3)", ""),
    ],
    ids=["killed", "silent", "by itself"],
)
def test_a_job_goes_on_without_a_rank_that_is_lost(plan: Plan, tmp_path: Path, end: str, how: str) -> None:
    smaller = shardwright.replan(plan, elastic.without(plan.fleet, ["n0.d3"]), devices="all")
    script = tmp_path / "train.py"
    script.write_text(LIVES.format(ranks=3, end=end))
    said: list[str] = []

    def run() -> Plan:
        return elastic.train(smaller, lambda path: [str(script)], tell=said.append, devices="all")

    if not how:
        with pytest.raises(PlanError, match="the job: ended with status"):
            run()
        assert not said
        return
    assert run().used_devices == ("n0.d0", "n0.d1")
    assert said == [f"rank 1 (n0.d1) {how}; planning for n0.d0, n0.d2"]


@pytest.mark.parametrize(
    ("noted", "status", "lost"),
    [
        ("1 silence\n", 9, True),
        ("1 silence\n", 128 + signal.SIGTERM, False),
        ("1 silence\n", -signal.SIGKILL, False),
        ("1 signal 15\n", 128 + signal.SIGTERM, True),
        ("1 status 3\n", 3, False),
        ("", 1, False),
    ],
)
def test_who_ends_the_launcher_loses_no_rank(
    noted: str, status: int, lost: bool, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []

    def run(ranks: int, arguments: Any, path: Path) -> int:
        runs.append(ranks)
        if noted:
            path.write_text(noted)
        return status if len(runs) == 1 else 0

    monkeypatch.setattr(elastic, "_run", run)
    if lost:
        elastic.train(plan, lambda path: ["-c", "pass"], folder=tmp_path, devices="all")
    else:
        with pytest.raises(PlanError, match=f"ended with status {status}"):
            elastic.train(plan, lambda path: ["-c", "pass"], folder=tmp_path)
    assert runs == ([4, 3] if lost else [4])
    assert not list(tmp_path.iterdir()), "nothing is left there"


def test_a_job_that_fails_by_itself_is_not_started_again(plan: Plan, tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = tmp_path / "train.py"
    script.write_text(f"open({str(count)!r}, 'a').write('x'); raise SystemExit(4)")
    one = replace(plan, used=(0,), ratios=(1.0, 0.0, 0.0, 0.0))
    with pytest.raises(PlanError, match="the job: ended with status 4"):
        elastic.train(one, lambda path: ["-S", str(script)])
    assert count.read_text() == "x"
