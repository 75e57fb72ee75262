"""`objective="cost"`: the part of a fleet on which a step costs the least money.

`shardwright.api.synthesize` hands over what plans a step for a fleet; each part that is considered is planned
for by itself, all of its devices taking part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet
from shardwright.cost.subfleet import subfleet
from shardwright.ir.errors import InputError
from shardwright.memory.rivals import overfill
from shardwright.plan import Plan
from shardwright.plans.parts import Spent, Unused, spread
from shardwright.synth.parts import Members, candidates


def price_per_hour(plan: Plan) -> float | None:
    """What the devices that a plan uses cost in an hour; None where the fleet does not say."""
    devices = plan.fleet.devices
    prices = [devices[d].type.price_per_hour for d in plan.used]
    return None if any(price is None for price in prices) else sum(price or 0.0 for price in prices)


def check_prices(fleet: Fleet) -> None:
    """Refuse a fleet that does not say what its devices cost.

    Raises:
        InputError: a device has no price.
    """
    free = dict.fromkeys(d.type.name for d in fleet.devices if d.type.price_per_hour is None)
    if free:
        raise InputError(
            place="objective",
            reason=f"is cost, and the fleet has no price of {', '.join(free)}",
            remedy="Add `price_per_hour: 1.20` beside the type of these devices in the fleet file, or the "
            "price to what is added: --what-if add=T4:1.20",
        )


def cheapest(
    fleet: Fleet, planned: Callable[[Fleet], Plan], late: Callable[[], bool] = lambda: False
) -> Plan:
    """The plan whose steps cost the least money: of every part of the fleet that is considered, its fastest.

    Where none fits into memory, it is the one that lacks least. The time bound of the plan is that of its own
    devices.

    Args:
        fleet: every device of which has a price.
        planned: the plan for a part of it, on all devices of the part.
        late: whether no further part is to be looked at, but for nodes and kinds of devices alone: what there
            is of these without a search takes a moment.

    Raises:
        InputError: a device has no price, or `planned` refuses the whole fleet.
    """
    check_prices(fleet)
    devices = fleet.devices
    best: tuple[bool, float, float] | None = None
    chosen: Plan | None = None
    untried = 0
    for members in parts(fleet):
        whole = len(members) == len(devices)
        if chosen is not None and late() and not _alone(fleet, members):
            untried += 1
            continue
        try:
            made = planned(fleet if whole else subfleet(fleet, members, fleet.name))
        except InputError:
            if whole:
                raise
            continue  # what was asked for, such as a pin over two mesh axes, is not possible on this part
        # What does not fit cannot be run for any money.
        lacking = 0.0 if made.fits else overfill(made)
        offer = (not made.fits, lacking, made.iteration_s * hourly(fleet, members) / 3600)
        if best is None or offer < best:
            best, chosen = offer, _whole(made, fleet, members)
    assert chosen is not None and best is not None
    why = f"1,000 steps on them cost least{', of those looked at' if untried else ''}: {1000 * best[2]:.4g}"
    if not chosen.fits:
        why = f"on them the step lacks least memory; 1,000 steps would cost {1000 * best[2]:.4g}"
    notes = [f"these devices were chosen because {why}; the bound is that of plans for just these devices"]
    if untried:
        notes.append(f"time was up: {untried} other parts of the fleet were not looked at")
    return replace(chosen, assumptions=(*chosen.assumptions, *notes))


def _alone(fleet: Fleet, members: Members) -> bool:
    """Whether devices are of one node, or of one kind."""
    chosen = [fleet.devices[d] for d in members]
    return len({device.node for device in chosen}) == 1 or len({device.type for device in chosen}) == 1


def parts(fleet: Fleet) -> tuple[Members, ...]:
    """The parts of a fleet that are considered, the whole first; of equal ones the cheapest.

    Devices of one type that differ in price are told apart: leaving out the dear ones may pay.
    """

    def priced(kind: DeviceType) -> DeviceType:
        return replace(kind, name=f"{kind.name} at {kind.price_per_hour}")

    nodes = [replace(node, devices=tuple([priced(kind) for kind in node.devices])) for node in fleet.nodes]
    least: dict[object, tuple[float, Members]] = {}
    for members in (*candidates(fleet), *candidates(replace(fleet, nodes=tuple(nodes)))):
        kinds = frozenset(Counter(node.kind for node in subfleet(fleet, members, fleet.name).nodes).items())
        price = hourly(fleet, members)
        if kinds not in least or price < least[kinds][0]:
            least[kinds] = price, members
    return tuple(members for _, members in least.values())


def hourly(fleet: Fleet, members: Sequence[int]) -> float:
    """What some devices cost in an hour."""
    return sum(fleet.devices[d].type.price_per_hour or 0.0 for d in members)


def _whole(made: Plan, fleet: Fleet, members: Sequence[int]) -> Plan:
    """A plan for a part of a fleet as one for the fleet."""
    count = len(fleet.devices)
    left = tuple(d for d in range(count) if d not in members)
    less = "costs less money" if made.fits else "lacks less memory"
    why = Unused(tuple(fleet.devices[d].name for d in left), f"a step without them {less}")
    return replace(
        made,
        fleet=fleet,
        ratios=spread(made.ratios, members, count, 0.0),
        memory_bytes=spread(made.memory_bytes, members, count, 0),
        spent=spread(made.spent, members, count, Spent(0.0, 0.0, 0.0)),
        used=tuple(members),
        unused=(why,) if left else (),
    )
