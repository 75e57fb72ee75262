"""Decompositions, solvers and Fourier transforms of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from tests.conformance.samples.draw import Draw, Program, add, sample


def _square(draw: Draw) -> jax.Array:
    """A batch of square matrices far from singular; sizes that no two dimensions share."""
    count, side = draw.n(5, 7), draw.n(3, 4)
    return draw.floats(count, side, side) + 12 * jnp.eye(side)


def _symmetric(draw: Draw) -> jax.Array:
    square = _square(draw)
    return square + square.mT + 24 * jnp.eye(square.shape[-1])


def _decomposition(name: str, function: Callable[..., Any], drawn: Callable[[Draw], Any] = _square) -> None:
    add(name, "batch", lambda draw: (function, (drawn(draw),)))


def _tall(draw: Draw) -> jax.Array:
    return draw.floats(draw.n(5, 7), draw.n(4, 6), draw.n(3, 2))


_decomposition("cholesky", lambda x: lax.linalg.cholesky(x, symmetrize_input=False), _symmetric)
_decomposition("eigh", lambda x: lax.linalg.eigh(x, symmetrize_input=False), _symmetric)
_decomposition("eig", lambda x: lax.linalg.eig(x, compute_left_eigenvectors=False))
_decomposition("lu", lax.linalg.lu)
_decomposition("qr", lambda x: lax.linalg.qr(x, full_matrices=False), _tall)
# Of complex numbers, of which there is no Partial(max): LAPACK may never return where some are infinite.
_decomposition("svd", lambda x: lax.linalg.svd(x, full_matrices=False), lambda d: _tall(d) + 1j * _tall(d))
_decomposition("schur", lax.linalg.schur)
_decomposition("hessenberg", lax.linalg.hessenberg)
_decomposition("tridiagonal", lambda x: lax.linalg.tridiagonal(x, lower=True), _symmetric)


@sample("householder_product")
def reflectors(draw: Draw) -> Program:
    tall = _tall(draw)
    return lax.linalg.householder_product, (tall, draw.floats(tall.shape[0], tall.shape[2]))


@sample("lu_pivots_to_permutation")
def pivots(draw: Draw) -> Program:
    side = draw.n(3, 4)
    return (
        lambda x: lax.linalg.lu_pivots_to_permutation(x, side),
        (draw.ints(draw.n(5, 7), side, low=0, high=side - 1),),
    )


def _triangular(draw: Draw, left: bool) -> Program:
    square = _square(draw)
    count, side, others = square.shape[0], square.shape[-1], draw.n(6, 5)
    right = draw.floats(count, *((side, others) if left else (others, side)))
    return lambda a, b: lax.linalg.triangular_solve(a, b, left_side=left, lower=True), (square, right)


add("triangular_solve", "from_the_left", lambda draw: _triangular(draw, True))
add("triangular_solve", "from_the_right", lambda draw: _triangular(draw, False))
for _kind, _function in {"two_axes": jnp.fft.fft2, "real": jnp.fft.rfft}.items():
    add("fft", _kind, lambda draw, f=_function: (f, (draw.floats(draw.n(3, 5), *draw.ab),)))
add("fft", "complex", lambda draw: (jnp.fft.fft, (draw.complexes(*draw.ab),)))
add("fft", "back_to_real", lambda draw: (jnp.fft.irfft, (draw.complexes(*draw.ab),)))
