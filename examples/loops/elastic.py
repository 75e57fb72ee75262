"""A loop that outlives a rank: it plans for the devices that are left and goes on from the last checkpoint.

    python examples/loops/elastic.py STEPS FLEET FOLDER [LOSE]

After step LOSE, rank 1 ends itself with SIGKILL, as a machine that goes down would.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardwright
from shardwright.elastic import train

BATCH, WIDTH, EVERY = 48, 64, 4
optimizer = optax.adam(3e-3)


def initial(key):
    one, two = jax.random.split(key)
    params = {"in": jax.random.normal(one, (8, WIDTH)) / 3, "out": jax.random.normal(two, (WIDTH, 1)) / 8}
    return params, optimizer.init(params)


def train_step(params, opt_state, x, y):
    def loss_of(params):
        return jnp.mean((jax.nn.relu(x @ params["in"]) @ params["out"] - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def batch(number):
    x = np.random.default_rng(number).normal(size=(BATCH, 8)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


def arguments():
    return (*jax.eval_shape(initial, jax.random.key(0)), *batch(0))


def run_rank(steps, folder, lose, plan_path):
    from mpi4py import MPI

    plan, rank = shardwright.Plan.load(plan_path), MPI.COMM_WORLD.rank
    traced = plan.attach(train_step, *arguments())
    step, newest = plan.compile_traced(traced, "mpi"), shardwright.latest(folder)
    if newest is None:
        state = plan.init(initial, jax.random.key(0), traced=traced)
    else:
        state = shardwright.restore(newest, arguments()[:2], plan, traced=traced)
    for number in range(int(newest.name) if newest else 0, steps):
        *state, loss = step(*state, *batch(number))
        if rank == 0:
            print(f"step {number}  loss {float(loss):.6f}", flush=True)
        if (number + 1) % EVERY == 0:
            shardwright.save(Path(folder) / str(number + 1), tuple(state))
        if (number, rank, newest) == (int(lose), 1, None):
            os.kill(os.getpid(), signal.SIGKILL)


def main(steps, fleet, folder, lose="-1"):
    fleet = shardwright.Fleet.load(fleet)
    plan = shardwright.synthesize(train_step, *arguments(), fleet=fleet, devices="all")
    plan = train(
        plan, lambda path: [__file__, "rank", steps, folder, lose, str(path)], tell=print, devices="all"
    )
    print(f"done on {len(plan.used)} devices")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        run_rank(int(sys.argv[2]), *sys.argv[3:])
    else:
        main(*sys.argv[1:])
