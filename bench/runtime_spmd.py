"""The spmd half of bench/runtime: one process with four simulated devices.

python -m bench.runtime_spmd ROWS.json ROUNDS CASE
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.runtime import (
    DEVICES,
    SIMULATED,
    Contestant,
    against_jit,
    arguments,
    compare,
    fleet,
    jit_s,
    model,
    steps_for,
)
from shardwright import baselines
from shardwright.execute import CompiledStep
from shardwright.ir.program import Program
from shardwright.ir.trace import Traced, trace

#: To measure what an exchange adds: so many, between products of so many rows, and so many turns.
EXCHANGES, PRODUCT, RUNS = 20, 256, 61

EVEN, UNEVEN = (0.25,) * DEVICES, (0.5, 0.25, 0.125, 0.125)


def whole(path: str, shape: tuple[int, ...]) -> P:
    """Data parallelism: every device has all parameters."""
    return P()


def cut(path: str, shape: tuple[int, ...]) -> P:
    """Fully sharded: every parameter is cut along its first dimension that can be."""
    dim = next((i for i, size in enumerate(shape) if size % DEVICES == 0), None)
    return P() if dim is None else P(*[None] * dim, "x")


def megatron(path: str, shape: tuple[int, ...]) -> P:
    """Tensor parallelism: attention by heads, the hidden layer by units, the vocabulary by words."""
    by_name = {
        "['tokens']": P("x"),
        "['qkv']": P(None, None, "x"),
        "['qkv_bias']": P(None, "x"),
        "['out']": P("x"),
        "['up']['weight']": P(None, "x"),
        "['up']['bias']": P("x"),
        "['down']['weight']": P("x"),
    }
    return next((spec for name, spec in by_name.items() if path.endswith(name)), P())


#: The baseline that is the same plan, where its author would put a parameter, and where the batch.
CASES = {
    "data parallelism": ("even data parallelism", whole, P("x")),
    "tensor parallelism": ("tensor parallelism", megatron, P()),
    "fully sharded": ("fully sharded", cut, P("x")),
}


def by_hand(args: tuple[Any, ...], case: str) -> Contestant:
    """Plain `jax.jit` with NamedShardings; the optimizer's state lies as the parameters it belongs to."""
    _, spec_of, of_batch = CASES[case]
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def placed(tree: Any) -> Any:
        return jax.tree.map_with_path(
            lambda path, x: NamedSharding(mesh, spec_of(jax.tree_util.keystr(path), x.shape)), tree
        )

    params, opt_state, batch = args
    state = placed(params), placed(opt_state)
    shardings = (*state, NamedSharding(mesh, of_batch))
    step = jax.jit(
        model().train_step,
        in_shardings=shardings,
        out_shardings=(*state, NamedSharding(mesh, P())),
        donate_argnums=(0, 1),
    )
    params, opt_state = jax.device_put((params, opt_state), state, may_alias=False)
    return Contestant(step, (params, opt_state), (batch,))


def by_themselves(args: tuple[Any, ...], shares: tuple[float, ...]) -> Contestant:
    """Loss and gradients on every device of its part of the batch, by `jax.jit`, without an exchange.

    Uneven ones take longer than even ones of the same work by what the machine makes of them: small
    multiplications are less efficient, and four unequal threads end unequally late on fewer cores.
    """
    params, _, batch = args
    rows = [round(share * len(batch)) for share in shares]
    first = [sum(rows[:i]) for i in range(len(rows))]
    parts = [
        jax.device_put((params, batch[start : start + count]), device)
        for start, count, device in zip(first, rows, jax.devices(), strict=True)
    ]
    local = jax.jit(jax.value_and_grad(model().loss_of))

    def step() -> tuple[float]:
        found = jax.block_until_ready([local(*part) for part in parts])
        return (sum(share * float(loss) for share, (loss, _) in zip(shares, found, strict=True)),)

    return Contestant(step, (), ())


def exchange_s() -> float:
    """Seconds that an exchange of one number between two segments adds to a program.

    That is what a fleet's latency is to the planner. Here it is no wire, but a rendezvous: devices wait for
    the one that is last, and for the system to wake them up.
    """
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def body(x: jax.Array, exchanged: bool) -> jax.Array:
        for _ in range(EXCHANGES):
            x = jnp.tanh(x @ x)
            first = x[0, 0]
            x = x + (jax.lax.psum(first, "x") if exchanged else first)
        return x

    runs = [
        jax.jit(
            jax.shard_map(
                partial(body, exchanged=exchanged),
                mesh=mesh,
                in_specs=P("x"),
                out_specs=P("x"),
                check_vma=False,
            )
        )
        for exchanged in (False, True)
    ]
    x = jax.device_put(np.ones((DEVICES * PRODUCT, PRODUCT), np.float32), NamedSharding(mesh, P("x")))
    for run in runs:
        run(x).block_until_ready()
    taken: list[float] = []
    for _ in range(RUNS):
        times = [time.perf_counter()]
        for run in runs:
            run(x).block_until_ready()
            times.append(time.perf_counter())
        taken.append(times[2] - 2 * times[1] + times[0])
    return max(0.0, median(taken)) / EXCHANGES


def ours(traced: Traced, program: Program, ratios: tuple[float, ...], args: tuple[Any, ...]) -> Contestant:
    """A plan's program on our backend; the batch comes from the host in every step, as it does there."""
    step = CompiledStep(lambda *given: traced, program, ratios, "spmd", donate=True)
    *state, batch = args
    return Contestant(step, tuple(jax.tree.map(np.asarray, state)), (batch,))


def rows(rounds: int, case: str) -> dict[str, list[dict[str, Any]]]:
    """A case, even and uneven, and what compiling the uneven one takes."""
    args = jax.tree.map(np.asarray, arguments())
    traced = trace(model().train_step, *args)
    latency_s = exchange_s()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned_for = fleet(DEVICES, f"{1e6 * latency_s:.0f} us")
        programs = {b.name: b.program for b in baselines(model().train_step, *args, fleet=planned_for)}
    program = programs[CASES[case][0]]
    single_s = jit_s(args)
    found = [race(case, (ours(traced, program, EVEN, args), by_hand(args, case)), rounds)]
    uneven = ours(traced, program, UNEVEN, args)
    took = against_jit(partial(compiled, uneven), single_s)
    compiling = [{"case": f"{case}, 4:2:1:1", "backend": "spmd", **took}]
    found.append(race(f"{case}, 4:2:1:1 against even", (uneven, by_hand(args, case)), rounds))
    if case == SIMULATED[0]:
        pair = by_themselves(args, UNEVEN), by_themselves(args, EVEN)
        found.append(race("no exchange, 4:2:1:1 against even", pair, rounds, "jax.jit"))
    return {"rows": found, "compile": compiling, "latency_s": {case: latency_s}}


def compiled(contestant: Contestant) -> None:
    """Compile a contestant's program."""
    flat = jax.tree.leaves((*contestant.state, *contestant.batch))
    contestant.step.prepared(*contestant.state, *contestant.batch).lower(*flat).compile()


def race(
    case: str, pair: tuple[Contestant, Contestant], rounds: int, backend: str = "spmd"
) -> dict[str, Any]:
    """Both in turns, the one that begins changing from round to round."""
    for contestant in pair:
        contestant.run(1)
    steps = steps_for(min(contestant.run(2) for contestant in pair))
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            taken[which].append(pair[which].run(steps))
    return compare(case, backend, *taken, pair)


if __name__ == "__main__":
    if hasattr(os, "SCHED_BATCH"):
        # Four threads on fewer cores: a device that wakes up does not interrupt one that computes.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    Path(sys.argv[1]).write_text(json.dumps(rows(int(sys.argv[2]), sys.argv[3])))
