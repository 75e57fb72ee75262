"""Runs under mpiexec: `python mpi_checks.py FOLDER [every]`. Checks many things in one start of the ranks.

FOLDER holds what the test wrote: programs as JSON and what `reference` made of them. Rank 0 leaves
`summary.json` there; the exit status is 1 where anything is wrong.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mpi_part
import numpy as np
from cases import DTYPES, Case, before, cases, expected, same
from greedy import build
from mpi4py import MPI
from steps import STEPS, nested, summed

from shardwright.backends.direct import DirectExchanger
from shardwright.backends.layout import cut
from shardwright.backends.mpi.executable import MpiExecutable, abort_on_error
from shardwright.backends.run_options import RunOptions
from shardwright.backends.schedule.acts import Repeat
from shardwright.backends.world import ShardedArray, World
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import Placement, R, Shard
from shardwright.ir.program import Compute, Program, verify
from shardwright.ir.rules import Signature
from shardwright.ir.serialize import program_from_json
from shardwright.ir.trace import trace
from shardwright.ir.wiring import Seats, Wiring
from shardwright.memory.device_memory import device_memory

comm = MPI.COMM_WORLD
every = "every" in sys.argv
failures: list[str] = []
checked = 0


def check(condition: bool, what: str) -> None:
    global checked
    checked += 1
    if not condition:
        failures.append(f"rank {comm.rank}: {what}")


def wirings(size: int) -> list[Wiring | None]:
    """Two nodes with unlike leaders, nodes whose devices do not stand together, and whoever shares memory."""
    halves = Wiring(tuple(int(2 * i >= size) for i in range(size)), (size // 2 - 1, size - 1))
    return [halves, Wiring(tuple(i % 2 for i in range(size)), (size - 1,)), None]


def everybody(wiring: Wiring | None) -> Seats:
    return Seats(tuple(range(comm.size)), comm.size, wiring)


def check_moves() -> None:
    worlds: dict[tuple[tuple[float, ...], int], World] = {}
    # How a dtype travels does not depend on the number of ranks.
    for case in cases(comm.size, local=False, dtypes=DTYPES if comm.size > 2 else DTYPES[:1], every=every):
        for number, wiring in enumerate(wirings(comm.size)):
            # Who shares a node matters to hierarchical strategies only, not to how dtypes travel.
            if number and (case.move.strategy != "hierarchical" or case.tensor.dtype != "float32"):
                continue
            key = case.ratios, number
            if key not in worlds:
                # Who waits by spinning takes the core from whom it waits for: not among many ranks.
                poll = comm.size > 3 or len(worlds) % 2 == 0
                worlds[key] = World(case.ratios, comm, seats=everybody(wiring), poll=poll)
            check_move(case, worlds[key])
    check_direct()


def check_direct() -> None:
    """MPI is given addresses of JAX's memory; on a CPU it can read these, whatever it is told they are."""
    direct, worlds = 0, dict[tuple[float, ...], World]()
    for case in cases(comm.size, local=False, dtypes=("float32",), every=every):
        if case.ratios not in worlds:
            worlds[case.ratios] = World(case.ratios, comm, seats=everybody(None), direct=True)
        world = worlds[case.ratios]
        check_move(case, world)
        exchanger = world.exchanger((case.move,), (case.tensor,))
        direct += isinstance(exchanger, DirectExchanger)
    check(direct >= 5, f"{direct} cases were direct")


def check_move(case: Case, world: World) -> None:
    world.join([case.move.group])
    arrays = before(case)
    mine = arrays[comm.rank]
    if case.move.root not in (None, comm.rank):
        mine = None
    elif world.direct and mine is not None:
        mine = jnp.asarray(mine)
    got = world.move(case.move, case.tensor, mine)
    check(same(got, expected(case, arrays)[comm.rank]), str(case))


def close(got: Any, wanted: Any, tolerance: float) -> bool:
    a, b = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    scale = float(np.max(np.abs(b), initial=1e-3))
    return a.shape == b.shape and float(np.max(np.abs(a - b), initial=0.0)) <= tolerance * scale


def check_programs(folder: Path) -> None:
    for path in sorted(folder.glob("*.program.json")):
        described = json.loads(path.read_text())
        step, args = STEPS[described["step"]]()
        traced = trace(step, *args)
        program = program_from_json(described["program"])
        verify(program, traced.graph)
        run = MpiExecutable(traced, program, described["ratios"], comm)
        flat = jax.tree.leaves(args)
        if described["step"] == "mlp":
            check_early(traced, program, described["ratios"], flat, run)
        first = run(*flat)
        check_refused(traced, program, described["ratios"], flat, first)
        # The loop: state goes back in as it came out, without being gathered.
        state = {inp: first[out] for out, inp in traced.graph.state.items()}
        second = run(*[state.get(i, leaf) for i, leaf in enumerate(flat)])
        wanted = np.load(path.with_suffix("").with_suffix(".npz"))
        tolerance = 2e-2 if described["step"] == "half" else 1e-5
        for call, results in (("first", first), ("second", second)):
            for i, result in enumerate(results):
                what = f"{path.name} {call} output {i}"
                check(isinstance(result, ShardedArray) and result.placement == program.outputs[i], what)
                check(close(result.gather(), wanted[f"{call}{i}"], tolerance), what)


def check_early(traced: Any, program: Program, ratios: Any, flat: list[Any], plain: MpiExecutable) -> None:
    """Buckets, early departures and donated state change nothing, bit for bit."""
    options = RunOptions(bucket_bytes=256, donate=True)
    early = MpiExecutable(traced, program, ratios, comm, options=options)
    state = traced.graph.state
    mine, theirs = list(flat), list(flat)
    for _ in range(3):
        got, wanted = early(*mine), plain(*theirs)
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            check(np.array_equal(a.local, b.local), f"early output {i}")
        for out, position in state.items():
            mine[position], theirs[position] = got[out], wanted[out]


def check_refused(traced: Any, program: Program, ratios: Any, flat: list[Any], results: list[Any]) -> None:
    """State that lies as another plan placed it is one error, before anything is compiled."""
    other = MpiExecutable(traced, program, ratios[::-1], comm)
    lying = {i: results[out] for out, i in traced.graph.state.items() if program.outputs[out] != R}
    if not lying or ratios[::-1] == ratios:
        return
    try:
        other(*[lying.get(i, leaf) for i, leaf in enumerate(flat)])
        check(False, "state of another plan must be refused")
    except PlanError as error:
        check("as another plan placed it" in str(error) and "gather()" in str(error), str(error))
        check(other.calls == 0, "before the first step")


def check_noise(traced: Any, program: Program, args: Any, ratios: tuple[float, ...]) -> None:
    """One unit in the last place, added to one rank's state in every step, stays what K steps make of it."""
    steps, every = 20, 5
    run = MpiExecutable(traced, program, ratios, comm, options=RunOptions(resync_every=every))
    flat = jax.tree.leaves(args)
    for number in range(1, steps + 1):
        results = run(*flat)
        apart = 0.0
        for out, position in traced.graph.state.items():
            local = np.asarray(results[out].local)
            parts = comm.allgather(local)
            scale = np.spacing(np.abs(parts[0]).max(initial=1.0))
            apart = max(apart, *(float(np.abs(part - parts[0]).max() / scale) for part in parts))
            noisy = np.nextafter(local, np.float32(9)) if comm.rank == comm.size - 1 else local
            held = jax.numpy.asarray(noisy)
            flat[position] = ShardedArray(held, results[out].placement, results[out].tensor, run.world)
        check(apart == 0.0 if number % every == 0 else apart < 8 * every, f"drift of {apart} units")
    check({drift.call % every for drift in run.drift} == {0}, "drift is found when states are compared")
    check(all(0 < drift.difference < 1e-4 and drift.name for drift in run.drift), "drift is reported")


def check_arrays() -> None:
    step, args = STEPS["mlp"]()
    traced = trace(step, *args)
    ratios = tuple((i + 1) / sum(range(1, comm.size + 1)) for i in range(comm.size))
    world = World(ratios, comm)
    x = np.arange(40, dtype=np.float32).reshape(8, 5)
    tensor = TensorType(x.shape, "float32")
    sharded = ShardedArray(
        cut(jax.numpy.asarray(x), tensor, Shard(1), comm.rank, ratios), Shard(1), tensor, world
    )
    check(len(jax.tree.leaves([sharded])) == 1 and jax.tree.leaves([sharded])[0] is sharded, "a pytree leaf")
    check(
        np.array_equal(sharded.gather(), x) and sharded.shape == (8, 5) and sharded.dtype == np.float32,
        "gather",
    )
    try:
        np.asarray(sharded)
        check(False, "a shard must not be converted silently")
    except PlanError as error:
        check("gather()" in str(error), "the remedy names gather()")
    scalar = ShardedArray(jax.numpy.float32(2.5), R, TensorType((), "float32"), world)
    check(float(scalar) == 2.5 and np.asarray(scalar) == 2.5, "a replicated scalar converts")
    check(int(scalar) == 2 and f"{scalar:.2f}" == "2.50" and str(scalar) == f"{scalar}", "as it is asked to")
    done = ShardedArray(jax.numpy.asarray(False), R, TensorType((), "bool"), world)
    check(not done, "False is not true because it is an array")
    check(jax.block_until_ready([sharded])[0] is sharded, "there is a way to wait for it")
    try:
        World((1.0,) * (comm.size + 1), comm)
        check(False, "a plan for more devices must be refused")
    except PlanError as error:
        check(f"mpiexec -n {comm.size + 1}" in str(error), "the remedy names the number of ranks")
    check_given_away(ratios)
    check_carried(ratios, summed(2048), [R, Shard(1), Shard(0)], [2, 3, 4, 5])
    check_carried(ratios, nested(512), [Shard(2), R], [1])
    if comm.size > 1:
        check_resync(traced, args, ratios)


def check_given_away(ratios: tuple[float, ...]) -> None:
    """What a step hands out beside its state outlives the next one, which takes the state's memory."""

    def added(w: jax.Array, x: jax.Array) -> Any:
        new = w + x
        return new, {"state": new, "data": x}

    x = jnp.arange(3.0 * (comm.size + 2)).reshape(-1, 3)
    tensor = TensorType(x.shape, "float32")
    for step in (added, lambda w, x: (x, w.sum(axis=1))):
        graph = (traced := trace(step, x, x)).graph
        cut_each = [
            Compute(e.index, Signature((Shard(0),) * len(e.inputs), (Shard(0),))) for e in graph.equations
        ]
        program = Program((Shard(0),) * 2, tuple(cut_each), (Shard(0),) * len(graph.outputs))
        run = MpiExecutable(traced, program, ratios, comm, options=RunOptions(donate=True))
        here = ShardedArray(cut(x, tensor, Shard(0), comm.rank, ratios), Shard(0), tensor, run.world)
        state, *others = run(x, here)
        wanted = [np.asarray(other.gather()) for other in others]
        run(state, here)
        check(step is not added or state.local.is_deleted(), "the state's memory is taken")
        for other, value in zip(others, wanted, strict=True):
            check(np.array_equal(other.gather(), value), "what was handed out beside it is still there")
        check(np.array_equal(here.gather(), x), "and so is what was passed in")


def check_carried(ratios: tuple[float, ...], case: Any, inputs: list[Placement], kept: list[int]) -> None:
    """What a loop carries stays in one place, where nobody else has it; memory is what the model says."""
    step, args = case
    traced = trace(step, *args)
    program = build(traced.graph, inputs)
    run = MpiExecutable(traced, program, ratios, comm)
    run.warm_up()
    assert run.script is not None
    ((_, found),) = run.script._loops.values()
    (loop,) = (given for do, given in run.script._donated.items() if isinstance(do, Repeat))
    check((sorted(found), len(loop)) == (kept, 1), f"{sorted(found)} are carried on, from {loop}")
    most, before = 0, live()

    def watched(do: Any) -> Any:
        def then(env: list[Any]) -> None:
            nonlocal most
            do(env)
            most = max(most, live())

        return then

    def watch(script: Any) -> None:
        script.steps = [watched(do) for do in script.steps]
        for body in script.bodies:
            watch(body)

    watch(run.script)
    given = [jnp.asarray(each) for each in args]
    first, second = run(*given), run(*given)
    for got, same_, wanted in zip(first, second, jax.tree.leaves(jax.jit(step)(*given)), strict=True):
        check(close(got.gather(), np.asarray(wanted), 1e-5), "sums over pieces")
        check(np.array_equal(got.local, same_.local), "nothing is left of the step before")
    for mine, each in zip(given, args, strict=True):
        check(np.array_equal(mine, each), "arguments are the caller's")
    planned = device_memory(program, traced.graph, ratios, comm.rank)
    # The caller has both arguments and, of the second step, the results of the first.
    beside = sum(each.nbytes for each in given) + sum(result.local.nbytes for result in first)
    most -= before + beside
    check(most <= planned.peak_bytes * 1.02, f"{most} bytes of {planned.peak_bytes}")


def live() -> int:
    """Bytes of all arrays of this rank."""
    return sum(each.nbytes for each in jax.live_arrays() if not each.is_deleted())


def check_resync(traced: Any, args: Any, ratios: tuple[float, ...]) -> None:
    """State that drifts on one rank is as device 0 has it after the next comparison."""
    equations = traced.graph.equations
    whole = [Compute(e.index, Signature((R,) * len(e.inputs), (R,) * len(e.outputs))) for e in equations]
    program = Program((R,) * len(traced.graph.inputs), tuple(whole), (R,) * len(traced.graph.outputs))
    check_noise(traced, program, args, ratios)
    run = MpiExecutable(traced, program, ratios, comm, resync_every=2)
    flat = jax.tree.leaves(args)
    state = {inp: out for out, inp in traced.graph.state.items()}
    results = run(*flat)
    check(run.resynced == 0, "nothing is sent while nothing drifts")
    drifted = [r.local for r in results]
    if comm.rank == comm.size - 1:
        drifted = [x + np.float32(1e-3) if i in traced.graph.state else x for i, x in enumerate(drifted)]
    held = [ShardedArray(x, r.placement, r.tensor, r.world) for x, r in zip(drifted, results, strict=True)]
    results = run(*[held[state[i]] if i in state else leaf for i, leaf in enumerate(flat)])
    check(run.resynced > 0, "drift is found")
    for i in traced.graph.state:
        everywhere = comm.allgather(np.asarray(results[i].local).tobytes())
        check(len(set(everywhere)) == 1, f"state output {i} is the same on every rank")


def main() -> int:
    folder = Path(sys.argv[1])
    took: dict[str, float] = {}
    for name, part in (
        ("moves", check_moves),
        ("arrays", check_arrays),
        ("programs", lambda: check_programs(folder)),
        ("part", lambda: mpi_part.main(str(folder / "part.json")) if comm.size == 4 else None),
    ):
        start = time.perf_counter()
        part()
        took[name] = time.perf_counter() - start
    everything = [line for lines in comm.allgather(failures) for line in lines]
    if comm.rank == 0:
        summary = {"checked": checked, "failures": everything[:50], "seconds": took}
        (folder / "summary.json").write_text(json.dumps(summary))
    return 1 if everything else 0


if __name__ == "__main__":
    with abort_on_error():
        status = main()
    sys.exit(status)
