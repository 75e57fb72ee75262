"""Memory on cards that are not there: the profile beside what XLA lays out when it compiles for them.

    pip install "jax[cuda12]"           XLA's GPU compiler and NVIDIA's libraries, some gigabytes; no card
    python -m bench.cards               measure all of it
    python -m bench.cards gpt2          some pieces; the others as they were measured before

XLA compiles for a card that is described to it (`target_config`). Which of several kernels is faster it
cannot try there: here cuBLAS and cuDNN run all products. An H100 that ran the same steps (`bench/card.py`)
laid them out in what is found here, within 4 %. Steps are at full width and a few layers, so that they fit
(of others XLA computes things again by itself), their state donated; a T4 lacks bfloat16 and has rules of
its own. Of plans it is program by program, as
the MPI backend runs them, as if every card were an A100; one more is of Llama-3-8B as it is.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

# JAX reads these once, when it is imported. Which kernel is fastest, Triton's products among them, is tried
# on a card; XLA's GPU compiler runs beside JAX's processor.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false"]
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.card import MODELS, step_of
from bench.memory import xla_bytes_of
from bench.memory_plans import rows_of, summary
from bench.pieces import Piece, measured
from bench.record import EXAMPLES, markdown, show, table, write
from bench.search import MIXED, fleet_of
from shardwright import Fleet
from shardwright.cost.profile import profile_step
from shardwright.factory import load_factory
from shardwright.ir.trace import marked, trace

#: What compiling for a card asks of it: name, compute capability, multiprocessors, float32 units of each,
#: bytes of memory, bytes/s, bytes of L2 cache, GHz, bytes of shared memory of a multiprocessor and of a
#: block, threads of a multiprocessor. By NVIDIA's datasheets and CUDA's table of compute capabilities.
CARDS: Mapping[str, tuple[Any, ...]] = {
    "A100": (
        "NVIDIA A100-SXM4-40GB", 8, 0, 108, 64,
        42331013120, 1555200000000, 41943040, 1.41, 167936, 166912, 2048,
    ),
    "H100": (
        "NVIDIA H100 80GB HBM3", 9, 0, 132, 128,
        84942979072, 3352320000000, 52428800, 1.98, 233472, 232448, 2048,
    ),
    "T4": ("Tesla T4", 7, 5, 40, 64, 15843721216, 320064000000, 4194304, 1.59, 65536, 65536, 1024),
}  # fmt: skip
#: Whose rules go for those that lack bfloat16.
LACKING = {"T4": "gpu-float32"}
#: Of these steps plans are made, for these fleets.
PLANNED = ("gpt2", "vit", "bert", "bert_moe", "resnet50")
FLEETS = ("a100_t4", "hap_testbed")


def description(card: str, nbytes: int | None = None) -> str:
    """A `GpuTargetConfigProto` in text form; with so much memory, if that is another one's."""
    name, major, minor, cores, units, memory, bandwidth, cached, clock, core, block, threads = CARDS[card]
    memory = nbytes or memory
    return f"""
        gpu_device_info {{
          name: "{name}"
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {cores}  fpus_per_core: {units}  clock_rate_ghz: {clock}
          device_memory_size: {memory}  memory_bandwidth: {bandwidth}  l2_cache_size: {cached}
          shared_memory_per_core: {core}  shared_memory_per_block: 49152
          shared_memory_per_block_optin: {block}
          threads_per_core_limit: {threads}  threads_per_block_limit: 1024  threads_per_warp: 32
          thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
          block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
          registers_per_core_limit: 65536  registers_per_block_limit: 65536
          device_vendor: "NVIDIA Corporation"  platform_version: "Compute Capability {major}.{minor}"
          device_address_bits: 64  pcie_bandwidth: 34359738368  ecc_enabled: true
          driver_version: "13.0.0"  runtime_version: "12.8.0"  compile_time_toolkit_version: "12.8.0"
          dnn_version: "9.10.0"  cub_version: "3.1.2"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{name}"
    """


@cache
def _place(card: str, nbytes: int | None) -> NamedSharding:
    jax.devices()  # plugins are looked for
    try:
        found = topologies.get_topology_desc(
            "", platform="cuda", target_config=description(card, nbytes), topology="1x1x1"
        )
    except RuntimeError as error:
        raise SystemExit(f'bench.cards: {error}\nIs "jax[cuda12]" installed?') from error
    return NamedSharding(Mesh(np.array(found.devices), ("card",)), PartitionSpec())


def compiled_for(
    card: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    donated: Sequence[int] = (),
    nbytes: int | None = None,
) -> Any:
    """A function of such arguments, compiled for a card, or one like it with so much memory."""
    place = _place(card, nbytes)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tuple(arguments))
    jitted = jax.jit(function, donate_argnums=tuple(donated), keep_unused=True)
    return jitted.trace(*shapes).lower(lowering_platforms=("cuda",)).compile()


def step_row(name: str) -> dict[str, Any]:
    """Bytes of a step by the profile, and by XLA for every card."""
    step, make = step_of(name)
    args = jax.eval_shape(make)
    traced = trace(step, *args)
    row: dict[str, Any] = {"step": name, "peak_bytes": {}}
    for compiler in ("gpu", *LACKING.values()):
        row["peak_bytes"][compiler] = profile_step(marked(traced, compiler=compiler).graph).peak_bytes
    for card in CARDS:
        compiled = compiled_for(card, step, args, range(len(traced.state_names)))
        row[card] = xla_bytes_of(compiled)
        print(f"{name} {card}: {_over(row, card):.3f}", flush=True)
    return row


def _over(row: dict[str, Any], card: str) -> float:
    return row["peak_bytes"][LACKING.get(card, "gpu")] / row[card]


def _step_summary(row: dict[str, Any]) -> dict[str, Any]:
    over = {f"over XLA's for {card}": f"{_over(row, card):.3f}" for card in CARDS}
    return {"step": row["step"], "profile's peak, MiB": f"{row['peak_bytes']['gpu'] / 2**20:,.1f}", **over}


def planned(name: str, fleet: str) -> list[dict[str, Any]]:
    """One row for every kind of device of a step's plan."""
    step, make = step_of(name)
    on = Fleet.load(EXAMPLES / "fleets" / f"{fleet}.yaml")
    return rows_of(name, step, jax.eval_shape(make), on, fleet, partial(compiled_for, "A100"))


def planned_whole() -> list[dict[str, Any]]:
    """The same of Llama-3-8B as it is, layer by layer on two mesh axes."""
    step, args = load_factory(f"{EXAMPLES / 'llama3'}.py:base")
    compiled = partial(compiled_for, "A100", nbytes=80 * 10**9)
    return rows_of("llama3-8b", step, args, fleet_of(MIXED), MIXED, compiled, axes=2, devices="auto")


def main(wanted: Sequence[str] = ()) -> Path:
    """Steps for every card, plans for one."""
    warnings.simplefilter("ignore")
    pieces: dict[str, Piece] = {name: partial(step_row, name) for name in MODELS}
    pieces |= {f"{name}@{fleet}": partial(planned, name, fleet) for name in PLANNED for fleet in FLEETS}
    pieces["llama3-8b@mixed"] = planned_whole
    found = measured("cards", pieces, wanted)
    rows = [found[name] for name in MODELS if name in found]
    plans = [row for name, each in found.items() if "@" in name for row in each]
    shown = [_step_summary(row) for row in rows]
    table(shown, header=True)
    markdown("cards", shown)
    show("cards", "memory.md")
    if plans:
        markdown("cards_plans", summary(plans))
        show("cards_plans", "memory.md")
    return write("cards", rows, plans=plans)


if __name__ == "__main__":
    main(sys.argv[1:])
