"""One case under one vector of ratios: local operands, local results, and whether they make up the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

from shardwright.backends import local
from shardwright.ir.collectives import combine, identity, split
from shardwright.ir.graph import Equation, TensorType
from shardwright.ir.placement import Partial, Placement, Shard
from shardwright.ir.registry import registry
from shardwright.ir.rules import Signature


@dataclass(frozen=True)
class Case:
    """One equation with the values of its operands and its unsharded results."""

    equation: Equation
    primitive: Any
    operands: tuple[Any, ...]
    results: tuple[np.ndarray, ...]
    exact: bool


#: Asked for the same few tensors a million times.
extents = cache(local.extents)


def to_numpy(array: Any) -> np.ndarray:
    """Numbers of an array; of a typed key the numbers it consists of, in trailing dimensions."""
    if str(array.dtype).startswith("key<"):
        array = jax.random.key_data(array)
    return np.asarray(array)


def parts(op: str, whole: np.ndarray, idle: Sequence[bool], rng: np.random.Generator) -> list[np.ndarray]:
    """Random local tensors whose `op` is `whole`; a device without work holds the identity."""
    neutral = np.full_like(whole, identity(op, whole.dtype))  # type: ignore[arg-type]
    working = [i for i, rests in enumerate(idle) if not rests]
    found = [neutral.copy() for _ in idle]
    if op == "sum":
        rest = whole
        for i in working[:-1]:
            part = _noise(whole, rng)
            found[i] = part
            rest = (rest - part).astype(whole.dtype)
        found[working[-1]] = rest
        return found
    owner = rng.choice(working, whole.shape)
    for i in working:
        # Others hold something less extreme, or the identity.
        other = np.where(rng.random(whole.shape) < 0.2, neutral, _beyond(op, whole, rng))
        found[i] = np.where(owner == i, whole, other).astype(whole.dtype)
    return found


def _noise(like: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if like.dtype.kind in "iu":  # wraps around, as sums of integers do
        bits = np.iinfo(like.dtype)
        return rng.integers(bits.min, bits.max, like.shape, dtype=like.dtype, endpoint=True)
    noise = rng.integers(-12, 13, like.shape) / 4  # sums of these are exact in any float
    if like.dtype.kind == "c":
        noise = noise + 1j * rng.integers(-12, 13, like.shape) / 4
    return noise.astype(like.dtype)


def _beyond(op: str, whole: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if whole.dtype.kind == "b":
        return (
            whole & (rng.random(whole.shape) < 0.5)
            if op == "max"
            else whole | (rng.random(whole.shape) < 0.5)
        )
    if whole.dtype.kind in "iu":
        bits = np.iinfo(whole.dtype)
        wide = whole.astype(object)
        noise = (rng.integers(0, 4, whole.shape) ** rng.integers(1, 5, whole.shape)).astype(object)
        return np.clip(wide - noise if op == "max" else wide + noise, bits.min, bits.max).astype(whole.dtype)
    noise = rng.integers(0, 17, whole.shape) / 4
    # Next to what is infinite or not a number, the others may well hold ordinary numbers.
    base = np.where(np.isfinite(whole), whole.astype(np.float64), rng.integers(-40, 41, whole.shape))
    nearer = (base - noise if op == "max" else base + noise).astype(whole.dtype)
    farthest = whole == whole.dtype.type(-np.inf if op == "max" else np.inf)
    return np.where(farthest, whole, nearer)


class Trial:
    """One case, one vector of ratios, one draw of Partial operands."""

    def __init__(self, case: Case, ratios: Sequence[float], seed: int, like: Trial | None = None) -> None:
        self.case = case
        self.ratios = ratios
        self.rng = np.random.default_rng(seed)
        self.operands: dict[tuple[int, Placement], list[Any]] = {}
        self.results: dict[Any, list[np.ndarray] | Exception] = {}
        #: Whether it is another draw, which has the results from operands that are not Partial in common.
        self.again = like is not None
        self.common = self.results if like is None else like.common
        op = registry().get(case.equation.primitive)
        # Only then does the local computation depend on where the result goes.
        self.positioned = op is None or op.localize is not None or bool(op.shape_params)

    def local_operands(self, index: int, placement: Placement) -> list[Any]:
        key = (index, placement)
        if key not in self.operands:
            self.operands[key] = self._cut(
                self.case.operands[index], self.case.equation.input_types[index], placement
            )
        return self.operands[key]

    def _cut(self, whole: Any, tensor: TensorType, placement: Placement) -> list[Any]:
        if isinstance(placement, Shard):
            dims = [
                extents(tensor, placement, i, self.ratios)[placement.dim] for i in range(len(self.ratios))
            ]
            stretches = split(to_numpy(whole), placement.dim, [extent.length for extent in dims])
            if tensor.dtype.startswith("key<"):
                return [
                    jax.random.wrap_key_data(stretch, impl=jax.random.key_impl(whole))
                    for stretch in stretches
                ]
            return [jax.device_put(stretch) for stretch in stretches]
        if isinstance(placement, Partial):
            idle = [ratio == 0 for ratio in self.ratios]
            return [jax.device_put(part) for part in parts(placement.op, np.asarray(whole), idle, self.rng)]
        return [whole] * len(self.ratios)

    def evaluate(self, signature: Signature, device: int) -> list[np.ndarray]:
        args = [self.local_operands(i, p)[device] for i, p in enumerate(signature.ins)]

        found = local.evaluate(self.case.equation, signature, self.case.primitive, device, self.ratios, args)
        return [to_numpy(array) for array in found]

    def run(self, signature: Signature, device: int) -> list[np.ndarray]:
        equation = self.case.equation
        outs = [
            tuple(e.length for e in extents(t, p, device, self.ratios))
            for t, p in zip(equation.output_types, signature.outs, strict=True)
        ]
        key: Any = (signature.ins, device, tuple(outs) if self.positioned else None)
        shards = [
            self.local_operands(i, p)[device].shape[p.dim]
            for i, p in enumerate(signature.ins)
            if isinstance(p, Shard)
        ] + [shape[p.dim] for shape, p in zip(outs, signature.outs, strict=True) if isinstance(p, Shard)]
        if 0 in shards:  # such a device may be excused, by what the result is
            key = (*key, signature.outs)
        known = self.results if any(isinstance(p, Partial) for p in signature.ins) else self.common
        if key not in known:
            try:
                known[key] = self.evaluate(signature, device)
            except Exception as error:  # whatever it is, this combination does not work
                known[key] = error
        result = known[key]
        if isinstance(result, Exception):
            raise result
        return result

    def mismatch(self, signature: Signature) -> str:
        """Why the combination does not work; "" if it does."""
        equation, whole = self.case.equation, self.case.results
        locals_: list[list[np.ndarray]] = []
        for device in range(len(self.ratios)):
            try:
                results = self.run(signature, device)
            except Exception as error:
                return f"device {device} raised {type(error).__name__}: {str(error).splitlines()[:1]}"
            if len(results) != len(whole):
                return f"device {device} has {len(results)} results for {len(whole)}"
            for j, (result, placement) in enumerate(zip(results, signature.outs, strict=True)):
                tensor = equation.output_types[j]
                if isinstance(placement, Shard):
                    cut = [
                        extents(tensor, placement, i, self.ratios)[placement.dim].length
                        for i in range(len(self.ratios))
                    ]
                    expected = split(whole[j], placement.dim, cut)[device]
                else:
                    expected = whole[j]
                if result.shape != expected.shape or result.dtype != expected.dtype:
                    found = f"{result.dtype}{list(result.shape)}"
                    return f"device {device} has {found} for {expected.dtype}{list(expected.shape)}"
                if not isinstance(placement, Partial) and not self.same(result, expected):
                    return f"result {j} differs on device {device}"
            locals_.append(results)
        for j, placement in enumerate(signature.outs):
            if isinstance(placement, Partial) and not self.same(
                combine(placement.op, [results[j] for results in locals_]), whole[j]
            ):
                return f"result {j} differs"
        return ""

    def same(self, a: np.ndarray, b: np.ndarray) -> bool:
        return _equal(a, b) if self.case.exact else _same(a, b)


_TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-12, "complex64": 1e-5}


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.all((a == b) | ((a != a) & (b != b))))


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    tolerance = _TOLERANCE.get(str(b.dtype))
    if tolerance is None:
        return np.array_equal(a, b)
    wide: Any = np.complex128 if b.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    scale = np.max(np.abs(b), initial=0.0, where=np.isfinite(b))
    return np.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
