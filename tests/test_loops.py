"""Training loops on real ranks: the examples, checkpoints between plans, and a rank that is lost.

Ranks compile without optimising: what is tested is what they compute and send, not how fast.
"""

from __future__ import annotations

import difflib
import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import shardwright
from shardwright import Fleet
from shardwright.backends.launch import find_mpiexec, rank_environment
from shardwright.ir.placement import OwnRatios
from shardwright.ir.ties import cut_by, stretches

HERE = Path(__file__).parent
LOOPS = HERE.parent / "examples" / "loops"

QUICK_ONE = {"name": "quick", "flops": "50 MFLOP/s", "memory_bandwidth": "100 MB/s", "memory": "1 GB"}
SLOW_ONE = {"name": "slow", "flops": "20 MFLOP/s", "memory_bandwidth": "40 MB/s", "memory": "1 GB"}
LINK = {"bandwidth": "400 GB/s", "latency": "100 ns"}


def fleet_of(*nodes: tuple[int, int]) -> dict[str, Any]:
    """Devices slow enough, on links fast enough, that cutting small tensors pays.

    Args:
        nodes: how many quick and slow devices each node has.
    """
    listed: list[dict[str, Any]] = []
    for quick, slow in nodes:
        kinds = [{"type": kind, "count": n} for kind, n in ((QUICK_ONE, quick), (SLOW_ONE, slow)) if n]
        listed.append({"devices": kinds, **({"link": LINK} if quick + slow > 1 else {})})
    return {"name": "slow", "nodes": listed, **({"network": LINK} if len(nodes) > 1 else {})}


def fleet_file(folder: Path, quick: int, slow: int) -> Path:
    path = folder / f"fleet{quick}{slow}.yaml"
    path.write_text(json.dumps(fleet_of((quick, slow))))
    return path


def environment(ranks: int, folder: Path) -> dict[str, str]:
    return rank_environment(ranks) | {"XDG_CACHE_HOME": str(folder)}


def run(ranks: int, arguments: list[str], folder: Path) -> str:
    """What `python arguments…` prints on ranks."""
    done = subprocess.run(
        [find_mpiexec(), "-n", str(ranks), sys.executable, *arguments],
        capture_output=True, text=True, check=False, timeout=900, env=environment(ranks, folder),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LOOP = ("gpt_nnx", "mixer_equinox", "mnist_haiku")


@pytest.mark.parametrize("name", LOOP)
def test_a_loop_differs_from_that_of_one_device_by_two_lines(name: str) -> None:
    ours, single = ((LOOPS / f"{name}{kind}.py").read_text().splitlines() for kind in ("", "_single"))
    assert len(ours) <= 80
    lines = [line for line in difflib.ndiff(single, ours) if line[0] in "+-" and line[1:].strip()]
    added = [line[2:] for line in lines if line[0] == "+"]
    removed = [line[2:] for line in lines if line[0] == "-"]
    assert len(added) == 2 and added[0] == "import shardwright" and "parallelize(" in added[1]
    assert len(removed) == 1 and "jit" in removed[0]


def numbers(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?:loss|norm|accuracy|beginning) +([\d.]+)", printed)]


@pytest.mark.parametrize(
    "name", [LOOP[0], *(pytest.param(name, marks=pytest.mark.full) for name in LOOP[1:])]
)
def test_a_loop_on_two_ranks_prints_what_one_device_prints(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = fleet_file(tmp_path, 1, 1)
    arguments = ["2", str(fleet), "1"]  # steps, fleet, and, where that can be chosen, layers
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(LOOPS / f"{name}_single.py"), run_name="__main__")
    single = capsys.readouterr().out
    ours = run(2, [str(LOOPS / f"{name}.py"), *arguments], tmp_path)
    wanted = numbers(single)
    assert len(wanted) >= 4
    # Every rank prints everything, in any order.
    assert sorted(numbers(ours)) == pytest.approx(
        sorted(2 * wanted), rel=1e-3, abs=2e-2 if "accuracy" in single else 1e-3
    )


def test_state_and_checkpoints_on_three_ranks(tmp_path: Path) -> None:
    sys.path.insert(0, str(HERE))
    try:
        from loop_checks import SHAPES, step
    finally:
        sys.path.remove(str(HERE))
    kinds: list[tuple[tuple[tuple[int, int], ...], dict[str, str]]] = [
        (((1, 2),), {}),
        (((0, 1), (1, 1)), {"params/w1": "S(0)/S(1)", "params/b1": "R/S(0)"}),
        (((1, 1),), {"params/w1": "S(1)", "params/w2": "R"}),
        (((1, 0),), {}),
    ]
    layouts: set[Any] = set()
    for number, (nodes, pins) in enumerate(kinds):
        fleet = Fleet.from_dict(fleet_of(*nodes))
        plan = shardwright.synthesize(step, *SHAPES, fleet=fleet, constraints=pins or None, devices="all")
        assert plan.axes == len(nodes)
        if pins and plan.axes == 1:  # and what is cut there is cut by ratios of its own
            graph, count = plan.step(plan.traced).graph, len(plan.used)
            own = OwnRatios(1, tuple(2.0 * (i + 1) / count / (count + 1) for i in range(count)))
            cut = dict.fromkeys(stretches(plan.program, graph).of, own)
            program = cut_by(plan.program, graph, cut)
            held = dict(zip(plan.held, map(str, program.inputs), strict=True))
            plan = replace(plan, program=program, held=held)
        plan.save(tmp_path / f"{number}.json")
        layouts.add((plan.ratios, plan.program.inputs))
    assert len(layouts) == 4
    run(3, [str(HERE / "loop_checks.py"), str(tmp_path)], tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == []


def test_a_loop_outlives_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, lost, folder = 14, 9, tmp_path / "checkpoints"
    fleet = fleet_file(tmp_path, 1, 2)
    arguments = [str(LOOPS / "elastic.py"), str(steps), str(fleet), str(folder), str(lost)]
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, check=False, timeout=900,
        env=environment(3, tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"rank 1 \(n0\.d1\) was ended by signal 9", done.stdout)
    assert "; planning for n0.d0, n0.d2\n" in done.stdout and "done on 2 devices\n" in done.stdout
    printed = [(int(n), float(loss)) for n, loss in re.findall(r"step (\d+)  loss ([\d.]+)", done.stdout)]
    # The last checkpoint before the loss is that of step 8; what came after it is done again.
    assert [n for n, _ in printed] in ([*range(10), *range(8, steps)], [*range(9), *range(8, steps)])
    assert sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) == [4, 8, 12]
    monkeypatch.syspath_prepend(str(LOOPS))
    import elastic

    step, state = jax.jit(elastic.train_step), elastic.initial(jax.random.key(0))
    undisturbed: list[float] = []
    for number in range(steps):
        *state, loss = step(*state, *elastic.batch(number))
        undisturbed.append(float(loss))
    for number, loss in printed:
        assert loss == pytest.approx(undisturbed[number], rel=1e-4)
    assert undisturbed[-1] < undisturbed[0]
