"""Quantities with units: what is read, what is refused and in which words, and that writing loses nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.quantity import (
    BANDWIDTH,
    COMPUTE,
    DURATION,
    KINDS,
    MEMORY,
    Kind,
    at_least,
    format_quantity,
    parse_quantity,
)
from shardwright.ir.errors import InputError


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("10.4 Gbit/s", BANDWIDTH, 1.3e9),
        ("130 GB/s", BANDWIDTH, 130e9),
        ("1 KiB/s", BANDWIDTH, 1024),
        ("8 bit/s", BANDWIDTH, 1),
        ("5 us", DURATION, 5e-6),
        ("5 µs", DURATION, 5e-6),
        ("5 \N{GREEK SMALL LETTER MU}s", DURATION, 5e-6),
        ("5us", DURATION, 5e-6),
        ("  .5   s ", DURATION, 0.5),
        ("20 GFLOP/s", COMPUTE, 20e9),
        ("1e-3 TFLOP/s", COMPUTE, 1e9),
        ("4 GB", MEMORY, 4e9),
        ("16 GiB", MEMORY, 2**34),
    ],
)
def test_parses(text: str, kind: Kind, amount: float) -> None:
    assert parse_quantity(text, kind, place="here") == amount


@pytest.mark.parametrize(
    ("value", "kind", "reason", "remedy"),
    [
        ("12", BANDWIDTH, "'12' has no unit", "as in '16 GB/s'"),
        (12, BANDWIDTH, "12 has no unit", "as in '16 GB/s'"),
        pytest.param(10**5000, MEMORY, "has no unit", "as in '16 GB'", id="more digits than str() takes"),
        (2.5, DURATION, "2.5 has no unit", "as in '5 us'"),
        (float("nan"), DURATION, "nan is not a finite number", "finite and above zero"),
        (True, MEMORY, "is no memory size", "as in '16 GB'"),
        (None, MEMORY, "is no memory size", "as in '16 GB'"),
        (["1 GB"], MEMORY, "is no memory size", "as in '16 GB'"),
        ("", COMPUTE, "'' is no compute rate", "as in '20 GFLOP/s'"),
        ("fast", COMPUTE, "'fast' is no compute rate", "as in '20 GFLOP/s'"),
        ("GB", MEMORY, "'GB' is no memory size", "as in '16 GB'"),
        ("nan GB/s", BANDWIDTH, "not a finite number", "finite and above zero"),
        ("-inf GB/s", BANDWIDTH, "not a finite number", "finite and above zero"),
        (".nan", BANDWIDTH, "not a finite number", "finite and above zero"),
        ("1e999 GB", MEMORY, "is too large", "a float can hold"),
        ("0 us", DURATION, "is zero", "above zero"),
        ("1e-400 us", DURATION, "is zero", "above zero"),
        ("-5 us", DURATION, "is negative", "above zero"),
        ("5 GB", BANDWIDTH, "'GB' is not a unit of bandwidth", "Did you mean 'GB/s'?"),
        ("5 parsec", DURATION, "'parsec' is not a unit of duration", "Known units: s, ms, us, µs, ns"),
        ("5 gb", MEMORY, "'gb' is not a unit of memory size", "GB, TB"),
        ("1 2 GB", MEMORY, "'2 GB' is not a unit", "Did you mean"),
        ("9" * 100 + " GB", MEMORY, "characters long", "as in '16 GB'"),
    ],
)
def test_refuses(value: object, kind: Kind, reason: str, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_quantity(value, kind, place="lab.yaml: network.bandwidth")
    assert caught.value.place == "lab.yaml: network.bandwidth"
    assert reason in caught.value.reason
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("amount", "kind", "text"),
    [
        (1.3e9, BANDWIDTH, "1.3 GB/s"),
        (5e-6, DURATION, "5 us"),
        (2**34, MEMORY, "17.179869184 GB"),
        (156e12, COMPUTE, "156 TFLOP/s"),
        (1e-12, DURATION, "1e-12 s"),
    ],
)
def test_writes(amount: float, kind: Kind, text: str) -> None:
    assert format_quantity(amount, kind) == text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_examples_and_preferred_units_are_units(kind: Kind) -> None:
    assert parse_quantity(kind.example, kind, place="here") > 0
    assert kind.units[kind.base] == 1
    sizes = [kind.units[unit] for unit in kind.written]
    assert sizes == sorted(sizes, reverse=True)


@given(st.sampled_from(KINDS), st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False))
def test_what_is_written_reads_back(kind: Kind, amount: float) -> None:
    assert parse_quantity(format_quantity(amount, kind), kind, place="here") == amount


@given(st.sampled_from(KINDS), st.text())
def test_any_text_is_a_positive_amount_or_an_input_error(kind: Kind, text: str) -> None:
    try:
        amount = parse_quantity(text, kind, place="here")
    except InputError:
        return
    assert 0 < amount < float("inf")


@given(st.floats(1e-3, 1e6))
def test_what_is_said_to_be_enough_is(factor: float) -> None:
    said = float(at_least(factor))
    assert factor * (1 - 1e-9) <= said <= factor * 1.011
    assert at_least(said) == at_least(said * (1 - 1e-13)), "what has three digits is not rounded up again"
