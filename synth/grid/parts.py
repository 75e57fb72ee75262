"""Programs of the whole fleet's space, as they run on a part of it.

What a space on two mesh axes consists of does not depend on how many devices the nodes have: only the
placements' names do. All parts of a fleet are therefore searched in the space of the whole; what was found
on a part is then put on its nodes.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.graph import Graph
from shardwright.ir.placement import Grid, Placement, grid
from shardwright.ir.program import Compute, Instruction, Move, Program
from shardwright.ir.rules import Signature
from shardwright.ir.wires import Wires, wires, with_wires


def on_nodes(program: Program, graph: Graph, nodes: tuple[int, ...]) -> Program:
    """A program on two mesh axes on other nodes.

    Args:
        program: on any nodes.
        graph: what it is a program of.
        nodes: devices of every node.
    """
    return _Nodes(nodes).program(program, graph)


class _Nodes:
    """Placements and signatures on some nodes, one object for each that there was."""

    def __init__(self, nodes: tuple[int, ...]) -> None:
        self.nodes = nodes
        self._placements: dict[Placement, Placement] = {}
        self._signatures: dict[int, tuple[Signature, Signature]] = {}

    def program(self, program: Program, graph: Graph) -> Program:
        """See `on_nodes`."""
        known = wires(program, graph)
        made = Program(
            tuple(map(self.placement, program.inputs)),
            tuple([self.instruction(each, graph) for each in program.instructions]),
            tuple(map(self.placement, program.outputs)),
        )
        numbers = {self.placement(p): code for p, code in known.numbers.items()}
        return with_wires(made, graph, Wires(known.reads, known.makes, numbers))

    def instruction(self, each: Instruction, graph: Graph) -> Instruction:
        if isinstance(each, Move):
            return replace(each, pre=self.placement(each.pre), post=self.placement(each.post))
        signature = self.signature(each.signature)
        if isinstance(each, Compute):
            return Compute(each.equation, signature)
        pairs = zip(each.bodies, graph.equations[each.equation].regions, strict=True)
        bodies = tuple([self.program(body, region) for body, region in pairs])
        return replace(each, signature=signature, bodies=bodies)

    def signature(self, one: Signature) -> Signature:
        found = self._signatures.get(id(one))
        if found is None:
            made = Signature(tuple(map(self.placement, one.ins)), tuple(map(self.placement, one.outs)))
            # What is remembered by identity is kept, lest something else comes to have it.
            found = self._signatures[id(one)] = one, made
        return found[1]

    def placement(self, one: Placement) -> Placement:
        if not isinstance(one, Grid):
            return one
        found = self._placements.get(one)
        if found is None:
            found = self._placements[one] = grid(one.across, one.within, self.nodes)
        return found
