"""Plans on disk by what they were made of, so that the second start of a job need not search.

A file holds one line with the SHA-256 of the rest, and the plan as JSON. It appears whole or not at all; one
that is damaged, of another format, or unreadable is no hit. Nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from shardwright import __version__
from shardwright.cost.fleet import Fleet
from shardwright.files import write_whole
from shardwright.ir import collectives
from shardwright.ir.errors import PlanError, ShardwrightError
from shardwright.ir.trace import Traced
from shardwright.plan import Plan


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`shardwright/plans` in the user's cache folder, as the XDG Base Directory Specification has it."""
    given = environment.get("XDG_CACHE_HOME", "")
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    return base / "shardwright" / "plans"


def versions() -> dict[str, str]:
    """Versions that a plan depends on."""
    return {"shardwright": __version__, "jax": jax.__version__}


def key_of(traced: Traced, fleet: Fleet, options: Mapping[str, Any]) -> str:
    """SHA-256 over the step, its arguments, the fleet, the options, the strategies known, and versions.

    Args:
        traced: the step; its fingerprint covers equations, types and state, but neither which arguments are
            typed weakly nor whether state is donated.
        fleet: the devices.
        options: how to plan. Pins that are a function count by what they say of each argument.
    """
    graph = traced.graph
    pins = options.get("constraints")
    if callable(pins):
        named = zip(graph.input_names, graph.inputs, strict=True)
        options = {**options, "constraints": {name: str(pins(name, value.type)) for name, value in named}}
    strategies = {name: list(c.strategies) for name, c in collectives.registry().items()}
    content = [
        traced.fingerprint,
        traced.graph.donated,
        sorted(traced.weak),
        list(graph.input_names),
        list(graph.output_names),
        fleet.fingerprint(),
        _stable(options),
        strategies,
        versions(),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _stable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_stable(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def load(folder: Path, key: str) -> Plan | None:
    """The plan of a key; None if there is none, or none that is whole."""
    try:
        head, _, body = (folder / f"{key}.json").read_bytes().partition(b"\n")
        if head.decode() != hashlib.sha256(body).hexdigest():
            return None
        return Plan.from_dict(json.loads(body), checked=True)
    except (OSError, ValueError, KeyError, TypeError, ShardwrightError):
        return None


def store(folder: Path, key: str, plan: Plan) -> bool:
    """Write a plan; whether that was possible (a cache that cannot be written is no reason to fail)."""
    body = json.dumps(plan.to_dict()) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{key}.json", f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}")
    except (OSError, PlanError):
        return False
    return True
