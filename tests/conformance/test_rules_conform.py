"""Every rule, every combination of placements, against brute force: nothing wrong, nothing missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import jax
import numpy as np
import pytest
from tests.conformance.checker import Report, cases, check
from tests.conformance.omissions import OMISSIONS
from tests.conformance.samples import ABSENT, SAMPLES, Draw, Sample
from tests.conformance.trial import Case, Trial

from shardwright.backends.local import evaluate
from shardwright.ir.placement import R, Shard
from shardwright.ir.registry import registry, rule_of
from shardwright.ir.rules import Signature, signatures

_TESTS = count(1)


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """Thousands of combinations raise, whose tracebacks nobody reads; their programs would stay in memory."""
    shown = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", shown)
    if next(_TESTS) % 20 == 0:  # until then, the next primitive has much of them to share
        jax.clear_caches()


def report(sample: Sample) -> Report:
    return check([cases(*sample.make(Draw(variant)), sample.primitive, sample.exact) for variant in (0, 1)])


def named(primitive: str, title: str) -> Sample:
    return next(s for s in SAMPLES if str(s) == f"{primitive}:{title}")


@pytest.mark.parametrize("primitive", sorted(set(registry()) - ABSENT))
def test_rule_conforms(primitive: str) -> None:
    samples = [sample for sample in SAMPLES if sample.primitive == primitive]
    assert samples, f"{primitive} has a rule but no sample: add one to tests/conformance/samples/"
    used: set[int] = set()
    for sample in samples:
        found = report(sample)
        assert found.combinations > 0, f"{sample} does not contain {primitive}"
        assert not found.wrong, f"{sample} declares what is wrong:\n" + "\n".join(map(str, found.wrong))
        title = sample.make.__name__
        missing = []
        for finding in found.missing:
            rows = {i for i, row in enumerate(OMISSIONS) if row.covers(primitive, title, finding.signature)}
            used |= rows
            if not rows:
                missing.append(finding)
        assert not missing, f"{sample} lacks:\n" + "\n".join(map(str, missing))
    rows = [(i, row) for i, row in enumerate(OMISSIONS) if row.always and primitive in row.primitives.split()]
    stale = [row for i, row in rows if i not in used]
    assert not stale, f"no longer needed for {primitive}: {stale}"


@pytest.mark.parametrize("primitive", sorted(name for name, op in registry().items() if op.omitted))
def test_what_a_rule_omits_is_not_there(primitive: str) -> None:
    """A text saying what is left out belongs to a dimension that some sample cannot shard."""

    def never_sharded(case: Case) -> bool:
        equation = case.equation
        found = [s.ins for s in signatures(rule_of(equation), equation)]
        return any(
            size > 1 and not any(isinstance(ins[i], Shard) and ins[i].dim == dim for ins in found)
            for i, tensor in enumerate(equation.input_types)
            for dim, size in enumerate(tensor.shape)
        )

    samples = [sample for sample in SAMPLES if sample.primitive == primitive]
    assert any(never_sharded(case) for sample in samples for case in cases(*sample.make(Draw(0)), primitive))


def test_every_sample_has_a_rule() -> None:
    assert {sample.primitive for sample in SAMPLES} == set(registry()) - ABSENT


# ---------------------------------------------------------------------------------------------------
# The checker itself: errors planted in rules that are right


PLANTED_WRONG = {
    # what is planted, and a signature that must be reported
    "mul joint": ("mul", "reals", {"linear": "joint"}, "P(sum), P(sum) -> P(sum)"),
    "exp linear": ("exp", "reals", {"linear": "each"}, "P(sum) -> P(sum)"),
    "log upper": ("log", "reals", {"upper": "each"}, "P(max) -> P(max)"),
    "div denominator": ("div", "reals", {"linear": "each"}, "R, P(sum) -> P(sum)"),
    "select one branch": ("select_n", "matrix", {"linear": "each"}, "R, P(sum), R -> P(sum)"),
    "square monotone": ("square", "reals", {"monotone": "each"}, "P(max) -> P(max)"),
    "running axis": ("cumsum", "running", {"axes": "e0 e1 -> e0 e1"}, "S(1) -> S(1)"),
    "contracted maximum": ("reduce_max", "one_axis", {"reduce": "sum"}, "S(1) -> P(sum)"),
    "transposed letters": ("dot_general", "matrix", {"axes": "m k, k n -> n m"}, "S(0), R -> S(1)"),
    "cut heads": ("reshape", "heads_merged", {"axes": "a h d -> a (d h)"}, "S(2) -> S(1:4)"),
    "lost accumulator": ("scatter-add", "add_clip", {"accumulator": None}, "R, S(0), S(0) -> P(sum)"),
    "sharded sort": ("sort", "alone", {"axes": "a b -> a b"}, "S(1) -> S(1)"),
    "overlapping windows": (
        "conv_general_dilated",
        "overlapping",
        {"axes": "n x i, r! i o -> n x o"},
        "S(1), R -> S(1)",
    ),
}


@pytest.mark.parametrize("planted", PLANTED_WRONG)
def test_checker_finds_what_is_wrong(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    primitive, title, changes, expected = PLANTED_WRONG[planted]
    op = registry()[primitive]
    corrupted = replace(op, rule=lambda equation: replace(op.rule(equation), **changes))
    monkeypatch.setitem(registry(), primitive, corrupted)
    assert expected in {str(finding.signature) for finding in report(named(primitive, title)).wrong}


PLANTED_MISSING = {
    "add not linear": ("add", "reals", {"linear": ()}, "P(sum), P(sum) -> P(sum)"),
    "mul one operand": ("mul", "reals", {"linear": ((0,),)}, "R, P(sum) -> P(sum)"),
    "max not joint": ("max", "reals", {"upper": ()}, "P(max), P(max) -> P(max)"),
    "blocked batch": ("dot_general", "batched", {"axes": "b! m k, b! k n -> b! m n"}, "S(0), S(0) -> S(0)"),
    "blocked contraction": ("dot_general", "matrix", {"reduce": None}, "S(1), S(0) -> P(sum)"),
    "blocked rows": ("cumsum", "running", {"axes": "a! b! -> a! b!"}, "S(0) -> S(0)"),
    "no vocabulary": ("gather", "dropped", {"reduce": None}, "S(0), R -> P(sum)"),
    "no heads": ("reshape", "flattened", {"axes": "a! b! c! -> d!"}, "P(sum) -> P(sum)"),
    "fixed channels": (
        "conv_general_dilated",
        "pointwise",
        {"axes": "n x i!, r! i! o -> n x o"},
        "S(2), S(1) -> P(sum)",
    ),
}


@pytest.mark.parametrize("planted", PLANTED_MISSING)
def test_checker_finds_what_is_missing(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    primitive, title, changes, expected = PLANTED_MISSING[planted]
    op = registry()[primitive]
    changes = {"linear": (), **changes} if planted == "no heads" else changes
    corrupted = replace(op, rule=lambda equation: replace(op.rule(equation), **changes))
    monkeypatch.setitem(registry(), primitive, corrupted)
    assert expected in {str(finding.signature) for finding in report(named(primitive, title)).missing}


def test_report_counts_every_combination() -> None:
    found = report(named("add", "matrix"))
    assert found.combinations == 6**3
    assert not found.wrong


def test_64_bit_numbers_come_from_their_global_position() -> None:
    with jax.enable_x64(True):
        sample = Sample(
            "random_bits", lambda d: (lambda k: jax.random.bits(k, (d.n(5, 7), 3), "uint64"), (d.keys(),))
        )
        found = report(sample)
    assert not found.wrong
    assert not found.missing


def test_positions_beyond_32_bits() -> None:
    """Counters of an array of more than 2**32 elements carry into their high word."""
    from shardwright.ir.ops.random import _positions
    from shardwright.ir.registry import Extent

    dims = (Extent(70_000, 69_998, 2), Extent(65_537, 0, 65_537), Extent(3, 1, 2))
    rows = (dims[0], Extent(65_537, 65_530, 7), dims[2])
    import shardwright.backends.local  # noqa: F401

    high, low = (np.asarray(x).astype(np.uint64) for x in _positions(jax, rows))
    i, j, k = np.meshgrid(
        *(np.arange(d.offset, d.offset + d.length, dtype=np.uint64) for d in rows), indexing="ij"
    )
    expected = (i * np.uint64(65_537) + j) * np.uint64(3) + k
    assert expected.max() > 2**33
    np.testing.assert_array_equal(high << np.uint64(32) | low, expected)


def test_an_empty_update_writes_nothing_into_a_stretch() -> None:
    args = np.zeros((6, 4), np.float32), np.zeros((0, 4), np.float32)
    (case,) = cases(lambda x, u: jax.lax.dynamic_update_slice(x, u, (2, 0)), args, "dynamic_update_slice")
    signature = Signature((Shard(0), R, R, R), (Shard(0),))
    assert signature in signatures(rule_of(case.equation), case.equation)
    assert Trial(case, (0.5, 0.3, 0.2), seed=0).mismatch(signature) == ""


def test_an_index_past_a_stretch_that_is_cut_out_as_the_program_runs_is_dropped() -> None:
    """On `spmd` the last row of the second device became the first one of the third, an error of XLA's."""
    w = np.arange(24, dtype=np.float32).reshape(6, 4)
    (case,) = cases(lambda w: w.at[0].add(1.0), (w,), "scatter-add")
    signature, (_, *others) = Signature((Shard(0), R, R), (Shard(0),)), case.operands

    @jax.jit
    def second(whole: jax.Array, first: int, *others: jax.Array) -> jax.Array:
        stretch = jax.lax.dynamic_slice_in_dim(whole, first, 2)
        (result,) = evaluate(case.equation, signature, case.primitive, 1, (1 / 3,) * 3, [stretch, *others])
        return result

    np.testing.assert_array_equal(second(w, 2, *others), w[2:4])
