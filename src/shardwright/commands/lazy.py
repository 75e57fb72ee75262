"""Commands that are imported when they are used: the help of the whole should not wait for JAX."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

import click

from shardwright.console import voice, voice_options
from shardwright.interrupts import heard, put_off
from shardwright.ir.errors import ShardwrightError

#: A file system that is full, and a file or an owner that has all that is allowed.
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class LazyCommand(click.Command):
    """Stands for a command in listings and completion, and loads it to be run.

    Args:
        name: of the command.
        where: `module:attribute` of the real one.
        short_help: one line, the first of the real one's documentation.
    """

    def __init__(self, name: str, where: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help)
        self.where = where

    def load(self) -> click.Command:
        """The real command, with the options that all have."""
        module, _, attribute = self.where.partition(":")
        with put_off():
            command: click.Command = getattr(import_module(module), attribute)
        return with_voice(command)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        return self.load().make_context(info_name, args, parent, **extra)


def with_voice(command: click.Command) -> click.Command:
    """The command, and those under it, with `--quiet` and `--verbose`."""
    taken = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    if "--quiet" not in taken:
        # Short names stay with the command's own options.
        for option in voice_options():
            option.opts = [name for name in option.opts if name not in taken]
            command.params.append(option)
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            command.commands[name] = inner if isinstance(inner, LazyCommand) else with_voice(inner)
    return command


class Commands(click.Group):
    """Turns our errors and those of usage into one line on stderr and exit code 2, and Ctrl-C into 130."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever standard output is: closed, or of an encoding that has no word for some characters."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
            elif isinstance(stream, TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="replace")
        return super().main(*args, **kwargs)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            _misused(error, str(info_name))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with heard():
                return super().invoke(ctx)
        except click.UsageError as error:
            _misused(error, f"{ctx.command_path} {ctx.invoked_subcommand}")
        except ShardwrightError as error:
            if voice() == "verbose":
                traceback.print_exc()
            _fail(str(error), 2)
        except KeyboardInterrupt:
            _fail("interrupted", 130)
        except BrokenPipeError:
            # As if SIGPIPE had ended it: 1 would say that a check failed.
            _forget_output()
            sys.exit(141)
        except OSError as error:
            if error.filename is not None or error.errno not in _NO_ROOM:
                raise
            _forget_output()
            _fail(f"standard output cannot be written: {error.strerror}", 2)


def _forget_output() -> None:
    """Nothing more goes to standard output: what is left would be written when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _misused(error: click.UsageError, where: str) -> NoReturn:
    """Says it with the command whose help to read: `where`, if the error knows none (the parser's do not)."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        raise error  # it is the help
    command = where if error.ctx is None else error.ctx.command_path
    reason = " ".join(error.format_message().split())
    _fail(f"{reason}{'' if reason.endswith(('.', '?')) else '.'} See {command} --help", 2)


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"shardwright: {message}", err=True)
    sys.exit(code)
