"""Which tensors of a graph a compiled step writes to memory, as `fusion.py` finds it for one device.

A program over the graph writes these too, and what its exchanges read; `cost/memory/liveness.py` adds up how
long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.cost.memory.buffers import scratch_bytes
from shardwright.cost.memory.compilers import COMPILERS, Compiler
from shardwright.cost.memory.fusion import Fusion
from shardwright.cost.memory.lowering import Lowering
from shardwright.cost.memory.nodes import Node
from shardwright.ir.graph import Equation, Graph, Value, per_graph
from shardwright.ir.regions import boundary
from shardwright.ir.stages import layers_of


@dataclass(frozen=True, slots=True)
class Temporary:
    """A buffer that no value of the graph has, such as a transposed operand.

    Attributes:
        like: position among operands and results of its equation of the tensor that it is cut like; None
            where every device has all of it.
        part: its bytes over that tensor's, or themselves.
        readers: equations that read it.
    """

    like: int | None
    part: float
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """What a graph writes; values and equations by index.

    Attributes:
        values: those that have a buffer.
        over: those of them that are written over an operand which nobody reads afterwards, if there is one.
        swapped: those of them that are transposed products, computed of swapped operands.
        same: what is computed by an equation that equals an earlier one -> that one's value.
        temporaries: by equation that needs them first.
        regions: of loops and branches, by equation: of every region.
    """

    values: frozenset[int]
    over: frozenset[int]
    swapped: frozenset[int]
    same: Mapping[int, int]
    temporaries: Mapping[int, tuple[Temporary, ...]]
    regions: Mapping[int, tuple[Written, ...]]


@per_graph
def written(graph: Graph) -> Written:
    """What a whole step writes."""
    return _written(graph, COMPILERS[graph.compiler])


def _written(
    graph: Graph, compiler: Compiler, sliced: Iterable[int] = (), stored: Collection[int] = ()
) -> Written:
    lowering = Lowering(graph, lambda equation: (), compiler, sliced, stored)
    fusion = Fusion(lowering)
    kernels = [node for node in fusion.asked if node.number in fusion.reads]
    runs = {kernel.number for kernel in kernels}
    owner: dict[int, int] = {}
    same: dict[int, int] = {}
    values: set[int] = set()
    over: set[int] = set()
    swapped: set[int] = set()
    regions: dict[int, tuple[Written, ...]] = {}
    for value in graph.inputs:
        node = lowering.of[value]
        owner[node.number] = value.index
        if node.number in runs:  # a slice of a stacked operand
            values.add(value.index)
    for equation in graph.equations:
        if equation.regions:
            values.update(value.index for value in equation.outputs)
            regions[equation.index] = _of_regions(equation, compiler)
        for value in equation.outputs:
            node = lowering.of[value]
            first = owner.setdefault(node.number, value.index)
            if first != value.index:
                same[value.index] = first
            elif node.number in runs and fusion.holder(node) is node:
                values.add(value.index)
                if node.kind in ("loop", "costly", "movement", "scatter") and node.group is None:
                    over.add(value.index)
                elif node.kind == "product" and equation.primitive == "transpose":
                    swapped.add(value.index)
    temporaries = _temporaries(fusion, kernels, owner) | _in_stages(graph)
    return Written(frozenset(values), frozenset(over), frozenset(swapped), same, temporaries, regions)


def _of_regions(equation: Equation, compiler: Compiler) -> tuple[Written, ...]:
    wiring = boundary(equation)
    found: list[Written] = []
    for number, region in enumerate(equation.regions):
        sliced = [port.inner for port in wiring.ins if port.stacked and port.region == number]
        stored = [port.inner for port in wiring.outs if port.stacked and port.region == number]
        found.append(_written(region, compiler, sliced, stored))
    return tuple(found)


def _temporaries(
    fusion: Fusion, kernels: Sequence[Node], owner: Mapping[int, int]
) -> dict[int, tuple[Temporary, ...]]:
    readers: dict[int, list[int]] = {}
    for kernel in kernels:
        if kernel.equation is not None:
            for operand in fusion.reads[kernel.number]:
                readers.setdefault(fusion.holder(operand).number, []).append(kernel.equation.index)
    found: dict[int, list[Temporary]] = {}
    for kernel in kernels:
        equation = kernel.equation
        if equation is None or equation.regions or kernel.number in owner or kernel.kind in ("store", "view"):
            continue
        if fusion.holder(kernel) is kernel and kernel.type.nbytes:
            like = _like(kernel, equation)
            if like is not None:
                read = tuple(dict.fromkeys(readers.get(kernel.number, ())))
                found.setdefault(equation.index, []).append(Temporary(*like, read))
    return {number: tuple(some) for number, some in found.items()}


def _in_stages(graph: Graph) -> dict[int, tuple[Temporary, ...]]:
    """What stages take while they run: a layer on one piece with its rows, and pieces that come and go."""
    found: dict[int, tuple[Temporary, ...]] = {}
    for equation in graph.equations:
        layers = layers_of(equation)
        if layers is not None:
            carried = range(layers.consts, layers.consts + layers.carries)
            pieces = sum(layers.graph.inputs[k].type.nbytes for k in carried)
            layer = replace(layers.graph, compiler=graph.compiler, memo={})
            rows = (*layer.inputs[carried.stop :], *layer.outputs[layers.carries :])
            nbytes = scratch_bytes(layer) + sum(row.type.nbytes for row in rows) + 3 * pieces
            found[equation.index] = (Temporary(None, nbytes, ()),)
    return found


def _like(node: Node, equation: Equation) -> tuple[int, float] | None:
    """The tensor of an equation that is as large as a node, or else the largest; how their bytes compare."""
    atoms = (*equation.inputs, *equation.outputs)
    sizes = [atom.type.nbytes if isinstance(atom, Value) else 0 for atom in atoms]
    wanted = node.type.nbytes
    best = min(range(len(sizes)), key=lambda i: (sizes[i] != wanted, -sizes[i]), default=None)
    if best is None or not sizes[best]:
        return None
    return best, wanted / sizes[best]
