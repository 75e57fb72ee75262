"""`scan_layers`: a training step that repeats its layers, as one that scans over them.

Where layers begin, and which leaves are one layer's, a step that was traced says by itself: its equations
repeat (`ir/rolling/`). What there is once per layer is stacked here; what the step does with it once per
layer becomes a `jax.lax.scan`, forward and backward, or one equation on stacks, as the optimizer's do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from shardwright.backends.layout import typed, weak_of
from shardwright.calls import Call, signed
from shardwright.ir.dtypes import dtype_of
from shardwright.ir.errors import InputError
from shardwright.ir.rolling.written import Written, written
from shardwright.ir.state import StateMap
from shardwright.ir.trace import Traced, argument_names, trace
from shardwright.layer_leaf import LayerLeaf
from shardwright.pause import collector_paused
from shardwright.shards import abstract, gather


def scan_layers(train_step: Callable[..., Any], *args: Any, state: StateMap | None = None) -> ScannedLayers:
    """A step with scans over its repeated layers, which are found by what it does, whatever their names.

    It does what tracing the step gives, in which rules of its own for derivatives (`jax.custom_vjp`) are not
    to be seen any more: take gradients in the step, not of the one that this returns.

    Args:
        train_step: a function of pytrees of arrays, see `shardwright.synthesize`.
        args: its positional arguments, as arrays or `jax.ShapeDtypeStruct`; nothing is executed.
        state: argument (position or name) -> output path, see `shardwright.synthesize`.

    Returns:
        The step, and what turns its arguments and results into those of `train_step` and back.

    Raises:
        InputError: an argument is no array, a state entry does not match, the step repeats no layers, or
            state that is stacked is part of a larger result.
        TraceError: the step cannot be traced or has side effects.
    """
    with collector_paused():
        abstracted = jax.tree.map(abstract, args)
        traced = trace(train_step, *abstracted, state=state)
        names = argument_names(train_step, args)
        counts = [child.num_leaves for child in traced.in_tree.children()]
        owner = [k for k, count in enumerate(counts) for _ in range(count)]
        held = set(traced.graph.state.values())
        sorts = [(k, i in traced.weak, i in held) for i, k in enumerate(owner)]
        found = written(traced.graph, traced.primitives, sorts)
    if found is None:
        raise InputError(
            place="scan_layers",
            reason="the step repeats no layers: nothing with parameters of its own follows its like",
            remedy="Plan it as it is",
        )
    # Shapes alone: NumPy's arrays and numbers are traced as they are, and would be kept.
    types = [(value.type, i in traced.weak) for i, value in enumerate(traced.graph.inputs)]
    flat = [jax.ShapeDtypeStruct(t.shape, dtype_of(t.dtype), weak_type=weak) for t, weak in types]
    arguments = _arguments(jax.tree.unflatten(traced.in_tree, flat), names, owner, found)
    results = _results(traced, arguments)
    step = _step(getattr(train_step, "__name__", "step"), arguments, results, found)
    return ScannedLayers(found.layers, step, arguments, results)


@dataclass(frozen=True, slots=True)
class _Tree:
    """An argument, or a result, in the step's structure and in that of stacks.

    Attributes:
        name: of the argument.
        first: number of its first leaf, of those of all arguments.
        structure: the step's.
        like: the step's leaves, as shapes.
        places: by leaf of the other structure, which of the step's leaves it stands for.
        names: of these leaves; none where nothing is stacked and the structure is the step's own.
    """

    name: str
    first: int
    structure: Any
    like: tuple[Any, ...]
    places: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()

    def stack(self, tree: Any) -> Any:
        """The step's argument with stacks."""
        leaves, structure = jax.tree.flatten(tree)
        self.check(structure, self.structure, "is not the argument that layers were found in")
        if not self.names:
            return tree
        return self.of([_stacked([leaves[i] for i in rows]) for rows in self.places])

    def unstack(self, tree: Any) -> Any:
        """What `stack` was given."""
        leaves, structure = jax.tree.flatten(tree)
        self.check(structure, self.stacked_structure, "has no such stacks as `stack` makes")
        found: list[Any] = [None] * self.structure.num_leaves
        for leaf, rows in zip(leaves, self.places, strict=True):
            for layer, i in enumerate(rows):
                found[i] = _row(leaf, layer, weak_of(self.like[i])) if len(rows) > 1 else leaf
        return jax.tree.unflatten(self.structure, found)

    def of(self, leaves: Sequence[Any]) -> Any:
        """Leaves, stacks among them, as the argument."""
        if self.names:
            return dict(zip(self.names, leaves, strict=True))
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def absolute(self) -> list[tuple[int, ...]]:
        """`places`, among the leaves of all arguments."""
        return [tuple([self.first + i for i in rows]) for rows in self.places]

    @property
    def stacked_structure(self) -> Any:
        return jax.tree.structure(self.of([0] * len(self.places)))

    def check(self, given: Any, wanted: Any, reason: str) -> None:
        if given != wanted:
            raise InputError(place=self.name, reason=reason, remedy=f"Pass {wanted}"[:400])


@dataclass(frozen=True, slots=True)
class ScannedLayers:
    """A step whose layers are scanned; made by `scan_layers`.

    Attributes:
        layers: how many layers, of every sequence of them that was found.
        step: the step, of arguments as `stack` makes them; it returns state with stacks, too, and other
            results as they were.
    """

    layers: tuple[int, ...]
    step: Callable[..., Any]
    _arguments: tuple[_Tree, ...]
    _results: _Results

    @property
    def args(self) -> tuple[Any, ...]:
        """Its arguments, as shapes, to plan it for."""
        return self.stack(*(jax.tree.unflatten(tree.structure, tree.like) for tree in self._arguments))

    @property
    def stacks(self) -> Mapping[str, int]:
        """Names of stacked leaves, and how many layers' each holds."""
        trees = [tree for tree in self._arguments if tree.names]
        found = ((t.name, n, len(rows)) for t in trees for n, rows in zip(t.names, t.places, strict=True))
        return {f"{argument}/{name}": layers for argument, name, layers in found if layers > 1}

    def stack(self, *args: Any) -> tuple[Any, ...]:
        """Leading arguments of the original step as those of `step`: layers' leaves stacked.

        Args:
            args: arrays, `jax.ShapeDtypeStruct`s, or what `results` returned. Of what else lies on ranks, all
                ranks make this call.

        Raises:
            InputError: the trees are not those that layers were found in.
        """
        self._check_count(args)
        return tuple([tree.stack(arg) for tree, arg in zip(self._arguments, args, strict=False)])

    def unstack(self, *args: Any) -> tuple[Any, ...]:
        """Inverse of `stack`: state that `step` returned as the original step has it, by argument.

        Leaves that lie on ranks are gathered first: all ranks make this call.

        Raises:
            InputError: the trees are not those that `stack` makes.
        """
        self._check_count(args)
        return tuple([tree.unstack(gather(arg)) for tree, arg in zip(self._arguments, args, strict=False)])

    def results(self, returned: Any) -> Any:
        """What `step` returned as the original step returns it.

        Of a stack that lies on several devices every layer has a `LayerLeaf`, and nothing is moved.

        Raises:
            InputError: it is nothing that `step` returns.
        """
        return self._results.unstacked(returned)

    def _check_count(self, args: Sequence[Any]) -> None:
        if len(args) > len(self._arguments):
            reason = f"{len(args)} were passed, of {len(self._arguments)}"
            raise InputError(place="arguments", reason=reason, remedy="Pass the step's, or the first of them")

    def __str__(self) -> str:
        sizes = " and ".join(map(str, self.layers))
        return f"{sizes} layers, {len(self.stacks)} stacks:\n" + "\n".join(
            f"  {name}" for name in self.stacks
        )


class Scanner:
    """Calls of a step as calls of it with its layers scanned, which are looked for once for equal types."""

    def __init__(self) -> None:
        self._known: dict[Hashable, ScannedLayers] = {}

    def call(self, call: Call, state: StateMap | None) -> Call:
        """The call, of stacks; what it is finished with is what the scanned step returns.

        Raises:
            InputError: see `scan_layers`.
        """
        types = call.types
        scanned = self._known.get(types)
        if scanned is None:
            scanned = self._known[types] = scan_layers(call.step, *call.trees, state=state)

        def finish(returned: Any) -> Any:
            return call.finish(scanned.results(returned))

        return replace(call, trees=scanned.stack(*call.trees), step=scanned.step, finish=finish)


def _step(name: str, arguments: Sequence[_Tree], results: _Results, found: Written) -> Callable[..., Any]:
    """The scanned step, whose arguments have the names that they had."""

    def step(*args: Any) -> Any:
        if len(args) != len(arguments):
            reason = f"takes {len(arguments)} arguments, not {len(args)}"
            raise InputError(place="the scanned step", reason=reason, remedy="Pass what `stack` returns")
        given: dict[tuple[int, ...], Any] = {}
        for tree, arg in zip(arguments, args, strict=True):
            leaves, structure = jax.tree.flatten(arg)
            tree.check(structure, tree.stacked_structure, "is not what `stack` makes of the argument")
            given.update(zip(tree.absolute, leaves, strict=True))
        made = found.run(*[given[rows] for rows in found.inputs])
        return results.of(dict(zip(found.outputs, made, strict=True)))

    step.__name__ = name
    return signed(step, [tree.name for tree in arguments])


def _arguments(
    args: tuple[Any, ...], names: Sequence[str], owner: Sequence[int], found: Written
) -> tuple[_Tree, ...]:
    trees: list[_Tree] = []
    first = 0
    for k, arg in enumerate(args):
        paths = [path for path, _ in tree_flatten_with_path(arg)[0]]
        leaves, structure = jax.tree.flatten(arg)
        places = [tuple([i - first for i in rows]) for rows in found.inputs if owner[rows[0]] == k]
        tree = _Tree(names[k], first, structure, tuple(leaves), tuple(places))
        if any(len(rows) > 1 for rows in places):
            named = _named(paths, places)
            tree = replace(tree, places=tuple(named.values()), names=tuple(named))
        trees.append(tree)
        first += len(leaves)
    return tuple(trees)


def _named(paths: Sequence[Any], places: Sequence[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Leaves of an argument by name, as a dictionary has them; of stacks with a star where names differ."""
    texts = [keystr(path, simple=True, separator="/") for path in paths]
    found: dict[str, tuple[int, ...]] = {}
    for rows in places:
        name = _common([texts[i] for i in rows])
        while name in found:
            name += "'"
        found[name] = rows
    return {name: found[name] for name in sorted(found)}


def _common(names: Sequence[str]) -> str:
    """What names have in common, with a star for the rest: "blocks/*/up"."""
    first, last = min(names), max(names)
    if first == last:
        return first
    before = next(i for i in range(len(last)) if first[i : i + 1] != last[i])
    ends = [name[before:][::-1] for name in names]
    least, most = min(ends), max(ends)
    after = next((i for i in range(len(most)) if least[i : i + 1] != most[i]), len(most))
    return f"{first[:before]}*{least[:after][::-1]}"


@dataclass(frozen=True, slots=True)
class _Results:
    """How flat results become what `ScannedLayers.step` returns: `whole` of `parts`, some typed weakly."""

    whole: Any
    parts: tuple[_Continued | _Fresh, ...]
    weak: frozenset[tuple[int, ...]]

    def of(self, made: Mapping[tuple[int, ...], Any]) -> Any:
        # Scans know nothing of weak types: a rate come back strong would widen what it multiplies next.
        outs = {at: typed(jnp.asarray(x), at in self.weak) for at, x in made.items()}
        return jax.tree.unflatten(self.whole, [part.of(outs) for part in self.parts])

    def unstacked(self, returned: Any) -> Any:
        """Results of the scanned step as those of the original one."""
        try:
            parts = self.whole.flatten_up_to(returned)
        except ValueError as error:
            raise InputError(
                place="results", reason="are not what the scanned step returns", remedy="Pass all it returned"
            ) from error
        pairs = zip(self.parts, parts, strict=True)
        return jax.tree.unflatten(self.whole, [part.unstacked(found) for part, found in pairs])


@dataclass(frozen=True, slots=True)
class _Continued:
    """An argument that is continued, with the result's structure and the outputs that its leaves become."""

    tree: _Tree
    structure: Any
    outputs: tuple[tuple[int, ...], ...]

    def of(self, made: Mapping[tuple[int, ...], Any]) -> Any:
        return self.tree.of([made[places] for places in self.outputs])

    def unstacked(self, found: Any) -> Any:
        return jax.tree.unflatten(self.structure, jax.tree.leaves(self.tree.unstack(found)))


@dataclass(frozen=True, slots=True)
class _Fresh:
    """Any other result: its structure, and which outputs it has."""

    structure: Any
    outputs: tuple[int, ...]

    def of(self, made: Mapping[tuple[int, ...], Any]) -> Any:
        return jax.tree.unflatten(self.structure, [made[place,] for place in self.outputs])

    def unstacked(self, found: Any) -> Any:
        return found


def _results(traced: Traced, arguments: Sequence[_Tree]) -> _Results:
    """Where results with stacks are: a whole result continues a whole argument."""
    out_tree, state, count = traced.out_tree, traced.graph.state, traced.out_tree.num_leaves
    numbered, inputs = jax.tree.unflatten(out_tree, range(count)), [state.get(k) for k in range(count)]
    by_leaves: dict[tuple[int | None, ...], _Tree] = {
        tuple(range(t.first, t.first + len(t.like))): t for t in arguments if t.names
    }
    children, whole = jax.tree.flatten(numbered, is_leaf=lambda node: node is not numbered)
    continued = by_leaves.get(tuple(inputs))
    if continued is not None:
        # Beside what continues an argument there may be results without leaves.
        sizes = [jax.tree.structure(child).num_leaves for child in children]
        if continued.structure == out_tree or max(sizes) < count:
            children, whole = [numbered], jax.tree.structure(0)
    stacked = {i for t in arguments if t.names for rows in t.absolute if len(rows) > 1 for i in rows}
    parts: list[_Continued | _Fresh] = []
    for child in children:
        places, structure = jax.tree.flatten(child)
        tree = by_leaves.get(tuple([inputs[k] for k in places]))
        if tree is not None:
            output = {i: k for k, i in state.items()}
            outputs = tuple([tuple([output[i] for i in rows]) for rows in tree.absolute])
            parts.append(_Continued(tree, structure, outputs))
            continue
        if not stacked.isdisjoint([inputs[k] for k in places]):
            raise InputError(
                place="scan_layers: state",
                reason="is part of a larger result, or of a larger argument, of which the rest is no state",
                remedy="Have the step return what continues an argument as a result of its own",
            )
        parts.append(_Fresh(structure, tuple(places)))
    return _Results(whole, tuple(parts), frozenset([(k,) for k in traced.weak_outputs]))


def _stacked(rows: Sequence[Any]) -> Any:
    """One layer's each as a stack, which is never typed weakly."""
    if len(rows) == 1:
        return rows[0]
    first = rows[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(rows), *first.shape), first.dtype)
    if isinstance(first, LayerLeaf):
        leaves = [row for row in rows if isinstance(row, LayerLeaf) and row.stack is first.stack]
        if [leaf.layer for leaf in leaves] == list(range(len(rows))) and first.stack.shape[0] == len(rows):
            return first.stack
    rows = gather(list(rows))
    return (
        np.stack(rows) if all(isinstance(row, np.ndarray) for row in rows) else typed(jnp.stack(rows), False)
    )


def _row(stack: Any, layer: int, weak: bool) -> Any:
    """One layer's of a stack."""
    if isinstance(stack, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, weak_type=weak)
    if hasattr(stack, "placement"):
        return LayerLeaf(stack, layer, weak)
    return typed(stack[layer], weak) if isinstance(stack, jax.Array) else stack[layer]
