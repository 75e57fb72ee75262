"""Replicated state that every device computes for itself, and may round as no other does."""

from __future__ import annotations

from shardwright.ir import collectives
from shardwright.ir.graph import Graph, Value
from shardwright.ir.placement import R
from shardwright.ir.program import Move, Program

#: Such state is compared every so many steps, where nobody says otherwise.
RESYNC_EVERY = 100


def redundant(program: Program, graph: Graph) -> tuple[int, ...]:
    """Positions of the outputs that are such state; what comes out of one collective is equal anyway."""
    kept = [(i, graph.outputs[i]) for i in graph.state if program.outputs[i] == R]
    values = {atom.index for _, atom in kept if isinstance(atom, Value)}
    known = collectives.registry()
    sent = {
        move.value
        for move in program.instructions
        if isinstance(move, Move)
        and move.value in values
        and move.post == R
        and move.group is None
        and not known[move.kind].local
    }
    return tuple(i for i, atom in kept if isinstance(atom, Value) and atom.index not in sent)
