"""`shardwright run`: steps on a fleet, in this process or on ranks."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import jax

from shardwright.backends.launch import find_mpiexec, launch, under_mpi
from shardwright.commands.options import check_made, factory_argument, json_option, planning_options
from shardwright.commands.plan import make_plan
from shardwright.console import say_json, stages
from shardwright.cost.fleet import Fleet
from shardwright.execute import BACKENDS, SPMD, run_options
from shardwright.factory import check_concrete, load_factory
from shardwright.ir.errors import InputError
from shardwright.ir.graph import TensorType
from shardwright.plan import Plan
from shardwright.reports.units import duration


@click.command()
@factory_argument
@click.option("--fleet", "fleet_path", metavar="FLEET.yaml", help="The fleet file (or --plan).")
@click.option("--plan", "plan_path", metavar="PLAN.json", help="Run this plan instead of making one.")
@click.option("--backend", type=click.Choice(sorted(BACKENDS)), default="reference", show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Steps to run.")
@click.option("--finite", is_flag=True, help="With mpi: stop at the first result that is no finite number.")
@planning_options
@json_option
def run(
    target: str,
    fleet_path: str | None,
    plan_path: str | None,
    backend: str,
    steps: int,
    finite: bool,
    planning: dict[str, Any],
    as_json: bool,
) -> None:
    """Run the step on a fleet.

    State is fed back, the other arguments stay the same.

    With --backend mpi, one rank per device that the plan uses is started by mpiexec, unless this process is
    a rank already.
    """
    if fleet_path is None and plan_path is None:
        raise InputError(place="run", reason="needs a fleet or a plan", remedy="Pass --fleet or --plan")
    if fleet_path is not None and plan_path is not None:
        raise InputError(place="run", reason="has --fleet and --plan", remedy="Pass one of them")
    if plan_path is not None:
        check_made(planning)
    if backend == "spmd":
        planning = {**SPMD, **planning}
    planned = partial(_load_or_plan, fleet_path=fleet_path, plan_path=plan_path, planning=planning)
    options = {"finite": True} if finite else {}
    run_options(backend, options)
    shown = partial(_run, steps=steps, as_json=as_json, options=options)
    if backend == "mpi" and not under_mpi():
        sys.exit(_launch(target, planned, steps, as_json=as_json, finite=finite))
    if backend == "mpi":
        _run_rank(target, planned, shown)
    else:
        step, args = load_factory(target)
        check_concrete(target, args)
        made = planned(step, args)
        shown(made, step, args, backend, loud=True)


def _launch(target: str, planned: Callable[..., Plan], steps: int, *, as_json: bool, finite: bool) -> int:
    """Plan once here, then start the ranks on the finished plan."""
    find_mpiexec()  # before the work, not after it
    step, args = load_factory(target)
    check_concrete(target, args)
    made = planned(step, args)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        made.save(path)
        arguments = [*("-m", "shardwright", "run", target, "--plan", path, "--backend", "mpi")]
        arguments += ["--steps", str(steps), *["--json"] * as_json, *["--finite"] * finite]
        return launch(len(made.used), arguments)


def _run_rank(target: str, planned: Callable[..., Plan], shown: Callable[..., None]) -> None:
    """One rank: the first one plans where no plan was made before, and tells the others."""
    from mpi4py import MPI

    from shardwright.backends.mpi.executable import abort_on_error

    comm = MPI.COMM_WORLD
    with abort_on_error(comm):
        step, args = load_factory(target)
        check_concrete(target, args)
        first = comm.Get_rank() == 0
        data = comm.bcast(planned(step, args).to_dict() if first else None)
        shown(Plan.from_dict(data), step, args, "mpi", loud=first)


def _run(
    made: Plan,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str,
    steps: int,
    *,
    loud: bool,
    as_json: bool,
    options: Mapping[str, Any],
) -> None:
    with stages():
        traced = made.attach(step, *args)
    state = traced.graph.state
    shown = [i for i, a in enumerate(traced.graph.outputs) if _is_number(a.type) and i not in state]
    compiled = made.compile(step, backend=backend, **options)
    flat = jax.tree.leaves(args)
    rows: list[dict[str, object]] = []

    def once() -> tuple[list[Any], dict[str, float]]:
        outputs = jax.tree.leaves(compiled(*jax.tree.unflatten(traced.in_tree, flat)))
        values = {
            f"output{traced.graph.output_names[i]}": float(
                outputs[i].gather() if backend == "mpi" else outputs[i]
            )
            for i in shown
        }
        return outputs, values

    for number in range(1, steps + 1):
        start = time.perf_counter()
        if number == 1 and loud:
            with stages() as tick:
                tick("compiling, and running the first step")
                outputs, values = once()
        else:
            outputs, values = once()
        took_s = time.perf_counter() - start
        for out, position in state.items():
            flat[position] = outputs[out]
        rows.append({"step": number, "outputs": values, "seconds": took_s})
        if loud and not as_json:
            results = "  ".join(f"{name} {value:.6g}" for name, value in values.items())
            click.echo(
                f"step {number}: {results}  "
                f"({duration(took_s)}{', compiling included' if number == 1 else ''})"
            )
    if loud and as_json:
        say_json({"backend": backend, "devices": list(made.used_devices), "steps": rows})


def _is_number(tensor: TensorType) -> bool:
    return tensor.rank == 0 and not tensor.dtype.startswith(("key<", "complex"))


def _load_or_plan(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    fleet_path: str | None,
    plan_path: str | None,
    planning: Mapping[str, Any],
) -> Plan:
    if plan_path is not None:
        return Plan.load(plan_path)
    assert fleet_path is not None
    return make_plan(step, args, Fleet.load(fleet_path), **planning)
