"""How commands speak: results on standard output, everything else on standard error.

On a terminal, work that takes time shows what it is at, and results are coloured and as wide as the window.
In a pipe there is nothing but results. `--quiet` leaves out progress and warnings, `--verbose` also tells a
pipe what begins, and when, and shows where an error was raised.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import click

if TYPE_CHECKING:
    from rich.console import Group

Voice: TypeAlias = Literal["quiet", "normal", "verbose"]

_VOICE = "shardwright.voice"


def voice() -> Voice:
    """How much the running command is to say; "normal" outside of one."""
    context = click.get_current_context(silent=True)
    return "normal" if context is None else cast(Voice, context.meta.get(_VOICE, "normal"))


def _choose(context: click.Context, option: click.Parameter, chosen: bool) -> None:
    if not chosen:
        return
    if context.meta.setdefault(_VOICE, option.name) != option.name:
        raise click.UsageError("--quiet and --verbose exclude each other", context)


def voice_options() -> list[click.Option]:
    """`--quiet` and `--verbose`, which every command takes, before its name and after it."""
    return [
        click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            expose_value=False,
            callback=_choose,
            help="Results and errors only.",
        ),
        click.Option(
            ["-v", "--verbose"],
            is_flag=True,
            expose_value=False,
            callback=_choose,
            help="Say what begins, and where an error was raised.",
        ),
    ]


def say(content: Group) -> None:
    """Print rich content: in colour on a terminal, as plain text into a pipe."""
    from shardwright.reports.text import WIDTH, render

    if not sys.stdout.isatty():
        click.echo(render(content, colour=False))
        return
    columns = shutil.get_terminal_size().columns
    click.echo(render(content, colour=True, width=min(columns, WIDTH)))


def say_json(data: object) -> None:
    """Print one JSON object on one line; numbers that JSON does not know (infinite, or none) are null."""
    try:
        text = json.dumps(data, allow_nan=False)
    except ValueError:
        text = json.dumps(json.loads(json.dumps(data), parse_constant=lambda name: None))
    click.echo(text)


def warn(text: str) -> None:
    """One line on standard error, unless quiet."""
    if voice() != "quiet":
        click.echo(f"warning: {text}", err=True)


@contextmanager
def stages() -> Generator[Callable[[str], None]]:
    """Told what begins, shows it: on a terminal a list of stages with their times, the last one turning.

    What a step prints while it is traced is no result: it goes to standard error.
    """
    with redirect_stdout(sys.stderr), _shown() as tick:
        yield tick


@contextmanager
def _shown() -> Generator[Callable[[str], None]]:
    if voice() == "quiet" or not (sys.stderr.isatty() or voice() == "verbose"):
        yield lambda what: None
        return
    if not sys.stderr.isatty():
        start = time.perf_counter()
        yield lambda what: click.echo(f"[{time.perf_counter() - start:7.2f} s] {what}", err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, Any] = {}
        running: list[Any] = []

        def tick(what: str) -> None:
            """One line per kind of work: a search that begins again turns on in its line."""
            for task in running:
                shown.update(task, total=1, completed=1)
            if what in tasks:
                shown.update(tasks[what], total=None, completed=0)
            else:
                tasks[what] = shown.add_task(what, total=None)
            running[:] = [tasks[what]]

        yield tick


@contextmanager
def bar(what: str) -> Generator[Callable[[int, int], None]]:
    """Told how many of how many are done, shows a bar on a terminal; silence in a pipe."""
    if voice() == "quiet" or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    done_of = TextColumn("{task.completed}/{task.total}")
    columns = (TextColumn(what), BarColumn(), done_of, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
