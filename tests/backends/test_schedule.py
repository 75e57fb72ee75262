"""Collective schedules: complete, in order, and run by something that knows nothing of this package."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from click.testing import CliRunner
from steps import STEPS

from shardwright import Fleet, Plan, api, bucketed, synthesize
from shardwright.backends.launch import find_mpiexec, rank_environment
from shardwright.backends.schedule.acts import Land, Launch
from shardwright.backends.schedule.document import Planned, check_schedule, emit
from shardwright.backends.schedule.geometry import on_the_wire
from shardwright.backends.schedule.order import arrange
from shardwright.backends.schedule.table import builders
from shardwright.cli import main
from shardwright.ir.collectives import IN_PARTS_BYTES, together
from shardwright.ir.errors import PlanError
from shardwright.ir.placement import Partial, R, Shard
from shardwright.ir.program import Move
from shardwright.ir.segments import Segment
from shardwright.ir.wiring import Wiring

HERE = Path(__file__).parent


def replay(ranks: int, *paths: Path) -> subprocess.CompletedProcess[str]:
    command = [find_mpiexec(), "-n", str(ranks), sys.executable, "-m", "mpi4py", str(HERE / "replay.py")]
    command += map(str, paths)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=rank_environment(ranks), check=False
    )


def every_strategy(ranks: int, every: bool) -> list[list[Planned]]:
    """One schedule per set of ratios with a message for every case of the conformance test."""
    found: dict[tuple[float, ...], list[Planned]] = {}
    for case in cases(ranks, local=False, every=every):
        # numpy alone has none of these; what widens is tested with float16.
        if case.tensor.dtype in ("bfloat16", "float8_e4m3fn", "int4", "key<fry>"):
            continue
        if ranks > 2 and case.tensor.dtype not in ("float32", "float16"):
            continue
        messages = found.setdefault(case.ratios, [])
        number = len(messages)
        move = replace(case.move, value=number)
        after = (number - 7,) if number % 5 == 4 and number > 6 else ()
        messages.append(Planned(number, (), (number,), (move,), (case.tensor,), after))
    return [emitted(messages, ratios) for ratios, messages in found.items()]


def emitted(messages: list[Planned], ratios: tuple[float, ...]) -> Any:
    ranks = len(ratios)
    wiring = Wiring(tuple(i % 2 for i in range(ranks)), (ranks - 1,))
    known = [m for m in messages if (m.moves[0].kind, m.moves[0].strategy) in builders()]
    names = [f"d{i}" for i in range(ranks)]
    return emit(known, ratios, wiring, devices=names, plan="none")


@pytest.mark.parametrize(
    ("ranks", "every"), [(3, False), *(pytest.param(n, True, marks=pytest.mark.full) for n in (2, 3))]
)
def test_an_independent_replayer_reproduces_every_strategy(ranks: int, every: bool, tmp_path: Path) -> None:
    paths = []
    for number, schedule in enumerate(every_strategy(ranks, every)):
        check_schedule(schedule)
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(schedule))
        kinds = {(m["collective"], m["strategy"]) for rank in schedule["ranks"] for m in rank["messages"]}
        assert number or {kind for kind in builders() if kind[0] != "send" or ranks == 2} <= kinds
    done = replay(ranks, *paths)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_replayer_finds_what_is_wrong(tmp_path: Path) -> None:
    message = Planned(0, (), (0,), (Move("all_reduce", 0, Partial("sum"), R, "ring"),), (tensor(5, 4),))
    schedule = emitted([message], (0.5, 0.5))
    for rank in schedule["ranks"]:
        stages = rank["messages"][0]["stages"]
        for stage in stages:
            stage["locals"] = [x for x in stage["locals"] if x["kind"] == "copy"]
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(schedule))
    done = replay(2, path)
    assert done.returncode != 0 and "message 0 (all_reduce.ring): wrong result" in done.stdout


def tensor(*shape: int) -> Any:
    from shardwright.ir.graph import TensorType

    return TensorType(shape, "float32")


def four() -> Fleet:
    kind = {"memory": "1 GB", "memory_bandwidth": "2 GB/s"}
    nodes = [
        {"devices": {"type": {"name": f"d{i}", "flops": f"{rate} GFLOP/s", **kind}, "count": 1}}
        for i, rate in enumerate((4, 2, 1, 1))
    ]
    return Fleet.from_dict(
        {"name": "four", "nodes": nodes, "network": {"bandwidth": "1 GB/s", "latency": "1 us"}}
    )


@pytest.mark.parametrize("bucket_bytes", [None, 256])
def test_a_plan_s_schedule_replays(bucket_bytes: int | None, tmp_path: Path) -> None:
    step, args = STEPS["mlp"]()
    plan = replace(synthesize(step, *args, fleet=four(), devices="all"), bucket_bytes=bucket_bytes)
    plan.save(tmp_path / "plan.json")
    runner = CliRunner()
    out = tmp_path / "schedule.json"
    result = runner.invoke(main, ["emit", str(tmp_path / "plan.json"), "-o", str(out)])
    assert result.exit_code == 0, result.output
    schedule = json.loads(out.read_text())
    check_schedule(schedule)
    assert schedule == plan.schedule() and len(schedule["ranks"]) == 4
    alone = runner.invoke(main, ["emit", str(tmp_path / "plan.json"), "--rank", "2"])
    (only,) = json.loads(alone.stdout)["ranks"]
    assert only == schedule["ranks"][2]
    # Every exchange of the program is in one message, and messages come after those they need.
    instructions = enumerate(plan.program.instructions)
    moves = [i for i, m in instructions if isinstance(m, Move) and m.kind not in ("slice", "own")]
    sent = [i for m in only["messages"] for i in m["instructions"]]
    assert sorted(sent) == moves
    assert all(n < m["number"] for m in only["messages"] for n in m["after"])
    done = replay(4, out)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        *((each, each) for each in ("float64", "complex128", "float32", "int64", "uint8")),
        *(
            (each, "float32")
            for each in ("float16", "bfloat16", "float8_e4m3fn", "float6_e2m3fn", "float4_e2m1fn")
        ),
        ("int4", "int8"),
    ],
)
def test_only_what_mpi_cannot_add_up_changes_its_dtype(dtype: str, wide: str) -> None:
    assert on_the_wire(dtype, "sum") == (wide, "sum")


def test_bad_requests_are_one_clear_error(tmp_path: Path) -> None:
    step, args = STEPS["mlp"]()
    plan = synthesize(step, *args, fleet=four(), devices="all")
    with pytest.raises(PlanError, match="rank 4: does not exist: the plan uses 4 devices"):
        plan.schedule([4])
    data = plan.to_dict()
    del data["messages"]
    with pytest.raises(PlanError, match="written by an earlier version"):
        Plan.from_dict(data).schedule()
    with pytest.raises(PlanError, match=r"schedule: format"):
        check_schedule(plan.schedule() | {"format": 2})
    with pytest.raises(PlanError, match="of its own"):
        emit(
            [Planned(0, (), (0,), (Move("all_gather", 0, Shard(0), R, "mine"),), (tensor(4),))],
            (0.5, 0.5), None, devices=("a", "b"), plan="",
        )  # fmt: skip


def test_sufficient_factor_broadcasts_are_labelled() -> None:
    import jax
    import jax.numpy as jnp

    def step(w: Any, x: Any, y: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.1 * gradient, loss

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((2048, 2048), (64, 2048), (64, 2048))]
    kind = {"name": "d", "flops": "10 TFLOP/s", "memory_bandwidth": "900 GB/s", "memory": "16 GB"}
    fleet = Fleet.from_dict(
        {
            "name": "slow network",
            "nodes": [{"devices": {"type": kind, "count": 1}} for _ in range(2)],
            "network": {"bandwidth": "100 MB/s", "latency": "1 us"},
        }
    )
    pins: Any = {"w": R, "x": Shard(0), "y": Shard(0)}
    plan = synthesize(step, *shapes, fleet=fleet, constraints=pins, devices="all")
    labels = {m["pattern"] for rank in plan.schedule()["ranks"] for m in rank["messages"]}
    assert "sufficient factors" in labels


def data_parallel(width: int) -> Any:
    """The order and the plan of a perceptron's step on two equal ranks of one node, in messages."""
    import jax
    import jax.numpy as jnp

    def step(weights: list[Any], x: Any) -> Any:
        def loss_of(weights: list[Any]) -> Any:
            h = x
            for w in weights:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss

    args = [jax.ShapeDtypeStruct((width, width), "float32")] * 4, jax.ShapeDtypeStruct((64, width), "float32")
    kind = {"name": "cpu", "flops": "20 GFLOP/s", "memory_bandwidth": "8 GB/s", "memory": "2 GB"}
    node = {"devices": {"type": kind, "count": 2}, "link": {"bandwidth": "2 GB/s", "latency": "2 ms"}}
    plan = synthesize(step, *args, fleet=Fleet.from_dict({"name": "two", "nodes": [node]}), devices="all")
    assert plan.traced is not None
    even = next(b for b in api.data_parallel(plan.traced, plan.fleet) if b.name.startswith("even"))
    plan = bucketed(replace(plan, program=even.program, ratios=even.ratios, iteration_s=even.iteration_s))
    assert plan.traced is not None
    return arrange(plan.program, plan.traced.graph, plan.bucket_bytes, near=plan.near), plan


def test_data_parallelism_is_two_segments_around_one_message_as_by_hand() -> None:
    order, plan = data_parallel(512)
    steps = [type(step) for step in order.steps]
    assert steps == [Segment, Launch, Land, Segment]
    (message,) = [message for _, message in order.messages()]
    assert len(message.moves) == 5, "four gradients and the loss"
    assert {move.strategy for move in plan.program.instructions if isinstance(move, Move)} >= {"tree"}
    assert {move.strategy for move in message.moves} == {"rs_ag"}, "4 MiB are added up in parts"
    (small,) = [message for _, message in data_parallel(64)[0].messages()]
    assert {move.strategy for move in small.moves} == {"tree"}, "80 kB are not worth another round"


def test_what_travels_together_has_one_strategy() -> None:
    large, small = IN_PARTS_BYTES, IN_PARTS_BYTES // 4
    pair = [("tree", large), ("tree", 4)]
    assert together("all_reduce", pair, near=True) == "rs_ag"
    assert together("all_reduce", pair, near=False) == "tree", "another round may cost more between nodes"
    assert together("all_reduce", [("tree", small), ("tree", small)], near=True) == "tree"
    assert together("all_reduce", [("tree", 4), ("ring", small)], near=False) == "ring", "as the largest one"
    assert together("all_reduce", [("tree", large)], near=True) == "tree", "one tensor goes as it is planned"
    assert together("all_reduce", [("hierarchical", large)] * 2, near=True) == "hierarchical"
    assert together("all_gather", [("padded", large)] * 2, near=True) == "padded"


def test_exchanges_leave_early_together_and_land_late() -> None:
    step, args = STEPS["mlp"]()
    plan = synthesize(step, *args, fleet=four(), devices="all")
    assert plan.traced is not None
    plain = arrange(plan.program, plan.traced.graph)
    early = arrange(plan.program, plan.traced.graph, 1 << 20)

    def moves(order: Any) -> list[Any]:
        return sorted((m.value, str(m.pre), str(m.post)) for _, x in order.messages() for m in x.moves)

    assert moves(plain) == moves(early)
    assert len(list(early.messages())) <= len(list(plain.messages()))
    for order in (plain, early):
        launched: set[int] = set()
        for step_ in order.steps:
            if isinstance(step_, Launch):
                assert set(step_.message.after) <= launched
                launched.add(step_.message.number)
            elif isinstance(step_, Land):
                assert step_.message.number in launched
