"""Which equations decide together: the fusion that keeps the choice graph narrow.

Elementwise equations that hand each other tensors of one shape and width are merged into a *class* and
computed in one placement: changing the placement between them costs as much as changing it at their
border. Never merged: across a change of width; an addition that joins tensors used elsewhere (a residual
stream, whose branches may be placed differently); and an equation through which a Partial(sum) may pass
with one through which it may not (gradients stay Partial up to the optimizer), unless the former takes
one tensor and hands it to the latter alone, so that reducing before or after it is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from shardwright.ir.graph import Equation, Graph, Value, per_form
from shardwright.ir.registry import registry, rule_of
from shardwright.ir.rules import passes_through
from shardwright.ir.table import Flags, Numbers, Table, table


@dataclass(frozen=True, slots=True)
class Fusion:
    """The classes of one graph; equations and values are their indices, see `shardwright.ir.table`.

    Attributes:
        of_equation: number of the class of every equation, -1 where it was not merged.
        of_value: the class in whose placement every value is computed, or in which its only users are; -1
            without one.
        within: of every operand, whether its equation takes it in the placement of its class.
        outside: how many use every value but its own class: equations, and the graph's outputs. Equations
            outside share one conversion each, which is therefore to be paid once.
        sums: of every class, whether its placement may be Partial(sum).
    """

    of_equation: Numbers
    of_value: Numbers
    within: Flags
    outside: Numbers
    sums: Flags


@per_form
def kind(equation: Equation) -> str:
    """Kind of an equation's primitive, "unknown" where there is no rule for it."""
    op = registry().get(equation.primitive)
    return "region" if equation.regions else op.kind if op is not None else "unknown"


def fuse(graph: Graph, may_sum: Flags, hubs: Flags) -> Fusion:
    """Merge elementwise equations into classes, and find every value's users.

    Args:
        graph: the graph.
        may_sum: of every value, whether it may arrive as Partial(sum) at all.
        hubs: of every value, whether it has a placement of its own (`shardwright.synth.space.wide`), and is
            in no class whoever reads it.
    """
    found = table(graph)
    count, values = len(found.form), len(found.handed_out)
    read, reader = found.readers(found.operands >= 0)
    readers = np.bincount(read, minlength=values)
    likes = found.by_form(_like)
    together = found.by_operand(
        [
            tuple([like is not None and k in like.together for k in range(len(example.inputs))])
            for like, example in zip(likes, found.examples, strict=True)
        ]
    )
    merged = np.array([like is not None for like in likes], dtype=np.bool_)[found.form]
    joins = np.array([like is not None and like.joins for like in likes], dtype=np.bool_)[found.form]
    elsewhere = (readers + found.handed_out > 1)[found.operands]
    merged &= ~found.any_of(together & elsewhere & joins[found.reader])
    together &= merged[found.reader]
    passes = np.array([like is not None and like.passes for like in likes], dtype=np.bool_)[found.form]
    passes &= merged & found.any_of(together & may_sum[found.operands])
    inside = found.readers(together)
    #: Values that only equations read which they may share a class with.
    alone = (readers > 0) & (np.bincount(inside[0], minlength=values) == readers) & ~found.handed_out & ~hubs
    _hand_on(passes, found, inside, alone)

    made_by = np.full(values, -1)
    made_by[found.results] = found.maker
    maker, user = made_by[inside[0]], inside[1]
    tied = (maker >= 0) & merged[maker] & (passes[maker] == passes[user])
    ties = sparse.coo_matrix((np.ones(tied.sum()), (maker[tied], user[tied])), shape=(count, count))
    labels = csgraph.connected_components(ties, directed=False)[1][merged] if count else made_by[:0]
    of_equation, of_value = np.full(count, -1), np.full(values, -1)
    leaders, of_equation[merged] = np.unique(labels, return_index=True, return_inverse=True)[1:]
    mine = merged[found.maker]
    of_value[found.results[mine]] = of_equation[found.maker[mine]]
    # A value from elsewhere is of the class in which all of its users are.
    lowest, highest = np.full(values, count), np.full(values, -1)
    np.minimum.at(lowest, read, of_equation[reader])
    np.maximum.at(highest, read, of_equation[reader])
    within = alone & (of_value < 0) & (lowest == highest)
    of_value[within] = highest[within]

    apart = (of_equation[reader] < 0) | (of_equation[reader] != of_value[read])
    sums = np.zeros(len(leaders), dtype=np.bool_)
    taking, giving = together & may_sum[found.operands], mine & may_sum[found.results]
    sums[of_equation[found.reader[taking]]] = True
    sums[of_equation[found.maker[giving]]] = True
    return Fusion(
        of_equation,
        of_value,
        within=together & (of_value[found.operands] == of_equation[found.reader]),
        outside=np.bincount(read[apart], minlength=values) + found.handed_out,
        sums=sums & passes[merged][leaders],
    )


def _hand_on(passes: Flags, found: Table, inside: tuple[Numbers, Numbers], alone: Flags) -> None:
    """Take a Partial(sum) out of `passes` where to reduce it before or after an equation is the same.

    That is where the equation takes one tensor and hands its result to equations alone through which none
    may pass, for them to share a class with.

    Args:
        passes: of every equation, whether a Partial(sum) may pass.
        found: the graph.
        inside: values, and equations that may share a class with them.
        alone: of every value, whether nobody else reads it.
    """
    read, reader = inside
    takes_one = np.bincount(reader, minlength=len(passes)) == 1
    candidates = np.flatnonzero(passes & takes_one)
    results = found.results[found.made[candidates]]
    handed_on = alone[results]
    candidates, results = candidates[handed_on], results[handed_on]
    begin, end = (np.searchsorted(read, results, side=side).tolist() for side in ("left", "right"))
    users, still = reader.tolist(), passes.tolist()
    for which in range(len(candidates) - 1, -1, -1):
        if True not in [still[user] for user in users[begin[which] : end[which]]]:
            still[candidates[which]] = False
    passes[:] = still


class _Like(NamedTuple):
    """What decides on merging an elementwise equation.

    Attributes:
        together: positions of the operands that have the shape and width of the result.
        joins: whether it adds tensors of equal shape: a residual stream, if they are used elsewhere too.
        passes: whether Partial(sum) passes through all of `together` at once, the others being replicated.
    """

    together: tuple[int, ...]
    joins: bool
    passes: bool


@per_form
def _like(equation: Equation) -> _Like | None:
    """None where an equation cannot be merged, whatever is around it."""
    if kind(equation) != "elementwise" or len(equation.outputs) != 1:
        return None
    out = equation.output_types[0]
    together = tuple(
        k
        for k, atom in enumerate(equation.inputs)
        if isinstance(atom, Value) and atom.type.shape == out.shape and atom.type.nbytes == out.nbytes
    )
    if not together:
        return None
    joins = equation.primitive in ("add", "add_any") and len(together) > 1
    return _Like(together, joins, passes_through(rule_of(equation), equation, together))
