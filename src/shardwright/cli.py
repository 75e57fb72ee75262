"""The command line. Exit codes: 0 done, 1 a check failed, 2 bad input."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
import jax
from rich.console import Console

from shardwright.api import ReplicatedWarning, baselines, data_parallel, synthesize
from shardwright.backends.launch import find_mpiexec, launch, under_mpi
from shardwright.calibrate_cli import calibrate_command
from shardwright.compare_cli import compare
from shardwright.cost.fleet import Fleet
from shardwright.cost.trace_events import trace_events
from shardwright.execute import BACKENDS
from shardwright.factory import load_factory
from shardwright.ir.errors import InputError, ShardwrightError
from shardwright.ir.graph import TensorType
from shardwright.options import parse_pins, parse_time_limit
from shardwright.plan import Plan, write_whole
from shardwright.profile_cli import profile_command
from shardwright.report import against, baselines_to_json, duration, layout, render
from shardwright.synth.baselines import Baseline


class _Command(click.Group):
    """Turns our errors into one line on stderr and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ShardwrightError as error:
            _fail(str(error), 2)


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"shardwright: {message}", err=True)
    sys.exit(code)


@click.group(cls=_Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="shardwright")
def main() -> None:
    """Plan, verify and run a single-device JAX training step on a fleet of unequal devices."""


main.add_command(compare)
main.add_command(calibrate_command)
main.add_command(profile_command)

_factory = click.argument("target", metavar="FILE_OR_MODULE:FACTORY")
_fleet = click.option("--fleet", "fleet_path", required=True, metavar="FLEET.yaml", help="The fleet file.")
_all = click.option("--all-devices", is_flag=True, help="Use every device, even where fewer are faster.")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@main.command()
@_factory
@_fleet
@click.option("-o", "--output", metavar="PLAN.json", help="Write the plan to this file.")
@click.option("--baselines", "with_baselines", is_flag=True, help="Price data parallelism beside the plan.")
@click.option("--program", "with_program", is_flag=True, help="Print the program, too.")
@click.option("--pin", "pins", multiple=True, metavar="PATTERN=PLACEMENT", help="Fix where arguments lie.")
@click.option("--time-limit", metavar="DURATION", help="Begin no search after this, such as 10s; 0: none.")
@click.option("--timeline", "trace_path", metavar="TRACE.json", help="Write the step in time, for Perfetto.")
@_all
@_json
def plan(
    target: str,
    fleet_path: str,
    output: str | None,
    with_baselines: bool,
    with_program: bool,
    pins: tuple[str, ...],
    time_limit: str | None,
    trace_path: str | None,
    all_devices: bool,
    as_json: bool,
) -> None:
    """Plan the step that FACTORY() returns, as (train_step, args), for a fleet."""
    fleet = Fleet.load(fleet_path)
    _check_writable(output)
    limit_s = parse_time_limit(time_limit)
    constraints = parse_pins(pins)
    _check_writable(trace_path, "--timeline")
    step, args = load_factory(target)
    made = _plan(step, args, fleet, all_devices=all_devices, constraints=constraints, time_limit_s=limit_s)
    if output is not None:
        made.save(output)
    if trace_path is not None:
        events = trace_events(made.timeline(), made.used_devices, f"{target} on {fleet.name}")
        write_whole(trace_path, json.dumps(events) + "\n")
    if as_json:
        click.echo(json.dumps(made.to_dict()))
        return
    assert made.traced is not None
    compared: tuple[Baseline, ...] = ()
    if with_baselines:
        with _progress() as tick:
            tick("pricing data parallelism")
            compared = data_parallel(made.traced, fleet)
    click.echo(render(layout(made, compared), colour=sys.stdout.isatty()))
    if with_program:
        click.echo(made.text())


@main.command("baselines")
@_factory
@_fleet
@_json
def price_baselines(target: str, fleet_path: str, as_json: bool) -> None:
    """Price what people do without a planner, beside the plan."""
    fleet = Fleet.load(fleet_path)
    step, args = load_factory(target)
    made = _plan(step, args, fleet)
    with _progress() as tick:
        found = baselines(step, *args, fleet=fleet, plan=made, tick=tick)
    if as_json:
        click.echo(json.dumps(baselines_to_json(made, found)))
    else:
        click.echo(render(against(made, found), colour=sys.stdout.isatty()))


@main.command()
@click.argument("plan_path", metavar="PLAN.json")
@_factory
@_json
def verify(plan_path: str, target: str, as_json: bool) -> None:
    """Run a plan on the reference backend and compare it with the single-device step."""
    loaded = Plan.load(plan_path)
    step, args = load_factory(target)
    _check_concrete(target, args)
    with _progress() as tick:
        tick("running the program on all devices of this process")
        result = loaded.verify(step, *args)
    if as_json:
        fields = {name: getattr(result, name) for name in type(result).__slots__}
        click.echo(json.dumps(fields))
    else:
        click.echo(str(result))
    sys.exit(0 if result.ok else 1)


@main.command()
@_factory
@click.option("--fleet", "fleet_path", metavar="FLEET.yaml", help="The fleet file (or --plan).")
@click.option("--plan", "plan_path", metavar="PLAN.json", help="Run this plan instead of making one.")
@click.option("--backend", type=click.Choice(sorted(BACKENDS)), default="reference", show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Steps to run.")
@_all
def run(
    target: str, fleet_path: str | None, plan_path: str | None, backend: str, steps: int, all_devices: bool
) -> None:
    """Run the step on a fleet: state is fed back, the other arguments stay the same.

    With --backend mpi, one rank per device that the plan uses is started by mpiexec, unless this process is
    a rank already.
    """
    if (fleet_path is None) == (plan_path is None):
        raise InputError(
            place="run", reason="needs a fleet or a plan, not both", remedy="Pass --fleet or --plan"
        )
    if plan_path is not None and all_devices:
        raise InputError(
            place="--all-devices",
            reason="is about making a plan, and --plan names one that is made",
            remedy="Pass --fleet, or leave it out",
        )
    planned = partial(_load_or_plan, fleet_path=fleet_path, plan_path=plan_path, all_devices=all_devices)
    if backend == "mpi" and not under_mpi():
        sys.exit(_launch(target, planned, steps))
    if backend == "mpi":
        _run_rank(target, planned, steps)
    else:
        step, args = load_factory(target)
        _check_concrete(target, args)
        made = planned(step, args)
        _run(made, step, args, backend, steps, loud=True)


def _launch(target: str, planned: Callable[..., Plan], steps: int) -> int:
    """Plan once here, then start the ranks on the finished plan."""
    find_mpiexec()  # before the work, not after it
    step, args = load_factory(target)
    _check_concrete(target, args)
    with tempfile.TemporaryDirectory() as folder:
        made = planned(step, args)
        path = str(Path(folder) / "plan.json")
        made.save(path)
        arguments = [
            "-m",
            "shardwright",
            "run",
            target,
            "--plan",
            path,
            "--backend",
            "mpi",
            "--steps",
            str(steps),
        ]
        return launch(len(made.used), arguments)


def _run_rank(target: str, planned: Callable[..., Plan], steps: int) -> None:
    """One rank: the first one plans where no plan was made before, and tells the others."""
    from mpi4py import MPI

    from shardwright.backends.mpi import abort_on_error

    comm = MPI.COMM_WORLD
    with abort_on_error(comm):
        step, args = load_factory(target)
        _check_concrete(target, args)
        first = comm.Get_rank() == 0
        data = comm.bcast(planned(step, args).to_dict() if first else None)
        _run(Plan.from_dict(data), step, args, "mpi", steps, loud=first)


def _run(
    made: Plan, step: Callable[..., Any], args: tuple[Any, ...], backend: str, steps: int, *, loud: bool
) -> None:
    traced = made.attach(step, *args)
    state = traced.graph.state
    shown = [i for i, a in enumerate(traced.graph.outputs) if _is_number(a.type) and i not in state]
    compiled = made.compile(step, backend=backend)
    flat = jax.tree.leaves(args)
    for number in range(1, steps + 1):
        start = time.perf_counter()
        outputs = jax.tree.leaves(compiled(*jax.tree.unflatten(traced.in_tree, flat)))
        values = {
            traced.graph.output_names[i]: float(outputs[i].gather() if backend == "mpi" else outputs[i])
            for i in shown
        }
        took = time.perf_counter() - start
        for out, position in state.items():
            flat[position] = outputs[out]
        if loud:
            results = "  ".join(f"output{name} {value:.6g}" for name, value in values.items())
            click.echo(
                f"step {number}: {results}  ({duration(took)}{', compiling included' if number == 1 else ''})"
            )


def _is_number(tensor: TensorType) -> bool:
    return tensor.rank == 0 and not tensor.dtype.startswith(("key<", "complex"))


def _load_or_plan(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    fleet_path: str | None,
    plan_path: str | None,
    all_devices: bool,
) -> Plan:
    if plan_path is not None:
        return Plan.load(plan_path)
    assert fleet_path is not None
    return _plan(step, args, Fleet.load(fleet_path), all_devices=all_devices)


def _plan(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    fleet: Fleet,
    *,
    all_devices: bool = False,
    **options: Any,
) -> Plan:
    """Plan with progress; warnings become lines on stderr."""
    with _progress() as tick, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ReplicatedWarning)
        made = synthesize(
            step, *args, fleet=fleet, devices="all" if all_devices else "auto", tick=tick, **options
        )
    for warning in caught:
        if issubclass(warning.category, ReplicatedWarning):
            click.echo(f"warning: {warning.message}", err=True)
    return made


def _check_concrete(target: str, args: tuple[Any, ...]) -> None:
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
        raise InputError(
            place=target,
            reason="returns shapes without values (jax.ShapeDtypeStruct), which can be planned but not run",
            remedy="Use a factory that returns concrete arrays",
        )


def _check_writable(output: str | None, option: str = "-o") -> None:
    """Find out before the work, not after it."""
    if output is None:
        return
    if Path(output).is_dir():
        raise InputError(place=output, reason="is a folder", remedy=f"Name a file with {option}")
    folder = Path(output).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            place=output, reason="its folder cannot be written", remedy=f"Choose another path for {option}"
        )


@contextmanager
def _progress() -> Generator[Callable[[str], None]]:
    """A spinner that says what is being done, on a terminal; silence in a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("starting") as status:
        yield lambda what: status.update(what)
