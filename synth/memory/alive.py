"""What is alive in memory whatever the placements, and in whatever order the equations run.

Rent (`rent.py`) and the question whether anything can fit at all rest on it: tensors that must live at one
moment, each counted once; those that the forward part keeps; and the results that are there in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from shardwright.cost.memory.liveness import stored, total_bytes
from shardwright.cost.memory.written import Written, written
from shardwright.cost.traffic import ALIASES
from shardwright.ir.graph import Equation, Graph, Value, per_graph
from shardwright.ir.host import is_reload
from shardwright.ir.regions import stacked_results
from shardwright.ir.table import table

#: Moments looked at of each kind, see `must_live`.
_MOMENTS = 8


@per_graph
def most_alive(graph: Graph) -> int:
    """Bytes of inputs and of what is in memory at the fullest moment of the order as traced.

    What lives in every order (`must_live`) lives in this one.
    """
    held = stored(graph)
    last = {value.index: equation.index for equation in graph.equations for value in equation.input_values}
    change = [0] * (len(graph.equations) + 1)
    for equation in graph.equations:
        for value in equation.outputs:
            if value.index in held:
                change[equation.index] += value.type.nbytes
                change[last.get(value.index, equation.index) + 1] -= value.type.nbytes
    return sum(value.type.nbytes for value in graph.inputs) + max(accumulate(change))


def crowded(graph: Graph, nbytes: float) -> bool:
    """Whether `most_alive` is more than so many bytes; it is not asked where all tensors together are not."""
    return total_bytes(graph) > nbytes and most_alive(graph) > nbytes


@per_graph
def kept_values(graph: Graph) -> tuple[Value, ...]:
    """What the forward part keeps for the backward part in memory; of tensors that share it, one."""
    return _apart(graph, [value for _, value in graph.residuals if value is not None], stored(graph))


@per_graph
def _makers(graph: Graph) -> Mapping[Value, Equation]:
    """The equation that makes a value, of all that are no inputs or constants."""
    return {value: equation for equation in graph.equations for value in equation.outputs}


def _apart(
    graph: Graph, values: Iterable[Value], kept: Collection[int], elsewhere: Iterable[Value] = ()
) -> tuple[Value, ...]:
    """Those that equations make and that are in memory; of tensors that share it, or that of others, one."""
    made = _makers(graph)
    found: dict[Value, None] = {}
    roots = {_root(value, made) for value in elsewhere}
    if graph.donated:  # what continues state lies where that lay, which is counted
        state = [graph.outputs[out] for out in graph.state]
        roots.update(_root(atom, made) for atom in state if isinstance(atom, Value))
    for value in values:
        if value.index not in kept:
            continue
        root = _root(value, made)
        if root in made and root not in roots:
            roots.add(root)
            found[value] = None
    return tuple(found)


def _root(value: Value, made: Mapping[Value, Equation]) -> Value:
    """The tensor whose memory another one shares."""
    while value in made and made[value].primitive in ALIASES and made[value].input_values:
        value = made[value].input_values[0]
    return value


@per_graph
def final_values(graph: Graph) -> tuple[Value, ...]:
    """Results that are there in the end beside all inputs; of tensors that share memory, one.

    What continues donated state may lie where that lay.
    """
    results = [atom for atom in graph.outputs if isinstance(atom, Value)]
    return _apart(graph, results, written(graph).values)


@per_graph
def must_live(graph: Graph) -> tuple[Value, ...]:
    """Many tensors that live at one moment in every order of the equations.

    The moment is when some value z is made: what z depends on was made, and what has a reader that depends on
    z is not freed; nor is what z is made of, unless z may be written over it. Of the moments when large
    tensors are made, or the last that the backward part needs, or when loops run, the fullest counts.
    """
    held = written(graph)
    alive = _alive(graph, held, _large_or_late(graph, held), _loops(graph))
    return max(alive, key=nbytes_of, default=())


@per_graph
def sure_bytes(graph: Graph) -> int:
    """Bytes beside the inputs in memory at some moment in every order, those within a loop included."""
    return _sure_bytes(graph, written(graph), ())


def _sure_bytes(graph: Graph, held: Written, elsewhere: Collection[Value]) -> int:
    """The same; `elsewhere` are results of a loop's body that may lie where those of the loop do."""
    loops, large = _loops(graph), _large_or_late(graph, held)
    alive = _alive(graph, held, large, loops, elsewhere)
    found = max(map(nbytes_of, alive[: len(large)]), default=0)
    for loop, mine in zip(loops, alive[len(large) :], strict=True):
        found = max(found, nbytes_of(mine) + _inside(loop, held.regions[loop.index]))
    return found


def _loops(graph: Graph) -> list[Equation]:
    return [equation for equation in graph.equations if equation.regions and equation.outputs]


def _inside(loop: Equation, held: Sequence[Written]) -> int:
    """Bytes that a loop's body has in memory at some moment, beside its operands and results."""
    if loop.primitive != "scan" or not loop.params["length"]:
        return 0  # of a branch it is not known whether it runs
    (body,), (own,) = loop.regions, held
    return _sure_bytes(body, own, [atom for atom in body.outputs if isinstance(atom, Value)])


def _handed_out(loop: Equation) -> set[Value]:
    """Results that need no place until a loop is done: it may begin with arguments, or a tensor twice."""
    stacked = stacked_results(loop)
    return {value for position, value in enumerate(loop.outputs) if position not in stacked}


def _large_or_late(graph: Graph, held: Written) -> tuple[Value, ...]:
    """Values at whose making memory may be full: the largest, and the last that the backward part needs."""
    makers = _makers(graph)
    made = _apart(graph, list(makers), held.values)
    large = sorted(made, key=lambda v: (-v.type.nbytes, v.index))[:_MOMENTS]
    backward = {v for e in graph.equations if e.part == "backward" for v in e.input_values}
    kept = (
        kept_values(graph)
        if graph.residuals
        else [v for v in made if v in backward and makers[v].part != "backward"]
    )
    late = sorted(kept, key=lambda v: makers[v].index)[-_MOMENTS:]
    return tuple(dict.fromkeys((*large, *late)))


def nbytes_of(values: Iterable[Value]) -> int:
    """Bytes of tensors, each once."""
    return sum(value.type.nbytes for value in values)


def _alive(
    graph: Graph,
    held: Written,
    moments: Sequence[Value],
    loops: Sequence[Equation],
    elsewhere: Collection[Value] = (),
) -> list[tuple[Value, ...]]:
    """What lives in every order of the equations when each of some values is made, and while loops run.

    Args:
        graph: the step, or the body of a loop.
        held: what of it is in memory.
        moments: the values.
        loops: equations with regions.
        elsewhere: values that do not count: their memory is another's.
    """
    equations = graph.equations
    makers = _makers(graph)
    values = _apart(graph, list(makers), held.values, elsewhere)
    readers = _readers(graph, held)
    # Sets of moments as bits: those before which an equation must have run, and those that it waits for.
    at, over = [0] * len(equations), [0] * len(equations)
    for bit, z in enumerate(moments):
        at[makers[z].index] |= 1 << bit
        # What a loop was made of may be gone when its results have places of their own.
        if z.index in held.over or makers[z].regions:
            over[makers[z].index] |= 1 << bit
    for bit, loop in enumerate(loops, len(moments)):
        at[loop.index] |= 1 << bit
    before, after = _spread(graph, at)
    alive: list[list[Value]] = [[] for _ in (*moments, *loops)]
    for value in values:
        waiting = 0
        for reader in readers.get(value, ()):
            waiting |= after[reader] & ~over[reader]
        both = before[makers[value].index] & waiting
        if both:
            for bit, mine in enumerate(alive):
                if both >> bit & 1:
                    mine.append(value)
    later = [frozenset[Value]() for _ in moments] + [_handed_out(loop) for loop in loops]
    return [tuple([v for v in mine if v not in own]) for mine, own in zip(alive, later, strict=True)]


def _readers(graph: Graph, held: Written) -> dict[Value, list[int]]:
    """The equations for which a value must be in memory until they run."""
    found: dict[Value, list[int]] = {}
    for equation in graph.equations:
        if equation.outputs and all(value.index in held.same for value in equation.outputs):
            continue  # computed already
        if is_reload(equation):
            continue  # what it reads may be in host memory until then
        for value in equation.input_values:
            found.setdefault(value, []).append(equation.index)
    return found


def _spread(graph: Graph, at: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of every equation the moments that wait for it, and those that it waits for, its own among both.

    Args:
        graph: the equations, in an order in which they may run.
        at: the moments at which an equation runs, as bits.
    """
    found = table(graph)
    maker = np.full(len(found.handed_out), -1)
    maker[found.results] = found.maker
    source = np.where(found.operands >= 0, maker[found.operands], -1)
    made = source >= 0
    before, after = list(at), list(at)
    pairs = list(zip(found.reader[made].tolist(), source[made].tolist(), strict=True))
    for reader, mine in reversed(pairs):
        if before[reader]:
            before[mine] |= before[reader]
    for reader, mine in pairs:
        if after[mine]:
            after[reader] |= after[mine]
    return before, after
