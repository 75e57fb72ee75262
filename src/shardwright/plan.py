"""A plan: everything a synthesis found, in a form that can be read, saved, verified and run.

The file form is versioned JSON, checked against `plan.schema.json` when it is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from shardwright import messages
from shardwright.attach import attached, traced_for
from shardwright.backends.schedule.document import Planned
from shardwright.cost.bill import Item, bill
from shardwright.cost.drift import with_comparisons
from shardwright.cost.grid.settled import pricing
from shardwright.cost.model import CostModel
from shardwright.cost.timeline import Timeline, timed_bill, timeline
from shardwright.execute import CompiledStep, concrete, run_options
from shardwright.files import write_whole
from shardwright.fleets.occupants import warn_of_other_card
from shardwright.ir.donation import check_donate
from shardwright.ir.errors import PlanError
from shardwright.ir.rewrites.rewriting import rewritten
from shardwright.ir.text import format_program
from shardwright.ir.trace import Traced, marked
from shardwright.partition import PartitionSpecs, partition_specs
from shardwright.plans import file as plan_file
from shardwright.plans.record import PlanRecord

if TYPE_CHECKING:
    from shardwright.backends.verify import VerifyResult
    from shardwright.synth.baselines import Baseline


class Plan(PlanRecord):
    """A distributed program for a fleet, with its ratios, costs and certificate: to be read, verified, run.

    Its attributes are those of `PlanRecord`.
    """

    def __str__(self) -> str:
        from shardwright.reports.text import describe

        return describe(self)

    def text(self, traced: Traced | None = None) -> str:
        """The program in its readable form; a loaded plan needs the step it was made for (see `attach`).

        Raises:
            PlanError: the plan was loaded from a file and no step is given.
        """
        return format_program(self.program, self.step(traced).graph)

    def timeline(
        self, traced: Traced | None = None, *, overlap: bool = False, bucket_bytes: int = 0
    ) -> Timeline:
        """The predicted step in time; a loaded plan needs the step it was made for (see `attach`).

        Args:
            traced: the step of a plan that was loaded from a file.
            overlap: as if exchanges ran beside computation, as `mpi` lets messages do between nodes.
            bucket_bytes: as if exchanges of one kind were gathered into messages of so many bytes at most.

        Raises:
            PlanError: the plan was loaded from a file and no step is given.
        """
        model = CostModel(self.part)
        priced = pricing(self.program, model, self.used_ratios)
        items = timed_bill(self.program, self.step(traced).graph, priced, model)
        found = timeline(items, model, self.used_ratios, overlap=overlap, bucket_bytes=bucket_bytes)
        return with_comparisons(found, self.program, self.step(traced).graph, model, self.resync_every)

    def schedule(self, ranks: Sequence[int] | None = None) -> dict[str, Any]:
        """What every rank exchanges in a step, as plain data in the form of `schedule.schema.json`.

        Args:
            ranks: these only; all by default.

        Raises:
            PlanError: there is no such rank, a strategy of the plan cannot be written down, or the plan comes
                from a file that does not have its messages.
        """
        return messages.schedule(self, ranks)

    def planned_messages(self) -> tuple[Planned, ...] | None:
        """What travels together; None where neither the step nor the file says."""
        return messages.planned_messages(self)

    def bill(self, traced: Traced | None = None) -> tuple[list[Item], CostModel]:
        """Every instruction with its cost, in order, and the model of the part of the fleet that is used.

        Args:
            traced: the step of a plan that was loaded from a file (see `attach`).

        Raises:
            PlanError: the plan was loaded from a file and no step is given.
        """
        model = CostModel(self.part)
        priced = pricing(self.program, model, self.used_ratios)
        return bill(self.program, self.step(traced).graph, priced), model

    def save_report(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "Plan",
        baselines: Sequence[Baseline] = (),
        traced: Traced | None = None,
    ) -> None:
        """Write a page about the plan, for a browser, which needs nothing beside it.

        It appears whole or not at all.

        Args:
            path: of the page.
            title: what was planned, for its heading.
            baselines: what `shardwright.baselines` found, to be shown beside the plan.
            traced: the step of a plan that was loaded from a file (see `attach`).

        Raises:
            PlanError: the plan was loaded from a file and no step is given, or the page cannot be written.
        """
        from shardwright.reports.page import page  # a template engine: only for those who ask for a page

        write_whole(path, page(self, self.step(traced), title, baselines))

    def step(self, traced: Traced | None = None) -> Traced:
        """The traced step: the one given, or else the one the plan was made of in this process.

        Raises:
            PlanError: the plan was loaded from a file and no step is given.
        """
        step = traced or self.traced
        if step is None:
            raise PlanError(
                place="plan",
                reason="was loaded without its step",
                remedy="Pass plan.attach(train_step, *args)",
            )
        return self._changed(step)

    def _changed(self, traced: Traced) -> Traced:
        marks = {"donated": self.donate, "compiler": self.fleet.compiler}
        return rewritten(marked(traced, **marks), self.rewriting)

    # -- files -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what `save` writes, in the form of `plan.schema.json`."""
        return plan_file.plain(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. The file appears whole or not at all."""
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: the file is missing, no JSON, of another format version, or does not follow the schema.
        """
        return Plan.from_dict(plan_file.read(path), place=str(path))

    @staticmethod
    def from_dict(data: Any, *, place: str = "plan", checked: bool = False) -> Plan:
        """Inverse of `to_dict`.

        Args:
            data: plain data.
            place: where it comes from, for errors.
            checked: it is known to be what `to_dict` returned; the schema need not say so again.

        Raises:
            PlanError: the data is of another format version, or does not follow the schema.
        """
        return Plan(**plan_file.fields(data, place, checked=checked))

    # -- the step ----------------------------------------------------------------------------------

    def attach(self, train_step: Callable[..., Any], *args: Any) -> Traced:
        """Trace the step and check that this plan was made for it.

        Raises:
            PlanError: the step is another one, or its arguments have other shapes.
        """
        return self.attach_traced(traced_for(self, train_step, args))

    def attach_traced(self, traced: Traced) -> Traced:
        """`attach` for a step that is traced already, with the plan's own `state_override`.

        Raises:
            PlanError: the step is another one, or its arguments have other shapes.
        """
        return attached(self, traced)

    def verify(self, train_step: Callable[..., Any], *args: Any) -> VerifyResult:
        """Run the program on the reference backend with concrete arguments and compare with one device.

        Args:
            train_step: the step the plan was made for.
            args: its arguments, as concrete arrays.

        Raises:
            PlanError: the plan was made for another step.
            InputError: an argument is a shape without values.
        """

        traced = self.attach(train_step, *args)
        leaves = concrete(args)

        def flat_step(*flat: Any) -> list[Any]:
            return jax.tree.leaves(train_step(*jax.tree.unflatten(traced.in_tree, flat)))

        from shardwright.backends.verify import verify_program

        return verify_program(traced, self.program, self.used_ratios, leaves, flat_step)

    def compile(
        self,
        train_step: Callable[..., Any],
        backend: str = "reference",
        *,
        donate: bool | None = None,
        **options: Any,
    ) -> Callable[..., Any]:
        """A callable with the signature of `train_step` that runs this plan.

        Args:
            train_step: the step the plan was made for.
            backend: "reference" (all devices in this process, global arrays), "mpi" (one process per
                device under mpiexec, or one per device that the plan uses; leaves are `ShardedArray`, with
                `gather()`) or "spmd" (one jitted program on JAX's own devices; leaves are global arrays, or
                `PaddedArray`, with `gather()`, where the plan cuts unevenly).
            donate: results may take over the memory of the state that is passed in, which must not be used
                again; None: as planned. "mpi" and "spmd" do so; "reference" has no use for it.
            options: of the "mpi" backend, see `RunOptions`; `bucket_bytes` and `resync_every` are the plan's
                unless they are given here.

        Raises:
            InputError: `donate` is something else.
            PlanError: there is no such backend or option; on the first call, the plan was made for another
            step.
        """
        return self._compiled(partial(self.attach, train_step), backend, donate, options, train_step)

    def compile_traced(
        self, traced: Traced, backend: str = "reference", *, donate: bool | None = None, **options: Any
    ) -> Callable[..., Any]:
        """`compile` for a step that is attached already; it is not traced again.

        Raises:
            PlanError: there is no such backend or option.
        """
        step = self._changed(traced)
        return self._compiled(lambda *args: step, backend, donate, options)

    def _compiled(
        self,
        attach: Callable[..., Traced],
        backend: str,
        donate: bool | None,
        options: Mapping[str, Any],
        step: Callable[..., Any] | None = None,
    ) -> CompiledStep:
        check_donate(donate)
        defaults: dict[str, Any] = {}
        if backend == "mpi" and "bucket_bytes" not in options:
            defaults["bucket_bytes"] = self.bucket_bytes
        found = run_options(backend, options, resync_every=self.resync_every, **defaults)
        donate = self.donate if donate is None else donate
        if backend == "mpi":
            warn_of_other_card([device.type.name for device in self.fleet.devices], self.seats)
        parts = attach, self.program, self.used_ratios, backend, self.seats
        return CompiledStep(*parts, options=found, donate=donate, step=step)

    # -- arguments on the ranks ------------------------------------------------------------------------

    def shard(self, tree: Any, argument: int | str = 0, *, traced: Traced | None = None) -> Any:
        """Arguments as `ShardedArray`s: of global arrays, the same on every rank, each rank keeps its part.

        Args:
            tree: the value of an argument, or a tuple of those of several in a row.
            argument: position or name of the first of them.
            traced: the step of a plan that was loaded from a file (see `attach`).

        Returns:
            The tree with `ShardedArray` leaves; outside of an MPI job the tree as it is.

        Raises:
            InputError: the tree is not that of the arguments.
            PlanError: the plan was loaded from a file and no step is given.
        """
        from shardwright import shards

        return shards.shard(self, self.step(traced), tree, argument)

    def from_local(self, tree: Any, argument: int | str = 0, *, traced: Traced | None = None) -> Any:
        """Arguments as `ShardedArray`s of what this rank holds, such as the rows that it has read itself.

        Args:
            tree: as for `shard`, but every leaf is this rank's part alone; see `local_batch`.
            argument: see `shard`.
            traced: see `shard`.

        Raises:
            InputError: the tree is not that of the arguments, or a leaf not of the shape held here.
            PlanError: the plan was loaded from a file and no step is given.
        """
        from shardwright import shards

        return shards.from_local(self, self.step(traced), tree, argument)

    def init(
        self, init: Callable[..., Any], *args: Any, argument: int | str = 0, traced: Traced | None = None
    ) -> Any:
        """Arguments made where they are to lie: each rank computes what it holds of `init(*args)`.

        What a rule does not shard (an orthogonal matrix, a draw from a generator that is not partitionable)
        is computed whole before it is cut, with a warning.

        Args:
            init: a function that returns the value of an argument, or a tuple of those of several in a row.
            args: its arguments, small and the same on every rank, such as a key.
            argument: position or name of the first argument that `init` makes.
            traced: see `shard`.

        Returns:
            The result of `init` with `ShardedArray` leaves; outside of an MPI job that of `jax.jit(init)`.

        Raises:
            InputError: the result is not what the step was planned for.
            TraceError: `init` cannot be traced.
            PlanError: the plan was loaded from a file and no step is given.

        Warns:
            ReplicatedWarning: a result that is to lie in stretches is computed whole.
        """
        from shardwright import shards

        return shards.init(self, self.step(traced), init, args, argument)

    def local_batch(
        self, rank: int, *, ranks: int | None = None, traced: Traced | None = None
    ) -> Mapping[str, tuple[slice, ...]]:
        """Which part of the arguments that are no state a rank needs: by name, a slice per dimension.

        Args:
            rank: of the job.
            ranks: how many the job has: one for every device that the plan uses, or one for every device of
                the fleet, of which some have nothing to do. By default as many as the MPI job that this
                process is of, if that has one of these numbers, or else one for every device of the fleet.
            traced: see `shard`.

        Raises:
            InputError: there is no such rank, or the plan does not run on so many.
            PlanError: the plan was loaded from a file and no step is given.
        """
        from shardwright import shards

        return shards.local_batch(self, self.step(traced), rank, ranks)

    def partition_specs(self, traced: Traced | None = None) -> PartitionSpecs:
        """How arguments and results of the step lie, in JAX's own terms, for `jax.jit`.

        Args:
            traced: the step of a plan that was loaded from a file (see `attach`).

        Returns:
            PartitionSpecs over one mesh axis, "devices", which has the devices that the plan uses in the
            plan's order.

        Raises:
            PlanError: the plan cuts unevenly, which PartitionSpecs cannot say.
        """
        return partition_specs(self.step(traced), self.program, self.used_ratios)
