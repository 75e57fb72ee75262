"""A plan as a callable with the training step's own signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, Protocol

import jax
from jax.core import Tracer

from shardwright import shards
from shardwright.attach import restructured
from shardwright.backends.faults import look_after_job
from shardwright.backends.reference import ReferenceExecutable
from shardwright.backends.run_options import RunOptions
from shardwright.ir.errors import InputError, PlanError
from shardwright.ir.program import Program
from shardwright.ir.trace import Traced
from shardwright.ir.wiring import Seats


class Executable(Protocol):
    """What a backend makes of a program: flat arguments in, flat outputs out."""

    def __call__(self, *flat: Any) -> Sequence[Any]: ...


def _reference(
    traced: Traced, program: Program, ratios: Sequence[float], seats: Seats | None, donate: bool = False
) -> Executable:
    # Its collectives are their own definitions: who shares a node makes no difference.
    return ReferenceExecutable(traced, program, ratios)


def _mpi(
    traced: Traced,
    program: Program,
    ratios: Sequence[float],
    seats: Seats | None,
    donate: bool = False,
    options: RunOptions | None = None,
) -> Executable:
    # Importing the backend imports mpi4py, which initialises MPI: only for those who ask for it.
    from shardwright.backends.mpi.executable import MpiExecutable

    options = options or RunOptions()
    options = replace(options, donate=donate or options.donate)
    return MpiExecutable(traced, program, ratios, seats=seats, options=options)


def _spmd(
    traced: Traced, program: Program, ratios: Sequence[float], seats: Seats | None, donate: bool = False
) -> Executable:
    from shardwright.backends.spmd.executable import SpmdExecutable

    return SpmdExecutable(traced, program, ratios, seats=seats, donate=donate)


#: Planning for `backend="spmd"`: one program for all devices takes two mesh axes only where all is even, and
#: host memory and stages not at all.
SPMD: Mapping[str, Any] = MappingProxyType({"axes": 1, "offload": "off", "stages": "off"})

#: From a step, a program, its ratios and its seats; those that have a use for it also take `donate`.
BACKENDS: dict[str, Callable[..., Executable]] = {
    "reference": _reference,
    "mpi": _mpi,
    "spmd": _spmd,
}


def run_options(backend: str, given: Mapping[str, Any], **defaults: Any) -> RunOptions | None:
    """Options of a backend: those given, and the defaults for the others; None where it has none.

    Raises:
        PlanError: the backend has no such option.
    """
    known = [f.name for f in fields(RunOptions) if f.name != "donate"] if backend == "mpi" else []
    for name in given:
        if name not in known:
            raise PlanError(
                place=f"option {name}",
                reason=f"is unknown to backend {backend!r}",
                remedy=f"It has {', '.join(known) or 'no options'}",
            )
    return RunOptions(**{**defaults, **given}) if known else None


class CompiledStep:
    """Runs a program with the signature of the step it was made for.

    Args:
        attach: traces the step for given arguments and checks that the program was made for it; called
            once, with the arguments of the first call.
        program: the program.
        ratios: share of every device of the program.
        backend: a name in `BACKENDS`.
        seats: which devices of a fleet these are; None: all of it.
        options: of backends that have some.
        donate: the memory of state that is passed in may be used for the results.
        step: the step itself, whose signature says which arguments keywords are.

    Raises:
        PlanError: there is no such backend.
    """

    def __init__(
        self,
        attach: Callable[..., Traced],
        program: Program,
        ratios: Sequence[float],
        backend: str,
        seats: Seats | None = None,
        *,
        options: RunOptions | None = None,
        donate: bool = False,
        step: Callable[..., Any] | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise PlanError(
                place="backend",
                reason=f"{backend!r} does not exist",
                remedy=f"Choose from {', '.join(BACKENDS)}",
            )
        self._attach = attach
        self._program = program
        self._ratios = ratios
        self._backend = backend
        self._seats = seats
        self._options = options
        self._donate = donate
        self._step = step
        self._ready: tuple[Traced, Executable] | None = None
        if backend == "mpi":
            look_after_job(options.timeout_s if options else None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step's outputs: global arrays on `reference`, `ShardedArray` leaves on `mpi`; on `spmd` global
        arrays, sharded where they are cut evenly, and `PaddedArray` leaves where they are not.

        Raises:
            InputError: the arguments are others than on the first call, or not those of the step.
            PlanError: the arguments do not fit the plan, or the plan was made for another step.
        """
        if kwargs:
            args = self._in_order(args, kwargs)
        flat, structure = jax.tree.flatten(args)
        traced, run = self._ready or self._made(flat, structure)
        if structure != traced.in_tree:
            raise restructured(traced, args)
        return jax.tree.unflatten(traced.out_tree, run(*concrete(flat)))

    def _in_order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """All arguments by position."""
        reason = "stand by name only, and plans are of arguments by position"
        try:
            bound = None if self._step is None else inspect.signature(self._step).bind(*args, **kwargs)
        except (TypeError, ValueError) as error:
            bound, reason = None, f"do not fit the step: {error}"
        if bound is None or bound.kwargs:
            names = ", ".join(kwargs if bound is None else bound.kwargs)
            raise InputError(place=f"arguments {names}", reason=reason, remedy="Pass them by position")
        return bound.args

    def prepared(self, *args: Any) -> Any:
        """The backend's executable, made for arguments such as these if it is not there yet.

        Raises:
            PlanError: the plan was made for another step.
        """
        return (self._ready or self._made(*jax.tree.flatten(args)))[1]

    def _made(self, flat: Sequence[Any], structure: Any) -> tuple[Traced, Executable]:
        abstract = jax.tree.unflatten(structure, [shards.abstract(leaf) for leaf in flat])
        traced = self._attach(*abstract)
        make = BACKENDS[self._backend]
        options: dict[str, Any] = {"donate": True} if self._donate else {}
        if self._options is not None:
            options["options"] = self._options
        self._ready = traced, make(traced, self._program, self._ratios, self._seats, **options)
        return self._ready


def concrete(args: Any) -> list[Any]:
    """The leaves of arguments that a step can be run with.

    Raises:
        InputError: one is a `jax.ShapeDtypeStruct`, or stands for an array in a transformation of JAX.
    """
    leaves = jax.tree.leaves(args)
    # Without this, whatever a backend first asks of an array says so in words of its own.
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise InputError(
            place="arguments",
            reason="are traced, by jax.jit, jax.grad, jax.vmap or the like around a planned step",
            remedy="Plan a step that calls these itself, and pass arrays to it",
        )
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise InputError(
            place="arguments",
            reason="are shapes without values (jax.ShapeDtypeStruct), which can be planned but not run",
            remedy="Pass concrete arrays",
        )
    return leaves
