"""Shardwright: a distributed program for unequal devices, from a single-device JAX training step.

import shardwright

step = shardwright.parallelize(train_step, fleet="fleet.yaml")
state, loss = step(state, batch)

plan = shardwright.synthesize(train_step, params, opt_state, batch, fleet="fleet.yaml")
print(plan)
step = plan.compile(train_step, backend="reference")

Names are imported when they are used: planning needs solvers, running needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.api import baselines, synthesize
    from shardwright.backends.verify import VerifyResult
    from shardwright.buckets import bucketed
    from shardwright.checkpoints import latest, restore, save
    from shardwright.compare import StrategyRow, compare_collectives
    from shardwright.cost.device import DeviceType
    from shardwright.cost.fleet import Fleet
    from shardwright.cost.kernels.seconds import kernel_s
    from shardwright.elastic import replan
    from shardwright.embed import Parallel, SingleProcessWarning, parallelize
    from shardwright.fleet_questions import WhatIf, what_if
    from shardwright.ir.errors import (
        InputError,
        OtherDeviceWarning,
        PlanError,
        ProgramError,
        ReplicatedWarning,
        ShardwrightError,
        TraceError,
    )
    from shardwright.ir.placement import Replicate, Shard
    from shardwright.memory.frontier import Frontier, frontier
    from shardwright.memory.remedies import Shortage, shortage
    from shardwright.plan import Plan
    from shardwright.profile_api import Profile, profile
    from shardwright.scan_layers import ScannedLayers, scan_layers
    from shardwright.shards import gather, to_global
    from shardwright.strategies import Strategy, add_strategy
    from shardwright.synth.baselines import Baseline, Baselines

__all__ = [
    "Baseline",
    "Baselines",
    "DeviceType",
    "Fleet",
    "Frontier",
    "InputError",
    "OtherDeviceWarning",
    "Parallel",
    "Plan",
    "PlanError",
    "Profile",
    "ProgramError",
    "Replicate",
    "ReplicatedWarning",
    "ScannedLayers",
    "Shard",
    "ShardwrightError",
    "Shortage",
    "SingleProcessWarning",
    "Strategy",
    "StrategyRow",
    "TraceError",
    "VerifyResult",
    "WhatIf",
    "__version__",
    "add_strategy",
    "baselines",
    "bucketed",
    "compare_collectives",
    "frontier",
    "gather",
    "kernel_s",
    "latest",
    "parallelize",
    "profile",
    "replan",
    "restore",
    "save",
    "scan_layers",
    "shortage",
    "synthesize",
    "to_global",
    "what_if",
]

#: Where each public name is.
_WHERE = {
    "api": ("baselines", "synthesize"),
    "backends.verify": ("VerifyResult",),
    "buckets": ("bucketed",),
    "checkpoints": ("latest", "restore", "save"),
    "compare": ("StrategyRow", "compare_collectives"),
    "cost.device": ("DeviceType",),
    "cost.fleet": ("Fleet",),
    "cost.kernels.seconds": ("kernel_s",),
    "elastic": ("replan",),
    "embed": ("Parallel", "SingleProcessWarning", "parallelize"),
    "fleet_questions": ("WhatIf", "what_if"),
    "ir.errors": (
        "InputError",
        "OtherDeviceWarning",
        "PlanError",
        "ProgramError",
        "ReplicatedWarning",
        "ShardwrightError",
        "TraceError",
    ),
    "ir.placement": ("Replicate", "Shard"),
    "plan": ("Plan",),
    "profile_api": ("Profile", "profile"),
    "memory.frontier": ("Frontier", "frontier"),
    "memory.remedies": ("Shortage", "shortage"),
    "scan_layers": ("ScannedLayers", "scan_layers"),
    "shards": ("gather", "to_global"),
    "strategies": ("Strategy", "add_strategy"),
    "synth.baselines": ("Baseline", "Baselines"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

#: What the package's metadata says, which is where the version stands.
__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version("shardwright")
    elif name in _MODULE_OF:
        found = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
