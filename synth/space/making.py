"""Choices and factors while a space is made of them; equal factors are one object."""

from __future__ import annotations

from shardwright.ir.placement import Placement
from shardwright.synth.space.conversions import Domain
from shardwright.synth.space.factors import Choice, LinkFactor, Use
from shardwright.synth.space.vocabulary import Vocabulary


class Made:
    """What a space is made of so far.

    Attributes:
        words: the domains, signatures and factors there are.
        choices: all choices, numbered.
        uses: all factors, with the choices they tie.
    """

    def __init__(self, words: Vocabulary) -> None:
        self.words = words
        self.choices: list[Choice] = []
        self.uses: list[Use] = []

    def choice(self, domain: Domain) -> Choice:
        """One more choice."""
        choice = Choice(len(self.choices), domain)
        self.choices.append(choice)
        return choice

    def tie(
        self,
        kind: str,
        *scope: Choice,
        weight: float = 1.0,
        stacked: bool = False,
        beside: tuple[Placement | None, ...] = (),
    ) -> None:
        """One more factor that is no equation's; choices that are the same need none."""
        if len(set(scope)) < len(scope):
            return
        domains, links = tuple([choice.domain for choice in scope]), self.words.links
        key = (kind, domains, weight, stacked, beside)
        factor = links.get(key)
        if factor is None:
            factor = links[key] = LinkFactor(kind, domains, weight, stacked, beside)
        self.uses.append(Use(factor, tuple([choice.index for choice in scope])))
