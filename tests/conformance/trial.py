"""One case under one vector of ratios: local operands, local results, and whether they make up the whole.

Compiling thousands of tiny programs one by one takes far longer than all else, so that what is wanted of many
combinations is compiled together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardwright.backends.local import evaluate, extents
from shardwright.ir.collectives import combine, identity, split
from shardwright.ir.graph import Equation, TensorType
from shardwright.ir.placement import Partial, Placement, Shard
from shardwright.ir.rules import Signature, registry


@dataclass(frozen=True)
class Case:
    """One equation with the values of its operands and its unsharded results."""

    equation: Equation
    primitive: Any
    operands: tuple[Any, ...]
    results: tuple[np.ndarray, ...]
    exact: bool


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


#: Where the local computation of a signature is known already: placements of operands, device, and what else
#: it depends on.
_Key = tuple[Any, ...]


class Trial:
    """One case, one vector of ratios, several draws of Partial operands."""

    def __init__(self, case: Case, ratios: Sequence[float], seeds: Sequence[int]) -> None:
        self.case = case
        self.ratios = ratios
        self.draws = range(len(seeds))
        self._rngs = [np.random.default_rng(seed) for seed in seeds]
        self._operands: dict[tuple[int, Placement, int], list[Any]] = {}
        #: By draw; what has no Partial operand is the same in all of them, and found under the first.
        self._results: list[dict[_Key, list[np.ndarray] | Exception]] = [{} for _ in seeds]
        op = registry().get(case.equation.primitive)
        # Only then does the local computation depend on where the result goes.
        self._positioned = op is None or op.localize is not None or bool(op.shape_params)

    def prepare(self, wanted: Iterable[Signature]) -> None:
        """Compute what every device computes for these signatures, in one executable or two."""
        todo: dict[bool, dict[_Key, tuple[Signature, int]]] = {False: {}, True: {}}
        for signature in wanted:
            drawn = _drawn(signature)
            for device in range(len(self.ratios)):
                key = self._key(signature, device)
                if key not in self._results[0]:
                    todo[drawn][key] = signature, device
        for drawn, some in todo.items():
            self._together(some, self.draws if drawn else self.draws[:1])

    def _together(self, wanted: dict[_Key, tuple[Signature, int]], draws: Sequence[int]) -> None:
        raised: dict[_Key, Exception] = {}
        places = [
            [(i, placement, device) for i, placement in enumerate(signature.ins)]
            for signature, device in wanted.values()
        ]
        slots = {place: slot for slot, place in enumerate(dict.fromkeys(p for some in places for p in some))}

        def everything(operands: list[Any]) -> list[list[Any]]:
            found: list[list[Any]] = []
            for (key, (signature, device)), mine in zip(wanted.items(), places, strict=True):
                args = [operands[slots[place]] for place in mine]
                try:
                    found.append(self._evaluate(signature, device, args))
                except Exception as error:  # whatever it is, this combination does not work
                    raised[key] = error
            return found

        compiled = jax.jit(everything, keep_unused=True)
        for draw in draws:
            operands = [self._local(i, placement, draw)[device] for i, placement, device in slots]
            found = iter(compiled(operands) if wanted else [])
            for key in wanted:
                self._results[draw][key] = (
                    raised[key] if key in raised else [to_numpy(array) for array in next(found)]
                )

    def _evaluate(self, signature: Signature, device: int, args: Sequence[Any]) -> list[Any]:
        return evaluate(self.case.equation, signature, self.case.primitive, device, self.ratios, args)

    def _key(self, signature: Signature, device: int) -> _Key:
        equation = self.case.equation
        outs = [
            tuple(e.length for e in extents(t, p, device, self.ratios))
            for t, p in zip(equation.output_types, signature.outs, strict=True)
        ]
        key: _Key = (signature.ins, device, tuple(outs) if self._positioned else None)
        shards = [
            extents(t, p, device, self.ratios)[p.dim].length
            for t, p in zip(equation.input_types, signature.ins, strict=True)
            if isinstance(p, Shard)
        ] + [shape[p.dim] for shape, p in zip(outs, signature.outs, strict=True) if isinstance(p, Shard)]
        # A device that has nothing may be excused, by what the result is.
        return (*key, signature.outs) if 0 in shards else key

    def _local(self, index: int, placement: Placement, draw: int) -> list[Any]:
        draw = draw if isinstance(placement, Partial) else 0
        key = (index, placement, draw)
        if key not in self._operands:
            tensor = self.case.equation.input_types[index]
            self._operands[key] = self._cut(self.case.operands[index], tensor, placement, draw)
        return self._operands[key]

    def _cut(self, whole: Any, tensor: TensorType, placement: Placement, draw: int) -> list[Any]:
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
            return [jax.numpy.asarray(stretch) for stretch in stretches]
        if isinstance(placement, Partial):
            idle = [ratio == 0 for ratio in self.ratios]
            return [
                jax.numpy.asarray(part)
                for part in parts(placement.op, np.asarray(whole), idle, self._rngs[draw])
            ]
        return [whole] * len(self.ratios)

    def mismatch(self, signature: Signature, draw: int) -> str:
        """Why the combination, which was prepared, does not work; "" if it does."""
        equation, whole = self.case.equation, self.case.results
        known = self._results[draw if _drawn(signature) else 0]
        locals_: list[list[np.ndarray]] = []
        for device in range(len(self.ratios)):
            results = known[self._key(signature, device)]
            if isinstance(results, Exception):
                return f"device {device} raised {type(results).__name__}: {str(results).splitlines()[:1]}"
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
                if not isinstance(placement, Partial) and not self._same(result, expected):
                    return f"result {j} differs on device {device}"
            locals_.append(results)
        for j, placement in enumerate(signature.outs):
            if isinstance(placement, Partial) and not self._same(
                combine(placement.op, [results[j] for results in locals_]), whole[j]
            ):
                return f"result {j} differs"
        return ""

    def _same(self, a: np.ndarray, b: np.ndarray) -> bool:
        return _equal(a, b) if self.case.exact else _same(a, b)


def _drawn(signature: Signature) -> bool:
    return any(isinstance(p, Partial) for p in signature.ins)


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
