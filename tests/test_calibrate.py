"""`shardwright calibrate`: from timed kernels and exchanges to a fleet file, and every way to be refused."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import astuple
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest
import yaml
from click.testing import CliRunner, Result

import shardwright.fleets.calibrate as module
import shardwright.fleets.calibration_cases as cases
from shardwright.backends.launch import find_mpiexec, rank_environment
from shardwright.backends.load import Usage, others
from shardwright.backends.measuring.kernel_cases import KernelCase, copies
from shardwright.backends.measuring.timing import Measured, RankInfo, Request, Resumed, example
from shardwright.cli import main
from shardwright.compare import compare_collectives
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.cost.op_classes import PRODUCTS
from shardwright.fleets.calibrate import calibrate
from shardwright.fleets.calibration_cases import CARD, PROCESSOR, KernelSizes, exchange_cases, kernel_cases
from shardwright.ir import collectives
from shardwright.ir.errors import InputError
from shardwright.ir.graph import TensorType

LAPTOP = Path(__file__).parent.parent / "examples" / "fleets" / "laptop.yaml"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["calibrate", *arguments])


RATES = {**dict.fromkeys(PRODUCTS, 1e11), "total": 5e8, "transcendental": 2e9}


def _rate(op_class: str, speed: float) -> float:
    return speed * RATES.get(op_class, 4e9)


def imagined(
    request: Request,
    ranks: int,
    *,
    noise: float = 0.0,
    load: float = 0.0,
    gains: Mapping[str, float] = MappingProxyType({}),
) -> Measured:
    """What a machine with known rates would measure: kernels by a roofline, exchanges by the model itself."""
    speeds = [1.0] + [0.5] * (ranks - 1)
    link = {"bandwidth": "2 GB/s", "latency": "100 us"}
    kind = {"name": "x", "flops": "1 GFLOP/s", "memory_bandwidth": "1 GB/s", "memory": "1 GB"}
    node = {"devices": {"type": kind, "count": ranks}, "link": link}
    model = CostModel(Fleet.from_dict({"name": "x", "nodes": [node]}))

    @cache
    def kernel_s(case: KernelCase, speed: float) -> float:
        if case.op in ("dispatch", "start"):
            return 5e-6
        each = (
            k.launches * 2e-6
            + max(
                k.flop / _rate(k.op_class, speed) / gains.get(k.arithmetic, 1) + k.turned / (3e8 * speed),
                k.nbytes / (1e10 * speed),
            )
            for k in module._kernels(case)
        )
        return 5e-6 / copies(case) + sum(each)

    @cache
    def exchange_s(kind: str, strategy: str, nbytes: int, ratios: tuple[float, ...]) -> float:
        rows = compare_collectives(model.fleet, kind, nbytes, ratios)
        return next(row.predicted_s for row in rows if row.strategy == strategy)

    wobble = [1 + noise * d for d in (-2, -1, -0.5, 0, 0.5, 1, 3)]
    return Measured(
        tuple(
            tuple(w * exchange_s(e.kind, e.strategy, e.nbytes, e.ratios) for w in wobble)
            for e in request.exchanges
        ),
        tuple(_resumed(exchange_s(*e)) for e in map(astuple, request.exchanges)),
        tuple(
            tuple(tuple(w * kernel_s(k, speed) for w in wobble) for k in request.kernels) for speed in speeds
        ),
        (RankInfo("h", "cpu", 10**9, 1),) * ranks,
        load,
    )


def _resumed(exchange_s: float) -> Resumed:
    """Of a segment of 4 ms."""
    times = (exchange_s + 4e-3 + 3e-4, exchange_s + 5e-5, 4e-3 + 2e-5, 2e-5)
    return Resumed(*((time,) * 7 for time in times))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known measurements in place of real ones."""
    monkeypatch.setattr(module, "load_now", lambda: 0.0)
    monkeypatch.setattr(module, "measure_on", lambda ranks, request, tick: imagined(request, ranks))


@pytest.mark.usefixtures("quiet")
def test_known_rates_come_back_as_a_fleet_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "measured.yaml"
    result = run("-n", "3", "-o", str(path))
    assert result.exit_code == 0, result.output
    fleet = Fleet.load(path)
    assert [c.members for c in fleet.classes] == [(0,), (1, 2)]
    fast, slow = (c.type for c in fleet.classes)
    assert fast.flop_rate("float32", "highest")[0] == pytest.approx(1e11, rel=0.1)
    assert slow.flop_rate("float32", "highest")[0] == pytest.approx(5e10, rel=0.1)
    assert fast.bandwidth_byte_per_s == pytest.approx(1e10, rel=0.1)
    assert fast.launch_s == pytest.approx(2e-6, rel=0.2)
    for op_class in ("total", "transcendental"):
        found = dict(fast.class_efficiencies)[op_class] * fast.float32_flop_per_s
        assert found == pytest.approx(RATES[op_class], rel=0.1), op_class
    assert fast.turned_per_s == pytest.approx(3e8, rel=0.1)
    assert fast.resume_s == slow.resume_s == pytest.approx(3e-4)
    assert fast.restart_s == pytest.approx(5e-5) and fast.resume_over_s == pytest.approx(4e-3)
    assert fast.measured and "±" in fast.source
    link = fleet.nodes[0].link
    assert link is not None
    for measured in link.strategies:
        assert [r.bandwidth_byte_per_s for r in measured.ranges] == pytest.approx([2e9], rel=0.01)
        assert [r.latency_s for r in measured.ranges] == pytest.approx([1e-4], rel=0.01)
    assert "all_gather.exact" in result.output and "95 % intervals" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["measured.yaml"]


def test_a_card_that_uses_tf32_is_timed_with_what_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of steps are in TF32 there, those of single kernels are not."""
    gains = {"default": 6.0, "bfloat16": 11.0, "float16": 10.0}
    asked: list[Request] = []

    def measured(ranks: int, request: Request, tick: object) -> Measured:
        asked.append(request)
        return imagined(request, ranks, gains=gains)

    monkeypatch.setattr(module, "load_now", lambda: 0.0)
    monkeypatch.setattr(module, "measure_on", measured)
    monkeypatch.setattr(module, "on_cards", lambda: True)
    found = calibrate(1)
    assert asked[0].kernels == kernel_cases(CARD)
    kind = found.fleet.devices[0].type
    assert kind.flop_rate("float32", "highest")[0] == pytest.approx(1e11, rel=0.05)
    assert kind.flop_rate("float32")[0] == pytest.approx(6e11, rel=0.1)
    assert kind.flop_rate("bfloat16")[0] == pytest.approx(1.1e12, rel=0.1)
    assert kind.bandwidth_byte_per_s == pytest.approx(1e10, rel=0.05)


@pytest.mark.usefixtures("quiet")
def test_predictions_follow_the_calibrated_links(tmp_path: Path) -> None:
    path = tmp_path / "measured.yaml"
    assert run("-n", "2", "-o", str(path)).exit_code == 0
    model = CostModel(Fleet.load(path))
    for kind in (kind for kind, collective in collectives.registry().items() if not collective.local):
        move, _ = example(kind, "", 1024)
        for strategy in model.strategies(kind, move.pre, move.post):
            times = [
                model.move(kind, strategy, TensorType((n,), "uint8"), move.pre, move.post).constant.max()
                for n in (1, 1 << 10, 1 << 15, 1 << 20, 1 << 25)
            ]
            assert all(a <= b for a, b in pairwise(times)), (kind, strategy)


@pytest.mark.usefixtures("quiet")
def test_names_nodes_and_memory_of_a_fleet_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "measured.yaml"
    assert run("--fleet", str(LAPTOP), "-o", str(path)).exit_code == 0
    fleet, given = Fleet.load(path), Fleet.load(LAPTOP)
    assert fleet.name == "laptop"
    assert [d.type.name for d in fleet.devices] == [f"{d.type.name}-measured" for d in given.devices]
    assert [d.type.memory_bytes for d in fleet.devices] == [d.type.memory_bytes for d in given.devices]


@pytest.mark.usefixtures("quiet")
def test_prices_of_a_fleet_are_kept(tmp_path: Path) -> None:
    given = Fleet.load(LAPTOP).to_dict()
    (node,) = cast("list[dict[str, Any]]", given["nodes"])
    for number, group in enumerate(node["devices"], 1):
        group["type"]["price_per_hour"] = 0.5 * number
    priced, path = tmp_path / "priced.yaml", tmp_path / "measured.yaml"
    priced.write_text(yaml.safe_dump(given))
    assert run("--fleet", str(priced), "-o", str(path)).exit_code == 0
    assert [d.type.price_per_hour for d in Fleet.load(path).devices] == [0.5, 1.0, 1.5, 1.5]


def test_every_collective_strategy_and_kind_of_kernel_is_asked_for() -> None:
    cases = exchange_cases(4)
    # Those that need several nodes make no sense between the ranks of one machine.
    wanted = {
        (k, s)
        for k, c in collectives.registry().items()
        if not c.local
        for s in c.strategies
        if s != "hierarchical"
    }
    assert {(case.kind, case.strategy) for case in cases} == wanted
    assert {len(case.ratios) for case in cases} == {4}
    uneven = {(case.kind, case.strategy) for case in cases if len(set(case.ratios)) > 1}
    assert ("all_gather", "exact") in uneven and ("all_reduce", "ring") not in uneven
    for sizes in (PROCESSOR, CARD):
        timed = {case.op.partition(":")[0] for case in kernel_cases(sizes)}
        assert timed >= {"dispatch", "matmul", "elementwise", "backward", "update"}
    assert exchange_cases(1) == []


def test_load_before_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "load_now", lambda: 0.4)
    result = run("-n", "2", "-o", str(tmp_path / "m.yaml"))
    assert result.exit_code == 2 and not list(tmp_path.iterdir())
    assert "other processes use 40% of this machine's cores" in result.stderr
    assert result.stderr.count("\n") == 1


def test_load_meanwhile_is_refused_unless_forced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "load_now", lambda: 0.0)
    monkeypatch.setattr(module, "measure_on", lambda n, request, tick: imagined(request, n, load=0.5))
    result = run("-n", "2", "-o", str(tmp_path / "m.yaml"))
    assert result.exit_code == 2 and "other processes use 50%" in result.stderr
    assert run("-n", "2", "--force", "-o", str(tmp_path / "m.yaml")).exit_code == 0


def test_noise_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "load_now", lambda: 0.0)
    monkeypatch.setattr(module, "measure_on", lambda n, request, tick: imagined(request, n, noise=0.6))
    result = run("-n", "2", "-o", str(tmp_path / "m.yaml"))
    assert result.exit_code == 2 and not list(tmp_path.iterdir())
    assert "too noisy: repeated runs" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "3", "--fleet", str(LAPTOP)), "has 4 devices, but 3 MPI ranks are to be measured"),
        (("-n", "4000"), "4000 ranks are too many"),
        (("--fleet", "nowhere.yaml"), "cannot be read"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = run(*arguments, "-o", str(tmp_path / "m.yaml"))
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_an_output_that_cannot_be_written_is_found_out_first(tmp_path: Path) -> None:
    result = run("-o", str(tmp_path / "no" / "m.yaml"))
    assert result.exit_code == 2 and "its folder cannot be written" in result.stderr


def test_what_others_use_is_what_is_busy_less_our_own() -> None:
    before, after = Usage(0.0, 10.0, 1.0, 0.0), Usage(2.0, 13.0, 1.5, 0.0)
    assert others(before, after, own_s=1.5, cores=2) == pytest.approx((3.5 - 1.5) / 4)
    assert others(before, after, own_s=9.0, cores=2) == 0


def test_real_ranks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SIZES", (1 << 10, 1 << 16))
    monkeypatch.setattr(cases, "SKEWS", cases.SKEWS[:1])
    small = KernelSizes(
        products=PROCESSOR.products[:2],
        large=(1, 64, 64, 64),
        widths=(1 << 8,),
        reductions=((64, 128),),
        pieces=(("mlp", (2, 8, 16, 32)), ("attention", (2, 8, 16, 2, 8))),
        updates=(("adam", (2, 8, 8)),),
    )
    monkeypatch.setattr(module, "PROCESSOR", small)
    found = calibrate(2, force=True, rounds=2, patience_s=0.0)
    assert len(found.fleet.devices) == 2
    assert all(d.type.measured and d.type.float32_flop_per_s > 1e7 for d in found.fleet.devices)
    assert found.between is not None and all(fit.link.ranges for fit in found.between.strategies)
    assert Fleet.from_dict(found.fleet.to_dict()) == found.fleet


def test_machines_of_a_job_become_nodes(tmp_path: Path) -> None:
    """Three ranks that believe to be on two machines: links inside and between are fitted."""
    script = tmp_path / "job.py"
    script.write_text(
        """
import socket
from mpi4py import MPI
comm = MPI.COMM_WORLD
socket.gethostname = lambda: f"host{(comm.rank + 1) // 2}"
import shardwright.fleets.calibrate as module
import shardwright.backends.measuring.timing as timing
import shardwright.fleets.calibration_cases as cases
timing.COLD_BYTES, cases.SIZES, cases.SKEWS = 1 << 16, (1 << 10, 1 << 14), ()
products = cases.PROCESSOR.products[:2]
module.PROCESSOR = cases.KernelSizes(products, (1, 64, 64, 64), (256,), ((8, 8),), (), ())
found = module.calibrate(3, comm=comm, force=True, rounds=2, patience_s=0.0)
fleet = found.fleet
assert [len(node.devices) for node in fleet.nodes] == [1, 2] and fleet.network is not None
assert fleet.nodes[1].link is not None and fleet.nodes[1].link.strategies
assert comm.allgather(fleet.fingerprint()) == [fleet.fingerprint()] * 3
"""
    )
    done = subprocess.run(
        [find_mpiexec(), "-n", "3", sys.executable, str(script)],
        env=rank_environment(3),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("hosts", "fleet", "reason"),
    [
        ("abab", None, "the ranks of one machine do not follow each other"),
        ("aabb", LAPTOP, "the ranks of n0 of laptop are on 2 machines"),
    ],
)
def test_ranks_that_are_no_nodes_are_refused_before_anything_is_measured(
    hosts: str, fleet: Path | None, reason: str
) -> None:
    class Comm:
        """Ranks that know what machines they are on, and can do nothing else."""

        def allgather(self, own: Any) -> list[str]:
            return list(hosts)

    with pytest.raises(InputError, match=reason):
        calibrate(4, None if fleet is None else Fleet.load(fleet), comm=Comm())


def test_a_job_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match="has 4 devices, but 2 MPI ranks"):
        calibrate(2, Fleet.load(LAPTOP), force=True)
