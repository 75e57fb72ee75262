"""Rules of JAX primitives, one file per family. Importing this package fills the registry (`ir.registry`)."""

from shardwright.ir.ops import (
    contraction,
    elementwise,
    indexing,
    joining,
    linalg,
    movement,
    random,
    reduction,
    slicing,
    stages,
    window,
)

__all__ = [
    "contraction",
    "elementwise",
    "indexing",
    "joining",
    "linalg",
    "movement",
    "random",
    "reduction",
    "slicing",
    "stages",
    "window",
]
