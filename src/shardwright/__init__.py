"""Shardwright: a distributed program for unequal devices, from a single-device JAX training step.

import shardwright

fleet = shardwright.Fleet.load("fleet.yaml")
plan = shardwright.synthesize(train_step, params, opt_state, batch, fleet=fleet)
print(plan)
step = plan.compile(train_step, backend="reference")
"""

from shardwright.api import ReplicatedWarning, baselines, synthesize
from shardwright.backends.verify import VerifyResult
from shardwright.compare import StrategyRow, compare_collectives
from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet
from shardwright.cost.kernels import kernel_s
from shardwright.ir.errors import InputError, PlanError, ProgramError, ShardwrightError, TraceError
from shardwright.ir.placement import Replicate, Shard
from shardwright.plan import Plan
from shardwright.profile_api import Profile, profile
from shardwright.strategies import Strategy, add_strategy
from shardwright.synth.baselines import Baseline, Baselines

__all__ = [
    "Baseline",
    "Baselines",
    "DeviceType",
    "Fleet",
    "InputError",
    "Plan",
    "PlanError",
    "Profile",
    "ProgramError",
    "Replicate",
    "ReplicatedWarning",
    "Shard",
    "ShardwrightError",
    "Strategy",
    "StrategyRow",
    "TraceError",
    "VerifyResult",
    "add_strategy",
    "baselines",
    "compare_collectives",
    "kernel_s",
    "profile",
    "synthesize",
]
