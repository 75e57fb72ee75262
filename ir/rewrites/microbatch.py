"""Micro-batches: forward and backward part run on one piece of the batch after another; sums are added up.

    microbatched(traced, count)     the step with a loop over `count` pieces of its batch

The rules that say how an equation is sharded over devices say as well how it is done piece by piece: with the
batch as a letter, what is sharded stays in pieces, and what is partial (a gradient, the loss) is the sum over
pieces, or the largest or smallest of them. So every value is one of these:

    invariant   depends on no data: computed once, before the loop
    in pieces   `Shard(dim)`: computed piece by piece in the loop
    partial     a sum over pieces, or a maximum: added up by the loop
    later       made of such sums: computed after the loop, as the optimizer's part is

What the loop wants to know of the whole batch beforehand, such as how many of its labels count, is worked out
ahead of it where that takes little (`Pieces.of_step`).

The loop is a scan whose carry are the sums: to planner and backends a loop like any other, whose body is
distributed over the devices. What a scan in it stacks up is added up within that scan (`adding.py`). Piece k
has every `count`-th row from k on, so that a device which holds a stretch of the batch has its share of every
piece, without any exchange. Sums are taken in another order than in one go, and the results differ by that
rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.ir.collectives import identity
from shardwright.ir.dtypes import dtype_of
from shardwright.ir.graph import Atom, Equation, Form, Forms, Graph, TensorType, Value
from shardwright.ir.jaxpr import Builder, source_text
from shardwright.ir.placement import Partial, Placement, ReduceOp, Shard, region
from shardwright.ir.regions import scan_counts
from shardwright.ir.registry import Extent, Local, registry
from shardwright.ir.rewrites import adding
from shardwright.ir.rewrites.batch import batch_of
from shardwright.ir.rewrites.graphs import renumbered, with_inputs
from shardwright.ir.rewrites.pieces import (
    INVARIANT,
    LATER,
    NotInPiecesError,
    Pieces,
    Split,
    placed,
    refuse,
    without_state,
)
from shardwright.ir.rewrites.replay import as_traced, results_of
from shardwright.ir.rows import in_pieces, piece_of, together
from shardwright.ir.rules import Signature
from shardwright.ir.trace import Traced


def microbatched(traced: Traced, count: int) -> Traced:
    """The step with a loop over `count` pieces of its batch.

    The batch is the arguments that are no state and have one number of rows (dimension 0): of several numbers
    the one by which most of what the step makes comes in pieces.

    Raises:
        NotInPiecesError: the batch has no such number of equal pieces, or something needs all of it at once.
    """
    graph = traced.graph
    pieces = Pieces(count)
    try:
        split = pieces.of_step(graph, batch_of(graph, count))
    except NotInPiecesError as error:
        if graph.state:
            raise
        raise without_state(error, "microbatches=1") from error
    later = [e for e in graph.equations if any(split.kinds[value] == LATER for value in e.outputs)]
    read = (atom for some in (*(e.inputs for e in later), graph.outputs) for atom in some)
    made = {value for equation in later for value in equation.outputs}.union(graph.inputs)
    handed_on = [atom for atom in dict.fromkeys(read) if isinstance(atom, Value) and atom not in made]
    avals = [_abstract(value.type) for value in graph.inputs]
    closed = jax.make_jaxpr(Runner(traced.primitives, count).until_later(graph, split, handed_on))(*avals)
    builder = Builder()
    builder.forms.adopt(graph.equations)
    loop = builder.graph(closed.jaxpr, closed.consts)
    named: dict[Atom, Atom] = dict(zip(graph.inputs, loop.inputs, strict=True))
    named.update(zip(handed_on, loop.outputs, strict=True))
    found = renumbered(
        replace(graph, inputs=loop.inputs, constants=loop.constants),
        [*loop.equations, *(_on(equation, named, builder.forms) for equation in later)],
        outputs=[named.get(atom, atom) for atom in graph.outputs],
    )
    return replace(traced, graph=found, primitives={**traced.primitives, **builder.primitives})


def _before(equation: Equation, split: Split) -> bool:
    """Whether an equation is done once, before the loop."""
    if equation.index in split.ahead:
        return True
    invariant = all(split.kinds[value] == INVARIANT for value in equation.outputs)
    return invariant and equation.index not in split.local


def _leading_to(wanted: Iterable[Value], equations: Sequence[Equation]) -> list[Equation]:
    """Those of some equations without which values cannot be made."""
    needed, found = set(wanted), list[Equation]()
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outputs):
            needed.update(equation.input_values)
            found.append(equation)
    return found[::-1]


def _on(equation: Equation, named: Mapping[Atom, Atom], forms: Forms) -> Equation:
    """An equation on what its operands have become."""
    inputs = tuple([named.get(atom, atom) for atom in equation.inputs])
    found = with_inputs(equation, inputs)
    if list(map(type, inputs)) == list(map(type, equation.inputs)):
        return found
    # The form of an equation says which literals it has.
    return replace(found, form=forms.of(equation.primitive, equation.params, inputs, equation.outputs))


def _abstract(tensor: TensorType) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tensor.shape, dtype_of(tensor.dtype))


Env: TypeAlias = dict[Value, Any]

#: What becomes of the result for pieces so far and that for one more.
_ADDED = {"sum": operator.add, "max": jnp.maximum, "min": jnp.minimum}


def _nothing(tensor: TensorType, op: ReduceOp) -> Any:
    """The result for no pieces."""
    return jnp.full(tensor.shape, identity(op, dtype_of(tensor.dtype)), dtype_of(tensor.dtype))


class Runner:
    """Writes the step down as JAX code.

    Args:
        primitives: JAX primitives by name.
        count: of pieces.
        stretches: whether a piece is a stretch of the batch, rather than every `count`-th row of it.
    """

    def __init__(self, primitives: Mapping[str, Any], count: int, *, stretches: bool = False) -> None:
        self.primitives, self.count, self.stretches = primitives, count, stretches
        self.ratios = (1.0 / count,) * count
        #: Forms and signatures of equations that are the same computation on every piece.
        self.alike: set[tuple[Form, Signature]] = set()
        #: Where pieces of tensors lie.
        self.extents: dict[tuple[int, TensorType, Placement], tuple[Extent, ...]] = {}
        #: Of the piece that the loop is at, where a loop inside of it wants to know.
        self.number: Any = None
        #: Sums so far of what a scan stacks up: it adds its own to them.
        self.totals: Mapping[Value, Any] = {}

    def until_later(self, graph: Graph, split: Split, handed_on: Sequence[Value]) -> Callable[..., list[Any]]:
        """The step up to the end of its loop, as a function of flat arguments: what it hands on."""
        local = [e for e in graph.equations if e.index in split.local]
        before = [e for e in graph.equations if _before(e, split)]
        made = {value for e in local for value in e.outputs}
        kinds = {value: split.kinds[value] for value in handed_on if value in made}
        sums: dict[Value, ReduceOp] = {
            value: kind.op for value, kind in kinds.items() if isinstance(kind, Partial)
        }
        rows = {value: kind for value, kind in kinds.items() if isinstance(kind, Shard)}
        in_loop = _leading_to([*sums, *rows], local)
        sliced = list(self._sliced(graph, in_loop, split))
        inside = adding.added_inside(in_loop, sums)

        def run(*flat: Any) -> list[Any]:
            env: Env = dict(zip(graph.inputs, flat, strict=True))
            env.update((value, jnp.asarray(array)) for value, array in graph.constants.items())
            for equation in before:
                self._whole(equation, env)
            pieces = [in_pieces(env[value], cut, self.count) for value, cut in sliced]
            numbered = bool(split.inside) or self.cuts_inside(split)
            if numbered:
                pieces.append(jnp.arange(self.count))

            def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                here: dict[tuple[Value, Placement], Any] = {
                    (value, cut): x for (value, cut), x in zip(sliced, xs, strict=not numbered)
                }
                own, totals = dict(env), dict(zip(sums, carry, strict=True))
                self.number = xs[-1] if numbered else None
                self.totals = {value: totals.pop(value) for value in inside}
                self._piece(in_loop, split, own, here)
                own.update((value, _ADDED[sums[value]](total, own[value])) for value, total in totals.items())
                return [own[value] for value in sums], [own[value] for value in rows]

            start = [_nothing(value.type, op) for value, op in sums.items()]
            with _marked("jvp()"):
                totals, stacked = jax.lax.scan(body, start, pieces, length=self.count)
            env.update(zip(sums, totals, strict=True))
            for (value, cut), x in zip(rows.items(), stacked, strict=True):
                env[value] = together(x, value.type.shape, cut, self.count)
            return [env[value] for value in handed_on]

        return run

    def _sliced(
        self, graph: Graph, in_loop: Sequence[Equation], split: Split
    ) -> Iterable[tuple[Value, Shard]]:
        """What the loop takes in pieces: the batch, and invariant tensors that go with it row by row."""
        found: dict[tuple[Value, Shard], None] = {}
        for value in graph.inputs:
            kind = split.kinds[value]
            if isinstance(kind, Shard):
                found[value, kind] = None
        for equation in in_loop:
            for atom, wanted in _wanted(equation, split.local[equation.index]):
                if not isinstance(atom, Value) or not isinstance(wanted, Shard) or atom in split.inside:
                    continue
                if split.kinds[atom] == INVARIANT and not split.spread(atom, wanted.dim):
                    found[atom, wanted] = None
        return found

    def _piece(
        self,
        equations: Sequence[Equation],
        split: Split,
        env: Env,
        here: dict[tuple[Value, Placement], Any],
    ) -> None:
        """Run equations on a piece."""
        for equation in equations:
            signature = split.local.get(equation.index)
            if signature is None:
                self._whole(equation, env)
                continue
            args = [self._operand(a, wanted, split, env, here) for a, wanted in _wanted(equation, signature)]
            with as_traced(equation):
                if equation.primitive == "cond":
                    results = self._cond(equation, split.inner[equation.index], args)
                elif equation.regions:
                    results = self._scan(equation, split.inner[equation.index], args)
                else:
                    results = self._local(equation, signature, args)
            env.update(zip(equation.outputs, results, strict=True))

    def _operand(
        self,
        atom: Atom,
        wanted: Placement,
        split: Split,
        env: Env,
        here: dict[tuple[Value, Placement], Any],
    ) -> Any:
        if not isinstance(atom, Value):
            return self._read(atom, env)
        if (atom, wanted) in here:
            return here[atom, wanted]
        if isinstance(wanted, Shard) and split.kinds[atom] == INVARIANT:
            maker = split.spread(atom, wanted.dim)
            if maker is None:
                unit = atom.type.shape[wanted.dim] // self.count if self.stretches else wanted.unit
                here[atom, wanted] = piece_of(env[atom], Shard(wanted.dim, unit), self.count, self.number)
                return here[atom, wanted]
            shape = list(atom.type.shape)
            shape[wanted.dim] //= self.count
            x = self._read(maker.inputs[0], env)
            here[atom, wanted] = jax.lax.broadcast_in_dim(x, shape, maker.params["broadcast_dimensions"])
            return here[atom, wanted]
        return env[atom]

    def cuts_inside(self, split: Split) -> bool:
        """Whether scans and conds in the loop take pieces of what is the same for all of them."""
        for equation in _done_on_pieces(split):
            for body, inside in zip(equation.regions, split.inner.get(equation.index, ()), strict=True):
                wanted = list(zip(body.outputs, map(placed, inside.ends), strict=True))
                for each in _done_on_pieces(inside):
                    wanted += _wanted(each, inside.local[each.index])
                if any(self._is_cut(*pair, inside) for pair in wanted) or self.cuts_inside(inside):
                    return True
        return False

    def _is_cut(self, atom: Atom, wanted: Placement, split: Split) -> bool:
        """Whether an operand is a piece of what is the same for all, and was made in one piece."""
        if not isinstance(atom, Value) or not isinstance(wanted, Shard) or split.kinds[atom] != INVARIANT:
            return False
        return split.spread(atom, wanted.dim) is None

    def _local(self, equation: Equation, signature: Signature, args: Sequence[Any]) -> list[Any]:
        """An equation on a piece; whichever piece it is, it must be the same computation."""
        op, primitive = registry()[equation.primitive], self.primitives[equation.primitive]
        if not any(isinstance(p, Shard) for p in (*signature.ins, *signature.outs)):
            return self._bound(primitive.bind(*args, **equation.params))

        def run(member: int, *args: Any) -> Any:
            ins = tuple(map(self._extents(member), equation.input_types, signature.ins))
            outs = tuple(map(self._extents(member), equation.output_types, signature.outs))
            params = dict(equation.params)
            params.update(dict.fromkeys(op.shape_params, tuple(e.length for e in outs[0])))
            if op.localize is None:
                return primitive.bind(*args, **params)
            return op.localize(Local(params, ins, outs, signature.ins, primitive.bind, jax), *args)

        if op.localize is not None and (equation.form, signature) not in self.alike:
            texts = {str(jax.make_jaxpr(partial(run, member))(*args)) for member in (0, self.count - 1)}
            if len(texts) > 1:
                raise refuse(
                    "depends on where in the batch it is",
                    f"{equation.primitive} at {source_text(equation.source)}",
                )
            self.alike.add((equation.form, signature))
        return self._bound(run(0, *args))

    def _extents(self, member: int) -> Callable[[TensorType, Placement], tuple[Extent, ...]]:
        def of(tensor: TensorType, placement: Placement) -> tuple[Extent, ...]:
            key = member, tensor, placement
            if key not in self.extents:
                held = region(tensor.shape, placement, member, self.ratios)
                pairs = zip(tensor.shape, held, strict=True)
                self.extents[key] = tuple([Extent(size, offset, length) for size, (offset, length) in pairs])
            return self.extents[key]

        return of

    def _cond(self, equation: Equation, splits: Sequence[Split], args: Sequence[Any]) -> list[Any]:
        """A cond on a piece."""
        which, *operands = args
        branches = [
            partial(self.region, branch, split)
            for branch, split in zip(equation.regions, splits, strict=True)
        ]
        return jax.lax.switch(which, branches, *operands)

    def _scan(self, equation: Equation, splits: Sequence[Split], args: Sequence[Any]) -> list[Any]:
        """A scan on a piece."""
        (body,), (split,) = equation.regions, splits
        return adding.scan(equation, args, partial(self.region, body, split), self.totals)

    def region(self, body: Graph, split: Split, *operands: Any) -> list[Any]:
        """The body of a scan, or the branch of a cond, on a piece."""
        env: Env = dict(zip(body.inputs, operands, strict=True))
        env.update((value, jnp.asarray(array)) for value, array in body.constants.items())
        here: dict[tuple[Value, Placement], Any] = {}
        self._piece(body.equations, split, env, here)
        ends = zip(body.outputs, map(placed, split.ends), strict=True)
        return [self._operand(atom, wanted, split, env, here) for atom, wanted in ends]

    def _whole(self, equation: Equation, env: Env) -> None:
        """Run an equation as it is."""
        results = results_of(equation, self.primitives, [self._read(a, env) for a in equation.inputs])
        env.update(zip(equation.outputs, results, strict=True))

    def _bound(self, results: Any) -> list[Any]:
        return list(results) if isinstance(results, (tuple, list)) else [results]

    def _read(self, atom: Atom, env: Env) -> Any:
        return env[atom] if isinstance(atom, Value) else np.asarray(atom.value, dtype_of(atom.type.dtype))


def _done_on_pieces(split: Split) -> Iterable[Equation]:
    """The equations of a graph that are done on every piece."""
    return (equation for equation in dict.fromkeys(split.makers.values()) if equation.index in split.local)


def _wanted(equation: Equation, signature: Signature) -> Iterable[tuple[Atom, Placement]]:
    """Operands and how they are wanted: of what a scan walks over, the signature is that of one iteration."""
    walked = sum(scan_counts(equation.params)) if equation.primitive == "scan" else len(equation.inputs)
    for position, (atom, wanted) in enumerate(zip(equation.inputs, signature.ins, strict=True)):
        if position >= walked and isinstance(wanted, Shard):
            wanted = Shard(wanted.dim + 1, wanted.unit)
        yield atom, wanted


def _marked(name: str) -> Any:
    """Context in which what is traced is named so."""
    return jax.named_scope(name)
