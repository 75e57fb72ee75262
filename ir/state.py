"""Which results of a step are state: the arguments of the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_structure

from shardwright.ir.errors import InputError

#: Argument (position or parameter name) -> output path (a position or a key path).
StateMap: TypeAlias = Mapping[int | str, Any]


def match_state(
    names: Sequence[str], args: Sequence[Any], out_shape: Any, override: StateMap | None
) -> tuple[dict[int, int], dict[str, str]]:
    """Flat output position -> flat input position, and the same by name."""
    arg_start = np.cumsum([0, *(len(jax.tree.leaves(arg)) for arg in args)])
    if override is None:
        pairs = [(i, path) for i, path in enumerate(_leading(args, out_shape))]
    elif not isinstance(cast(object, override), Mapping):
        raise InputError(
            place="state", reason=f"is {override!r}", remedy="Map arguments to outputs, as {'params': 0}"
        )
    else:
        pairs = [(_argument(key, names), _output_path(where)) for key, where in override.items()]
    out_leaves = [(path, leaf) for path, leaf in tree_flatten_with_path(out_shape)[0]]
    out_paths = [keystr(path) for path, _ in out_leaves]
    mapping: dict[int, int] = {}
    by_name: dict[str, str] = {}
    for position, path in pairs:
        under = [k for k, name in enumerate(out_paths) if _is_under(name, path)]
        leaves = jax.tree.leaves(args[position])
        same = len(leaves) == len(under) and all(
            _same_type(leaf, out_leaves[k][1]) for leaf, k in zip(leaves, under, strict=True)
        )
        if not same:
            raise InputError(
                place=f"state[{names[position]}]",
                reason=f"output {path or 'of the step'} does not match it in structure, shape and dtype",
                remedy=f"Name one of the outputs {', '.join(sorted({keystr(p[:1]) for p, _ in out_leaves}))}",
            )
        if mapping.keys() & set(under) or names[position] in by_name:
            raise InputError(
                place=f"state[{names[position]}]",
                reason=f"it, or output {path or 'of the step'}, is matched twice",
                remedy="Match every argument and every output once",
            )
        mapping.update({k: int(arg_start[position]) + j for j, k in enumerate(under)})
        if leaves:
            by_name[names[position]] = f"output{path}"
    return mapping, by_name


def _leading(args: Sequence[Any], out_shape: Any) -> list[str]:
    """Paths of the leading outputs that match the leading arguments.

    A result that is as a whole what the first argument is (a step of one container) is state.
    """
    if args and _same_trees(args[0], out_shape):
        return [""]
    outs = list(out_shape) if type(out_shape) in (tuple, list) else [out_shape]
    found: list[str] = []
    for i, (arg, out) in enumerate(zip(args, outs, strict=False)):
        if not _same_trees(arg, out):
            break
        found.append(f"[{i}]" if type(out_shape) in (tuple, list) else "")
    return found


def _same_trees(arg: Any, out: Any) -> bool:
    same = tree_structure(arg) == tree_structure(out)
    return same and all(map(_same_type, jax.tree.leaves(arg), jax.tree.leaves(out)))


def _is_under(leaf: str, path: str) -> bool:
    """Whether an output leaf lies under a key path: `.a` holds `.a` and `.a['x']`, but not `.ab`."""
    return leaf.startswith(path) and (not path or leaf[len(path) :][:1] in ("", "[", "."))


def _argument(key: int | str, names: Sequence[str]) -> int:
    if isinstance(key, int) and 0 <= key < len(names):
        return key
    if isinstance(key, str) and key in names:
        return names.index(key)
    raise InputError(
        place=f"state[{key!r}]", reason="is no argument", remedy=f"Name one of {', '.join(names)}"
    )


def _output_path(where: Any) -> str:
    if isinstance(where, int):
        return f"[{where}]"
    if isinstance(where, str):
        return where
    if isinstance(where, (tuple, list)):
        return "".join(f"[{part!r}]" for part in cast(Sequence[Any], where))
    raise InputError(
        place=f"state: {where!r}",
        reason=f"a {type(where).__name__} is no output path",
        remedy="Name the output by position, by key path such as \"[0]['params']\", or by a tuple of keys",
    )


def _same_type(a: Any, b: Any) -> bool:
    def of(leaf: Any) -> tuple[tuple[int, ...], str]:
        if isinstance(leaf, (bool, int, float, complex)):
            return (), str(jax.dtypes.result_type(leaf))
        return tuple(leaf.shape), str(
            jax.dtypes.canonicalize_dtype(leaf.dtype) if _plain(leaf) else leaf.dtype
        )

    # Of equal dtypes JAX makes the same: asking it is slow, and a step has hundreds of leaves.
    if hasattr(a, "dtype") and a.dtype == b.dtype:
        return tuple(a.shape) == tuple(b.shape)
    return of(a) == of(b)


def _plain(leaf: Any) -> bool:
    return not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended)
