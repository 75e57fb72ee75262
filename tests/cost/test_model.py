"""Prices of kernels in seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cost_cases import CPU, S0, S1, SLOW, SUM, f32, graph_of, model_of, only, price
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.bill import Cut, Shares
from shardwright.cost.catalogue import catalogue
from shardwright.cost.kernels.contractions import like_linear, product_sizes, sharded_size
from shardwright.cost.kernels.products import follows_kernel_model
from shardwright.cost.kernels.seconds import products_s
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import ShareCost
from shardwright.cost.traffic import Traffic
from shardwright.ir.graph import Equation
from shardwright.ir.placement import R, Shard
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Signature, flop_count, signatures
from shardwright.synth.prices.tables import Prices


def test_matrix_product_takes_its_flops_or_its_bytes() -> None:
    model = model_of(CPU, SLOW)
    m, k, n = 300, 400, 500
    dot = only(graph_of(jnp.matmul, f32(m, k), f32(k, n)), "dot_general")
    whole = price(model, dot, Signature((R, R), (R,)))
    half = np.full(2, 0.5)
    compute = 2 * m * n * k
    assert whole.per_class(half) == pytest.approx([2e-6 + compute / 20e9, 8e-6 + compute / 5e9])
    assert not whole.varies
    thin = only(graph_of(jnp.matmul, f32(3000, 1), f32(1, 3000)), "dot_general")
    moved = 4 * (3000 + 3000 + 3000 * 3000)
    assert price(model, thin, Signature((R, R), (R,))).per_class(half) == pytest.approx(
        [2e-6 + moved / 10e9, 8e-6 + moved / 2e9]
    )


def test_only_sharded_tensors_shrink_with_the_share() -> None:
    model = model_of(CPU)
    thin = only(graph_of(jnp.matmul, f32(3000, 1), f32(1, 3000)), "dot_general")
    rows = price(model, thin, Signature((S0, R), (S0,)))
    for share in (0.0, 0.25, 1.0):
        moved = 4 * (3000 + share * (3000 + 3000 * 3000))
        assert rows.exact(np.array([share])) == pytest.approx(2e-6 + moved / 10e9)
    contracted = only(graph_of(jnp.matmul, f32(64, 512), f32(512, 64)), "dot_general")
    partial = price(model, contracted, Signature((S1, S0), (SUM,)))
    assert partial.exact(np.array([0.5])) == pytest.approx(2e-6 + 0.5 * 2 * 64 * 64 * 512 / 20e9)


def test_precision_and_dtype_choose_the_rate() -> None:
    fast = {**CPU, "name": "fast", "flops": "19.5 TFLOP/s", "tf32": "156 TFLOP/s", "bfloat16": "312 TFLOP/s"}
    wide = {**fast, "memory_bandwidth": "1000000 TB/s", "launch": "0.000001 us"}
    model, share = model_of(wide), np.ones(1)
    work = 2 * 512**3

    def product(**options: Any) -> Any:
        return lambda a, b: jnp.matmul(a, b, **options)

    def taken(function: Any, dtype: Any = jnp.float32) -> float:
        arg = jax.ShapeDtypeStruct((512, 512), dtype)
        dot = only(graph_of(function, arg, arg), "dot_general")
        return price(model, dot, Signature((R, R), (R,))).exact(share)

    assert taken(product()) == pytest.approx(work / 156e12, rel=1e-3)
    assert taken(product(precision=jax.lax.Precision.HIGHEST)) == pytest.approx(work / 19.5e12, rel=1e-3)
    assert taken(product(), jnp.bfloat16) == pytest.approx(work / 312e12, rel=1e-3)
    assert not [a for a in model.assumptions if "matrix rate" in a]
    assert taken(product(), jnp.float16) == pytest.approx(work / 19.5e12, rel=1e-3)
    assert [a for a in model.assumptions if "float16" in a]


def test_equal_kernels_are_one_object() -> None:
    model = model_of(CPU)
    first, second = (
        e for e in graph_of(lambda x: jnp.sin(jnp.sin(x) @ x), f32(8, 8)).equations if e.primitive == "sin"
    )
    signature, through = Signature((S0,), (S0,)), Traffic((True,), (True,))
    assert price(model, first, signature, through) is price(model, second, signature, through)
    assert price(model, first, signature, through) is model.kernel(second, signature, through)
    assert price(model, first, signature, through) is not price(
        model, first, signature, Traffic((True,), (False,))
    )


def test_renaming_is_free_and_what_stays_in_registers_is_not_launched() -> None:
    model = model_of(CPU)
    reshape = only(graph_of(lambda x: x.reshape(6, 4) + 1, f32(4, 6)), "reshape")
    assert price(model, reshape, Signature((R,), (R,)), Traffic((True,), (True,))).exact(np.ones(1)) == 0.0
    sine = only(graph_of(jnp.sin, f32(1000)), "sin")
    inside = price(model, sine, Signature((R,), (R,)), Traffic((False,), (False,))).exact(np.ones(1))
    assert 0 < inside < 2e-6  # arithmetic alone


# ---------------------------------------------------------------------------------------------------
# Contractions by the kernel model

GPU = {"name": "gpu", "flops": "14 TFLOP/s", "memory_bandwidth": "900 GB/s", "memory": "32 GB", "sms": 80}
FOUR = ("A100-PCIE-40GB", "T4", "T4", "T4")


def cuts_of(equation: Equation) -> dict[int | None, Signature]:
    return {sharded_size(s): s for s in signatures(rule_of(equation), equation)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_priced_at_its_own_shape(dtype: str) -> None:
    """Alone and whole: launch and the kernel model's seconds, or the bytes, whichever is more."""
    model, share = model_of(*FOUR), np.ones(2)
    a100, t4 = model.types
    for m, k, n in ((4096, 1024, 4096), (130, 700, 33), (32, 32, 32)):
        args = (jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype))
        dot = only(graph_of(jnp.matmul, *args), "dot_general")
        price_s = price(model, dot, Signature((R, R), (R,))).per_class(share)
        used = ("tf32", "float32") if dtype == "float32" else ("bfloat16", "bfloat16")
        for device, name, seconds_of_class in zip((a100, t4), used, price_s, strict=True):
            whole = products_s([device], [name], [(1, m, n, k)], linear=False)[0, 0]
            compute = products_s([device], [name], [(1, m, n, k)], linear=False, memory=False)[0, 0]
            taken = seconds_of_class - device.launch_s
            assert compute * 0.999 <= taken <= whole * 1.001
            assert taken >= 0.999 * whole / 2**0.125  # an 8-norm, where the price is a maximum
    assert ("bfloat16" in str(list(model.assumptions))) == (dtype == "bfloat16")


def test_a_sharded_product_has_the_rate_of_the_even_share() -> None:
    model = model_of(*FOUR)
    a100, t4 = model.types
    dot = only(graph_of(lambda x, w: x @ w, f32(512, 256), f32(256, 2048)), "dot_general")
    for cut, signature in cuts_of(dot).items():
        if cut is None:
            continue
        local = [1, 512, 2048, 256]
        local[cut] //= 4
        cost = price(model, dot, signature)
        for device, dtype, column in ((a100, "tf32", 0), (t4, "float32", 1)):
            wanted = products_s([device], [dtype], [tuple(local)], linear=False, memory=False)[0, 0]
            assert cost.linear[0, column] / 4 == pytest.approx(wanted, rel=1e-12)
            assert cost.constant[0, column] == device.launch_s


def model_launch(model: CostModel) -> np.ndarray[Any, Any]:
    return np.array([device.launch_s for device in model.types])


def test_small_kernels_are_less_efficient_than_large_ones() -> None:
    model = model_of("A100-PCIE-40GB")

    def rate(size: int) -> float:
        dot = only(graph_of(jnp.matmul, f32(size, size), f32(size, size)), "dot_general")
        cost = price(model, dot, Signature((R, R), (R,)))
        return 2 * size**3 / (cost.exact(np.ones(1)) - model.types[0].launch_s)

    assert rate(128) < 0.2 * rate(1024) < rate(4096)


def test_what_calibration_measured_stands() -> None:
    """An inline type follows the kernel model if it states multiprocessors, unless it was measured."""
    calibrated = {**GPU, "name": "mine", "measured": True, "matmul_efficiency": 0.5}
    plain = {key: value for key, value in GPU.items() if key != "sms"} | {"name": "plain"}
    model = model_of(GPU, calibrated, plain)
    assert [follows_kernel_model(device) for device in model.types] == [True, False, False]
    assert all(follows_kernel_model(device) for device in catalogue().values())
    # Nor is a card another one where a fleet leaves less of its memory to plans.
    assert all(follows_kernel_model(replace(device, memory_bytes=1)) for device in catalogue().values())
    dot = only(graph_of(jnp.matmul, f32(100, 200), f32(200, 300)), "dot_general")
    priced = price(model, dot, Signature((R, R), (R,))).per_class(np.ones(3)) - model_launch(model)
    flop = 2 * 100 * 200 * 300
    assert priced[1:] == pytest.approx([flop / 7e12, flop / 14e12])
    assert priced[0] > 2 * priced[2]


def convolution(groups: int = 1, batch_groups: int = 1, **options: Any) -> Any:
    return lambda x, w: jax.lax.conv_general_dilated(
        x,
        w,
        (options.get("stride", 1),) * 2,
        "VALID",
        feature_group_count=groups,
        batch_group_count=batch_groups,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )


@pytest.mark.parametrize(
    ("function", "shapes", "sizes"),
    [
        (jnp.matmul, ((5, 7), (7, 11)), (1, 5, 11, 7)),
        (jnp.matmul, ((3, 5, 7), (3, 7, 11)), (3, 5, 11, 7)),
        (lambda x, y: jnp.einsum("abij,cij->abc", x, y), ((2, 3, 4, 5), (6, 4, 5)), (1, 6, 6, 20)),
        (convolution(), ((8, 3, 10, 10), (16, 3, 3, 3)), (1, 8 * 8 * 8, 16, 27)),
        (convolution(stride=2), ((8, 3, 10, 10), (16, 3, 2, 2)), (1, 8 * 5 * 5, 16, 12)),
        (convolution(groups=2), ((8, 6, 10, 10), (16, 3, 3, 3)), (2, 8 * 8 * 8, 8, 27)),
        (convolution(batch_groups=2), ((8, 3, 10, 10), (16, 3, 3, 3)), (2, 4 * 8 * 8, 8, 27)),
    ],
)
def test_contractions_are_products(function: Any, shapes: Any, sizes: tuple[int, ...]) -> None:
    (equation,) = graph_of(function, *(f32(*shape) for shape in shapes)).equations
    rule = rule_of(equation)
    flop = flop_count(rule, equation)
    assert product_sizes(equation, flop) == sizes
    assert 2 * np.prod(sizes) == flop
    cuts = cuts_of(equation)
    assert set(cuts) - {None} <= {i for i, size in enumerate(sizes) if size > 1}
    for cut, signature in cuts.items():
        if cut is not None:  # what is cut is as long as what the signature shards, times whole dimensions
            pairs = zip(equation.input_types, signature.ins, strict=True)
            (first, *_) = (t.shape[p.dim] // p.unit for t, p in pairs if isinstance(p, Shard))
            assert sizes[cut] % first == 0


def test_where_the_contracted_dimension_lies() -> None:
    def of(text: str) -> bool:
        return like_linear(
            only(graph_of(lambda x, y: jnp.einsum(text, x, y), f32(4, 4), f32(4, 4)), "dot_general")
        )

    assert of("mk,nk->mn")
    assert not of("mk,kn->mn") and not of("km,kn->mn")


@given(
    weights=st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 7.0]), min_size=3, max_size=3).filter(any),
    units=st.integers(1, 40),
    spread=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 2**32),
)
def test_floors_hold_after_rounding(weights: list[float], units: int, spread: Any, seed: int) -> None:
    model = model_of(CPU, SLOW, CPU)
    ratios = [w / sum(weights) for w in weights]
    largest = max(ratios)
    low, high = largest * spread[0], largest + (1 - largest) * spread[1]
    constant, linear, product = np.random.default_rng(seed).exponential(1.0, (3, 2, 2))
    for cost in (
        ShareCost(constant, linear, product),
        ShareCost(constant + linear, -linear, product),
        ShareCost(constant, 0 * linear, product),
    ):
        rounded, within = Shares(ratios, model.class_of), Prices.floors(model, (low, high))
        assert within.evaluate(cost, Cut(units, 1)) <= rounded.seconds(cost, Cut(units, 1)) + 1e-9
        assert within.evaluate(cost, None) <= rounded.seconds(cost, None) + 1e-9
        assert within.evaluate(cost, Cut(units, 1)) >= Prices.floors(model).evaluate(cost, None)
        assert (
            Prices.floors(model).evaluate(cost, Cut(units, 1)) <= rounded.seconds(cost, Cut(units, 1)) + 1e-9
        )


def test_floors_of_alike_devices_are_prices_at_even_ratios() -> None:
    """Four units on three devices: one of them has two, which is more than a third."""
    model = model_of(CPU, CPU, CPU)
    cost = ShareCost(np.array([[1.0]]), np.array([[6.0]]), np.zeros((1, 1)))
    assert Prices.floors(model).evaluate(cost, Cut(4, 1)) == pytest.approx(1 + 6 * 2 / 4)
    assert Prices.floors(model).evaluate(cost, Cut(4, 1)) == Shares([1 / 3] * 3, model.class_of).seconds(
        cost, Cut(4, 1)
    )
    assert Prices.floors(model).evaluate(cost, Cut(3000, 1)) == pytest.approx(1 + 6 / 3)
