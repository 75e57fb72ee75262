"""Which devices hold the same of a program, whatever their shares."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache

from shardwright.ir.graph import Graph, TensorType, value_types
from shardwright.ir.placement import Grid, Placement, Shard, by_node, cuts, lengths, seat
from shardwright.ir.program import Move, Program


class Kinds:
    """What decides how much each device holds of a program: how its tensors are cut, and its groups."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self._flat: dict[tuple[int, Shard], None] = {}
        #: Size and unit of a dimension that is cut over the nodes, those of one that is cut within them (0
        #: where none is), and whether they are one dimension.
        self._grids: dict[tuple[tuple[int, int], tuple[int, int], bool], None] = {}
        self._groups: dict[tuple[int, ...], None] = {}
        self._nodes: tuple[int, ...] | None = None
        # Many equations are of one form and have one signature.
        self._met: set[tuple[int, int]] = set()
        self._note(program, graph)

    def of_devices(self, ratios: Sequence[float]) -> Iterator[Hashable]:
        """Of every device, its stretches at these ratios, and the groups it is in."""
        stretches = [lengths(units, 1, cut.ratios(ratios)) for units, cut in self._flat]
        if self._nodes is not None:
            stretches += _on_nodes(self._grids, ratios, self._nodes)
        for device in range(len(ratios)):
            own = tuple(stretch[device] for stretch in stretches)
            yield own, tuple(device in group for group in self._groups)

    def _note(self, program: Program, graph: Graph) -> None:
        types, met = value_types(graph), self._met
        pairs = [(v.type, p) for v, p in zip(graph.inputs, program.inputs, strict=True)]
        for instruction in program.instructions:
            if isinstance(instruction, Move):
                tensor = types[instruction.value]
                pairs += [(tensor, instruction.pre), (tensor, instruction.post)]
                if instruction.group is not None:
                    self._groups[instruction.group] = None
                continue
            equation = graph.equations[instruction.equation]
            key = id(equation.form), id(instruction.signature)
            if key not in met:
                met.add(key)
                pairs += zip(equation.input_types, instruction.signature.ins, strict=True)
                pairs += zip(equation.output_types, instruction.signature.outs, strict=True)
            for body, region in zip(getattr(instruction, "bodies", ()), equation.regions, strict=False):
                self._note(body, region)
        for tensor, placement in set(pairs):
            self._cut(tensor, placement)

    def _cut(self, tensor: TensorType, placement: Placement) -> None:
        if isinstance(placement, Grid):
            self._nodes = placement.nodes
            across, within = (
                (tensor.shape[p.dim], p.unit) if isinstance(p, Shard) else (0, 1)
                for p in (placement.across, placement.within)
            )
            nested = len({cut.dim for cut in cuts(placement)}) < len(cuts(placement))
            self._grids[across, within, nested] = None
        else:
            for cut in cuts(placement):
                self._flat[tensor.shape[cut.dim] // cut.unit, Shard(0, by=cut.by)] = None


def _on_nodes(
    grids: Mapping[tuple[tuple[int, int], tuple[int, int], bool], None],
    ratios: Sequence[float],
    nodes: tuple[int, ...],
) -> list[Sequence[int]]:
    """Elements per device of what is cut over the nodes, and of what is cut within them.

    Args:
        grids: see `Kinds`.
        ratios: share of every device.
        nodes: devices of every node.
    """
    shares, inside = by_node(ratios, nodes)
    # Equal nodes are cut alike.
    cut = cache(lengths)
    found: dict[tuple[object, ...], Sequence[int]] = {}
    for (size, unit), (own, own_unit), nested in grids:
        of_node = cut(size, unit, shares)
        if (size, unit) not in found:
            found[size, unit] = [of_node[seat(d, nodes)[0]] for d in range(len(ratios))]
        key = (size, unit, own_unit) if nested else (own, own_unit, "within")
        if key not in found:
            parts = of_node if nested else [own] * len(nodes)
            pairs = zip(parts, inside, strict=True)
            found[key] = [n for part, mine in pairs for n in cut(part, own_unit, mine)]
    return list(found.values())
