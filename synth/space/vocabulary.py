"""What spaces are made of: domains, signatures and factors, one object for equal content.

Equal layers share them within a space. Spaces of one step and its rewritings may share them, too
(`Space(graph, nodes, vocabulary)`): what is priced for a factor of one is then known for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from shardwright.ir.placement import ReduceOp
from shardwright.ir.rules import Signature
from shardwright.synth.space.conversions import Domains
from shardwright.synth.space.factors import EquationFactor, LinkFactor, Needs

Key: TypeAlias = tuple[object, ...]


@dataclass(slots=True)
class Vocabulary:
    """See the module's docstring.

    Attributes:
        domains: of choices; they know the nodes, if programs are on two mesh axes.
        signatures: by form and units.
        pairs: signatures on two mesh axes, by the id of those on one, which `signatures` keeps.
        arising: which reductions results may have outstanding.
        factors, links: of equations, and between choices.
        needs: what is known of the needs of factors (`EquationFactor.needs`), by signatures, slots and
            `Domain.alike`: they have them in common.
    """

    domains: Domains
    signatures: dict[Key, tuple[Signature, ...]] = field(default_factory=dict[Key, tuple[Signature, ...]])
    pairs: dict[int, tuple[Signature, ...]] = field(default_factory=dict[int, tuple[Signature, ...]])
    arising: dict[Key, tuple[frozenset[ReduceOp], ...]] = field(
        default_factory=dict[Key, tuple[frozenset[ReduceOp], ...]]
    )
    factors: dict[Key, EquationFactor] = field(default_factory=dict[Key, EquationFactor])
    links: dict[Key, LinkFactor] = field(default_factory=dict[Key, LinkFactor])
    needs: dict[Key, list[Needs]] = field(default_factory=dict[Key, list[Needs]])
