"""What spaces are made of: domains, signatures and factors, one object for equal content.

Equal layers share them within a space. Spaces of one step and its rewritings may share them, too
(`Space(graph, nodes, vocabulary)`): what is priced for a factor of one is then known for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from shardwright.ir.pairs import Paired, pairs
from shardwright.ir.placement import ReduceOp
from shardwright.ir.rules import Signature
from shardwright.synth.space.conversions import Domains
from shardwright.synth.space.factors import EquationFactor, LinkFactor, Needs

Key: TypeAlias = tuple[object, ...]
Side: TypeAlias = tuple[Signature, ...]


@dataclass(slots=True)
class Vocabulary:
    """See the module's docstring.

    Attributes:
        domains: of choices; they know the nodes, if programs are on two mesh axes.
        signatures: by form and units.
        sides: of lists that are not the same on both mesh axes, by id: those across the nodes, those within.
        pairs: signatures on two mesh axes, by the id of those on one, which `signatures` or `sides` keeps.
        arising: which reductions results may have outstanding.
        factors, links: of equations, and between choices.
        needs: what is known of the needs of factors (`EquationFactor.needs`), by signatures, slots and
            `Domain.alike`: they have them in common.
    """

    domains: Domains
    signatures: dict[Key, tuple[Signature, ...]] = field(default_factory=dict[Key, tuple[Signature, ...]])
    sides: dict[int, tuple[Side, Side, Side]] = field(default_factory=dict[int, tuple[Side, Side, Side]])
    pairs: dict[int, tuple[Signature, ...]] = field(default_factory=dict[int, tuple[Signature, ...]])
    arising: dict[Key, tuple[frozenset[ReduceOp], ...]] = field(
        default_factory=dict[Key, tuple[frozenset[ReduceOp], ...]]
    )
    factors: dict[Key, EquationFactor] = field(default_factory=dict[Key, EquationFactor])
    links: dict[Key, LinkFactor] = field(default_factory=dict[Key, LinkFactor])
    needs: dict[Key, list[Needs]] = field(default_factory=dict[Key, list[Needs]])

    def apart(self, across: Side, within: Side) -> Side:
        """A list of signatures of which some are across the nodes alone, or within them."""
        both = tuple(dict.fromkeys((*across, *within)))
        # What is remembered by identity is kept, lest something else comes to have it.
        self.sides[id(both)] = both, across, within
        return both

    def sides_of(self, found: Side) -> tuple[Side, Side]:
        """Of a list of signatures, those across the nodes and those within them: mostly all of them."""
        _, across, within = self.sides.get(id(found), (found, found, found))
        return across, within

    def on_mesh(self, found: Side) -> Side:
        """Signatures on the mesh axes of the domains: these, if they are on those, or else all pairs."""
        nodes = self.domains.nodes
        if nodes is None or isinstance(found, Paired):
            return found
        if id(found) not in self.pairs:
            self.pairs[id(found)] = pairs(*self.sides_of(found), nodes)
        return self.pairs[id(found)]
