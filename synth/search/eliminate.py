"""Bucket elimination over the choice graph: exact messages, or admissible ones where tables would not fit.

Eliminating a choice v adds up the terms that mention it and minimises over v; what remains is a message
to the choices it was tied to. In reverse order, the messages tell the cost of completing any partial
assignment: a perfect heuristic for A*. Where a table would exceed `most_cells`, the terms of the bucket
are minimised in several smaller groups (mini-buckets); the sum of the minima is then a lower bound, and
the heuristic stays admissible (Dechter 1999; Kask & Dechter 2001).

Repeated layers cost nothing: a `Tape` lists every distinct elimination once, whatever the prices. And
since messages are kept up to a constant, those that travel along a chain of equal layers soon repeat
themselves (the turnpike property), so that even a chain is worked out for its ends only. What choices cost
that all layers are tied to grows from layer to layer: it travels beside the messages, as a table of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.ir.record import record as record_class
from shardwright.synth.search.fold import Folded, Scope
from shardwright.synth.search.merged import Merged, Seen, Table, whole
from shardwright.synth.search.minimum import Loose, apart, content, loosened, minimum
from shardwright.synth.search.prune import Kept

#: Where a table comes from: ("term", recipe, classes...) or ("message", operation).
Source: TypeAlias = tuple[object, ...]

T = TypeVar("T", bound=tuple[object, ...])

#: A choice that is eliminated so many buckets later is one that a chain of layers is tied to.
_LATER = 40

#: Messages of fewer cells are worked out again as fast as they are taken apart.
_FEW = 1 << 14


@dataclass(frozen=True, slots=True)
class Operation:
    """One distinct elimination: add up `sources` on axes (choice, *rest), minimise over the first.

    Attributes:
        sources: tables to add up, each with its axes among (choice, *rest).
        kinds: classes of (choice, *rest).
        lasting: places in `rest` of choices that are eliminated much later.
    """

    sources: tuple[tuple[Source, tuple[int, ...]], ...]
    kinds: tuple[int, ...]
    lasting: tuple[int, ...]


@record_class(frozen=True, slots=True)
class Bucket:
    """What is eliminated with one choice: operations, each with the other choices that its table is over."""

    choice: int
    parts: tuple[tuple[int, Scope], ...]


@dataclass(frozen=True, slots=True)
class Tape:
    """Buckets in order of elimination, over choices with more than one value left.

    Attributes:
        operations: distinct ones, each after those whose messages it reads.
        buckets: in order of elimination.
        open: classes with more than one value left.
        left: what mentions only choices that are not eliminated, messages included.
        constants: sources of terms all of whose choices are settled, and how often each occurs.
        split: whether mini-buckets were needed.
        width: most choices in one table.
    """

    operations: tuple[Operation, ...]
    buckets: tuple[Bucket, ...]
    open: frozenset[int]
    left: tuple[tuple[Source, Scope], ...]
    constants: tuple[tuple[Source, int], ...]
    split: bool
    width: int


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of one operation.

    Attributes:
        sources: tables that were added up, with their axes among (choice, *rest).
        message: their minimum over the choice, less its own least entry; None where nothing else is in it.
        least: that entry; where prices are several, an array of them, and tables have one more axis in front.
        loose: what was taken out of the message besides, see `loosened`.
    """

    sources: tuple[tuple[Table, tuple[int, ...]], ...]
    message: Table | None
    least: Floats
    loose: Loose | None


@dataclass(frozen=True, slots=True)
class Elimination:
    """The result: outcome of every operation, and what they add up to.

    Attributes:
        tape: what was done.
        done: per operation.
        left: tables of what is left, in the order of the tape.
        constant: what was settled. If nothing is left: the least cost of any assignment, or a lower bound on
            it where the tape is split. Where prices are several, one for each.
        cells: size of all tables that were added up.
    """

    tape: Tape
    done: tuple[Done, ...]
    left: tuple[Floats, ...]
    constant: Floats
    cells: int

    def one(self, number: int) -> Elimination:
        """Where prices are several, what one of them gives."""

        def cut(table: Floats, axes: int) -> Floats:
            return table[number] if table.ndim > axes else table

        def either(table: Table, axes: int) -> Table:
            return table if isinstance(table, Merged) else cut(table, axes)

        apart: dict[int, Done] = {}
        for done, operation in zip(self.done, self.tape.operations, strict=True):
            if id(done) not in apart:
                message, rest = done.message, len(operation.kinds) - 1
                apart[id(done)] = Done(
                    tuple([(either(table, len(axes)), axes) for table, axes in done.sources]),
                    None if message is None else either(message, rest),
                    cut(done.least, 0),
                    None if done.loose is None else (done.loose[0], cut(done.loose[1], len(done.loose[0]))),
                )
        left = zip(self.left, self.tape.left, strict=True)
        return Elimination(
            self.tape,
            tuple([apart[id(done)] for done in self.done]),
            tuple([cut(table, len(scope)) for table, (_, scope) in left]),
            cut(self.constant, 0),
            self.cells,
        )


def live(folded: Folded, size_of: Sequence[int]) -> list[Scope]:
    """Scopes of all terms, without choices of which only one value is left."""
    settled = {v for v, kind in enumerate(folded.class_of) if size_of[kind] <= 1}
    return [
        scope if settled.isdisjoint(scope) else tuple([v for v in scope if v not in settled])
        for scope in folded.scopes
    ]


def record(
    folded: Folded, room: Sequence[int], size_of: Sequence[int], order: Sequence[int], most_cells: int
) -> Tape:
    """Find the distinct operations that eliminate the choices of `order`.

    Args:
        folded: the problem.
        room: values that every class may have left; those of one are settled.
        size_of: values that it has left now, which say how large tables are.
        order: choices to eliminate, each of which has more than one value left.
        most_cells: largest table; beyond it buckets are split.
    """
    class_of = folded.class_of
    sizes = [size_of[kind] for kind in class_of]
    last, count = len(order), len(class_of)
    place = [last] * count
    for k, v in enumerate(order):
        place[v] = k
    #: In order of elimination. Those that stay come last, ascending, as scopes of what is left must be.
    rank = [k * count + v for v, k in enumerate(place)]
    waiting: list[list[tuple[Source, Scope]]] = [[] for _ in range(last + 1)]
    constants: dict[Source, int] = {}
    for scope, recipe, free in zip(folded.scopes, folded.recipe_of, live(folded, room), strict=True):
        # Axes of settled choices have length one; they are dropped when the table is read.
        source = ("term", recipe, *[class_of[v] for v in scope])
        if free:
            waiting[min([place[v] for v in free])].append((source, free))
        else:
            constants[source] = constants.get(source, 0) + 1
    numbers: dict[tuple[object, ...], int] = {}
    operations: list[Operation] = []
    buckets: list[Bucket] = []
    split, width = False, 0
    for k, v in enumerate(order):
        parts: list[tuple[int, Scope]] = []
        groups = in_groups(waiting[k], sizes, most_cells)
        waiting[k] = []
        split = split or len(groups) > 1
        for tied, group in groups:
            # The choice itself comes first.
            mine = sorted(tied, key=rank.__getitem__)
            rest, axis = tuple(mine[1:]), {u: at for at, u in enumerate(mine)}
            found = [(s, tuple([axis[u] for u in scope])) for s, scope in group]
            if len(found) > 1:
                found.sort()
            sources, kinds = tuple(found), tuple([class_of[u] for u in mine])
            number = numbers.setdefault((sources, kinds), len(numbers))
            if number == len(operations):
                lasting = tuple([at for at, u in enumerate(rest) if place[u] - k > _LATER])
                operations.append(Operation(sources, kinds, lasting))
                width = max(width, len(kinds))
            parts.append((number, rest))
            if rest:
                waiting[place[rest[0]]].append((("message", number), rest))
        buckets.append(Bucket(v, tuple(parts)))
    opened = frozenset(kind for kind, size in enumerate(room) if size > 1)
    left = tuple(waiting[last])
    return Tape(tuple(operations), tuple(buckets), opened, left, tuple(constants.items()), split, width)


def in_groups(
    terms: list[tuple[T, Scope]], sizes: Sequence[int], most_cells: int
) -> list[tuple[set[int], list[tuple[T, Scope]]]]:
    """All terms together if their table fits, else greedily, largest first, into tables that fit.

    Returns:
        Of every group, the choices that its table is over, and its terms.
    """

    if not terms:
        return []
    every = set(terms[0][1])
    if len(terms) > 1:
        every.update(*[scope for _, scope in terms])
    if math.prod([sizes[u] for u in every]) <= most_cells:
        return [(every, terms)]

    def cells(scope: set[int]) -> int:
        return math.prod([sizes[u] for u in scope])

    groups: list[tuple[set[int], list[tuple[T, Scope]]]] = []
    for term in sorted(terms, key=lambda t: (-cells(set(t[1])), t)):
        for scope, members in groups:
            if cells(scope | set(term[1])) <= most_cells:
                scope.update(term[1])
                members.append(term)
                break
        else:
            groups.append((set(term[1]), [term]))
    return groups


def eliminate(tape: Tape, kept: Kept) -> Elimination:
    """Carry out the operations of a tape on the tables of `kept`."""
    messages: list[Table | None] = []
    #: What travels beside each message, by axes of it.
    beside: list[dict[tuple[int, ...], Floats]] = []
    done: list[Done] = []
    by_inputs: dict[tuple[object, ...], Done] = {}
    by_content: dict[tuple[object, ...], Table] = {}
    squeezed: dict[tuple[object, ...], Floats] = {}
    # What is left is folded and pruned again, value by value: its tables are whole.
    cells, seen = 0, None if tape.left else Seen()

    def read(source: Source) -> Table:
        if source[0] == "message":
            found = messages[source[1]]  # pyright: ignore[reportArgumentType, reportCallIssue]
            assert found is not None
            return found
        recipe, kinds = source[1], source[2:]
        settled = tuple([k for k, kind in enumerate(kinds) if kind not in tape.open])
        key = (kept.key(recipe, kinds), settled)  # pyright: ignore[reportArgumentType]
        if key not in squeezed:
            table = kept.table(recipe, kinds)  # pyright: ignore[reportArgumentType]
            front = table.ndim - len(kinds)
            squeezed[key] = table.squeeze(tuple([front + k for k in settled])) if settled else table
        return squeezed[key]

    for operation in tape.operations:
        sources = [(read(source), axes) for source, axes in operation.sources]
        loose: dict[tuple[int, ...], Floats] = {}
        for source, axes in operation.sources:
            if source[0] == "message":
                for mine, table in beside[source[1]].items():  # pyright: ignore[reportArgumentType, reportCallIssue]
                    at = tuple([axes[axis] for axis in mine])
                    if 0 in at:
                        sources.append((by_content.setdefault(content(table), table), at))
                    else:
                        _add(loose, tuple([axis - 1 for axis in at]), table)
        shape = tuple([kept.size(kind) for kind in operation.kinds])
        lasting = operation.lasting if seen is not None and math.prod(shape[1:]) >= _FEW else ()
        key = (shape, *sorted([(id(table), axes) for table, axes in sources]))
        found = by_inputs.get(key)
        if found is None:
            lowest, size = minimum(sources, shape, seen)
            cells += size
            low, message = apart(lowest, len(shape) - 1)
            taken: Loose | None = None
            if message is not None:
                if lasting:
                    message, taken = loosened(message, len(shape) - 1, lasting)
                message = by_content.setdefault(content(message), message)
            found = by_inputs[key] = Done(tuple(sources), message, low, taken)
        if found.loose is not None:
            _add(loose, *found.loose)
        done.append(found)
        messages.append(found.message)
        beside.append(loose)
    constant = sum((whole(read(source)) * times for source, times in tape.constants), np.zeros(()))
    times = Counter([number for bucket in tape.buckets for number, _ in bucket.parts])
    constant = constant + sum((done[number].least * count for number, count in times.items()), np.zeros(()))
    left = tuple([whole(read(source)) for source, _ in tape.left])
    return Elimination(tape, tuple(done), left, constant, cells)


def _add(tables: dict[tuple[int, ...], Floats], axes: tuple[int, ...], table: Floats) -> None:
    """Add a table to what there is over the same axes."""
    tables[axes] = tables[axes] + table if axes in tables else table
