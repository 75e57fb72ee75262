"""Plan files: versioned JSON, checked against `plan.schema.json` and for contradictions when it is read."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardwright.backends.schedule.document import Planned
from shardwright.cost.fleet import Fleet
from shardwright.ir import collectives
from shardwright.ir.dtypes import is_dtype
from shardwright.ir.errors import PlanError, ShardwrightError
from shardwright.ir.program import Move, Program, nodes_of, own_ratios, wrong_move
from shardwright.ir.redundant import RESYNC_EVERY
from shardwright.ir.rewrites.rewriting import Rewriting
from shardwright.ir.serialize import program_from_json, program_to_json
from shardwright.plans.parts import Exchanged, PinPrice, Spent, Stats, Unused

if TYPE_CHECKING:
    import jsonschema

    from shardwright.ir.state import StateMap
    from shardwright.plan import Plan

FORMAT = 1

#: Of a whole number: what a machine's numbers hold.
_MOST_DIGITS = 18

#: By what part rounding may have a bound exceed the cost.
_SAME = 1e-6


def plain(plan: Plan) -> dict[str, Any]:
    """A plan as plain data, in the form of `plan.schema.json`."""
    messages = plan.planned_messages()
    data = {
        "format": FORMAT,
        "versions": dict(plan.versions),
        "fleet": plan.fleet.to_dict(),
        "fleet_fingerprint": plan.fleet.fingerprint(),
        "fingerprint": plan.fingerprint,
        "devices": list(plan.devices),
        "ratios": list(plan.ratios),
        "iteration_s": plan.iteration_s,
        "cost_s": plan.cost_s,
        "bound_s": plan.bound_s,
        "gap": plan.gap,
        "search_gap": plan.search_gap,
        "axes": plan.axes,
        "pins": [_pin(pin) for pin in plan.pins],
        "used": list(plan.used),
        "unused": [{"devices": list(u.devices), "why": u.why} for u in plan.unused],
        "memory_bytes": list(plan.memory_bytes),
        "fits": plan.fits,
        "exchanges": [_exchange(e) for e in plan.exchanges],
        "held": dict(plan.held),
        "arguments": dict(plan.arguments),
        "state": dict(plan.state),
        "state_override": None if plan.state_override is None else _entries(plan.state_override),
        "assumptions": list(plan.assumptions),
        "stats": {name: _plain(getattr(plan.stats, name)) for name in Stats.__slots__},
        "spent": [{name: getattr(one, name) for name in Spent.__slots__} for one in plan.spent],
        "bucket_bytes": plan.bucket_bytes,
        "resync_every": plan.resync_every,
        "rewriting": plan.rewriting.to_dict(),
        "donate": plan.donate,
        "again_s": plan.again_s,
        "host_s": plan.host_s,
        "comparing_s": plan.comparing_s,
        "program": program_to_json(plan.program),
    }
    return data if messages is None else data | {"messages": [m.to_dict() for m in messages]}


def read(path: str | os.PathLike[str]) -> Any:
    """The JSON of a plan file, unchecked.

    Raises:
        PlanError: the file is missing or no JSON.
    """
    place = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text, parse_constant=_not_finite, parse_float=_float, parse_int=_int)
    except OSError as error:
        raise PlanError(
            place=place,
            reason=f"cannot be read: {error.strerror}",
            remedy="Name a file written by plan.save",
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(
            place=place, reason=f"is no JSON ({error})", remedy="Write it again with plan.save"
        ) from error


def fields(data: Any, place: str, *, checked: bool = False) -> dict[str, Any]:
    """The attributes of the `Plan` that plain data describes.

    Args:
        data: the plain data.
        place: where it comes from, for errors.
        checked: it is known to be what `plain` made; the schema need not say so again.

    Raises:
        PlanError: the data is of another format version, does not follow the schema, or contradicts itself.
    """
    version = cast(dict[str, Any], data).get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise PlanError(
            place=f"{place}: format",
            reason=f"is {version!r}, this version of Shardwright reads {FORMAT}",
            remedy="Make the plan again with `shardwright plan`",
        )
    errors = () if checked else _validator().iter_errors(data)
    problem = next(iter(sorted(errors, key=lambda e: list(map(str, e.path)))), None)
    if problem is not None:
        where = ".".join(str(part) for part in problem.path) or "top level"
        message = problem.message if len(problem.message) < 200 else problem.message[:200] + "…"
        raise PlanError(
            place=f"{place}: {where}",
            reason=message,
            remedy="Make the plan again with `shardwright plan`",
        )
    try:
        fleet = Fleet.from_dict(data["fleet"])
        program = program_from_json(data["program"])
        messages = tuple(Planned.from_dict(entry) for entry in data.get("messages", ()))
    except ShardwrightError as error:  # which knows of no file
        raise PlanError(place=f"{place}: {error.place}", reason=error.reason, remedy=error.remedy) from error
    if wrong := _mismatch(data, fleet, program) or _wrong_message(messages, data, fleet):
        where, reason = wrong
        raise PlanError(
            place=f"{place}: {where}", reason=reason, remedy="Make the plan again with `shardwright plan`"
        )
    override = data["state_override"]
    return {
        "program": program,
        "ratios": tuple(data["ratios"]),
        "iteration_s": data["iteration_s"],
        "cost_s": data["cost_s"],
        "bound_s": data["bound_s"],
        "memory_bytes": tuple(data["memory_bytes"]),
        "fits": data["fits"],
        "exchanges": tuple(Exchanged(**e) for e in data["exchanges"]),
        "held": data["held"],
        "state": data["state"],
        "state_override": None if override is None else {key: _path(value) for key, value in override},
        "assumptions": tuple(data["assumptions"]),
        "fleet": fleet,
        "fingerprint": data["fingerprint"],
        "versions": data["versions"],
        "stats": Stats(**data["stats"]),
        "spent": tuple(Spent(**one) for one in data["spent"]),
        "search_gap": data.get("search_gap", 0.0),
        "axes": data.get("axes", 1),
        "pins": tuple(
            PinPrice(**entry | {"arguments": tuple(entry.get("arguments", ()))})
            for entry in data.get("pins", ())
        ),
        "used": tuple(data.get("used", ())),
        "unused": tuple(Unused(tuple(entry["devices"]), entry["why"]) for entry in data.get("unused", ())),
        "bucket_bytes": data.get("bucket_bytes"),
        "resync_every": data.get("resync_every", RESYNC_EVERY),
        "rewriting": Rewriting.from_dict(data.get("rewriting", {})),
        "donate": data.get("donate", False),
        "again_s": data.get("again_s", 0.0),
        "host_s": data.get("host_s", 0.0),
        "comparing_s": data.get("comparing_s", 0.0),
        "arguments": data.get("arguments", {}),
        "messages": messages,
    }


def _mismatch(data: Mapping[str, Any], fleet: Fleet, program: Program) -> tuple[str, str] | None:
    """Where the parts of a plan file contradict each other, and how; None if they do not."""
    count = len(fleet.devices)
    if data["devices"] != [device.name for device in fleet.devices]:
        return "devices", f"are not the {count} of the fleet in it"
    if data["fleet_fingerprint"] != fleet.fingerprint():
        return "fleet_fingerprint", "is that of another fleet"
    for name in ("ratios", "memory_bytes", "spent"):
        if len(data[name]) != count:
            return name, f"there are {len(data[name])} for {count} devices"
    used = data.get("used", range(count))
    if not all(a < b for a, b in pairwise((-1, *used, count))):
        return "used", f"are no devices of {count} in ascending order"
    if any(ratio for d, ratio in enumerate(data["ratios"]) if d not in set(used)):
        return "ratios", "give a share to a device that is not used"
    if abs(sum(data["ratios"]) - 1) > 1e-6:
        return "ratios", f"add up to {sum(data['ratios']):g}, not to 1"
    if data["bound_s"] > data["cost_s"] * (1 + _SAME):
        return "bound_s", "is above cost_s"
    if abs(data["gap"] - (1 - data["bound_s"] / data["cost_s"] if data["cost_s"] else 0.0)) > _SAME:
        return "gap", "is not what cost_s and bound_s say"
    limits = [device.type.memory_bytes for device in fleet.devices]
    if data["fits"] != all(n <= limit for n, limit in zip(data["memory_bytes"], limits, strict=True)):
        return "fits", "is not what memory_bytes say"
    moves = [i for i in program.all_instructions() if isinstance(i, Move)]
    if unknown := [move.kind for move in moves if move.kind not in collectives.registry()]:
        return "program", f"there is no collective {unknown[0] or 'without a name'}"
    named = {d for move in moves for d in (*(move.group or ()), move.root or 0)}
    if max(named, default=0) >= len(used):
        return "program", f"names device {max(named)}, the last one is {len(used) - 1}"
    for number, own in own_ratios(program).items():
        if len(own.shares) != len(used) or abs(sum(own.shares) - 1) > 1e-6:
            return "program", f"ratios {number} are not {len(used)} that add up to 1, one per used device"
    nodes = nodes_of(program)
    if nodes is not None and nodes != tuple(Counter(fleet.devices[d].node for d in used).values()):
        return "program", f"is for nodes of {', '.join(map(str, nodes))} devices, which the used ones are not"
    axes = data.get("axes", 1)
    if axes != (1 if nodes is None else 2):
        return "axes", f"are {axes}, and those of the program are not"
    if list(data["held"].values()) != [str(placement) for placement in program.inputs]:
        return "held", "is not where the program has its inputs"
    return None


def _wrong_message(
    messages: Sequence[Planned], data: Mapping[str, Any], fleet: Fleet
) -> tuple[str, str] | None:
    """The first message that nobody can exchange, and why; None if there is none."""
    count = len(data.get("used", fleet.devices))
    for place, message in enumerate(messages):
        for move, tensor in zip(message.moves, message.tensors, strict=True):
            where = f"messages.{place}"
            if not all(type(n) is int for n in tensor.shape):  # a schema takes 1e308 for an integer
                return where, f"{list(tensor.shape)} is no shape"
            if not is_dtype(tensor.dtype):
                return where, f"there is no dtype {tensor.dtype!r}"
            if problem := wrong_move(move, tensor.shape):
                return where, problem
            if max(*(move.group or ()), move.root or 0, 0) >= count:
                return where, f"names a device beyond the {count} that are used"
    return None


def _pin(pin: PinPrice) -> dict[str, Any]:
    data = {"name": pin.name, "placement": pin.placement, "price_s": pin.price_s}
    return data | ({"arguments": list(pin.arguments)} if pin.arguments else {})


def _exchange(exchanged: Exchanged) -> dict[str, Any]:
    data = {"name": exchanged.name, "count": exchanged.count, "seconds": exchanged.seconds}
    return data | ({"pattern": exchanged.pattern} if exchanged.pattern else {})


def _not_finite(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def _float(text: str) -> float:
    found = float(text)
    if not isfinite(found):  # 1e999 is one by the grammar, and Python reads it as infinite
        raise ValueError(f"{text:.20} is too large a number")
    return found


def _int(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"{text[:20]}… is too large a number")
    return int(text)


def _entries(override: StateMap) -> list[list[Any]]:
    return [[key, list(value) if isinstance(value, tuple) else value] for key, value in override.items()]


def _path(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    return dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else value


@cache
def _validator() -> jsonschema.Draft202012Validator:
    import jsonschema  # a tenth of a second, which loading from the plan cache does not need

    schema = json.loads(
        resources.files("shardwright").joinpath("plan.schema.json").read_text(encoding="utf-8")
    )
    return jsonschema.Draft202012Validator(schema)
