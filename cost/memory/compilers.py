"""What tells XLA's compilers apart where memory is concerned: this folder takes their decisions again.

The CPU's is that of jaxlib 0.10, read off optimised programs and buffer assignments. So is the GPU's: it
compiles for cards that are not there (`bench/cards.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardwright.cost.device import DeviceType
from shardwright.cost.memory.nodes import COSTLY, HALVES
from shardwright.ir.graph import Graph, TensorType, per_graph
from shardwright.ir.registry import is_contraction


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
        widens: whether products of bfloat16 are computed in float32, and their operands and results kept so.
    """

    costly: frozenset[str]
    library: bool
    thrifty: bool
    takes_in: frozenset[str] = frozenset()
    workspace_bytes: int = 0
    widens: bool = False

    def kept(self, primitive: str, made: TensorType) -> TensorType:
        """What is kept of a result: what is costly is computed in float32, and its readers want it so."""
        if self.thrifty and primitive in self.costly and made.dtype in HALVES:
            return TensorType(made.shape, "float32")
        return made

    def multiplied(self, tensor: TensorType) -> TensorType:
        """As what an operand of a product is read, or its result made."""
        if self.widens and tensor.dtype == "bfloat16":
            return TensorType(tensor.shape, "float32")
        return tensor


_GPU = Compiler(
    # A tanh is computed again on some cards: on an H100, of which arithmetic takes less.
    costly=frozenset({"erfc", "random_bits", "tanh"}),
    library=False,
    thrifty=True,
    takes_in=frozenset({"iota", "reduction", "scatter"}),
    # XLA's `GetWorkspaceSize`; 32 MiB on Hopper and later.
    workspace_bytes=4 << 20,
)

COMPILERS: Mapping[str, Compiler] = MappingProxyType(
    {
        "cpu": Compiler(costly=COSTLY, library=True, thrifty=False),
        "gpu": _GPU,
        "gpu-float32": replace(_GPU, widens=True),  # of cards that lack bfloat16
    }
)
"""By name: see `shardwright.ir.graph.Graph`."""


def compilers(graph: Graph, types: Sequence[DeviceType]) -> tuple[str, ...]:
    """By device, whose memory a step has there: what the graph says, but for cards that lack its bfloat16."""
    if not (COMPILERS[graph.compiler].thrifty and _multiplies_bfloat16(graph)):
        return (graph.compiler,) * len(types)
    return tuple(["gpu-float32" if each.lacks_bfloat16 else graph.compiler for each in types])


@per_graph
def _multiplies_bfloat16(graph: Graph) -> bool:
    return any(
        any(each.dtype == "bfloat16" for each in equation.input_types) and is_contraction(equation.primitive)
        for equation in graph.all_equations()
    )
