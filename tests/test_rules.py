"""Axis strings, units of merged dimensions, signatures, and how dimensions are cut."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.op_classes import op_class
from shardwright.ir.errors import ProgramError
from shardwright.ir.graph import Equation, Forms, TensorType, Value
from shardwright.ir.placement import REDUCE_OPS, Partial, R, Replicate, Shard, lengths, parse_placement
from shardwright.ir.registry import registry, replicated_rule, rule_of
from shardwright.ir.rules import (
    Passing,
    Rule,
    Signature,
    admits,
    allows,
    cuts,
    flop_count,
    letter_signature,
    letter_sizes,
    passes_through,
    signatures,
)
from shardwright.ir.trace import trace


def equation(ins: list[tuple[int, ...]], outs: list[tuple[int, ...]], dtype: str = "float32") -> Equation:
    values = [Value(i, TensorType(shape, dtype)) for i, shape in enumerate([*ins, *outs])]
    operands, results = tuple(values[: len(ins)]), tuple(values[len(ins) :])
    return Equation(0, Forms().of("made_up", {}, operands, results), operands, results)


def parse(text: str) -> Signature:
    left, right = (
        tuple(parse_placement(part.strip()) for part in side.split(",") if part.strip())
        for side in text.split("->")
    )
    return Signature(left, right)


def texts(rule: Rule, of: Equation, **units: int) -> list[str]:
    return [str(signature) for signature in signatures(rule, of, units)]


# ---------------------------------------------------------------------------------------------------
# Axis strings


def test_letters_shard_through_contract_and_are_produced() -> None:
    matmul = equation([(6, 4), (4, 8)], [(6, 8)])
    assert texts(Rule("m k, k n -> m n"), matmul) == [
        "R, R -> R",
        "S(0), R -> S(0)",
        "S(1), S(0) -> P(sum)",
        "R, S(1) -> S(1)",
    ]
    assert texts(Rule("-> a"), equation([], [(6,)])) == [" -> R", " -> S(0)"]


def test_blocked_letters_and_ones_are_never_sharded() -> None:
    of = equation([(6, 4, 1)], [(6, 4, 5)])
    rule = Rule("a b! 1 -> a b! c")
    assert rule.letters == ("a", "c")
    assert texts(rule, of) == ["R -> R", "S(0) -> S(0)", "R -> S(2)"]


def test_without_a_reduction_contracted_letters_are_blocked() -> None:
    assert texts(Rule("a b -> a", reduce=None), equation([(6, 4)], [(6,)])) == ["R -> R", "S(0) -> S(0)"]


@pytest.mark.parametrize("dtype", ["float32", "bool"])
@pytest.mark.parametrize("linear", ["each", "joint", (), ((0,),), ((2, 0),)])
def test_sums_pass_through_what_a_signature_lets_them_through(linear: Passing, dtype: str) -> None:
    of = equation([(6,), (6,), (6,)], [(6,)], dtype)
    rule = Rule("a, a, a -> a", linear=linear)
    for some in itertools.chain.from_iterable(itertools.combinations(range(3), k) for k in range(4)):
        ins = tuple(Partial("sum") if k in some else R for k in range(3))
        listed = Signature(ins, (Partial("sum"),)) in signatures(rule, of)
        assert passes_through(rule, of, some) == listed


def test_scalars_have_no_axes() -> None:
    assert texts(Rule("., a -> a"), equation([(), (6,)], [(6,)])) == ["R, R -> R", "R, S(0) -> S(0)"]


def test_a_merged_dimension_is_cut_between_heads() -> None:
    split = equation([(5, 12)], [(5, 3, 4)])
    rule = Rule("a (h d) -> a h d!")
    assert letter_sizes(rule, split) == {"a": 5, "h": 3, "d": 4}
    assert "S(1:4) -> S(1)" in texts(rule, split)
    assert "S(1:8) -> S(1:2)" in texts(rule, split, h=2)
    left, right = cuts(rule, split, "h")
    assert (left[0].dim, left[0].minor) == (1, 4)
    assert (right[0].dim, right[0].minor) == (1, 1)


def test_a_minor_axis_may_be_a_number() -> None:
    rule = Rule("(h 4) -> h")
    assert letter_sizes(rule, equation([(12,)], [(3,)])) == {"h": 3, "4": 4}
    assert flop_count(rule, equation([(12,)], [(3,)])) == 3


def test_partial_passes_each_joint_or_as_listed() -> None:
    of = equation([(6,), (6,)], [(6,)])
    assert texts(Rule("a!, a! -> a!", linear="each"), of)[1:] == [
        "P(sum), R -> P(sum)",
        "R, P(sum) -> P(sum)",
    ]
    assert texts(Rule("a!, a! -> a!", linear="joint"), of)[1:] == ["P(sum), P(sum) -> P(sum)"]
    assert texts(Rule("a!, a! -> a!", linear=((1,),)), of)[1:] == ["R, P(sum) -> P(sum)"]
    assert texts(Rule("a!, a! -> a!", upper="joint", lower=((0,),)), of)[1:] == [
        "P(max), P(max) -> P(max)",
        "P(min), R -> P(min)",
    ]


def test_partial_exists_only_where_its_reduction_does() -> None:
    for dtype, expected in {
        "float32": {"sum", "max", "min"},
        "int8": {"sum", "max", "min"},
        "bool": {"max", "min"},
        "complex64": {"sum"},
        "key<fry>": set(),
    }.items():
        tensor = TensorType((6,), dtype)
        assert {op for op in REDUCE_OPS if admits(tensor, Partial(op))} == expected, dtype
        passing = texts(Rule("a! -> a!", linear="each", monotone="each"), equation([(6,)], [(6,)], dtype))
        assert set(passing) == {"R -> R", *(f"P({op}) -> P({op})" for op in expected)}


def test_an_accumulator_is_partial_where_a_letter_is_contracted() -> None:
    of = equation([(6, 4), (9, 4)], [(6, 4)])
    rule = Rule("v d, b d -> v d", accumulator=0)
    assert str(letter_signature(rule, of, "b")) == "P(sum), S(0) -> P(sum)"
    assert str(letter_signature(rule, of, "d")) == "S(1), S(1) -> S(1)"


def test_unknown_primitives_run_replicated() -> None:
    of = equation([(6, 4), ()], [(3,), (6, 4)])
    assert texts(rule_of(of), of) == ["R, R -> R, R"]
    assert replicated_rule(of, "why").note == "why"
    assert flop_count(rule_of(of), of) == 27


# ---------------------------------------------------------------------------------------------------
# What verification accepts


def test_allows_takes_any_unit_and_refuses_the_rest() -> None:
    split = equation([(5, 24)], [(5, 6, 4)])
    rule = Rule("a (h d) -> a h d!", linear="each")
    for text in (
        "R -> R",
        "S(0) -> S(0)",
        "S(1:4) -> S(1)",
        "S(1:8) -> S(1:2)",
        "S(1:12) -> S(1:3)",
        "P(sum) -> P(sum)",
    ):
        assert allows(rule, split, parse(text)), text
    for text in (
        "R -> S(1)",
        "S(1) -> S(1)",
        "S(1:4) -> S(1:2)",
        "S(1:8) -> S(1)",
        "S(1:6) -> S(1)",
        "S(0) -> S(1)",
        "S(1:4) -> S(2)",
        "P(max) -> P(max)",
        "P(sum) -> R",
        "R -> P(sum)",
    ):
        assert not allows(rule, split, parse(text)), text


@given(st.sampled_from(["a", "h"]), st.integers(1, 3))
def test_allows_what_signatures_gives(letter: str, unit: int) -> None:
    split = equation([(6, 24)], [(6, 6, 4)])
    rule = Rule("a (h d) -> a h d!")
    assert allows(rule, split, letter_signature(rule, split, letter, unit))


def test_known_primitives_that_run_replicated_say_why() -> None:
    def bits(data: jax.Array) -> jax.Array:
        return jax.random.bits(jax.random.wrap_key_data(data, impl="rbg"), (6,))

    graph = trace(bits, jnp.zeros(4, "uint32"), state={}).graph
    drawn = next(e for e in graph.equations if e.primitive == "random_bits")
    assert "key<rbg>" in rule_of(drawn).note
    assert rule_of(drawn).letters == ()


def test_groups_of_rows_are_cut_where_rows_are() -> None:
    """Forward, for the weights and for the rows: rows shard through, or leave a sum of the gradients.

    They ran replicated, and a mixture of experts with them.
    """

    def step(w: jax.Array, x: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda w, x: (jax.lax.ragged_dot(x, w, sizes) ** 2).sum(), (0, 1))(w, x)

    args = jnp.ones((3, 4, 5)), jnp.ones((8, 4)), jnp.array([3, 0, 5], jnp.uint8)
    products = [e for e in trace(step, *args).graph.equations if e.primitive == "ragged_dot_general"]
    cut = Shard(0)
    assert [signatures(rule_of(e), e)[1] for e in products if e.output_types[0].rank == 2] == [
        Signature((cut, R, R), (cut,))
    ] * 2
    (weights,) = [e for e in products if e.output_types[0].rank == 3]
    assert Signature((cut, cut, R), (Partial("sum"),)) in signatures(rule_of(weights), weights)
    assert {flop_count(rule_of(e), e) for e in products} == {2.0 * 8 * 4 * 5}
    assert {op_class(e) for e in products} == {"product"}


def test_threefry_that_is_not_partitionable_runs_replicated() -> None:
    def drawing() -> Equation:
        (drawn,) = trace(lambda k: jax.random.bits(k, (6,)), jax.random.key(0), state={}).graph.equations
        return drawn

    assert rule_of(drawing()).letters == ("e0",)
    with jax.threefry_partitionable(False):
        drawn = drawing()
        assert "partitionable" in rule_of(drawn).note
        assert rule_of(drawn).letters == ()


def test_elementwise_kinds_share_every_dimension_and_need_no_localizer() -> None:
    """Such equations are merged into one placement class."""
    for op in registry().values():
        if op.kind == "elementwise":
            assert op.localize is None, op.primitive
            assert not op.shape_params, op.primitive


# ---------------------------------------------------------------------------------------------------
# Cutting and naming


@st.composite
def shares(draw: st.DrawFn) -> tuple[float, ...]:
    weights = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any))
    return tuple(weight / sum(weights) for weight in weights)


@given(st.integers(0, 500), st.integers(1, 16), shares())
def test_lengths_are_whole_units_that_sum_up(units: int, unit: int, ratios: tuple[float, ...]) -> None:
    cut = lengths(units * unit, unit, ratios)
    assert sum(cut) == units * unit
    assert len(cut) == len(ratios)
    assert all(length >= 0 and length % unit == 0 for length in cut)


@given(st.integers(0, 500), shares())
def test_lengths_are_within_one_unit_of_the_share(size: int, ratios: tuple[float, ...]) -> None:
    for length, ratio in zip(lengths(size, 1, ratios), ratios, strict=True):
        assert abs(length - size * ratio) < 1 + 1e-6
        assert ratio > 0 or length == 0


@given(st.integers(0, 500), shares())
def test_larger_shares_get_no_less(size: int, ratios: tuple[float, ...]) -> None:
    cut = lengths(size, 1, ratios)
    pairs = list(zip(ratios, cut, strict=True))
    assert all(a <= b for r, a in pairs for s, b in pairs if r < s - 1e-9)


@given(st.integers(0, 100), st.integers(1, 8), st.integers(1, 8), shares())
def test_equally_many_units_are_cut_alike(
    units: int, one: int, other: int, ratios: tuple[float, ...]
) -> None:
    a, b = lengths(units * one, one, ratios), lengths(units * other, other, ratios)
    assert [length // one for length in a] == [length // other for length in b]


def test_lengths_of_ratios_from_a_solver() -> None:
    assert lengths(12, 1, (0.24999999999, 0.75000000001)) == (3, 9)
    assert lengths(7, 1, (0.5, 0.5)) == (4, 3)
    assert lengths(0, 4, (0.5, 0.5)) == (0, 0)


placements = st.one_of(
    st.builds(Replicate),
    st.builds(Shard, st.integers(0, 12), st.integers(1, 4096)),
    st.builds(Partial, st.sampled_from(REDUCE_OPS)),
)


@given(placements)
def test_placements_parse_back(placement: Replicate | Shard | Partial) -> None:
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize("text", ["", "S", "S()", "S(-1)", "S(0:)", "P(prod)", "R ", "S(0:2", "r"])
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(ProgramError, match="is none of R"):
        parse_placement(text)


def test_a_rule_may_be_registered_once_only() -> None:
    from shardwright.ir.registry import register

    with pytest.raises(AssertionError, match="twice"):
        register(registry()["add"])


def test_replicate_is_one_value() -> None:
    assert Replicate() == R
