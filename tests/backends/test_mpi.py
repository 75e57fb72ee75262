"""The MPI backend on real ranks: collectives against their definition, programs against `reference`."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from greedy import build, several
from steps import STEPS, starts

from shardwright import Fleet, Plan, synthesize
from shardwright.backends.launch import (
    TCP_PIECES,
    find_mpiexec,
    launch,
    launched,
    rank_environment,
    under_mpi,
)
from shardwright.backends.mpi.moves import lowerings
from shardwright.backends.reference import ReferenceExecutable
from shardwright.backends.schedule.table import builders
from shardwright.backends.world import World
from shardwright.ir import collectives
from shardwright.ir.errors import InputError, PlanError
from shardwright.ir.serialize import program_to_json
from shardwright.ir.trace import trace
from shardwright.ir.wiring import Seats
from shardwright.synth.memory.anew import anew
from shardwright.synth.memory.joined import joined

HERE = Path(__file__).parent
RATIOS = {1: (1.0,), 2: (0.7, 0.3), 3: (0.5, 0.0, 0.5), 4: (0.4, 0.1, 0.2, 0.3)}

# (step, start, seed of the builder) on each number of ranks.
PROGRAMS = {
    1: [],
    2: [("mlp", "zero", None), ("scanned", "data", 0), ("batched", "data", None), ("summed", "last", 1)],
    3: [
        ("mlp", "data", 1),
        ("scanned", "last", None),
        ("controlled", "data", None),
        ("batched", "data", None),
        ("summed", "zero", None),
    ],
    4: [
        ("mlp", "last", None),
        ("controlled", "zero", 0),
        ("batched", "zero", 0),
        ("half", "data", None),
        ("summed", "last", None),
    ],
}


def test_every_strategy_is_lowered_and_nothing_else() -> None:
    moves = {k: c for k, c in collectives.registry().items() if not c.local}
    named = {(kind, strategy) for kind, c in moves.items() for strategy in c.strategies}
    assert set(builders()) | set(lowerings()) == named
    assert not set(builders()) & set(lowerings())


def write_programs(folder: Path, ranks: int) -> None:
    for number, (name, start, seed) in enumerate(PROGRAMS[ranks]):
        step, args = STEPS[name]()
        traced = trace(step, *args)
        rng = None if seed is None else random.Random(seed)
        program = build(traced.graph, starts(traced.graph)[start], rng)
        if rng is not None:
            program = several(program, traced.graph, ranks, rng)
        reference = ReferenceExecutable(traced, program, RATIOS[ranks])
        flat = jax.tree.leaves(args)
        first = reference(*flat)
        state = {inp: first[out] for out, inp in traced.graph.state.items()}
        second = reference(*[state.get(i, leaf) for i, leaf in enumerate(flat)])
        wanted = {
            f"{call}{i}": np.asarray(x)
            for call, xs in (("first", first), ("second", second))
            for i, x in enumerate(xs)
        }
        if rng is None:  # ranks run it as it is where memory is short; the results are those of the other
            program = anew(joined(program, traced.graph, 1 / ranks), traced.graph, 1 / ranks)
        described = {"step": name, "ratios": RATIOS[ranks], "program": program_to_json(program)}
        (folder / f"{number}.program.json").write_text(json.dumps(described))
        np.savez(folder / f"{number}.npz", **wanted)


# Of two and three ranks other tests run whole steps and every strategy, `test_mpi_grid` nodes of three.
# Nor is every combination of what can be combined tried on four, but some of each (`cases.py`).
@pytest.mark.parametrize(
    ("ranks", "every"),
    [(1, True), (4, False), *(pytest.param(n, True, marks=pytest.mark.full) for n in (2, 3, 4))],
)
def test_ranks_conform(ranks: int, every: bool, tmp_path: Path) -> None:
    write_programs(tmp_path, ranks)
    if ranks == 4:
        planned_for_two().save(tmp_path / "part.json")
    status = launch(ranks, [str(HERE / "mpi_checks.py"), str(tmp_path), *["every"] * every])
    summary = json.loads((tmp_path / "summary.json").read_text())
    print(summary)
    assert summary["failures"] == []
    assert status == 0
    assert summary["checked"] > 300


def two_of_four() -> Fleet:
    """Two quick devices that share a node, between two slow ones that are hard to reach."""

    def node(speed: float, count: int) -> dict[str, object]:
        kind = {"name": f"d{speed:g}", "flops": f"{speed} MFLOP/s", "memory_bandwidth": f"{2 * speed} MB/s"}
        link = {"bandwidth": "400 GB/s", "latency": "100 ns"}
        return {"devices": {"type": kind | {"memory": "1 GB"}, "count": count}, "link": link}

    network = {"bandwidth": "1 kB/s", "latency": "1 s"}
    return Fleet.from_dict(
        {"name": "four", "nodes": [node(1, 1), node(5, 2), node(1, 1)], "network": network}
    )


def planned_for_two() -> Plan:
    step, args = STEPS["mlp"]()
    plan = synthesize(step, *args, fleet=two_of_four(), axes=1)
    assert plan.used == (1, 2) and min(plan.used_ratios) > 0
    return plan


# With the others, on four ranks, it trains in the start of these that is above.
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_plan_that_leaves_devices_out_trains_on_ranks_with_and_without_them(
    ranks: int, tmp_path: Path
) -> None:
    planned_for_two().save(tmp_path / "plan.json")
    assert launch(ranks, [str(HERE / "mpi_part.py"), str(tmp_path / "plan.json")]) == 0


def test_the_error_for_another_number_of_ranks_names_both_that_would_do() -> None:
    from mpi4py import MPI

    with pytest.raises(PlanError, match=r"uses 2 of 4 devices, but 1 .* mpiexec -n 2, or -n 4"):
        World((0.5, 0.5), MPI.COMM_SELF, seats=Seats((1, 2), 4))


FAILING = """
import sys
from mpi4py import MPI
from shardwright.backends.mpi.executable import abort_on_error
from shardwright.ir.errors import PlanError
comm = MPI.COMM_WORLD
with abort_on_error():
    if comm.rank == 1:
        error = PlanError(place="here", reason="is wrong", remedy="Mend it")
        if sys.argv[1] == "bug":
            error = ValueError("no more")
        error.add_note("at instruction 7: %3 R = all_reduce.ring %3 P(sum)")
        raise error
    comm.Barrier()
"""


@pytest.mark.parametrize(("kind", "status"), [("bug", 1), ("input", 2)])
def test_a_failing_rank_takes_the_job_down(kind: str, status: int, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = subprocess.run(
        [find_mpiexec(), "-n", "2", sys.executable, str(script), kind],
        capture_output=True, text=True, timeout=60, env=rank_environment(2), check=False,
    )  # fmt: skip
    assert done.returncode == status, done
    assert "rank 1 at instruction 7: %3 R = all_reduce.ring %3 P(sum): " in done.stderr
    assert ("Traceback" in done.stderr) == (kind == "bug")


def test_importing_shardwright_does_not_start_mpi() -> None:
    code = "import sys, shardwright.backends.mpi.executable; print('mpi4py.MPI' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_launcher_of_another_mpi_is_refused(tmp_path: Path) -> None:
    """Each of its ranks would take itself for the only one."""
    environment = os.environ | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    command = [sys.executable, "-m", "shardwright", "calibrate", "-o", str(tmp_path / "m.yaml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "backend mpi: mpiexec started 4 ranks, but the MPI library of mpi4py (MPICH" in done.stderr
    assert launched({"PMI_SIZE": "3"}) == 3 and launched({}) is None


def test_pieces_of_tcp_are_large_unless_the_user_says_otherwise() -> None:
    assert rank_environment(2, {}).items() >= TCP_PIECES.items()
    smaller = {"UCX_TCP_RX_SEG_SIZE": "32k"}
    found = rank_environment(2, smaller)
    assert {name: found[name] for name in TCP_PIECES if name in found} == smaller
    code = "import json, os; from shardwright.backends.mpi.link import mpi; mpi();"
    code += "print(json.dumps(dict(os.environ)))"
    own = {key: value for key, value in os.environ.items() if key not in TCP_PIECES}
    for chosen, expected in (({}, TCP_PIECES), (smaller, smaller)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, timeout=60, env=own | chosen, check=True,
        )  # fmt: skip
        given = json.loads(done.stdout)
        assert {name: given[name] for name in TCP_PIECES if name in given} == expected


def test_missing_mpiexec_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"pip install 'shardwright\[mpi\]'"):
        find_mpiexec()


def test_ranks_are_recognised() -> None:
    assert under_mpi({"PMI_RANK": "0"})
    assert under_mpi({"OMPI_COMM_WORLD_RANK": "3"})
    assert not under_mpi({"PATH": ""})


def test_crowded_ranks_get_one_thread() -> None:
    environment = rank_environment(1000, {"XLA_FLAGS": "--xla_dump_to=x"})
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["XLA_FLAGS"] == "--xla_dump_to=x --xla_cpu_multi_thread_eigen=false"
