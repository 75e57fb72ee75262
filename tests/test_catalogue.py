"""The catalogue: every entry is plausible, short names resolve, and rates follow dtype and precision."""

import jax
import pytest

from shardwright.cost.catalogue import ALIASES, catalogue, device_type
from shardwright.cost.device import DeviceType
from shardwright.cost.document import Entry

TYPES = list(catalogue().values())
PROMISED = (
    *("P100-16GB", "V100-16GB", "V100-32GB", "T4", "A10", "A40", "L4", "L40S", "A100-40GB", "A100-80GB"),
    *("H100-80GB", "H200", "RTX-3090", "RTX-4090"),
)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_is_plausible(kind: DeviceType) -> None:
    assert 5e12 < kind.float32_flop_per_s < 2e14
    assert 1e11 < kind.memory_bandwidth_byte_per_s < 1e13
    assert 8e9 <= kind.memory_bytes <= 2e11
    for rate in (kind.tf32_flop_per_s, kind.float16_flop_per_s, kind.bfloat16_flop_per_s):
        assert rate is None or kind.float32_flop_per_s <= rate < 3e15
    for fraction in (kind.matmul_efficiency, kind.tensor_efficiency, kind.bandwidth_efficiency):
        assert 0.5 < fraction <= 1
    assert "datasheet" in kind.source
    assert kind.measured == ("measured:" in kind.source)
    assert kind.measured or "median of the measured types" in kind.source
    assert kind.vector_rate("float64") <= kind.vector_rate("float32") == kind.vector_rate("int32")


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_round_trips(kind: DeviceType) -> None:
    assert DeviceType.from_entry(Entry(kind.to_dict(), "catalogue")) == kind


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "complex64"]
)
def test_every_dtype_has_a_rate_and_a_lack_is_said(kind: DeviceType, dtype: str) -> None:
    rate, assumption = kind.flop_rate(dtype)
    assert 0 < rate < 3e15
    if assumption is not None:
        assert kind.name in assumption
        assert rate == kind.flop_rate("float32", "HIGHEST")[0]


@pytest.mark.parametrize("name", [*PROMISED, *ALIASES])
def test_short_names_resolve(name: str) -> None:
    assert device_type(name, place="here").name in catalogue()


def test_names_are_unique() -> None:
    assert len(catalogue()) == 27
    assert not set(ALIASES) & set(catalogue())


def test_default_precision_means_tf32_where_the_card_has_it() -> None:
    a100, t4 = device_type("A100-40GB", place="here"), device_type("T4", place="here")
    for precision in (None, "DEFAULT", "HIGH"):
        assert a100.flop_rate("float32", precision) == (156e12 * a100.tensor_efficiency, None)
        assert t4.flop_rate("float32", precision) == (8.1e12 * t4.matmul_efficiency, None)
    assert a100.flop_rate("float32", "HIGHEST") == (19.5e12 * a100.matmul_efficiency, None)
    assert a100.flop_rate("bfloat16", "HIGHEST") == (312e12 * a100.tensor_efficiency, None)
    assert "bfloat16" in str(t4.flop_rate("bfloat16")[1])


@pytest.mark.parametrize("precision", [*jax.lax.Precision, *jax.lax.DotAlgorithmPreset], ids=str)
def test_every_precision_of_jax_has_a_rate(precision: object) -> None:
    a100 = device_type("A100-40GB", place="here")
    rate, assumption = a100.flop_rate("float32", str(precision))
    assert rate > 0
    # 8-bit floats are priced at the float32 rate, and the plan says so.
    assert (assumption is not None) == ("F8" in str(precision))
