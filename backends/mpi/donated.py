"""Memory that nobody else needs: which segments, and which loops, of a rank's order may take it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardwright.backends.layout import holds
from shardwright.backends.schedule.acts import Land, Launch, Order, Repeat
from shardwright.ir.dtypes import is_key
from shardwright.ir.program import Property
from shardwright.ir.segments import Back, Segment


def given_away(
    order: Order,
    donated: Collection[Property],
    rank: int,
    devices: int,
    begun: Mapping[Repeat, Collection[Property]] | None = None,
) -> dict[Segment | Repeat, set[Property]]:
    """Per segment, the inputs that it reads as the last: nobody needs them, no message carries them.

    Args:
        order: the steps.
        donated: inputs that may be given away.
        rank: whose they are.
        devices: how many there are.
        begun: what loops might begin with in the place where it was made (`shardwright.ir.carried`); of it,
            too, what no message carries.
    """
    found: dict[Segment | Repeat, set[Property]] = {}
    carried: dict[int, set[Property]] = {}
    shared: set[Property] = set()  # loops may hand out what came in, and a message to oneself is its operand
    for step in order.steps:
        if isinstance(step, Repeat):
            flying = shared.union(*carried.values())
            found[step] = {p for p in (begun or {}).get(step, ()) if p not in flying and holds(p, rank)}
            shared.update(step.needs)
        elif isinstance(step, Back):
            shared.update(step.stayed)
        elif isinstance(step, Launch):
            carried[step.message.number] = set(step.message.needs)
            group = step.message.moves[0].group
            alone = len(group) == 1 if group is not None else devices == 1
            rooted = step.message.moves[0].root is not None
            if alone or rooted:
                shared.update(step.message.needs)
        elif isinstance(step, Land):
            carried.pop(step.message.number)
        elif isinstance(step, Segment):
            flying = shared.union(*carried.values())
            mine = {
                prop
                for prop in step.needs
                if prop in donated
                and prop in step.drops
                and prop not in flying
                and not is_key(order.types[prop.value].dtype)
                and holds(prop, rank)
            }
            if mine:
                found[step] = mine
    return found
