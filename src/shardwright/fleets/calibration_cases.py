"""What calibration times: kernels, and every exchange by every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.backends.measuring.kernel_cases import ELEMENTWISE, KernelCase
from shardwright.backends.measuring.timing import ExchangeCase, example
from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet, Link, Node
from shardwright.cost.model import CostModel
from shardwright.ir.collectives import registry

SIZES = tuple(1 << power for power in range(10, 25))
#: A skewed device's share as a multiple of the least.
SKEWS = ((4, 2), (7, 1))


@dataclass(frozen=True)
class KernelSizes:
    """What a kind of device is timed with: from sizes at which starting kernels counts to ones that fill it.

    Attributes:
        products: (b, m, k, n), in all layouts.
        large: a product that is timed in every arithmetic.
        widths: of elementwise kernels.
        reductions: rows and columns.
        pieces: layers and their sizes: small and large, whole and as one of several devices that share the
            layer.
        updates: optimizers and their sizes.
    """

    products: tuple[tuple[int, ...], ...]
    large: tuple[int, ...]
    widths: tuple[int, ...]
    reductions: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[str, tuple[int, ...]], ...]
    updates: tuple[tuple[str, tuple[int, ...]], ...]


PROCESSOR = KernelSizes(
    products=(
        (1, 32, 32, 32),
        (1, 128, 32, 96),
        (1, 128, 128, 128),
        (1, 512, 128, 128),
        (1, 128, 512, 128),
        (1, 512, 512, 512),
        (1, 1024, 256, 1024),
        (16, 64, 32, 64),
        (32, 128, 64, 128),
    ),
    large=(1, 1024, 512, 1024),
    widths=(1 << 8, 1 << 16, 1 << 20, 1 << 22),
    reductions=((64, 128), (512, 512), (2048, 1024)),
    pieces=(
        ("mlp", (8, 32, 128, 512)),
        ("mlp", (8, 64, 256, 1024)),
        ("mlp", (16, 64, 256, 512)),
        ("mlp", (16, 64, 192, 384)),
        ("mlp", (16, 64, 256, 256)),
        ("attention", (8, 32, 128, 4, 32)),
        ("attention", (8, 64, 256, 4, 64)),
        ("attention", (16, 64, 256, 2, 64)),
        ("attention", (16, 64, 192, 2, 48)),
        ("attention", (16, 64, 256, 1, 64)),
        ("classifier", (256, 128, 512)),
        ("classifier", (1024, 256, 256)),
        ("embedding", (1024, 512, 256)),
        ("convolution", (16, 32, 3, 192, 4, 4)),
        ("convolution", (4, 16, 64, 64, 3, 1)),
    ),
    updates=(
        ("adam", (8, 128, 128)),
        ("adam", (8, 256, 1024)),
        ("clip", (8, 128, 128)),
        ("clip", (8, 256, 1024)),
    ),
)
"""A processor's cores."""

CARD = KernelSizes(
    products=(
        (1, 512, 512, 512),
        (1, 1024, 1024, 1024),
        (1, 2048, 2048, 2048),
        (1, 8192, 768, 3072),
        (1, 8192, 3072, 768),
        (1, 128, 4096, 4096),
        (96, 512, 64, 512),
        (96, 1024, 64, 1024),
    ),
    large=(1, 4096, 4096, 4096),
    widths=(1 << 16, 1 << 24, 1 << 26),
    reductions=((2048, 1024), (8192, 1024), (32768, 2048)),
    pieces=(
        ("mlp", (8, 1024, 768, 3072)),
        ("mlp", (16, 512, 1024, 2048)),
        ("mlp", (8, 512, 1024, 1024)),
        ("mlp", (4, 512, 512, 2048)),
        ("attention", (8, 1024, 768, 12, 64)),
        ("attention", (32, 128, 768, 12, 64)),
        ("attention", (8, 512, 1024, 4, 64)),
        ("classifier", (4096, 768, 32768)),
        ("classifier", (2048, 1024, 8192)),
        ("embedding", (8192, 32768, 768)),
        ("convolution", (32, 224, 3, 64, 7, 2)),
        ("convolution", (32, 56, 64, 64, 3, 1)),
        ("convolution", (32, 28, 128, 512, 1, 1)),
    ),
    updates=(
        ("adam", (8, 256, 1024)),
        ("adam", (16, 768, 3072)),
        ("clip", (8, 256, 1024)),
        ("clip", (16, 768, 3072)),
    ),
)
"""A card with memory of its own, whose caches and multiprocessors the former would not fill."""


def kernel_cases(sizes: KernelSizes) -> tuple[KernelCase, ...]:
    """Products, elementwise kernels and reductions of several sizes, and pieces of steps."""
    kernels = [KernelCase("dispatch", ()), KernelCase("start", ())]
    layouts = ("matmul", "matmul:tn", "matmul:nt")  # forward, and the two backward
    shapes = (*sizes.products, sizes.large)
    kernels += [KernelCase(op, shape, "float32", "highest") for op in layouts for shape in shapes]
    kernels += [KernelCase("matmul", sizes.large, dtype) for dtype in ("float32", "float16", "bfloat16")]
    kernels += [KernelCase(f"elementwise:{op}", (1, width)) for op in ELEMENTWISE for width in sizes.widths]
    kernels += [KernelCase("reduction", shape) for shape in sizes.reductions]
    for layer, shape in sizes.pieces:
        kernels += [KernelCase(f"{way}:{layer}", shape) for way in ("forward", "backward")]
    kernels += [KernelCase(f"update:{optimizer}", shape) for optimizer, shape in sizes.updates]
    return tuple(kernels)


def exchange_cases(ranks: int) -> list[ExchangeCase]:
    """Every collective × strategy × size, at even shares and, where they matter, at uneven ones."""
    if ranks < 2:
        return []
    even = (1.0 / ranks,) * ranks
    skewed = [_shares([*skew, *[1] * (ranks - 2)]) for skew in SKEWS]
    cases: list[ExchangeCase] = []
    model = CostModel(flat(ranks, Link(1.0, 1.0)))
    for kind in (kind for kind, collective in registry().items() if not collective.local):
        move, tensor = example(kind, "", SIZES[-1])
        for strategy in model.strategies(kind, move.pre, move.post):
            uneven = skewed if model.move(kind, strategy, tensor, move.pre, move.post).varies else []
            cases += [ExchangeCase(kind, strategy, n, even) for n in SIZES]
            cases += [ExchangeCase(kind, strategy, n, s) for s in uneven for n in SIZES[::3]]
    return cases


def _shares(parts: Sequence[int]) -> tuple[float, ...]:
    return tuple(part / sum(parts) for part in parts)


def flat(ranks: int, link: Link) -> Fleet:
    """Equal devices on one link."""
    return Fleet("flat", (Node("n0", (DeviceType("any", 1.0, 1.0, 1, measured=True),) * ranks, link),), None)
