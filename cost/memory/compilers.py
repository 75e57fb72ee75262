"""What tells XLA's compilers apart where memory is concerned: this folder takes their decisions again.

The CPU's is that of jaxlib 0.10, read off optimised programs and buffer assignments. So is the GPU's: it
compiles for cards that are not there (`bench/cards.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwright.cost.memory.nodes import COSTLY
from shardwright.ir.graph import TensorType

_HALVES = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler of XLA's.

    Attributes:
        costly: elementwise equations that are written rather than computed by several kernels.
        library: whether reductions are carried out by a library, which takes in what is around them.
        thrifty: whether bytes decide what is computed again (`recompute.py`) and the order of kernels
            (`schedule.py`).
        takes_in: kernels, or kinds of them, that compute their operands where they read them.
        workspace_bytes: what a matrix product takes while it runs.
    """

    costly: frozenset[str]
    library: bool
    thrifty: bool
    takes_in: frozenset[str] = frozenset()
    workspace_bytes: int = 0

    def kept(self, primitive: str, made: TensorType) -> TensorType:
        """What is kept of a result: what is costly is computed in float32, and its readers want it so."""
        if self.thrifty and primitive in self.costly and made.dtype in _HALVES:
            return TensorType(made.shape, "float32")
        return made


COMPILERS: Mapping[str, Compiler] = MappingProxyType(
    {
        "cpu": Compiler(costly=COSTLY, library=True, thrifty=False),
        "gpu": Compiler(
            # A tanh is computed again on some cards: on an H100, of which arithmetic takes less.
            costly=frozenset({"erfc", "random_bits", "tanh"}),
            library=False,
            thrifty=True,
            takes_in=frozenset({"iota", "reduction", "scatter"}),
            # XLA's `GetWorkspaceSize`; 32 MiB on Hopper and later.
            workspace_bytes=4 << 20,
        ),
    }
)
"""By name: see `shardwright.ir.graph.Graph`."""
