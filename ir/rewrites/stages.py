"""Scans over layers become stages: see `shardwright.ir.stages`.

    staged(traced, pieces)     the step with its scans over layers done on `pieces` pieces of the batch

What a piece of the batch makes of every layer is what micro-batches ask, too (`ir/rewrites/pieces.py`). But
here the loop over pieces is around each scan alone: what is between scans, such as the loss, sees all of the
batch at once, and may need all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from shardwright.ir.dtypes import dtype_of, is_key
from shardwright.ir.graph import Atom, Equation, Form, Graph, TensorType, Value
from shardwright.ir.jaxpr import Builder
from shardwright.ir.placement import Partial, Placement, Shard
from shardwright.ir.regions import scan_counts
from shardwright.ir.rewrites.batch import batch_of
from shardwright.ir.rewrites.microbatch import Runner
from shardwright.ir.rewrites.pieces import (
    INVARIANT,
    Kind,
    NotInPiecesError,
    Pieces,
    Split,
    refuse,
    without_state,
)
from shardwright.ir.rules import Signature
from shardwright.ir.stages import STAGES, Going, Layers, piece_type, stages_p
from shardwright.ir.trace import Traced


def staged(traced: Traced, pieces: int) -> Traced:
    """The step with its scans over layers done on so many pieces of the batch, layers being free to be cut.

    Raises:
        NotInPiecesError: the batch has no such number of equal pieces, or no scan over layers comes in them.
    """
    graph = traced.graph
    try:
        found, why = _splits(graph, pieces)
    except NotInPiecesError as error:
        if graph.state:
            raise
        raise without_state(error, "stages='off'") from error
    runner = Runner(traced.primitives, pieces, stretches=True)
    changed = {e: _changed(e, found, runner) for e in graph.equations if e.index in found.inner}
    instead = {e: new for e, new in changed.items() if new is not None}
    if not instead:
        cause = "" if why is None else f": {why.place} {why.reason}"
        raise refuse(f"no scan over layers comes in pieces{cause}", "stages", _REMEDY)
    equations = tuple([instead.get(equation, equation) for equation in graph.equations])
    primitives = {**traced.primitives, STAGES: stages_p}
    return replace(traced, graph=replace(graph, equations=equations, memo={}), primitives=primitives)


_REMEDY = "Plan with stages='off', or scan over the layers: shardwright.scan_layers has a step do so"


def _splits(graph: Graph, pieces: int) -> tuple[Split, NotInPiecesError | None]:
    """What values are in pieces, of scans what is in them; and what is in the way, of a scan before others.

    Where something needs all of the batch at once, what comes after it is not known to be in pieces. Of a
    scan there, what is of a type that comes in pieces elsewhere is taken to come so as well: whether a layer
    can be done so, its rules say.
    """
    batch, known = batch_of(graph, pieces, STAGES), Pieces(pieces)
    try:
        return known.of_step(graph, batch), None
    except NotInPiecesError as error:
        found, why = known.found, error
    types: dict[TensorType, Shard] = {}
    for value, kind in found.kinds.items():
        if isinstance(kind, Shard):
            types.setdefault(value.type, kind)
    for loop in graph.equations:
        if loop.primitive == "scan" and loop.index not in found.inner:
            kinds = [_kind(atom, found, types) for atom in loop.inputs]
            try:
                known.of_scan(loop, found, kinds)
            except NotInPiecesError as error:
                why = error
    return found, why


def _kind(atom: Atom, found: Split, types: Mapping[TensorType, Shard]) -> Kind:
    """What an operand of a scan is; if nothing is known, it goes with every piece as it is."""
    if not isinstance(atom, Value) or found.kinds.get(atom) == INVARIANT:
        return INVARIANT
    kind = found.kinds.get(atom)
    return kind if isinstance(kind, Shard) else types.get(atom.type, INVARIANT)


def _changed(loop: Equation, found: Split, runner: Runner) -> Equation | None:
    """A scan as stages; None where it is none over layers, or pieces of it are not alike."""
    if loop.primitive != "scan" or loop.params["length"] < 2:
        return None
    (split,), signature = found.inner[loop.index], found.local[loop.index]
    consts, carries = scan_counts(loop.params)
    walked = signature.ins[consts + carries :]
    carried = signature.ins[consts : consts + carries]
    # A sum over pieces is not there while the next piece passes; rows are what stages have for themselves.
    passed = all(not isinstance(p, Partial) for p in signature.ins)
    if not (walked and passed and any(isinstance(p, Shard) for p in carried)):
        return None
    if any(is_key(tensor.dtype) for tensor in loop.output_types):
        return None
    (region,) = loop.regions
    layers = _layers(loop, region, split, signature, runner)
    form = Form(STAGES, {"layers": layers}, loop.input_types, loop.output_types)
    return replace(loop, form=form, regions=())


def _layers(loop: Equation, region: Graph, split: Split, signature: Signature, runner: Runner) -> Layers:
    consts, carries = scan_counts(loop.params)
    # Of what a scan walks over, the signature is that of one iteration.
    pairs = [(v.type, p) for v, p in zip(region.inputs, signature.ins, strict=True)]
    types = [piece_type(tensor, _going(p, tensor, runner.count)) for tensor, p in pairs]

    def layer(*operands: Any) -> list[Any]:
        *own, runner.number = operands
        return runner.region(region, split, *own)

    number = jax.ShapeDtypeStruct((), "int32")
    closed = jax.make_jaxpr(layer)(*map(_abstract, types), number)
    builder = Builder()
    builder.forms.adopt(region.equations)
    return Layers(
        consts=consts,
        carries=carries,
        length=loop.params["length"],
        reverse=loop.params["reverse"],
        pieces=runner.count,
        ins=tuple(
            [
                _going(placement, tensor, runner.count, stacked=k >= consts + carries)
                for k, (placement, tensor) in enumerate(zip(signature.ins, loop.input_types, strict=True))
            ]
        ),
        outs=tuple(
            [_going(*pair, runner.count) for pair in zip(signature.outs, loop.output_types, strict=True)]
        ),
        body=closed,
        graph=builder.graph(closed.jaxpr, closed.consts),
        source=region,
    )


def _going(placement: Placement, tensor: TensorType, pieces: int, *, stacked: bool = False) -> Going:
    """How a tensor goes with pieces that lie as devices would; `stacked`: as seen in one iteration."""
    if isinstance(placement, Shard):
        dim = placement.dim + stacked
        return Shard(dim, tensor.shape[dim] // pieces)
    return placement.op if isinstance(placement, Partial) else None


def _abstract(tensor: TensorType) -> Any:
    return jax.ShapeDtypeStruct(tensor.shape, dtype_of(tensor.dtype))
