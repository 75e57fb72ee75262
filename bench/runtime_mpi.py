"""One rank of the mpi half of bench/runtime.

python -m bench.runtime_mpi ROWS.json ROUNDS
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.runtime import Contestant, against_jit, arguments, compare, fleet, jit_s, model, steps_for
from shardwright import bucketed
from shardwright.api import data_parallel, synthesize_traced
from shardwright.backends.measuring.timing import RESUMED_BYTES, ExchangeCase, Request, measure
from shardwright.backends.mpi.executable import abort_on_error
from shardwright.backends.mpi.link import mpi
from shardwright.ir.trace import trace


def by_hand(args: tuple[Any, ...], comm: Any) -> Contestant:
    """Data parallelism as one writes it with mpi4py: two compiled functions, one all-reduce between them.

    The batch comes from the host in every step, as it does to ours.
    """
    gpt2 = model()
    params, opt_state, batch = args
    rows = len(batch) // comm.size
    mine = slice(comm.rank * rows, (comm.rank + 1) * rows)
    sizes = np.cumsum([leaf.size for leaf in jax.tree.leaves(params)])

    @jax.jit
    def local(params: Any, batch: Any) -> jax.Array:
        loss, gradients = jax.value_and_grad(gpt2.loss_of)(params, batch)
        flat = [leaf.ravel() for leaf in jax.tree.leaves(gradients)]
        return jnp.concatenate([*flat, loss[None]]) / comm.size

    def update(params: Any, opt_state: Any, flat: Any) -> tuple[Any, Any, Any]:
        leaves, structure = jax.tree.flatten(params)
        parts = jnp.split(flat[:-1], sizes[:-1])
        gradients = structure.unflatten([p.reshape(x.shape) for p, x in zip(parts, leaves, strict=True)])
        updates, opt_state = gpt2.optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, flat[-1]

    updated = jax.jit(update, donate_argnums=(0, 1))

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        own = np.asarray(local(params, jnp.asarray(batch[mine])))
        total = np.empty_like(own)
        comm.Allreduce(own, total)
        return updated(params, opt_state, total)

    state = jax.tree.map(jnp.array, (params, opt_state))
    return Contestant(step, state, (batch,), comm.Barrier)


def exchange_s(comm: Any) -> float:
    """Seconds that an exchange of 64 KiB behind a segment adds to it, as `shardwright calibrate` measures it.

    That is what a fleet's latency is to the planner. Between ranks of one machine hardly any of it is on the
    way: caches refill, and the rank that was waiting has to wake up.
    """
    case = ExchangeCase("all_reduce", "tree", RESUMED_BYTES, (1 / comm.size,) * comm.size)
    (resumed,) = measure(Request(exchanges=(case,)), comm).resumed
    assert resumed is not None, "exchanges of this size are timed behind segments"
    return median(resumed.through_s) - (median(resumed.alone_s) - median(resumed.empty_s))


def ours(args: tuple[Any, ...], comm: Any, latency_s: float) -> Contestant:
    """Even data parallelism on our backend, in messages of the size that the plan's timeline suggests."""
    traced = trace(model().train_step, *args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        equal = fleet(comm.size, f"{1e6 * latency_s:.0f} us")
        plan = synthesize_traced(traced, fleet=equal, time_limit_s=0, devices="all")
    even = next(b for b in data_parallel(traced, plan.fleet) if b.name.startswith("even"))
    plan = bucketed(replace(plan, program=even.program, ratios=even.ratios, iteration_s=even.iteration_s))
    *state, batch = args
    if comm.rank == 0:
        print(f"messages of a step: {len(plan.planned_messages() or ())}")
    step = plan.compile_traced(traced, "mpi", donate=True)
    return Contestant(step, tuple(state), (batch,), comm.Barrier)


def main(path: Path, rounds: int) -> None:
    comm = mpi().COMM_WORLD
    with abort_on_error(comm):
        args = jax.tree.map(np.asarray, arguments())
        latency_s = exchange_s(comm)
        pair = ours(args, comm, latency_s), by_hand(args, comm)
        compiled = {
            "case": "data parallelism, 2 ranks",
            "backend": "mpi",
            **against_jit(
                lambda: pair[0].step.prepared(*pair[0].state, *pair[0].batch).warm_up(), jit_s(args)
            ),
        }
        for contestant in pair:
            contestant.run(1)
        steps = min(comm.allgather(steps_for(min(contestant.run(2) for contestant in pair))))
        taken: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds):
            for which in (0, 1) if turn % 2 else (1, 0):
                taken[which].append(max(comm.allgather(pair[which].run(steps))))
        if comm.rank == 0:
            found = [compare("data parallelism, 2 ranks", "mpi", *taken, pair)]
            latencies = {"data parallelism, 2 ranks": latency_s}
            path.write_text(json.dumps({"rows": found, "compile": [compiled], "latency_s": latencies}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
