"""Brute force over placements: which combinations work, against which the rules declare.

For one equation, every combination of placements of its operands and results is tried on unequal
devices: local operands are made from the whole ones, the local computation runs on every device, and what
comes out is put together again and compared with the unsharded result. Then

- *wrong* is what the rule declares and brute force refutes (an exception or another result);
- *missing* is what brute force confirms, on all data, sizes and ratios tried, and the rule does not declare.

Not counted as missing, because nothing is missing:

1. what follows from a declared signature by free instructions: an operand that is R may be sliced (S) or
   kept by one owner (P), and so may a result that is declared R;
2. combinations that shard a dimension of one element: its shard is the whole on one device, which by
   another name is R or P (rules may still declare them, and then they must be right).

The idea is PyTorch DTensor's `strategy_validation.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from hypothesis import settings
from tests.conformance.trial import Case, Trial, to_numpy

from shardwright.ir.graph import Equation, Literal, TensorType
from shardwright.ir.placement import REDUCE_OPS, Partial, Placement, R, Shard
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Rule, Signature, admits, allows, cuts, signatures
from shardwright.ir.trace import trace

#: Shares tried: an even number of devices, which refute most at least cost, one of three left without work,
#: and three unequal devices.
RATIOS = ((0.6, 0.4), (0.0, 0.6, 0.4), (0.5, 0.33, 0.17))

#: A placement independent of sizes: "R", "P(op)", or ("S", dim, i) for the i-th finest unit of `dim`.
Key = Any


@dataclass(frozen=True)
class Finding:
    """One combination that is wrong or missing."""

    signature: Signature
    reason: str

    def __str__(self) -> str:
        return f"{self.signature}: {self.reason}"


@dataclass
class Report:
    """What brute force found out about one sample (or one primitive, when added up)."""

    combinations: int = 0
    wrong: list[Finding] = field(default_factory=list)
    missing: list[Finding] = field(default_factory=list)

    def __add__(self, other: Report) -> Report:
        return Report(
            self.combinations + other.combinations, self.wrong + other.wrong, self.missing + other.missing
        )


def cases(
    function: Callable[..., Any], args: Sequence[Any], primitive: str, exact: bool = False
) -> list[Case]:
    """The equations of `primitive` in `function`, evaluated on one device.

    `exact`: results must agree to the last bit, as where the rule is about rounding.
    """
    traced = trace(function, *args, state={})
    graph = traced.graph
    env: dict[Any, Any] = dict(graph.constants)
    env.update(zip(graph.inputs, jax.tree.leaves(tuple(args)), strict=True))
    found: list[Case] = []
    for equation in graph.equations:
        operands = tuple(
            jax.numpy.asarray(a.value, a.type.dtype) if isinstance(a, Literal) else env[a]
            for a in equation.inputs
        )
        target = traced.primitives[equation.primitive]
        results = target.bind(*operands, **equation.params)
        results = list(results) if target.multiple_results else [results]
        env.update(zip(equation.outputs, results, strict=True))
        if equation.primitive == primitive:
            found.append(Case(equation, target, operands, tuple(map(to_numpy, results)), exact))
    return found


# ---------------------------------------------------------------------------------------------------
# Enumeration


def _options(tensor: TensorType, units: Mapping[int, Sequence[int]]) -> dict[Key, Placement]:
    found: dict[Key, Placement] = {"R": R}
    for dim in range(tensor.rank):
        for i, unit in enumerate(sorted({1, *units.get(dim, ())})):
            found["S", dim, i] = Shard(dim, unit)
    for op in REDUCE_OPS:
        if admits(tensor, Partial(op)):
            found[str(Partial(op))] = Partial(op)
    return found


def options(rule: Rule, equation: Equation) -> tuple[list[dict[Key, Placement]], list[dict[Key, Placement]]]:
    """Placements to try for every operand and every result, the rule's units among them."""
    n_in = len(equation.inputs)
    tensors = (*equation.input_types, *equation.output_types)
    units: list[dict[int, set[int]]] = [{} for _ in tensors]
    for letter in rule.letters:
        cut_ins, cut_outs = cuts(rule, equation, letter)
        for i, cut in enumerate((*cut_ins, *cut_outs)):
            if cut is not None and cut.minor:
                units[i].setdefault(cut.dim, set()).add(cut.minor)
    found = [
        _options(tensor, {d: sorted(u) for d, u in unit.items()})
        for tensor, unit in zip(tensors, units, strict=True)
    ]
    return found[:n_in], found[n_in:]


def implied(declared: Sequence[Signature], outs: Sequence[Mapping[Key, Placement]]) -> set[Signature]:
    """The declared signatures with free instructions before and after them."""
    found: set[Signature] = set()
    for one in declared:
        before = [{p, R} for p in one.ins]
        after = [{*option.values(), p} if p == R else {p} for p, option in zip(one.outs, outs, strict=True)]
        n = len(before)
        found.update(Signature(ps[:n], ps[n:]) for ps in itertools.product(*before, *after))
    return found


# ---------------------------------------------------------------------------------------------------
# The check


def check(variants: Sequence[Sequence[Case]]) -> Report:
    """Check the rule of the equations of one sample.

    Args:
        variants: the same equations on data of different sizes.
    """
    report = Report()
    with np.errstate(all="ignore"):
        for same in zip(*variants, strict=True):
            report += _check_equation(same)
    return report


def _check_equation(same: Sequence[Case]) -> Report:
    rules = [rule_of(case.equation) for case in same]
    choices = [options(rule, case.equation) for rule, case in zip(rules, same, strict=True)]
    ins, outs = choices[0]
    assert all([list(o) for o in a] == [list(o) for o in ins] for a, _ in choices), (
        "units differ between variants"
    )

    def placed(variant: int, keys: tuple[Key, ...]) -> Signature:
        of_ins, of_outs = choices[variant]
        values = [option[key] for option, key in zip((*of_ins, *of_outs), keys, strict=True)]
        return Signature(tuple(values[: len(of_ins)]), tuple(values[len(of_ins) :]))

    trials: list[tuple[int, Trial]] = []
    others: list[tuple[int, Trial]] = []
    for v, case in enumerate(same):
        for ratios in RATIOS:
            # Every length is compiled anew: three unequal devices have the other data, unless there is time
            # for everything, or little is left to try.
            usual = (v > 0) == (ratios == RATIOS[-1]) or settings().max_examples > 100
            first = Trial(case, ratios, seed=len(trials))
            again = Trial(case, ratios, seed=len(trials) + 1, like=first)
            (trials if usual else others).extend([(v, first), (v, again)])

    def refuted(keys: tuple[Key, ...], trials: Sequence[tuple[int, Trial]]) -> str:
        drawn = any(isinstance(p, Partial) for p in placed(0, keys).ins)
        for v, trial in trials:
            if trial.again and not drawn:
                continue  # the numbers are those of the first draw
            reason = trial.mismatch(placed(v, keys))
            if reason:
                operands = ", ".join(map(str, trial.case.equation.input_types))
                return f"{reason}, shares {trial.ratios}, operands {operands}"
        return ""

    report = Report()
    equation, plain = same[0].equation, set(signatures(rules[0], same[0].equation))
    combinations = {placed(0, keys): keys for keys in itertools.product(*ins, *outs)}
    report.combinations = len(combinations)
    declared = [s for s in combinations if s in plain or (_coarse(s) and allows(rules[0], equation, s))]
    known = implied(declared, outs)  # and not missing
    for signature in declared:
        if reason := refuted(combinations[signature], trials):
            report.wrong.append(Finding(signature, reason))
    for signature, keys in combinations.items():
        if signature in known or _shards_one(equation, signature):
            continue
        if not refuted(keys, trials) and not refuted(keys, others):
            report.missing.append(Finding(signature, "works but is not declared"))
    report.wrong += [
        Finding(s, "is declared but is no combination of placements") for s in plain - set(declared)
    ]
    return report


def _coarse(signature: Signature) -> bool:
    return any(isinstance(p, Shard) and p.unit > 1 for p in (*signature.ins, *signature.outs))


def _shards_one(equation: Equation, signature: Signature) -> bool:
    tensors = (*equation.input_types, *equation.output_types)
    return any(
        isinstance(p, Shard) and t.shape[p.dim] == 1
        for t, p in zip(tensors, (*signature.ins, *signature.outs), strict=True)
    )
