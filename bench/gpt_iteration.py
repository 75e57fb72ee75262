"""A training iteration of a GPT, priced kernel by kernel: the 16-bit efficiency's fit, and its check.

One microbatch of one tensor-parallel rank runs, in each layer, six matrix products forward and twelve
backward, and six memory-bound kernels forward whose backward moves twice their bytes; with activation
recomputation the forward runs twice. A pass of a layer takes what the device or what the host needs for it,
whichever is more. Tensor parallelism adds two all-reduces of the activations to each pass. Once an
iteration: all-reduce of the gradients over the replicas, and Adam, which is bandwidth.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from shardwright.cost.catalogue import catalogue
from shardwright.cost.kernels.seconds import own_constants
from shardwright.cost.kernels.seconds import terms as model
from shardwright.cost.kernels.terms import Card

Array = NDArray[np.float64]
Constants = Mapping[str, float]

#: vTrain does not state which A100; its all-reduces run at NVLink speed, so it is no PCIe card.
VTRAIN_CARD = "A100-SXM-80GB"
#: A rate of a large product counts as many rows of vTrain as this squared: six of them as 216 of 360 rows.
_RATE_WEIGHT = 6.0
_BYTES = {"float16": 2, "tf32": 4, "float32": 4}


@dataclass(frozen=True)
class Gpt:
    """Configurations of iterations of pipeline degree 1, one entry each.

    Attributes:
        hidden, heads, layers, sequence, vocabulary: of the model.
        micro: samples of a microbatch.
        count: microbatches of a replica.
        tp, dp: tensor- and data-parallel degree.
    """

    hidden: Array
    heads: Array
    layers: Array
    sequence: Array
    vocabulary: Array
    micro: Array
    count: Array
    tp: Array
    dp: Array

    @property
    def parameters(self) -> Array:
        """Of one rank."""
        return (12 * self.hidden**2 * self.layers + self.vocabulary * self.hidden) / self.tp


def compute_s(
    c: Constants, own: Constants, gpt: Gpt, card: str, dtype: str, *, host_s: float, recompute: bool
) -> Array:
    """Seconds of all kernels of an iteration, without communication."""
    sheet, itemsize = Card.of(catalogue()[card], dtype), _BYTES[dtype]
    tokens, one = gpt.micro * gpt.sequence, np.ones_like(gpt.hidden)
    h, tp, head, batch = gpt.hidden, gpt.tp, gpt.hidden / gpt.heads, gpt.micro * gpt.heads / gpt.tp

    def product(b: Array, m: Array, n: Array, k: Array) -> Array:
        tensor = sheet.matrix > sheet.flop_per_s
        return model.matmul_work(c, own, sheet, b, m, n, k, itemsize=itemsize, tensor=bool(tensor))

    def stream(name: str, b: Array, width: Array) -> Array:
        return model.elementwise_work(c, own, sheet, name, b, width, itemsize=itemsize)

    def rows(op: str, b: Array, width: Array) -> Array:
        return model.row_work(c, own, sheet, op, b, width, itemsize=itemsize)

    s = gpt.sequence
    products = (
        product(one, tokens, 3 * h / tp, h)
        + product(batch, s, s, head)
        + product(batch, s, head, s)
        + product(one, tokens, h, h / tp)
        + product(one, tokens, 4 * h / tp, h)
        + product(one, tokens, h, 4 * h / tp)
    )
    others = (
        2 * rows("layernorm", tokens, h)
        + rows("softmax", batch * s, s)
        + stream("mulu", batch * s, s)
        + stream("gelu", tokens, 4 * h / tp)
        + 2 * stream("add", tokens, h)
    )
    # Kernels that the host starts in a forward pass: those above, and as many reshapes and copies.
    forward = np.maximum(products + others, host_s)
    backward = np.maximum(2 * products + 2 * others, 2 * host_s)
    layers = gpt.layers * ((2 if recompute else 1) * forward + backward)
    logits = 3 * product(one, tokens, gpt.vocabulary / tp, h)
    loss = 4 * stream("addu", tokens, gpt.vocabulary / tp)
    # Adam reads the gradient, both moments and the weight in float32, and writes the last three.
    adam = gpt.parameters * 28 / (sheet.byte_per_s * np.exp(c["stream"]))
    return gpt.count * (layers + logits + loss) + adam


def reached_flop_per_s(c: Constants, own: Mapping[str, Constants], card: str, size: int = 8192) -> float:
    """Rate of one large 16-bit product on a type of the catalogue."""
    device = catalogue()[card]
    sides = (np.full(1, float(size)) for _ in range(3))
    mine, sheet = own_constants(device, own), Card.of(device, "bfloat16")
    work = model.matmul_work(c, mine, sheet, np.ones(1), *sides, itemsize=2, tensor=True)
    return 2 * size**3 / float(work[0])


def _large_products(data: Path) -> dict[str, float]:
    """FLOP/s of the fastest bfloat16 products that aiconfigurator lists, by type of the catalogue."""
    with (data / "gpus.csv").open(newline="") as file:
        column = "measured_bf16_matmul_tflops_median"
        return {row["name"]: float(row[column]) * 1e12 for row in csv.DictReader(file) if row[column]}


def vtrain_fit(
    data: Path, shared: Constants, own: Mapping[str, Constants]
) -> tuple[dict[str, float], list[Any]]:
    """The 16-bit constants and the errors of both halves of vTrain's rows of pipeline degree 1.

    Fitted on the half of smaller hidden size, and on aiconfigurator's rates of large products: what a card
    reaches at best, which no row of that half shows.
    """
    with (data / "endtoend" / "vtrain_single_node.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["pp"] == "1"]
    column = {name: np.array([float(row[name]) for row in rows]) for name in rows[0] if name != "gpu"}
    gpt = Gpt(
        hidden=column["hidden"],
        heads=column["heads"],
        layers=column["layers"],
        sequence=column["sequence_length"],
        vocabulary=np.full(len(rows), 51200.0),
        micro=column["micro_batch"],
        count=column["global_batch"] / column["micro_batch"] / column["dp"],
        tp=column["tp"],
        dp=column["dp"],
    )
    measured = column["measured_iteration_ms"] * 1e-3
    reduce_s = _all_reduce(data)
    activations = 2 * gpt.micro * gpt.sequence * gpt.hidden
    passes = 3 * 2 * gpt.layers * gpt.count
    tensor_s = passes * np.where(gpt.tp > 1, reduce_s(activations, gpt.tp), 0.0)
    gradient_s = np.where(gpt.dp > 1, reduce_s(2 * gpt.parameters, gpt.dp), 0.0)
    mine = own_constants(catalogue()[VTRAIN_CARD], own)

    def predict(values: Array) -> Array:
        c = {**shared, "tensor": values[0], "tensor_latency": values[1]}
        host = float(np.exp(values[2]))
        work = compute_s(c, mine, gpt, VTRAIN_CARD, "float16", host_s=host, recompute=True)
        return work + np.exp(values[3]) * tensor_s + gradient_s + np.exp(values[4])

    use = gpt.hidden <= np.median(gpt.hidden)
    start = np.array([-0.2, -0.5, np.log(1e-3), 0.0, np.log(0.01)])
    width = np.array([0.5, 1.0, 1.0, 0.3, 1.0])

    large = _large_products(data)

    def residual(values: Array) -> Array:
        error = np.log(predict(values) / measured)[use]
        c = {**shared, "tensor": values[0], "tensor_latency": values[1]}
        rates = [np.log(reached_flop_per_s(c, own, card) / rate) for card, rate in large.items()]
        return np.concatenate([error, _RATE_WEIGHT * np.array(rates), 0.3 * (values - start) / width])

    found = least_squares(residual, start, loss="soft_l1", f_scale=0.1, x_scale=width, diff_step=1e-3)
    time_s = predict(found.x)
    error = np.abs(time_s / measured - 1)
    report: list[Any] = []
    for name, at in (("fitted: hidden up to the median", use), ("predicted: the other rows", ~use)):
        for tp in (None, 1, 2, 4, 8):
            some = at & (gpt.tp == tp) if tp else at
            report.append(
                {
                    "vTrain rows": name if tp is None else f"… tensor parallel {tp}",
                    "rows": int(some.sum()),
                    "MAPE": round(100 * float(error[some].mean()), 2),
                    "bias": round(100 * float(np.median(time_s[some] / measured[some]) - 1), 1),
                    "rank correlation": round(_spearman(time_s[some], measured[some]), 3),
                }
            )
    names = ("tensor", "tensor_latency", "gpt_host", "gpt_reduce", "gpt_fixed")
    return dict(zip(names, map(float, found.x), strict=True)), report


def sailor_rows(data: Path, shared: Constants, own: Mapping[str, Constants]) -> list[Any]:
    """Sailor's rows of pipeline degree 1, each replica's card priced; the slowest counts."""
    folder = data / "endtoend"
    with (folder / "sailor_models.csv").open(newline="") as file:
        models = {row["model"]: row for row in csv.DictReader(file)}
    with (folder / "sailor_stages.csv").open(newline="") as file:
        stages = list(csv.DictReader(file))
    with (folder / "sailor_iterations.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["pp"] == "1"]
    links = _links(data)
    report: list[Any] = []
    for row in rows:
        shape = models[row["model"]]
        micro, dp, tp = int(row["micro_batch"]), int(row["dp"]), int(row["tp"])
        gpt = Gpt(
            *(
                np.array([float(value)])
                for value in (
                    shape["hidden"],
                    shape["heads"],
                    shape["transformer_layers"],
                    shape["sequence_length"],
                    shape["vocabulary"],
                    micro,
                    int(row["global_batch"]) / micro / dp,
                    tp,
                    dp,
                )
            )
        )
        measured = float(row["measured_iteration_s"])
        cards = sorted({stage["gpu"] for stage in stages if stage["row_id"] == row["row_id"]})
        entry: dict[str, Any] = {"Sailor row": row["row_id"], "measured s": round(measured, 4)}
        for dtype in ("float32", "tf32", "float16"):
            slowest = 0.0
            for card in cards:
                mine = own_constants(catalogue()[card], own)
                host = float(np.exp(shared["gpt_host"]))
                work = compute_s(shared, mine, gpt, card, dtype, host_s=host, recompute=False)
                piece = _BYTES[dtype] * micro * float(shape["sequence_length"]) * float(shape["hidden"]) / tp
                # Sailor's own form of a ring: 2 (n - 1) steps of an n-th at the point-to-point rate.
                step = piece / links(card, tp, piece)
                reduces = 4 * float(gpt.layers[0] * gpt.count[0])
                slowest = max(slowest, float(work[0]) + reduces * 2 * (tp - 1) * step)
            predicted = slowest + float(row["measured_grad_reduce_s"])
            entry[f"{dtype} s"] = round(predicted, 4)
            entry[f"{dtype} error %"] = round(100 * (predicted / measured - 1), 1)
        report.append(entry)
    return report


def _all_reduce(data: Path) -> Callable[[Array, Array], Array]:
    """The all-reduces that vTrain measured: seconds by bytes and group, log-linear between its sizes."""
    with (data / "network" / "collectives.csv").open(newline="") as file:
        rows = [
            (int(r["devices"]), float(r["bytes"]), float(r["seconds"]))
            for r in csv.DictReader(file)
            if r["source"] == "vTrain" and r["gpu"] == "A100" and r["collective"] == "all_reduce"
        ]
    curves = {n: np.array(sorted((b, t) for m, b, t in rows if m == n)) for n in {m for m, _, _ in rows}}

    def seconds(size: Array, group: Array) -> Array:
        out = np.zeros(len(size))
        for n in np.unique(group[group > 1]):
            curve, at = curves[int(n)], group == n
            inside = np.exp(np.interp(np.log(size[at]), *np.log(curve.T)))
            # Beyond the largest size measured, its bandwidth holds.
            out[at] = inside * np.maximum(size[at] / curve[-1, 0], 1.0)
        return out

    return seconds


def _links(data: Path) -> Callable[[str, int, float], float]:
    """Sailor's fitted bandwidth inside a node, byte/s by card, group and message."""
    with (data / "network" / "sailor_bandwidth_fits.csv").open(newline="") as file:
        fits = {
            (r["gpu_a"], int(r["gpus_a"])): tuple(float(r[k]) for k in ("c2", "c1", "c0", "max_gb_per_s"))
            for r in csv.DictReader(file)
            if r["scope"] == "intra_node"
        }

    def byte_per_s(card: str, group: int, size: float) -> float:
        c2, c1, c0, most = fits[card, group]
        x = np.log2(max(size, 1e5) / 1e6)
        return float(np.clip(c2 * x * x + c1 * x + c0, 0.05, most)) * 1e9

    return byte_per_s


def _spearman(a: Array, b: Array) -> float:
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])
