"""One call of a user's function, taken apart as `jax.jit` would: what is traced, what is part of the code.

    dynamic   arrays and numbers in arguments: traced
    static    arguments named by `static_argnums` and `static_argnames`; leaves that are neither arrays nor
              numbers (the activation function of a module); numbers inside an equinox module, which
              `eqx.filter_jit` also keeps
    modules   flax nnx objects: their arrays are traced, and updated in place when the step is done

What the function sees is what it was written for. What is traced is a function of pytrees of arrays, in which
a static leaf is a node without leaves, so that it is part of the structure.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardwright.backends.layout import weak_of
from shardwright.ir.errors import InputError

#: The argument that holds the arrays of nnx modules, all of them together.
MODULES = "modules"


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class Static:
    """A static leaf in a pytree: part of its structure."""

    value: Any


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        names: of the dynamic arguments.
        trees: the dynamic arguments.
        key: everything that is static, the structure of `trees` excepted.
        step: the function of `trees` that is traced; it returns trees of arrays.
        finish: turns what `step` returned, arrays in place, into what the caller is given.
        origin: of each dynamic argument its position in the call, or its name; None for nnx modules.
    """

    names: tuple[str, ...]
    trees: tuple[Any, ...]
    key: Hashable
    step: Callable[..., Any]
    finish: Callable[[Any], Any]
    origin: tuple[int | str | None, ...]

    @property
    def types(self) -> Hashable:
        """What a call is planned for: all that is static, and types of what is not."""
        leaves, structure = jax.tree.flatten(self.trees)
        return self.key, self.names, structure, tuple(map(_shape_of, leaves))


class Callee:
    """A user's function and which of its arguments are static.

    Args:
        function: of arrays and other things.
        static_argnums: positions of static arguments; negative ones count from the end.
        static_argnames: names of static arguments.

    Raises:
        InputError: a name is none of the function's parameters.
    """

    def __init__(
        self, function: Callable[..., Any], static_argnums: Sequence[int], static_argnames: Sequence[str]
    ) -> None:
        self.function = function
        try:
            self.signature = inspect.signature(function)
        except (TypeError, ValueError):
            self.signature = None
        self.nums, self.argnames = tuple(static_argnums), tuple(static_argnames)
        self.parameters = () if self.signature is None else tuple(self.signature.parameters.values())
        known = {p.name for p in self.parameters}
        takes_any = not self.parameters or any(p.kind is p.VAR_KEYWORD for p in self.parameters)
        for name in self.argnames:
            if name not in known and not takes_any:
                raise InputError(
                    place=f"static_argnames: {name!r}",
                    reason="is no parameter of the step",
                    remedy=f"Name one of {', '.join(sorted(known))}",
                )

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Take a call apart.

        Raises:
            TypeError: the function cannot be called so.
            InputError: a static value has no hash.
        """
        if self.signature is not None:
            bound = self.signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        names = self._names(len(args))
        nums = {i % len(args) if args else i for i in self.nums if -len(args) <= i < len(args)}
        static_names = {*self.argnames, *(self.parameters[i].name for i in self.nums if self._named(i))}
        nums |= {i for i, name in enumerate(names) if name in static_names}
        fixed = {i: args[i] for i in sorted(nums)}
        fixed_names = {name: kwargs[name] for name in sorted(kwargs) if name in static_names}
        origin: list[int | str] = [i for i in range(len(args)) if i not in fixed]
        origin += [name for name in sorted(kwargs) if name not in fixed_names]
        values = [args[o] if isinstance(o, int) else kwargs[o] for o in origin]
        for where, value in (*((names[i], v) for i, v in fixed.items()), *fixed_names.items()):
            _hashed(where, value)
        count = len(args)
        function = self.function

        def rebuilt(dynamic: Sequence[Any]) -> Any:
            given: dict[int | str, Any] = {**fixed, **dict(zip(origin, dynamic, strict=True))}
            named = {o: v for o, v in given.items() if isinstance(o, str)}
            return function(*(given[i] for i in range(count)), **named, **fixed_names)

        # As `jax.jit` has it, 2 and 2.0 are other code, though they are equal.
        statics = {**fixed, **fixed_names}
        key = (tuple((where, type(value), value) for where, value in statics.items()), tuple(origin))
        labels = [names[o] if isinstance(o, int) else o for o in origin]
        modules = [i for i, value in enumerate(values) if _has_modules(value)]
        if modules:
            return _with_modules(rebuilt, values, labels, origin, modules, key)
        hidden = tuple(hide(value, label) for value, label in zip(values, labels, strict=True))

        def step(*trees: Any) -> Any:
            return hide(rebuilt([show(tree) for tree in trees]), "result")

        return Call(tuple(labels), hidden, key, signed(step, labels), show, tuple(origin))

    def _named(self, i: int) -> bool:
        """Whether position `i` is a parameter of its own."""
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return -len(self.parameters) <= i < len(self.parameters) and self.parameters[i].kind in kinds

    def _names(self, count: int) -> list[str]:
        found = [p.name for i, p in enumerate(self.parameters) if self._named(i)][:count]
        rest = next((p.name for p in self.parameters if p.kind is p.VAR_POSITIONAL), "arg")
        return [*found, *(f"{rest}{i}" for i in range(len(found), count))]


def _with_modules(
    rebuilt: Callable[[Sequence[Any]], Any],
    values: Sequence[Any],
    labels: Sequence[str],
    origin: Sequence[int | str],
    modules: Sequence[int],
    key: Hashable,
) -> Call:
    """A call with nnx modules among its arguments: split before, merged inside, updated afterwards."""
    from flax import nnx

    objects = tuple(values[i] for i in modules)
    others = [i for i in range(len(values)) if i not in modules]
    graphdef, state = nnx.split(objects)

    def step(state: Any, *trees: Any) -> Any:
        merged = nnx.merge(graphdef, state)
        given = dict(zip(modules, merged, strict=True)) | {
            i: show(tree) for i, tree in zip(others, trees, strict=True)
        }
        result = rebuilt([given[i] for i in range(len(values))])
        after, new = nnx.split(merged)
        if after != graphdef:
            raise InputError(
                place="nnx modules",
                reason="the step changes their structure (a variable more, another mode)",
                remedy="Make all variables before the first step",
            )
        return new, hide(result, "result")

    def finish(result: Any) -> Any:
        new, rest = result
        nnx.update(objects, new)
        return show(rest)

    names = [MODULES, *(labels[i] for i in others)]
    trees = (state, *(hide(values[i], labels[i]) for i in others))
    return Call(
        tuple(names),
        trees,
        (key, graphdef),
        signed(step, names),
        finish,
        (None, *(origin[i] for i in others)),
    )


def _has_modules(value: Any) -> bool:
    """Whether an argument has nnx modules in it (those of flax linen are no pytrees and hold no arrays)."""
    if "flax.nnx" not in sys.modules:
        return False
    from flax import nnx

    def is_module(leaf: Any) -> bool:
        return isinstance(leaf, nnx.Pytree) and not isinstance(leaf, (nnx.State, nnx.Variable))

    return any(map(is_module, jax.tree.leaves(value, is_leaf=is_module)))


def _is_equinox(value: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(value, equinox.Module)


def _is_array(leaf: Any) -> bool:
    """Arrays of any kind, `jax.ShapeDtypeStruct` and `ShardedArray` included; text arrays are none."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OSUM"
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def hide(tree: Any, where: str) -> Any:
    """The tree with static leaves as `Static` nodes.

    Raises:
        InputError: a static leaf has no hash.
    """

    def of_module(leaf: Any) -> Any:
        return leaf if _is_array(leaf) else _static(leaf)

    def leaf_of(leaf: Any) -> Any:
        if _is_equinox(leaf):
            return jax.tree.map(of_module, leaf)
        return leaf if _is_array(leaf) or isinstance(leaf, (bool, int, float, complex)) else _static(leaf)

    def _static(leaf: Any) -> Static:
        return Static(_hashed(f"a {type(leaf).__name__} in {where}", leaf))

    return jax.tree.map(leaf_of, tree, is_leaf=_is_equinox)


def show(tree: Any) -> Any:
    """Inverse of `hide`."""

    def is_static(leaf: Any) -> bool:
        return isinstance(leaf, Static)

    def shown(leaf: Any) -> Any:
        return leaf.value if isinstance(leaf, Static) else leaf

    return jax.tree.map(shown, tree, is_leaf=is_static)


def _hashed(where: str, value: Any) -> Any:
    try:
        hash(value)
    except TypeError as error:
        raise InputError(
            place=where,
            reason=f"is static and cannot be hashed ({error})",
            remedy="Pass arrays and numbers, or static values with a hash (a tuple in place of a list)",
        ) from error
    return value


def signed(step: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The function with named parameters, for error messages, plans and pins."""
    kind = inspect.Parameter.POSITIONAL_ONLY
    unique = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]
    step.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in unique])  # type: ignore[attr-defined]
    return step


def _shape_of(leaf: Any) -> Hashable:
    """What of a leaf tracing sees: a number is an array of its weak type."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return (), str(jax.dtypes.result_type(leaf)), weak_of(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return tuple(leaf.shape), str(dtype), weak_of(leaf)
