"""Fit the kernel model's constants on published measurements, and report its errors.

    python -m bench.fit_kernels --data DIR [--write] [--rows 2000] [--steps 14]

DIR holds `kernels/*.csv` (NeuSight's forward kernels: A100-PCIE-40GB, P100-PCIE-16GB, T4, V100-PCIE-32GB),
`endtoend/vtrain_single_node.csv`, `endtoend/sailor_*.csv`, `network/*.csv` and `gpus.csv`; docs/kernels.md
names the public repositories that they come from. Figures go to bench/results/kernels.json; `--write` also
rewrites cost/kernels/constants.py and the tables of docs/kernels.md.

What is fitted on which rows:

- in-sample: fitted on every row, `train` and `test`, of all four cards; evaluated on the same rows;
- held-out shapes: fitted on `train` rows, evaluated on `test` rows of the same cards (other, larger shapes);
- leave one card out: fitted on every row of the other three, evaluated on every row of the one left out, of
  which nothing but its datasheet is used;
- 16 bit: vTrain's rows of pipeline degree 1 with hidden size up to the median and the rates of large products
  in gpus.csv, evaluated on vTrain's other rows of pipeline degree 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from bench.fit_families import (
    CARDS,
    Family,
    Rows,
    cards_of,
    elementwise_family,
    load,
    matmul_family,
    row_family,
)
from bench.gpt_iteration import sailor_rows, vtrain_fit
from bench.record import ROOT, write
from shardwright.cost.catalogue import catalogue
from shardwright.cost.kernels.seconds import own_constants
from shardwright.cost.kernels.seconds import terms as model
from shardwright.cost.kernels.terms import Card

Array = NDArray[np.float64]
CONSTANTS = ROOT / "cost" / "kernels" / "constants.py"
PAGE = ROOT / "docs" / "kernels.md"


# --- the fit ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """Fitted constants.

    Attributes:
        shared: of all cards.
        own: by card.
        corrections: by card and table.
    """

    shared: dict[str, float]
    own: dict[str, dict[str, float]]
    corrections: dict[str, dict[str, Array]]

    def of_card(self, card: str) -> dict[str, float]:
        """The card's own constants, or those that the model gives to a card that was not measured."""
        return own_constants(catalogue()[card], self.own)

    def predict(self, family: Family, rows: Rows) -> Array:
        spread = {card: self.of_card(card) for card in CARDS}
        own = {name: np.array([spread[card][name] for card in CARDS])[rows.card] for name in family.own}
        card = cards_of(rows)
        work, dispatch = family.parts(self.shared, own, card, rows)
        tables = family.table(rows)
        for index, name in enumerate(CARDS):
            for table, values in self.corrections.get(name, {}).items():
                at = (rows.card == index) & (tables == table)
                shape, part = tuple(size[at] for size in rows.shape), Card.of(catalogue()[name])
                if at.any():
                    work[at] *= model.correction_factor(table, values, part, shape)
        return family.joined(self.shared, work, dispatch, rows)


def sample(rows: Rows, count: int) -> Rows:
    """At most `count` rows of each card and op, the same at every call."""
    random = np.random.default_rng(0)
    keys = np.char.add(rows.card.astype(str), rows.op)
    picked = []
    per_card = {key: sum(name[0] == key[0] for name in np.unique(keys)) for key in np.unique(keys)}
    for key in np.unique(keys):
        at = np.flatnonzero(keys == key)
        share = int((keys == key).sum() / (np.char.startswith(keys, key[0])).sum() * count)
        picked.append(random.choice(at, min(max(share, count // per_card[key] // 2), len(at)), replace=False))
    return rows.take(np.concatenate(picked))


def fit(
    family: Family, rows: Rows, *, count: int, steps: int, start: Mapping[str, float] | None = None
) -> Fit:
    """Least squares on the logarithm, soft L1 beyond 10 %, priors as told; no corrections."""
    few = sample(rows, count)
    card = cards_of(few)
    present = np.unique(few.card)
    names, kinds = list(family.shared), list(family.own)
    prior, deviation, low, high = (np.array(column) for column in zip(*family.shared.values(), strict=True))
    spread = np.repeat([family.own[kind] for kind in kinds], len(present))
    target = np.log(few.seconds)
    scale = 0.1 * np.sqrt(len(few) / 1000)

    def unpack(values: Array) -> tuple[dict[str, float], dict[str, Array]]:
        own = np.zeros((len(kinds), len(CARDS)))
        own[:, present] = values[len(names) :].reshape(len(kinds), len(present))
        shared = dict(zip(names, map(float, values), strict=False))
        return shared, dict(zip(kinds, own, strict=True))

    def residual(values: Array) -> Array:
        shared, own = unpack(values)
        mine = {kind: column[few.card] for kind, column in own.items()}
        work, dispatch = family.parts(shared, mine, card, few)
        error = np.log(family.joined(shared, work, dispatch, few)) - target
        soft = np.sign(error) * 0.1 * np.sqrt(2 * (np.sqrt(1 + (error / 0.1) ** 2) - 1))
        stray = (values[: len(names)] - prior) / deviation * scale
        return np.concatenate([soft, stray, values[len(names) :] / spread * scale])

    first = prior if start is None else np.array([start[name] for name in names])
    first = np.clip(first, np.nextafter(low, np.inf), np.nextafter(high, -np.inf))
    # A library that does without small tiles is slower for it, never faster.
    least = np.repeat([0.0 if kind in ("sn", "sr") else -3.0 for kind in kinds], len(present))
    guess = np.concatenate([first, np.maximum(least + 0.01, 0.0)])
    bounds = (np.append(low, least), np.append(high, np.full(len(spread), 3.0)))
    size = np.append(deviation, spread)
    found = least_squares(residual, guess, bounds=bounds, x_scale=size, diff_step=1e-3, max_nfev=steps)
    shared, own = unpack(found.x)
    cards = {CARDS[i]: {kind: float(own[kind][i]) for kind in kinds} for i in present}
    return Fit(shared, cards, {})


def corrected(family: Family, base: Fit, rows: Rows, *, ridge: float = 4.0, rounds: int = 6) -> Fit:
    """The fit with a correction table for every card and table: reweighted ridge regression of the log."""
    own = {name: np.array([base.of_card(card)[name] for card in CARDS])[rows.card] for name in family.own}
    work, dispatch = family.parts(base.shared, own, cards_of(rows), rows)
    powers = family.power(base.shared, rows)
    tables, corrections = family.table(rows), {}
    for index, card in enumerate(CARDS):
        for table in np.unique(tables):
            at = (rows.card == index) & (tables == table)
            if not at.any():
                continue
            part, power = Card.of(catalogue()[card]), powers[at]
            basis = model.correction_basis(str(table), part, tuple(size[at] for size in rows.shape))
            values = np.zeros(basis.shape[1])
            for _ in range(rounds):
                scaled = work[at] * np.exp(basis @ values)
                time_s = (scaled**power + dispatch[at] ** power) ** (1 / power)
                share = (scaled / time_s) ** power  # d log time / d log work
                error = np.log(rows.seconds[at] / time_s)
                weight = 0.1 / np.maximum(np.abs(error), 0.02)
                slope = basis * share[:, None]
                normal = (slope * weight[:, None]).T @ slope + ridge * np.eye(len(values))
                values = np.linalg.solve(normal, (slope * weight[:, None]).T @ (error + slope @ values))
            corrections.setdefault(card, {})[str(table)] = np.round(values, 3)
    return Fit(base.shared, base.own, corrections)


# --- the report ------------------------------------------------------------------------------------------


def mape(predicted: Array, rows: Rows, at: NDArray[np.bool_]) -> float | None:
    error = np.abs(predicted / rows.seconds - 1)
    return round(100 * float(error[at].mean()), 2) if at.any() else None


def evaluate(family: Family, rows: Rows, *, count: int, steps: int) -> tuple[Fit, list[dict[str, Any]]]:
    """The shipped fit, and a row of errors for each card and op."""
    base = fit(family, rows, count=count, steps=steps)
    shipped = corrected(family, base, rows)
    train = rows.take(~rows.test)
    on_train = corrected(family, fit(family, train, count=count, steps=steps, start=base.shared), train)
    inside, plain, held = (f.predict(family, rows) for f in (shipped, base, on_train))
    outside = np.zeros(len(rows))
    for index in range(len(CARDS)):
        others = fit(family, rows.take(rows.card != index), count=count, steps=steps)
        at = np.flatnonzero(rows.card == index)
        outside[at] = others.predict(family, rows.take(at))
    ops = {"matmul": {"bmm": ["bmm"], "linear": ["linear"], "matmul": ["bmm", "linear"]}}.get(
        family.name, {str(op): [str(op)] for op in np.unique(rows.op)}
    )
    if family.name == "elementwise":
        ops = {"elementwise": list(ops)} | ops
    report = []
    for card, (op, members) in ((card, item) for card in CARDS for item in ops.items()):
        at = (rows.card == CARDS.index(card)) & np.isin(rows.op, members)
        report.append(
            {
                "card": card,
                "op": op,
                "rows": int(at.sum()),
                "in_sample": mape(inside, rows, at),
                "no_tables": mape(plain, rows, at),
                "held_out_shapes": mape(held, rows, at & rows.test),
                "leave_card_out": mape(outside, rows, at),
                "leave_card_out_bias": round(100 * float(np.median(outside[at] / rows.seconds[at]) - 1), 1),
            }
        )
    return shipped, report


def constants_text(shared: Mapping[str, float], own: Mapping[str, Any], tables: Mapping[str, Any]) -> str:
    """cost/kernels/constants.py."""
    lines = [
        '"""Constants of the kernel model, written by bench/fit_kernels.py: do not edit.',
        "",
        "Fitted on public measurements: NeuSight (sitar-lab/NeuSight, MIT; forward kernels in float32) and",
        "vTrain (VIA-Research/vTrain; 16-bit GPT iterations on A100). docs/kernels.md tells what they mean;",
        "corrections are thousandths of a natural logarithm, in the order of `kernels.correction_basis`.",
        '"""',
        "",
        "from collections.abc import Mapping",
        "",
        "# fmt: off",
        "SHARED: Mapping[str, float] = {",
        *(f'    "{name}": {value:.6g},' for name, value in shared.items()),
        "}",
        "OWN: Mapping[str, Mapping[str, float]] = {",
    ]
    for card, values in own.items():
        lines += [f'    "{card}": {{', *(f'        "{k}": {v:.4g},' for k, v in values.items()), "    },"]
    lines += ["}", "CORRECTIONS: Mapping[str, Mapping[str, tuple[int, ...]]] = {"]
    for card, by_table in tables.items():
        lines.append(f'    "{card}": {{')
        for table, values in by_table.items():
            lines.append(f'        "{table}": (')
            line = "           "
            for value in np.round(1000 * values).astype(int):
                if len(line) + len(str(value)) > 100:
                    lines.append(line)
                    line = "           "
                line += f" {value},"
            lines += [line, "        ),"]
        lines.append("    },")
    lines += ["}", "# fmt: on", ""]
    return "\n".join(lines)


def digest(text: str) -> str:
    """What docs/kernels.md quotes of the constants that its tables belong to."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join("–" if v is None else str(v) for v in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def replace_block(page: str, name: str, text: str) -> str:
    """The page with what stands between `<!-- name -->` and `<!-- end -->` replaced."""
    head, found, rest = page.partition(f"<!-- {name} -->\n")
    if not found:
        raise SystemExit(f"docs/kernels.md has no block {name}")
    return head + found + text + "\n" + rest[rest.index("<!-- end -->") :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rows", type=int, default=2000, help="rows of each card that the fit looks at")
    parser.add_argument("--steps", type=int, default=14, help="evaluations of the Jacobian")
    parser.add_argument("--only", help="one family, and no report but its table")
    arguments = parser.parse_args()
    began = time.monotonic()
    matmul = load(arguments.data, ("matmul_bmm", "matmul_linear"), "bmnk")
    elementwise = load(arguments.data, ("elementwise",), "bh")
    rows = load(arguments.data, ("softmax", "layernorm"), "bh")
    families = (
        (matmul_family(), matmul),
        (elementwise_family(elementwise), elementwise),
        (row_family(), rows),
    )
    shared, own, tables, report = {}, {card: {} for card in CARDS}, {card: {} for card in CARDS}, []
    for family, measured in families:
        if arguments.only not in (None, family.name):
            continue
        found, errors = evaluate(family, measured, count=arguments.rows, steps=arguments.steps)
        shared |= found.shared
        for card in CARDS:
            own[card] |= found.own[card]
            tables[card] |= found.corrections[card]
        report += errors
        print(markdown(errors), f"\n{time.monotonic() - began:.0f} s\n", flush=True)
        if arguments.only:
            print(json.dumps({"shared": found.shared, "own": found.own}, indent=1))
            return
    half, vtrain = vtrain_fit(arguments.data, shared, own)
    shared |= half
    shipped = {name: value for name, value in shared.items() if not name.startswith("gpt_")}
    text = constants_text(shipped, own, tables)
    sailor = sailor_rows(arguments.data, shared, own)
    print(markdown(vtrain), "\n")
    print(markdown(sailor), f"\nconstants {digest(text)}, {time.monotonic() - began:.0f} s")
    path = write("kernels", [*report, *vtrain, *sailor, {"constants": digest(text)}])
    print(f"written to {path.relative_to(ROOT)}")
    if arguments.write:
        CONSTANTS.write_text(text)
        page = PAGE.read_text()
        page = replace_block(page, "table per card", markdown(report))
        page = replace_block(page, "vtrain", markdown(vtrain))
        page = replace_block(page, "sailor", markdown(sailor))
        page = replace_block(page, "digest", f"Constants: `{digest(text)}`.")
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
