"""What the runtime adds: our backends against the same step written by hand, on the same plans.

    python -m bench runtime
    python -m bench.runtime PIECE…      overhead, mpi, data, tensor, fully

`mpi`: two equal ranks, data parallelism, against plain JAX with mpi4py (bench/runtime_mpi.py). `spmd`: four
devices simulated on the CPU, data parallelism, tensor parallelism and fully sharded, against plain `jax.jit`
with NamedShardings; and the uneven step of 4 : 2 : 1 : 1 against the even one of equal total work
(bench/runtime_spmd.py). Beside: what compiling takes against the step for one device under `jax.jit`, and
what the runtime itself takes (bench/runtime_overhead.py). Both of a pair run in turns; seconds are medians
over the rounds, the ratio is the median of the rounds' own ratios. Written to bench/results/runtime.json and
.md with the machine's load.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax

from bench.pieces import Piece, measured
from bench.record import EXAMPLES, markdown, show, table, write
from shardwright import Fleet
from shardwright.backends.launch import launch, rank_environment

ROUNDS = 41
#: Long enough to be timed, short enough for many rounds.
SAMPLE_S = 0.3
DEVICES = 4
RANKS = 2
#: The cases of bench/runtime_spmd.py.
SIMULATED = ("data parallelism", "tensor parallelism", "fully sharded")

#: A small GPT-2, whose step takes tens of milliseconds on a core.
SIZES = {"batch": 16, "vocabulary": 512, "sequence": 64, "layers": 2, "d": 256, "heads": 4}


def model() -> Any:
    """The module of the step, examples/gpt2.py."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import gpt2

    return gpt2


def arguments() -> tuple[Any, ...]:
    """Concrete arguments of its `train_step`: parameters, state of the optimizer, a batch."""
    return jax.jit(partial(model().arguments, **SIZES))()


def fleet(devices: int, latency: str = "50 us") -> Fleet:
    """Equal devices, for which the baselines are planned."""
    cpu = {"name": "cpu", "flops": "20 GFLOP/s", "memory_bandwidth": "8 GB/s", "memory": "2 GB"}
    node = {"devices": {"type": cpu, "count": devices}, "link": {"bandwidth": "2 GB/s", "latency": latency}}
    return Fleet.from_dict({"name": "equal", "nodes": [node]})


@dataclass
class Contestant:
    """A step that runs again and again, its state fed back.

    Attributes:
        step: from the state and the batch to the new state and the loss.
        state: what comes back.
        batch: what stays.
        meet: called before each sample.
        used_s: processor seconds of a step, over each sample.
    """

    step: Any
    state: tuple[Any, ...]
    batch: tuple[Any, ...]
    meet: Callable[[], None] = lambda: None
    loss: float = 0.0
    used_s: list[float] = field(default_factory=list[float])

    def run(self, steps: int) -> float:
        """Seconds of a step, over so many."""
        self.meet()
        used, begin = time.process_time(), time.perf_counter()
        for _ in range(steps):
            *state, loss = self.step(*self.state, *self.batch)
            self.state = tuple(state)
        # The loss depends on all devices, but not on the last update.
        jax.block_until_ready([ready(leaf) for leaf in (loss, *jax.tree.leaves(self.state))])
        took = (time.perf_counter() - begin) / steps
        self.used_s.append((time.process_time() - used) / steps)
        self.loss = float(loss)
        return took


def ready(leaf: Any) -> Any:
    """What JAX can wait for."""
    return getattr(leaf, "stored", getattr(leaf, "local", leaf))


def steps_for(seconds: float) -> int:
    """Steps of a sample."""
    return max(1, round(SAMPLE_S / seconds))


def jit_s(args: tuple[Any, ...]) -> float:
    """Processor seconds to compile the step for one device; asked once, for JAX remembers."""
    single = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    begin = time.process_time()
    jax.jit(model().train_step).lower(*single).compile()
    return time.process_time() - begin


def against_jit(compile_ours: Callable[[], object], single_s: float) -> dict[str, float]:
    """Processor seconds that compiling our program takes, beside those of `jit_s`."""
    begin = time.process_time()
    compile_ours()
    took = time.process_time() - begin
    return {"ours_s": took, "jit_s": single_s, "ratio": took / single_s}


def compare(
    case: str,
    backend: str,
    ours: Sequence[float],
    by_hand: Sequence[float],
    pair: tuple[Contestant, Contestant],
) -> dict[str, Any]:
    """A row, from the seconds of both by round. `processor` is the ratio of their processor seconds.

    Raises:
        SystemExit: the two do not compute the same.
    """
    one, other = pair
    if abs(one.loss - other.loss) > 1e-3 * abs(other.loss):
        raise SystemExit(f"{case}, {backend}: the losses are {one.loss} and {other.loss}")
    used = zip(one.used_s[-len(ours) :], other.used_s[-len(ours) :], strict=True)
    return {
        "case": case,
        "backend": backend,
        "ours_s": median(ours),
        "handwritten_s": median(by_hand),
        "ratio": median(a / b for a, b in zip(ours, by_hand, strict=True)),
        "processor": median(a / b for a, b in used),
        "rounds": len(ours),
        "load": round(os.getloadavg()[0], 2),
    }


def ranks(count: int, module: str, rounds: int) -> Any:
    """What a module writes down that runs as MPI ranks."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "found.json"
        if status := launch(count, ["-m", module, str(part), str(rounds)]):
            raise SystemExit(status)
        return json.loads(part.read_text())


def simulated(case: str, rounds: int) -> Any:
    """What a case of bench/runtime_spmd.py writes down."""
    # Each simulated device computes on one thread, as MPI ranks do.
    flags = f"--xla_force_host_platform_device_count={DEVICES} --xla_cpu_multi_thread_eigen=false"
    # XLA asks for memory in threads, whose arenas give back what is larger than 64 MiB: see docs/spmd.md.
    # A device that waits in an exchange keeps a thread of XLA's pool, which has as many as there are cores,
    # or devices: without more, unequal devices wait for a thread while a core is idle.
    process = {"MALLOC_ARENA_MAX": "1", "PJRT_NPROC": str(2 * DEVICES)}
    environment = rank_environment(1) | process | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "found.json"
        command = [sys.executable, "-m", "bench.runtime_spmd", str(part), str(rounds), case]
        subprocess.run(command, env=os.environ | environment, check=True)
        return json.loads(part.read_text())


def main(wanted: Sequence[str] = (), rounds: int = ROUNDS) -> Path:
    """The pieces wanted (all, if none are named), and all rows that are there, as JSON and as tables."""
    pieces: dict[str, Piece] = {
        "overhead": partial(ranks, 1, "bench.runtime_overhead", rounds),
        "mpi": partial(ranks, RANKS, "bench.runtime_mpi", rounds),
        **{case.split()[0]: partial(simulated, case, rounds) for case in SIMULATED},
    }
    found = measured("runtime", pieces, wanted)
    overhead = found.pop("overhead", None)
    rows = [row for piece in found.values() for row in piece["rows"]]
    compiling = [row for piece in found.values() for row in piece["compile"]]
    latency_s = {case: each for piece in found.values() for case, each in piece.get("latency_s", {}).items()}
    for case, each in latency_s.items():
        print(f"{case}: planned for exchanges of {1e6 * each:.0f} µs")
    for name, some in (("runtime", rows), ("runtime_compile", compiling)):
        if some:
            table(some, header=True)
            markdown(name, some)
            show(name, "execution.md")
    if overhead:
        us = overhead["per_instruction_s"] * 1e6
        markdown("runtime_overhead", [{"instructions": overhead["instructions"], "µs per instruction": us}])
        show("runtime_overhead", "execution.md")
        print(f"{us:.1f} µs per instruction")
    return write("runtime", rows, compile=compiling, overhead=overhead, latency_s=latency_s, sizes=SIZES)


if __name__ == "__main__":
    main(sys.argv[1:])
