"""A plan in JAX's own terms, where these can say it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from shardwright.backends.spmd.executable import check_program
from shardwright.backends.spmd.layout import obstacle, spec_of
from shardwright.ir.errors import PlanError
from shardwright.ir.program import Program
from shardwright.ir.trace import Traced


class PartitionSpecs(NamedTuple):
    """PartitionSpecs of a step.

    Attributes:
        arguments: a tuple with one pytree for each positional argument, of its structure.
        results: a pytree of the structure of what the step returns.
    """

    arguments: tuple[Any, ...]
    results: Any


def partition_specs(traced: Traced, program: Program, ratios: Sequence[float]) -> PartitionSpecs:
    """How a program's arguments and results lie; see `Plan.partition_specs`."""
    check_program(program)
    if problem := obstacle(program, traced.graph, ratios):
        raise PlanError(
            place="partition specs",
            reason=f"they cut evenly and {problem}",
            remedy='Compile the plan with backend="spmd", which pads, or plan for equal devices',
        )
    arguments = jax.tree.unflatten(traced.in_tree, map(spec_of, program.inputs))
    return PartitionSpecs(arguments, jax.tree.unflatten(traced.out_tree, map(spec_of, program.outputs)))
