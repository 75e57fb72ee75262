"""One card (or what else JAX finds): training steps predicted, run, and compared.

    python -m bench.card                        measure all of it, and predict
    python -m bench.card gpt2 calibration       some pieces; the others as they were measured before

Predictions are those of plans for one device: of the catalogue's type, as `shardwright fleet detect` would
name it, and of the type that `calibrate` fits there, if it was; nothing is fitted to steps. Measured are
steps that XLA compiles whole, state donated, and the memory that it lays out for them. What was measured
stands in bench/results/card.json beside the predictions, which need no card: `python -m bench.card predict`
makes them anew. docs/calibrate.md shows the table. `python -m bench` leaves all of it out: on a processor its
sizes take too long.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
from scipy import stats

from bench.memory import xla_bytes_of
from bench.pieces import Piece, measured
from bench.record import EXAMPLES, RESULTS, markdown, show, table, write
from shardwright import Fleet, synthesize
from shardwright.cost.profile import profile_step
from shardwright.fleets.calibrate import calibrate
from shardwright.fleets.inventory import Seen, catalogue_name, of_jax
from shardwright.ir.trace import marked, trace

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
    # Mostly probabilities, which lie otherwise for the backward part.
    "llama3-long": (
        "llama3",
        {
            "batch": 4, "sequence": 2048, "vocabulary": 8192, "layers": 4,
            "d": 1024, "heads": 16, "kv_heads": 4, "hidden": 3584,
        },
    ),
}  # fmt: skip


def calibration() -> dict[str, Any]:
    """The fleet that one rank here is. The rank is alone with the card: this process has not opened it."""
    result = calibrate(1, force=True)
    return {"load": result.others, "fleet": result.fleet.to_dict()}


def step_of(model: str) -> tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]:
    """The training step, and what makes its arguments."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    module, sizes = MODELS[model]
    example = importlib.import_module(module)
    sizes = {**example.SMALL, **sizes} if module == "llama3" else sizes
    return example.train_step, partial(example.arguments, **sizes)


def run(model: str) -> dict[str, Any]:
    """Seconds of a step and the bytes that XLA lays out for it, on the first device of JAX."""
    step, make = step_of(model)
    args = jax.jit(make)()
    states = len(trace(step, *args).state_names)
    donating = jax.jit(step, donate_argnums=tuple(range(states)), keep_unused=True)
    compiled = donating.lower(*args).compile()
    state, data = args[:states], args[states:]
    del args
    seconds: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        state = jax.block_until_ready(compiled(*state, *data))[:states]
        seconds.append(time.perf_counter() - begin)
    (seen,) = of_jax(jax.devices()[:1])
    return {
        "seconds": seconds,
        "xla_bytes": xla_bytes_of(compiled),
        "device": seen.name,
        "device_bytes": seen.memory_bytes,
        "jax": jax.__version__,
    }


def row_of(model: str, ran: Mapping[str, Any], calibrated: Mapping[str, Any] | None) -> dict[str, Any]:
    """What was measured of a step beside what is predicted of it."""
    step, make = step_of(model)
    name = catalogue_name(Seen(ran["device"], ran["device_bytes"]))
    fleets: dict[str, Fleet] = {}
    if name is not None:
        node = {"devices": {"type": name, "count": 1}}
        fleets["datasheet"] = Fleet.from_dict({"name": "one", "nodes": [node]})
    if calibrated is not None:
        fleets["calibrated"] = Fleet.from_dict(calibrated["fleet"])
    args = jax.eval_shape(make)
    measured_s = median(ran["seconds"][WARM:])
    row: dict[str, Any] = {"step": model, "measured_ms": 1e3 * measured_s}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a primitive that runs replicated is priced so
        for known, fleet in fleets.items():
            plan = synthesize(step, *args, fleet=fleet)
            row |= {
                f"{known}_ms": 1e3 * plan.iteration_s,
                f"{known} error": plan.iteration_s / measured_s - 1,
            }
        peak = profile_step(marked(trace(step, *args), compiler="gpu").graph).peak_bytes
    row |= {"peak_bytes": peak, "xla_bytes": ran["xla_bytes"], "peak / XLA's": peak / ran["xla_bytes"]}
    table([row], header=True)
    return row


def main(wanted: Sequence[str] = ()) -> Path:
    """Calibrate, run, predict, compare."""
    pieces: dict[str, Piece] = {"calibration": calibration}
    pieces |= {model: partial(run, model) for model in MODELS}
    if list(wanted) == ["predict"]:
        ran: dict[str, Any] = json.loads((RESULTS / "card.json").read_text())["measured"]
    else:
        ran = measured("card", pieces, wanted)
    calibrated, results = ran.get("calibration"), {name: ran[name] for name in MODELS if name in ran}
    if not results:
        raise SystemExit("bench.card: measure a step, too")
    rows = [row_of(model, each, calibrated) for model, each in results.items()]
    summary: dict[str, Any] = {
        "on": sorted({f"{each['device']}, JAX {each['jax']}" for each in results.values()}),
        "not measured": [piece for piece in pieces if piece not in ran],
    }
    for name in ("datasheet", "calibrated"):
        known = [row for row in rows if f"{name}_ms" in row]
        if known:
            ranked = stats.spearmanr(
                [row[f"{name}_ms"] for row in known], [row["measured_ms"] for row in known]
            )
            mean = sum(abs(row[f"{name} error"]) for row in known) / len(known)
            summary[name] = {"MAPE": mean, "spearman": float(ranked[0])}
    print(summary)
    markdown("card", [{k: v for k, v in row.items() if not k.endswith("_bytes")} for row in rows])
    show("card", "calibrate.md")
    return write("card", rows, summary=summary, measured=ran)


if __name__ == "__main__":
    main(sys.argv[1:])
