"""Loading `FILE_OR_MODULE:FACTORY`, a function that returns `(train_step, args)`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, cast

import jax

from shardwright.ir.errors import InputError, ShardwrightError

Factory: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]

#: What stands behind a `+` where layers are to be scanned.
SCANNED = "scan_layers"

#: Ends of names of files that describe something, a fleet or a plan, where one that computes is asked for.
_DATA = (".json", ".toml", ".yaml", ".yml")


def load_factory(target: str) -> Factory:
    """The step and arguments that `target` names; what its code prints goes to standard error.

    Args:
        target: `path/to/file.py:factory` (its folder becomes importable) or `package.module:factory`; with
            `+scan_layers` behind it, the step that `shardwright.scan_layers` makes of its step.

    Raises:
        InputError: there is no such file, module or factory, it raises, or returns something else; or its
            step repeats no layers that are to be scanned.
    """
    with redirect_stdout(sys.stderr):
        return _load(target)


def _load(target: str) -> Factory:
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise InputError(
            place=target,
            reason="is not of the form FILE_OR_MODULE:FACTORY",
            remedy="For example examples/gpt2.py:tiny",
        )
    name, plus, change = name.partition("+")
    if plus and change != SCANNED:
        raise InputError(
            place=target,
            reason=f"there is no change {change!r}",
            remedy=f"Leave +{change} out, or say {name}+{SCANNED} to have its layers scanned",
        )
    module = _module(where)
    factory = getattr(module, name, None)
    if not callable(factory):
        public = [
            n
            for n, v in vars(module).items()
            if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        raise InputError(
            place=target,
            reason=f"{where} has no function {name!r}",
            remedy=f"It has {', '.join(n for n in public if not n.startswith('_')) or 'none'}",
        )
    # Whatever user code raises is the user's to see, in one line and without our traceback.
    try:
        made: object = factory()
    except ShardwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            place=target,
            reason=f"raised {type(error).__name__}: {_first_line(error)}{_line_of(error)}",
            remedy="Call the factory by itself to see where",
        ) from error
    if isinstance(made, tuple) and len(cast(tuple[Any, ...], made)) == 2:
        step, args = cast(tuple[Any, Any], made)
        if callable(step) and isinstance(args, (tuple, list)):
            found: Factory = step, tuple(cast(tuple[Any, ...], args))
            return _scanned(*found) if plus else found
    raise InputError(
        place=target,
        reason=f"returned {_shape_of(made)}",
        remedy="Return (train_step, args): a function and the tuple of its positional arguments",
    )


def _scanned(step: Callable[..., Any], args: tuple[Any, ...]) -> Factory:
    """The step with its layers scanned, and its arguments with stacks."""
    from shardwright.scan_layers import scan_layers

    found = scan_layers(step, *args)
    return found.step, found.stack(*args)


def step_file(target: str) -> str | None:
    """The file that `target` names; None where it names a module."""
    where = target.rpartition(":")[0]
    return where if _is_file(where) else None


def _is_file(where: str) -> bool:
    # A module may be called json, too.
    return "/" in where or where.endswith((".py", ".yaml", ".yml")) or Path(where).is_file()


def check_concrete(target: str, args: tuple[Any, ...]) -> None:
    """Refuse to run what can only be planned.

    Raises:
        InputError: an argument is a `jax.ShapeDtypeStruct`.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
        raise InputError(
            place=target,
            reason="returns shapes without values (jax.ShapeDtypeStruct), which can be planned but not run",
            remedy="Use a factory that returns concrete arrays",
        )


def _module(where: str) -> ModuleType:
    if _is_file(where):
        path = Path(where)
        if path.suffix in _DATA:
            raise InputError(
                place=where,
                reason="is no Python file",
                remedy="Name the one that has the factory, or a module; a fleet's file follows --fleet",
            )
        if not path.is_file():
            raise InputError(
                place=where, reason="is no file", remedy="Name a Python file, or a module to import"
            )
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return _run(where, lambda: _from_file(path))
    return _run(where, lambda: importlib.import_module(where))


def _from_file(path: Path) -> ModuleType:
    loader = SourceFileLoader(path.stem, str(path))
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _run(where: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except ModuleNotFoundError as error:
        raise InputError(
            place=where, reason=f"there is no module {error.name!r}", remedy="Install it, or correct the name"
        ) from error
    except (Exception, SystemExit) as error:
        raise InputError(
            place=where,
            reason=f"raised {type(error).__name__} on import: {_first_line(error)}{_line_of(error)}",
            remedy="Import it by itself to see where",
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _line_of(error: BaseException) -> str:
    """` (file.py:12)` of the innermost frame of user code."""
    trace = error.__traceback__
    place = ""
    while trace is not None:
        name = Path(trace.tb_frame.f_code.co_filename)
        if "shardwright" not in name.parts and "importlib" not in str(name):
            place = f" ({name.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place


def _shape_of(made: object) -> str:
    if isinstance(made, tuple):
        parts = cast(tuple[Any, ...], made)
        return "a tuple of " + (
            " and ".join(type(part).__name__ for part in parts) if len(parts) == 2 else str(len(parts))
        )
    return f"a {type(made).__name__}"
