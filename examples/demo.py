"""`make demo`: plan a real model for unequal GPUs, verify a small one, and train one on four unequal ranks.

python examples/demo.py                    everything
python examples/demo.py train PLAN LOSSES  one rank of the training (started by mpiexec)
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

# Four unequal processors are shown: a card would be shared, and most of its memory taken by this process.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gpt2
import jax
from demo_model import batches, byte_gpt

from shardwright import Fleet, Plan, synthesize
from shardwright.api import data_parallel
from shardwright.backends.launch import launch
from shardwright.reports.text import describe

FLEETS = Path(__file__).parent / "fleets"
STEPS = 50


def show_plan() -> None:
    """GPT-2 small on an A100 and three T4, with a batch that their memory can hold."""
    step, args = gpt2.small(batch=32)
    plan = synthesize(step, *args, fleet=Fleet.load(FLEETS / "a100_t4.yaml"))
    assert plan.traced is not None
    print(describe(plan, data_parallel(plan.traced, plan.fleet)))


def show_verification() -> bool:
    """The tiny GPT-2, every equation against one device."""
    step, args = gpt2.tiny()
    plan = synthesize(step, *args, fleet=Fleet.load(FLEETS / "laptop.yaml"), devices="all")
    result = plan.verify(step, *args)
    print(result)
    return result.ok


def show_training() -> bool:
    """A byte-level GPT on the standard library's sources: four MPI ranks beside one device."""
    step, args = byte_gpt()
    # For a model this small one rank would be faster; the point here is to train on all four.
    plan = synthesize(step, *args, fleet=Fleet.load(FLEETS / "laptop.yaml"), devices="all")
    shares = ", ".join(f"{name} {ratio:.1%}" for name, ratio in zip(plan.devices, plan.ratios, strict=True))
    exchanges = ", ".join(f"{e.count:g} × {e.name}" for e in plan.exchanges)
    print(f"shares: {shares}\nexchanges per step: {exchanges}")
    with tempfile.TemporaryDirectory() as folder:
        plan_path, losses_path = f"{folder}/plan.json", Path(folder) / "losses.json"
        plan.save(plan_path)
        status = launch(len(plan.devices), [__file__, "train", plan_path, str(losses_path)])
        if status:
            return False
        distributed = json.loads(losses_path.read_text())
    jitted = jax.jit(step)
    params, opt_state, _ = args
    single: list[float] = []
    for tokens in batches(STEPS):
        params, opt_state, loss = jitted(params, opt_state, tokens)
        single.append(float(loss))
    print(f"{'step':>6}{'one device':>14}{'four ranks':>14}{'difference':>14}")
    differences = [abs(a - b) / abs(b) for a, b in zip(distributed, single, strict=True)]
    for i in (0, *range(9, STEPS, 10)):
        print(f"{i + 1:>6}{single[i]:>14.6f}{distributed[i]:>14.6f}{differences[i]:>14.1e}")
    print(f"largest relative difference of any step: {max(differences):.1e} (allowed 1e-3)")
    return max(differences) <= 1e-3


def train(plan_path: str, losses_path: str) -> None:
    """One rank: the same loop as on one device, on shards."""
    from mpi4py import MPI

    from shardwright.backends.mpi.executable import abort_on_error

    comm = MPI.COMM_WORLD
    with abort_on_error(comm):
        step, (params, opt_state, _) = byte_gpt()
        distributed = Plan.load(plan_path).compile(step, backend="mpi")
        losses: list[float] = []
        for tokens in batches(STEPS):
            params, opt_state, loss = distributed(params, opt_state, tokens)
            losses.append(float(loss.gather()))
        if comm.Get_rank() == 0:
            Path(losses_path).write_text(json.dumps(losses))


def main() -> int:
    """Run the parts in turn; the exit status says whether verification and training agreed."""
    start = time.perf_counter()
    print("== 1. GPT-2 small, 32 sequences of 1024 tokens, on one A100 and three T4: the plan\n")
    show_plan()
    print("\n== 2. GPT-2 tiny on four unequal CPUs: verified equation by equation against one device\n")
    verified = show_verification()
    print(
        "\n== 3. A byte-level GPT, 50 steps on Python's own sources, on four MPI ranks with unequal shares\n"
    )
    trained = show_training()
    print(f"\n{'all agreed' if verified and trained else 'MISMATCH'} ({time.perf_counter() - start:.0f} s)")
    return 0 if verified and trained else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        sys.exit(main())
