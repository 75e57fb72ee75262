"""Fleet questions: what a step would take on a changed fleet."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.api import synthesize, synthesize_traced
from shardwright.cost.catalogue import device_type
from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import MOST_DEVICES, Fleet, FleetLike, Link, Node
from shardwright.cost.subfleet import subfleet
from shardwright.ir.errors import InputError
from shardwright.ir.rewrites.rewriting import original
from shardwright.money import check_prices, price_per_hour
from shardwright.plan import Plan

_REMEDY = "Write it as in --what-if add=2xA100-40GB,drop=n3"
_COUNTED = re.compile(r"(?:(\d+)x)?(.+)")


@dataclass(frozen=True)
class WhatIf:
    """A plan for a fleet as it is, and one for it as it would be.

    Attributes:
        changes: what is different, as it was asked.
        now: the plan for the fleet.
        then: the plan for the changed fleet.
    """

    changes: str
    now: Plan
    then: Plan

    @property
    def change(self) -> float:
        """By what part of itself an iteration would take longer; below zero where it is faster.

        Infinite where one takes no time now, and some then.
        """
        now_s, then_s = self.now.iteration_s, self.then.iteration_s
        if not now_s:
            return math.inf if then_s else 0.0
        return then_s / now_s - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "changes": self.changes,
            "change": self.change,
            "now": _facts(self.now),
            "then": _facts(self.then),
        }

    def text(self) -> str:
        """A table for people."""
        now, then = _facts(self.now), _facts(self.then)
        by = f" ({self.change:+.1%})" if math.isfinite(self.change) else ""
        rows = [
            ("", "now", "then"),
            ("fleet", str(self.now.fleet), str(self.then.fleet)),
            ("devices used", str(now["devices"]), str(then["devices"])),
            ("iteration", _ms(now["iteration_s"]), f"{_ms(then['iteration_s'])}{by}"),
            ("at least", _ms(now["bound_s"]), _ms(then["bound_s"])),
            ("fits", *("yes" if each["fits"] else "no" for each in (now, then))),
        ]
        if now["price_per_hour"] is not None and then["price_per_hour"] is not None:
            rows.append(("price per hour", f"{now['price_per_hour']:g}", f"{then['price_per_hour']:g}"))
            thousand = (f"{1000 * each['price_per_step']:.4g}" for each in (now, then))
            rows.append(("of 1,000 steps", *thousand))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"what if {self.changes}", *lines])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _facts(plan: Plan) -> dict[str, Any]:
    hourly = price_per_hour(plan)
    return {
        "fleet": plan.fleet.to_dict(),
        "devices": len(plan.used),
        "iteration_s": plan.iteration_s,
        "cost_s": plan.cost_s,
        "bound_s": plan.bound_s,
        "fits": plan.fits,
        "memory_bytes": list(plan.memory_bytes),
        "price_per_hour": hourly,
        "price_per_step": None if hourly is None else hourly * plan.iteration_s / 3600,
    }


def changed(fleet: Fleet, changes: str) -> Fleet:
    """A fleet with devices added and dropped.

    Args:
        fleet: as it is, or the path of its file.
        changes: separated by commas: `drop=` a node (`n3`), a device (`n0.d1`), so many of a type (`2xT4`,
            the last ones) or all of it (`T4`); `add=` so many of a type of the fleet or the catalogue
            (`2xA100-40GB`), into a node (`A100-40GB@n0`), or without that into the only node, or else as a
            node of its own, linked like the first one; with a price per hour, where that is not the fleet's,
            as `A100-40GB:1.80`. Names are those of the fleet as it is; so many of a type are of those that
            changes before have left.

    Raises:
        InputError: a change cannot be read, names nothing that there is, or leaves no device.
    """
    _check_text(changes)
    dropped: set[int] = set()
    added: list[tuple[int, DeviceType, str]] = []
    for text in changes.split(","):
        verb, equals, what = text.strip().partition("=")
        place = f"--what-if {text.strip()}"
        if verb not in ("add", "drop") or not equals or not what:
            raise InputError(place=place, reason="is neither add= nor drop=", remedy=_REMEDY)
        if verb == "drop":
            dropped.update(_dropped(fleet, dropped, what, place))
            continue
        kind, into, node = what.partition("@")
        kind, costs, price = kind.partition(":")
        if into and not node:
            raise InputError(place=place, reason="names no node after @", remedy=_REMEDY)
        found = _COUNTED.fullmatch(kind)
        if found is None:
            raise InputError(place=place, reason="has no number of devices", remedy=_REMEDY)
        count = _number(found[1] or "1")
        if not count:
            raise InputError(place=place, reason="adds no device", remedy=_REMEDY)
        _check_count(count, place)
        own = {device.type.name: device.type for device in fleet.devices}
        type_ = own.get(found[2]) or device_type(found[2], place=place)
        if costs:
            type_ = replace(type_, price_per_hour=_price(price, place))
        added.append((count, type_, node))
    nodes = list(fleet.nodes)
    for count, kind, name in added:
        nodes = _with(nodes, count, kind, name, fleet)
    first, kept = 0, list[int]()
    for node in nodes:
        old = next((n for n in fleet.nodes if n.name == node.name), None)
        gone = {d.index for d in fleet.devices if old is not None and fleet.nodes[d.node] is old} & dropped
        start = min((d.index for d in fleet.devices if fleet.nodes[d.node] is old), default=0)
        kept += [first + d for d in range(len(node.devices)) if start + d not in gone or old is None]
        first += len(node.devices)
    _check_count(len(kept), f"--what-if {changes}")
    if not kept:
        raise InputError(place=f"--what-if {changes}", reason="leaves no device", remedy="Keep one at least")
    if len(nodes) > 1 and fleet.network is None and any(node.uplink is None for node in nodes):
        raise InputError(
            place=f"--what-if {changes}",
            reason="makes more than one node, and the fleet has no network",
            remedy="Add `network:` to the fleet file, or name a node: add=T4@n0",
        )
    return subfleet(replace(fleet, nodes=tuple(nodes)), kept, f"{fleet.name}, {changes}")


def _check_text(changes: object) -> None:
    if not isinstance(changes, str):
        raise InputError(place="changes", reason=f"is {changes!r}", remedy=_REMEDY)


def _number(digits: str) -> int:
    """What digits say; from some length on just too many."""
    return int(digits) if len(digits) < 10 else 10**9


def _check_count(count: int, place: str) -> None:
    if count > MOST_DEVICES:
        raise InputError(
            place=place,
            reason=f"brings the fleet beyond {MOST_DEVICES} devices",
            remedy=f"Plan for at most {MOST_DEVICES} devices at a time",
        )


def _price(text: str, place: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise InputError(
            place=place,
            reason=f"{text!r} is no price per hour",
            remedy="Write a number above 0, as in add=2xA100-40GB:1.80",
        )
    return found


def _dropped(fleet: Fleet, gone: Collection[int], what: str, place: str) -> list[int]:
    """The devices that a change takes: so many of a type are those that are not gone already."""
    devices = fleet.devices
    found = [d.index for d in devices if what in (fleet.nodes[d.node].name, d.name, d.type.name)]
    counted = _COUNTED.fullmatch(what)
    if not found and counted is not None and counted[1]:
        alike = [d.index for d in devices if d.type.name == counted[2]]
        left = [index for index in alike if index not in gone]
        count = _number(counted[1])
        if alike and count > len(left):
            still = " left" if len(left) < len(alike) else ""
            raise InputError(
                place=place,
                reason=f"there are {len(left)} {counted[2]}{still}",
                remedy="Drop as many at most",
            )
        found = left[len(left) - count :]
    if not found:
        names = dict.fromkeys([*(node.name for node in fleet.nodes), *(d.type.name for d in devices)])
        raise InputError(
            place=place, reason=f"there is no {what}", remedy=f"Name one of {', '.join(names)}, or n0.d0"
        )
    return found


def _with(nodes: Sequence[Node], count: int, kind: DeviceType, name: str, fleet: Fleet) -> list[Node]:
    found = list(nodes)
    place = f"--what-if add={count}x{kind.name}"
    if name or len(fleet.nodes) == 1:
        wanted = name or fleet.nodes[0].name
        number = next((i for i, node in enumerate(found) if node.name == wanted), None)
        if number is None:
            raise InputError(
                place=place, reason=f"there is no node {wanted}", remedy="Name one of the fleet's"
            )
        node = found[number]
        link = node.link or next((other.link for other in fleet.nodes if other.link is not None), None)
        if link is None:
            raise InputError(
                place=place,
                reason=f"nothing is known of what would join the devices of node {wanted}",
                remedy="Give the node a `link` in the fleet file",
            )
        known = node.host_links or (None,) * len(node.devices)
        links = (*known, *(_host_link(kind, [node, *fleet.nodes]),) * count)
        links = links if any(links) else ()
        found[number] = replace(node, devices=(*node.devices, *(kind,) * count), link=link, host_links=links)
        return found
    like = next((node for node in fleet.nodes if node.link is not None), fleet.nodes[0])
    if count > 1 and like.link is None:
        raise InputError(
            place=place,
            reason="no node of the fleet has a link",
            remedy="Give one to a node of the fleet file",
        )
    host_link = _host_link(kind, [like, *fleet.nodes])
    found.append(
        Node(
            f"new{len(found)}",
            (kind,) * count,
            like.link if count > 1 else None,
            like.uplink,
            like.rails,
            (host_link,) * count if host_link else (),
        )
    )
    return found


def _host_link(kind: DeviceType, nodes: Sequence[Node]) -> Link | None:
    """What would join a device to the host's memory: as others of its type, or else as the first that is."""
    pairs = [pair for node in nodes for pair in node.equipped if pair[1] is not None]
    return next((link for device, link in pairs if device == kind), pairs[0][1] if pairs else None)


def what_if(
    train_step: Callable[..., Any],
    *args: Any,
    fleet: FleetLike,
    changes: str,
    tick: Callable[[str], None] = lambda what: None,
    **planning: Any,
) -> WhatIf:
    """Plan a step for a fleet as it is, and for the fleet as it would be.

    Args:
        train_step: see `synthesize`.
        args: see `synthesize`.
        fleet: as it is, or the path of its file.
        changes: separated by commas, such as "add=2xA100-40GB,drop=n3": `drop=` a node (`n3`), a device
            (`n0.d1`), so many of a type (`2xT4`, the last ones) or all of it (`T4`); `add=` so many of a type
            of the fleet or the catalogue, into a node (`A100-40GB@n0`), or without that into the only node,
            or else as a node of its own, linked like the first one; with a price per hour, where that is not
            the fleet's, as `A100-40GB:1.80`.
        tick: told what begins (for progress displays).
        planning: further arguments of `synthesize`, such as `objective`, for both plans.

    Raises:
        InputError: a change cannot be read, names nothing that there is, or leaves no device; or see
            `synthesize`.
        TraceError: the step cannot be traced or has side effects.
    """
    fleet = Fleet.of(fleet)
    check_change(fleet, changes, planning)
    now = synthesize(train_step, *args, fleet=fleet, tick=tick, **planning)
    return beside(now, changes, tick, **planning)


def check_change(fleet: Fleet, changes: str, planning: Mapping[str, Any]) -> None:
    """Find out before the work, not after it, whether a changed fleet can be planned for.

    Raises:
        InputError: see `changed`; or steps are to cost least, and a device has no price.
    """
    wanted = changed(fleet, changes)
    if planning.get("objective") == "cost":
        check_prices(fleet)
        check_prices(wanted)


def beside(
    now: Plan, changes: str, tick: Callable[[str], None] = lambda what: None, **planning: Any
) -> WhatIf:
    """`what_if` for a plan that was just made with the same further arguments of `synthesize`."""
    fleet = changed(now.fleet, changes)
    tick(f"planning for {fleet}")
    traced = original(now.step())
    options: dict[str, Any] = {"state": now.state_override, **planning}
    return WhatIf(changes, now, synthesize_traced(traced, fleet=fleet, tick=tick, **options))
