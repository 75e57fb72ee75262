"""What `bench.fit_kernels` fits: measured rows of each family of kernels, its constants and their priors."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.catalogue import catalogue
from shardwright.cost.kernels.seconds import terms as model
from shardwright.cost.kernels.terms import Card

Array = NDArray[np.float64]
CARDS = ("A100-PCIE-40GB", "P100-PCIE-16GB", "V100-PCIE-32GB", "T4")
#: All priors of shared constants are narrowed by this: wide ones fit three cards better and the fourth worse.
PULL = 0.3


@dataclass(frozen=True)
class Rows:
    """Measured kernels of one family.

    Attributes:
        card: index into CARDS.
        op: the source's name of the op.
        shape: b, m, n, k or b, h.
        seconds: measured.
        test: whether the source lists the row as test.
    """

    card: NDArray[np.int64]
    op: NDArray[np.str_]
    shape: tuple[Array, ...]
    seconds: Array
    test: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, at: NDArray[Any]) -> Rows:
        shape = tuple(size[at] for size in self.shape)
        return Rows(self.card[at], self.op[at], shape, self.seconds[at], self.test[at])


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def load(data: Path, files: Sequence[str], sizes: str) -> Rows:
    rows = [row for file in files for row in read(data / "kernels" / f"{file}.csv") if row["gpu"] in CARDS]
    return Rows(
        card=np.array([CARDS.index(row["gpu"]) for row in rows]),
        op=np.array([{"ln": "layernorm"}.get(row["op"], row["op"]) for row in rows]),
        shape=tuple(np.array([float(row[size]) for row in rows]) for size in sizes),
        seconds=np.array([float(row["latency_ms"]) * 1e-3 for row in rows]),
        test=np.array([row["split"] == "test" for row in rows]),
    )


def cards_of(rows: Rows) -> Card:
    """The datasheet of every row's card."""
    sheets = [Card.of(catalogue()[name]) for name in CARDS]
    return Card(*(np.array([getattr(s, f.name) for s in sheets])[rows.card] for f in fields(Card)))


# --- families: which constants, where they start, how far they may stray ---------------------------------


@dataclass(frozen=True)
class Family:
    """A family of kernels that is fitted together.

    Attributes:
        shared: constants of all cards: start, standard deviation of the prior around it, lower, upper bound.
        own: constants of each card: standard deviation of the prior around 0.
        work: constants, constants of the card of every row, cards, rows -> seconds on the device.
        group: which dispatch constant every row takes.
        table: name of the correction table of every row.
    """

    name: str
    shared: Mapping[str, tuple[float, float, float, float]]
    own: Mapping[str, float]
    work: Callable[[Mapping[str, float], Mapping[str, Array], Card, Rows], Array]
    group: Callable[[Rows], NDArray[np.str_]]
    table: Callable[[Rows], NDArray[np.str_]]

    def parts(
        self, c: Mapping[str, float], own: Mapping[str, Array], card: Card, rows: Rows
    ) -> tuple[Array, Array]:
        """Seconds on the device and of dispatch."""
        dispatch = np.zeros(len(rows))
        groups = self.group(rows)
        for name in np.unique(groups):
            at = groups == name
            dispatch[at] = np.asarray(model.dispatch_s(c, own, card, str(name)))[at]
        return self.work(c, own, card, rows), dispatch

    def power(self, c: Mapping[str, float], rows: Rows) -> Array:
        """How dispatch and work are joined, by row."""
        return np.array([c[f"join_{model.FAMILY.get(name, self.name)}"] for name in self.group(rows)])

    def joined(self, c: Mapping[str, float], work: Array, dispatch: Array, rows: Rows) -> Array:
        power = self.power(c, rows)
        return (work**power + dispatch**power) ** (1 / power)


Prior = tuple[float, float, float, float]


def free(start: float, deviation: float = 0.5, low: float = -np.inf, high: float = np.inf) -> Prior:
    """Where a constant starts, how far it is expected to stray, and its bounds."""
    return start, PULL * deviation, low, high


def matmul_family() -> Family:
    shared = {
        "dispatch_bmm": free(np.log(40e-6)),
        "dispatch_linear": free(np.log(65e-6)),
        "dispatch_newer_matmul": free(-0.2, 0.2),
        "join_matmul": free(1.6, 1, 1, 8),
        "waves": free(0.8, 0.5, 0, 1),
        "prologue": free(16, 8, 0, 100),
        "dram": free(-0.6, 0.3),
        "energy": free(14, 3, 8, 25),
        "small_tile_energy": free(0.3, 0.5, 0, 2),
        "ragged_batch": free(0.05, 0.1, 0, 1),
        "ragged_single": free(0.08, 0.1, 0, 1),
        "tlb": free(0.5, 0.4, 0, 2),
        "tlb_log2_bytes": free(16.8, 0.6, 14, 18),
        "split_us": free(3, 3, 0, 30),
        "transposed": free(0.05, 0.15),
    }
    rates = (0.0, -0.05, -0.3, -0.7, -1.2, -0.9)
    latencies = (40, 150, 100, 60, 90, 90)
    for tile, (rate, latency) in enumerate(zip(rates, latencies, strict=True)):
        shared[f"tile{tile}"] = free(rate, 0.4)
        shared[f"latency{tile}"] = free(np.log(latency), 0.7)
    own = {"clk": 0.15, "ov_matmul": 0.3, "kt": 0.5, "lat": 0.5, "tn": 0.2, "un": 0.7, "sn": 0.4, "sr": 0.4}

    def work(c: Mapping[str, float], own: Mapping[str, Array], card: Card, rows: Rows) -> Array:
        return model.matmul_work(c, own, card, *rows.shape)

    def table(rows: Rows) -> NDArray[np.str_]:
        return np.where(rows.shape[0] == 1, "linear", "bmm")

    return Family("matmul", shared, own, work, table, table)


def elementwise_family(rows: Rows) -> Family:
    names = [str(name) for name in np.unique(rows.op)]
    shared = {"join_elementwise": free(2, 2, 1, 8), "dispatch_newer_elementwise": free(-0.2, 0.2)}
    shared |= {"stream": free(-0.2, 0.2)}
    shared |= {f"dispatch_{name}": free(np.log(35e-6)) for name in names}
    shared |= {f"flop_{name}": free(np.log(5.0), 1) for name in names}

    def work(c: Mapping[str, float], own: Mapping[str, Array], card: Card, rows: Rows) -> Array:
        out = np.zeros(len(rows))
        for name in names:
            at = rows.op == name
            part = Card(*(np.asarray(getattr(card, f.name))[at] for f in fields(Card)))
            mine = {key: value[at] for key, value in own.items()}
            out[at] = model.elementwise_work(c, mine, part, name, *(size[at] for size in rows.shape))
        return out

    def table(rows: Rows) -> NDArray[np.str_]:
        return np.full(len(rows), "elementwise")

    return Family(
        "elementwise", shared, {"ov_elementwise": 0.3, "bw": 0.15}, work, lambda rows: rows.op, table
    )


def row_family() -> Family:
    shared: dict[str, Prior] = {}
    for op in ("softmax", "layernorm"):
        shared |= {
            f"join_{op}": free(2, 2, 1, 8),
            f"dispatch_newer_{op}": free(-0.2, 0.2),
            f"dispatch_{op}": free(np.log(45e-6)),
            f"{op}_stream": free(0.2, 0.3),
            f"{op}_long": free(0.2, 0.3),
            f"{op}_row": free(np.log(20.0), 1),
            f"{op}_row_long": free(0.5, 1),
            f"{op}_flop": free(np.log(20.0), 1),
        }

    def work(c: Mapping[str, float], own: Mapping[str, Array], card: Card, rows: Rows) -> Array:
        parts = {op: model.row_work(c, own, card, op, *rows.shape) for op in ("softmax", "layernorm")}
        return np.where(rows.op == "softmax", parts["softmax"], parts["layernorm"])

    def table(rows: Rows) -> NDArray[np.str_]:
        return rows.op

    own = {"ov_softmax": 0.3, "ov_layernorm": 0.3, "row": 0.3, "row_bw": 0.15}
    return Family("rows", shared, own, work, table, table)
