"""One card (or what else JAX finds): training steps predicted, run, and compared.

    python -m bench.card                        all of it
    python -m bench.card calibration gpt2       some pieces; the others as they were measured before

Predictions are those of plans for one device: of the catalogue's type, as `shardwright fleet detect` would
name it, and of the type that `calibrate` fits here; nothing is fitted to steps. Measured are steps that XLA
compiles whole, state donated, and the memory that it lays out for them. Written to bench/results/card.json;
docs/calibrate.md shows the table. `python -m bench` leaves it out: on a processor its sizes take too long.
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
from scipy import stats

from bench.memory import xla_bytes_of
from bench.pieces import Piece, found, measured
from bench.record import EXAMPLES, markdown, show, table, write
from shardwright import Fleet, synthesize
from shardwright.cost.profile import profile_step
from shardwright.fleets.calibrate import calibrate
from shardwright.fleets.inventory import catalogue_name, of_jax

ROUNDS = 9
#: Timed from here on: the first calls load kernels.
WARM = 2
_IMAGES = {"batch": 64, "pixels": 224, "classes": 1000}
_BERT = {
    "batch": 64, "sequence": 128, "vocabulary": 30522, "positions": 512, "layers": 4, "d": 768, "heads": 12,
}  # fmt: skip
#: Examples at full width and a few layers, which fill a card and compile in seconds.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": (
        "gpt2",
        {"batch": 8, "vocabulary": 50257, "sequence": 1024, "layers": 4, "d": 768, "heads": 12},
    ),
    "gpt2-wide": (
        "gpt2",
        {"batch": 4, "vocabulary": 32768, "sequence": 1024, "layers": 2, "d": 2048, "heads": 16},
    ),
    "vit": ("vit", {**_IMAGES, "patch": 16, "layers": 4, "d": 768, "heads": 12}),
    "bert": ("bert", _BERT),
    "bert_moe": ("bert_moe", {**_BERT, "experts": 8}),
    "resnet50": ("resnet50", {**_IMAGES, "width": 64, "blocks": (3, 4, 6, 3)}),
    "llama3": ("llama3", {"batch": 2, "sequence": 1024, "vocabulary": 32000, "layers": 2}),
}


def calibration() -> dict[str, Any]:
    """The fleet that one rank here is. The rank is alone with the card: this process has not opened it."""
    result = calibrate(1, force=True)
    return {"load": result.others, "fleet": result.fleet.to_dict()}


def fleets() -> dict[str, Fleet]:
    """One device, by the catalogue and as it was measured; what there is of the two."""
    (seen,) = of_jax(jax.devices()[:1])
    name = catalogue_name(seen)
    known: dict[str, Fleet] = {}
    if name is not None:
        node = {"devices": {"type": name, "count": 1}}
        known["datasheet"] = Fleet.from_dict({"name": "one", "nodes": [node]})
    return known | {"calibrated": Fleet.from_dict(found("card", "calibration")["fleet"])}


def of_model(model: str) -> dict[str, Any]:
    """Predictions and measurements of one step."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    module, sizes = MODELS[model]
    example = importlib.import_module(module)
    sizes = {**example.SMALL, **sizes} if module == "llama3" else sizes
    args = jax.jit(partial(example.arguments, **sizes))()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a primitive that runs replicated is priced so
        plans = {name: synthesize(example.train_step, *args, fleet=fleet) for name, fleet in fleets().items()}
    traced = next(iter(plans.values())).traced
    assert traced is not None
    states = len(traced.state_names)
    profiled = profile_step(traced.graph)
    step = jax.jit(example.train_step, donate_argnums=tuple(range(states)), keep_unused=True)
    compiled = step.lower(*args).compile()
    state, data = args[:states], args[states:]
    del args
    seconds: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        state = jax.block_until_ready(compiled(*state, *data))[:states]
        seconds.append(time.perf_counter() - begin)
    measured_s = median(seconds[WARM:])
    row: dict[str, Any] = {"step": model, "measured_ms": 1e3 * measured_s}
    for name, plan in plans.items():
        row |= {
            f"{name}_ms": 1e3 * plan.iteration_s,
            f"{name} error": plan.iteration_s / measured_s - 1,
        }
    actual = xla_bytes_of(compiled)
    row |= {
        "peak_bytes": profiled.peak_bytes,
        "xla_bytes": actual,
        "peak / XLA's": profiled.peak_bytes / actual,
    }
    table([row], header=True)
    return row


def main(wanted: Sequence[str] = ()) -> Path:
    """Calibrate, predict, run, compare."""
    pieces: dict[str, Piece] = {"calibration": calibration}
    pieces |= {model: partial(of_model, model) for model in MODELS}
    results = measured("card", pieces, wanted)
    rows = [results[model] for model in MODELS if model in results]
    if not rows:
        raise SystemExit("bench.card: measure a step, too")
    summary: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    for name in ("datasheet", "calibrated"):
        errors = [row[f"{name} error"] for row in rows if f"{name} error" in row]
        if errors:
            times = [row[f"{name}_ms"] for row in rows]
            ranked = stats.spearmanr(times, [row["measured_ms"] for row in rows])
            summary[name] = {
                "MAPE": sum(map(abs, errors)) / len(errors),
                "spearman": float(ranked[0]),
            }
    print(summary)
    markdown("card", [{k: v for k, v in row.items() if not k.endswith("_bytes")} for row in rows])
    show("card", "calibrate.md")
    return write("card", rows, summary=summary, calibrated=results.get("calibration"))


if __name__ == "__main__":
    main(sys.argv[1:])
