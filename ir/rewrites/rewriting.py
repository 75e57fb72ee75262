"""How a plan changes the step before it distributes it; what the step computes stays the same.

A rewriting is a few numbers, and applying it needs nothing else: a plan file has the rewriting, and whoever
loads it traces the step and applies it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from shardwright.ir.graph import Equation, Form, Graph, Value
from shardwright.ir.host import RELOAD, reload_p
from shardwright.ir.rewrites.graphs import renumbered
from shardwright.ir.rewrites.microbatch import microbatched
from shardwright.ir.rewrites.recompute import Stretch, recomputing
from shardwright.ir.rewrites.stages import staged
from shardwright.ir.trace import Traced


@dataclass(frozen=True, slots=True)
class Rewriting:
    """What is changed.

    Attributes:
        recompute: stretches of the forward part that the backward part computes again, or what is kept of
            which waits in host memory, by equations of `differentiated`, ascending.
        microbatches: in so many equal pieces of the batch forward and backward part run, one after another.
        stages: the layers of scans may lie on different devices, which hand on so many pieces of the batch
            (see `shardwright.ir.stages`); not together with micro-batches.
    """

    recompute: tuple[Stretch, ...] = ()
    microbatches: int = 1
    stages: int = 1

    def __bool__(self) -> bool:
        return self != AS_TRACED

    def to_dict(self) -> dict[str, Any]:
        """Plain data, see `plan.schema.json`."""
        return {
            "recompute": [
                {"name": s.name, "first": s.first, "last": s.last, "keep": s.keep, "host": s.host}
                for s in self.recompute
            ],
            "microbatches": self.microbatches,
            **({} if self.stages == 1 else {"stages": self.stages}),
        }

    @staticmethod
    def from_dict(data: Any) -> Rewriting:
        """Inverse of `to_dict`."""
        again = tuple(Stretch(**entry) for entry in data.get("recompute", ()))
        return Rewriting(again, data.get("microbatches", 1), data.get("stages", 1))


#: No change.
AS_TRACED = Rewriting()


def original(traced: Traced) -> Traced:
    """The step as it was traced."""
    return traced if traced.origin is None else traced.origin


def rewriting_of(traced: Traced) -> Rewriting:
    """How a step was changed since it was traced."""
    return traced.rewriting if isinstance(traced.rewriting, Rewriting) else AS_TRACED


def rewritten(traced: Traced, rewriting: Rewriting) -> Traced:
    """A step, changed; of one that was changed already, its origin is.

    Its fingerprint is still that of the step as it was traced.

    Raises:
        PlanError: the rewriting is of another step.
        InputError: the step cannot be run in so many micro-batches.
    """
    if rewriting_of(traced) == rewriting:
        return traced
    source = original(traced)
    if not rewriting:
        return source
    known = cast("dict[Rewriting, Traced]", source.graph.memo.setdefault(Rewriting, {}))
    if rewriting not in known:
        if rewriting.stages > 1:
            changed = staged(rewritten(source, replace(rewriting, stages=1)), rewriting.stages)
        elif rewriting.microbatches > 1 and not rewriting.recompute:
            changed = microbatched(source, rewriting.microbatches)
        else:
            pieces = rewritten(source, replace(rewriting, recompute=()))
            graph = differentiated(pieces)
            again = recomputing(graph, rewriting.recompute)
            changed = replace(
                pieces,
                graph=again if graph is pieces.graph else _with_body(pieces.graph, again),
                primitives={**pieces.primitives, RELOAD: reload_p},
            )
        known[rewriting] = replace(changed, origin=source, rewriting=rewriting)
    return known[rewriting]


def differentiated(traced: Traced) -> Graph:
    """The graph that forward and backward part are in: the step's, or the body of its loop over pieces.

    The body's inputs have the names of what comes in, and parameters count as its state.
    """
    graph = traced.graph
    loop = None if rewriting_of(traced).microbatches == 1 else _loop(graph)
    if loop is None:
        return graph
    (body,) = loop.regions
    state = {graph.inputs[position] for position in graph.state.values()}
    named = dict(zip(graph.inputs, graph.input_names, strict=False))
    held = [i for i, atom in enumerate(loop.inputs[: len(body.inputs)]) if atom in state]
    return replace(
        body,
        outputs=(*body.outputs, *(body.inputs[i] for i in held)),
        input_names=tuple(named.get(atom, "") if isinstance(atom, Value) else "" for atom in loop.inputs),
        state={len(body.outputs) + number: i for number, i in enumerate(held)},
        memo={},
    )


def _loop(graph: Graph) -> Equation | None:
    """The loop over pieces of the batch: the only one in which forward and backward part both are."""
    for equation in graph.equations:
        if equation.primitive == "scan":
            parts = {inner.part for region in equation.regions for inner in region.equations}
            if {"forward", "backward"} <= parts:
                return equation
    return None


def _with_body(graph: Graph, body: Graph) -> Graph:
    """The graph with another body of its loop over pieces, one that `differentiated` gave and was changed."""
    loop = _loop(graph)
    assert loop is not None, "the loop is there: `differentiated` found it"
    outputs = body.outputs[: len(loop.regions[0].outputs)]
    region = renumbered(replace(body, outputs=outputs, input_names=(), state={}, memo={}), body.equations)
    form = Form("scan", dict(loop.params), loop.input_types, loop.output_types)
    changed = replace(loop, form=form, regions=(region,))
    equations = tuple(changed if equation is loop else equation for equation in graph.equations)
    return replace(graph, equations=equations, memo={})
