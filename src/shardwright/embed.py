"""`parallelize`: a training step like `jax.jit`'s, on a fleet.

Under `mpiexec` every rank runs the same script. The first call with arguments of new shapes traces the step
on every rank; the first rank plans, or finds the plan in the cache, and tells the others; all compare what
they have traced. Outside of an MPI job the step runs in this process alone, under `jax.jit`.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax

from shardwright import shards
from shardwright.backends.faults import agree, look_after_job
from shardwright.backends.launch import under_mpi
from shardwright.calls import MODULES, Call, Callee
from shardwright.cost.fleet import Fleet, FleetLike
from shardwright.execute import BACKENDS, FOR_SPMD, concrete
from shardwright.ir.donation import donating
from shardwright.ir.errors import InputError, PlanError, ReplicatedWarning, ShardwrightError, TraceError
from shardwright.ir.trace import StateMap, Traced, trace
from shardwright.pause import collector_paused
from shardwright.plan import Plan
from shardwright.plans import cache as plan_cache

if TYPE_CHECKING:
    from shardwright.scan_layers import Scanner

#: Of messages that carry plans.
_PLAN_TAG = 7421

#: Arguments of `shardwright.synthesize` that are passed on. A test holds them to what is there: to look there
#: imports the planner, which is not needed where plans come from the cache, or from another rank.
PLANNING = (
    *("constraints", "time_limit_s", "devices", "axes", "recompute", "microbatches", "offload"),
    *("stages", "objective", "donate", "tick"),
)

Numbers = int | Iterable[int] | None
Names = str | Iterable[str] | None


class SingleProcessWarning(UserWarning):
    """A step that was to run on a fleet runs in this process alone."""


def parallelize(
    train_step: Callable[..., Any] | None = None,
    *,
    fleet: FleetLike,
    static_argnums: Numbers = None,
    static_argnames: Names = None,
    donate_argnums: Numbers = None,
    donate_argnames: Names = None,
    state: StateMap | None = None,
    backend: str = "auto",
    gather: bool = True,
    scan_layers: bool = False,
    cache: str | os.PathLike[str] | Literal[False] | None = None,
    **planning: Any,
) -> Any:
    """A step that runs on a fleet, called like the function under `jax.jit`.

    Args:
        train_step: a function of pytrees of arrays (flax nnx and equinox modules included) that returns
            pytrees of arrays. Its first results continue its first arguments, see `synthesize`. Without it a
            decorator is returned.
        fleet: the devices, or the path of a fleet file.
        static_argnums: positions of arguments that are part of the code, as for `jax.jit`.
        static_argnames: names of such arguments.
        donate_argnums: positions of arguments that the caller will not read again: under `jax.jit` their
            memory is reused, and on a fleet too where all of the state is donated.
        donate_argnames: names of such arguments.
        state: argument name -> output path where state is not what leads, see `synthesize`.
        backend: "auto" is "mpi" under mpiexec and "jit" elsewhere; "jit" runs in this process alone, whatever
            the fleet; or a backend of `Plan.compile`.
        gather: results that are no state are global arrays on every rank; with False they stay as they lie.
        scan_layers: layers that the step has in a Python loop are found and scanned, see
            `shardwright.scan_layers`, so that they may be stages. State stays in stacks between steps; what
            the step returns has a `LayerLeaf` for each layer's leaf of one, on ranks. Under `jax.jit` they
            are left alone.
        cache: folder for plans; None: `shardwright/plans` in the user's cache folder; False: none.
        planning: further arguments of `synthesize`, such as `devices`, `constraints`, `time_limit_s`. For
            `backend="spmd"` `axes` is 1, `offload` and `stages` are "off" unless they are given.

    Returns:
        A `Parallel`, or a decorator that makes one.

    Raises:
        InputError: there is no such backend, `synthesize` has no such argument, or the function no such
            static one.

    Warns:
        SingleProcessWarning: on the first call outside of an MPI job, if the fleet has several devices.
    """
    if train_step is None:
        return partial(
            parallelize,
            fleet=fleet,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            state=state,
            backend=backend,
            gather=gather,
            scan_layers=scan_layers,
            cache=cache,
            **planning,
        )
    if backend not in ("auto", "jit", *BACKENDS):
        raise InputError(
            place="backend",
            reason=f"{backend!r} does not exist",
            remedy=f"Choose from auto, jit, {', '.join(BACKENDS)}",
        )
    # Before the first step, and outside of an MPI job too, where nothing is planned.
    for name in planning:
        if name not in PLANNING:
            near = get_close_matches(name, PLANNING, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            known = ", ".join(PLANNING)
            raise InputError(place=name, reason="is no argument", remedy=f"{hint}About planning: {known}")
    if backend == "auto":
        backend = "mpi" if under_mpi() else "jit"
    if backend == "mpi":
        look_after_job()
    return Parallel(
        Callee(train_step, _several(static_argnums), _several(static_argnames)),
        Fleet.of(fleet),
        state=state,
        backend=backend,
        gather=gather,
        scan_layers=scan_layers,
        donated=(*_several(donate_argnums), *_several(donate_argnames)),
        cache=None if cache is False else Path(cache) if cache is not None else plan_cache.default_folder(),
        # One program for all devices takes two mesh axes only where all is even, and host memory not at all.
        planning=({**FOR_SPMD} if backend == "spmd" else {}) | planning,
    )


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, (int, str)) else tuple(given)


@dataclass
class _Planned:
    """What is known for arguments of some shapes."""

    traced: Traced
    plan: Plan
    run: Callable[..., Any] | None = None
    #: By flat argument: a sharded array that lies otherwise than planned, and the one made of it.
    moved: dict[int, tuple[weakref.ref[Any], Any]] = field(default_factory=dict[int, Any])


class Parallel:
    """A step on a fleet; made by `parallelize`.

    Attributes:
        fleet: the devices.
        backend: where the step runs.
    """

    def __init__(
        self,
        callee: Callee,
        fleet: Fleet,
        *,
        state: StateMap | None,
        backend: str,
        gather: bool,
        scan_layers: bool,
        donated: Sequence[int | str],
        cache: Path | None,
        planning: dict[str, Any],
    ) -> None:
        self.fleet = fleet
        self.backend = backend
        self._callee = callee
        self._state = state
        self._gather = gather
        self._scan_layers = scan_layers
        self._scanner: Scanner | None = None
        self._donated = donated
        self._cache = cache
        self._planning = planning
        self._planned: dict[Hashable, _Planned] = {}
        self._jitted: dict[Hashable, Callable[..., Any]] = {}
        update_wrapper(self, callee.function)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for such arguments (arrays, or `jax.ShapeDtypeStruct`s); made, or found in the cache.

        In an MPI job all ranks make this call.

        Raises:
            InputError: see `synthesize` and `scan_layers`.
            TraceError: the step cannot be traced or has side effects.
            PlanError: the ranks do not run the same step, versions or fleet.
        """
        return self._find(self._call(args, kwargs)).plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step. State comes back as it lies, on ranks as `ShardedArray`s; it goes back in as it is.

        Raises:
            InputError: see `synthesize` and `scan_layers`.
            TraceError: the step cannot be traced or has side effects.
            PlanError: the ranks do not run the same step, versions or fleet, or are another number than
                the plan is for.
        """
        call = self._call(args, kwargs)
        if self.backend == "jit":
            return call.finish(self._alone(call))
        flat = concrete(call.trees)
        found = self._find(call)
        traced, plan = found.traced, found.plan
        if found.run is None:
            found.run = plan.compile_traced(traced, self.backend)
        stacks: dict[int, Any] = {}
        flat = [self._entering(found, i, leaf, stacks) for i, leaf in enumerate(flat)]
        result = jax.tree.leaves(found.run(*jax.tree.unflatten(traced.in_tree, flat)))
        if self._gather:
            state = traced.graph.state
            result = [leaf if i in state else shards.gather(leaf) for i, leaf in enumerate(result)]
        return call.finish(jax.tree.unflatten(traced.out_tree, result))

    def _entering(self, found: _Planned, i: int, leaf: Any, stacks: dict[int, Any]) -> Any:
        """The argument as the plan wants it; what lies otherwise is moved once, not at every call.

        Parameters that one step trains and another one evaluates may lie otherwise for each of them.
        """
        tensor, placement = found.traced.graph.inputs[i].type, found.plan.program.inputs[i]
        move = shards.moving(leaf, found.plan, tensor, placement, self.backend, stacks)
        if move is None:
            return leaf
        known = found.moved.get(i)
        if known is not None and known[0]() is leaf:
            return known[1]
        moved = move()
        found.moved[i] = weakref.ref(leaf), moved
        return moved

    def _donates(self, call: Call, traced: Traced) -> bool:
        """Whether the caller has donated all of the state."""
        counts = [child.num_leaves for child in traced.in_tree.children()]
        owners = [i for i, count in enumerate(counts) for _ in range(count)]
        state = {owners[position] for position in traced.graph.state.values()}
        return bool(state) and all(self._is_donated(call.origin[i], call.names[i]) for i in state)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """A call of the step, or, where that is asked for, of the step with its layers scanned."""
        call = self._callee.call(args, kwargs)
        if not self._scan_layers or self.backend == "jit":
            return call
        from shardwright.scan_layers import Scanner

        self._scanner = self._scanner or Scanner()
        return self._scanner.call(call, self._state_of(call))

    # -- planning ----------------------------------------------------------------------------------------

    def _find(self, call: Call) -> _Planned:
        found = self._planned.get(call.types)
        if found is None:
            abstract = jax.tree.map(shards.abstract, call.trees)
            found = self._planned[call.types] = self._make(call, abstract)
        return found

    def _make(self, call: Call, abstract: Any) -> _Planned:
        comm: Any = None
        if self.backend == "mpi":
            from shardwright.backends.mpi.link import mpi

            comm = mpi().COMM_WORLD
        state = self._state_of(call)
        traced = trace(call.step, *abstract, state=state)
        traced = donating(traced, self._donates(call, traced))
        if comm is None:
            return _Planned(traced, self._planned_here(traced, state))
        agree(comm, self._facts(traced))
        told: Any = None
        if comm.rank == 0:
            try:
                told = self._planned_here(traced, state).to_dict()
            except ShardwrightError as error:
                told = type(error).__name__, error.place, error.reason, error.remedy
            except Exception as error:
                # A user's function may say where arguments lie, and raise anything: the others wait for word.
                reason = f"raised {type(error).__name__} while planning: {error}"
                _told(comm, ("PlanError", "rank 0", reason, "Look at its own traceback"))
                raise
        told = _told(comm, told)
        if isinstance(told, tuple):
            name, place, reason, remedy = told
            kinds = {kind.__name__: kind for kind in (InputError, TraceError, PlanError)}
            raise kinds.get(name, PlanError)(place=place, reason=reason, remedy=remedy)
        plan = Plan.from_dict(told, checked=True)
        return _Planned(traced, replace(plan, traced=plan.attach_traced(traced)))

    def _state_of(self, call: Call) -> StateMap | None:
        """What the step continues."""
        if MODULES not in call.names:
            return self._state
        # Beside modules, which are updated in place, nothing is state that is not said to be.
        return {MODULES: 0} | {key: _inside(path) for key, path in (self._state or {}).items()}

    def _facts(self, traced: Traced) -> dict[str, str]:
        """What must be the same on all ranks before one of them plans, by name."""
        options = sorted((name, str(value)) for name, value in self._planning.items() if not callable(value))
        return {
            "step": traced.fingerprint[:12],
            "fleet": self.fleet.fingerprint()[:12],
            "planning options": str(options),
            **plan_cache.versions(),
        }

    def _planned_here(self, traced: Traced, state: StateMap | None) -> Plan:
        """The plan from the cache, or a new one, which then goes there."""
        options = {**self._planning, "state": state}
        key = "" if self._cache is None else plan_cache.key_of(traced, self.fleet, options)
        plan = None if self._cache is None else self._cached(self._cache, key, traced)
        if plan is not None:
            return plan
        from shardwright.api import synthesize_traced

        plan = synthesize_traced(traced, fleet=self.fleet, state=state, **self._planning)
        if self._cache is not None:
            plan_cache.store(self._cache, key, plan)
        return plan

    def _cached(self, folder: Path, key: str, traced: Traced) -> Plan | None:
        with collector_paused():
            plan = plan_cache.load(folder, key)
            if plan is None:
                return None
            try:
                plan = replace(plan, traced=plan.attach_traced(traced))
            except PlanError:
                return None  # whatever is in the file is no plan for this step: a new one is made
        for primitive, why in plan.stats.replicated.items():
            warnings.warn(f"{primitive} runs replicated: {why}", ReplicatedWarning, stacklevel=6)
        return plan

    # -- one process ----------------------------------------------------------------------------------

    def _alone(self, call: Call) -> Any:
        """The step under `jax.jit`."""
        leaves, structure = jax.tree.flatten(call.trees)
        key = (call.key, call.names, structure)
        if not self._jitted and len(self.fleet.devices) > 1:
            warnings.warn(
                f"{getattr(self, '__name__', 'the step')} runs in this process alone, under jax.jit. For the "
                f"{len(self.fleet.devices)} devices of the fleet, start it with "
                f"mpiexec -n {len(self.fleet.devices)}",
                SingleProcessWarning,
                stacklevel=3,
            )
        if key not in self._jitted:
            donated = [i for i, o in enumerate(call.origin) if self._is_donated(o, call.names[i])]
            self._jitted[key] = jax.jit(call.step, donate_argnums=donated)
        return self._jitted[key](*jax.tree.unflatten(structure, leaves))

    def _is_donated(self, origin: int | str | None, name: str) -> bool:
        # The arrays of nnx modules are all replaced by the step: who donates one of them donates them all.
        return bool(self._donated) if origin is None else bool({origin, name} & set(self._donated))


def _told(comm: Any, value: Any) -> Any:
    """The first rank's value. Who waits for a plan sleeps: spinning would take cores from who makes it."""
    if comm.rank == 0:
        for rank in range(1, comm.size):
            comm.send(value, dest=rank, tag=_PLAN_TAG)
        return value
    while not comm.iprobe(source=0, tag=_PLAN_TAG):
        time.sleep(0.005)
    return comm.recv(source=0, tag=_PLAN_TAG)


def _inside(path: Any) -> Any:
    """An output path of a step whose result comes second, after the arrays of its modules."""
    if isinstance(path, int):
        return f"[1][{path}]"
    return f"[1]{path}" if isinstance(path, str) else (1, *path)
