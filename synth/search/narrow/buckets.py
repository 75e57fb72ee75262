"""Mini-buckets there and back: a bound, and one for every value of every choice.

Eliminating choice after choice, as on one axis, needs tables that do not fit. Buckets are therefore split
(`shardwright.synth.search.eliminate`), which treats a choice as if it could be different in each part. Where
it is, the parts are brought to agree as far as prices can do that: what they say of their common choices at
least is averaged before they are minimised ("moment matching", Ihler, Flerova, Dechter, Otten 2012; the total
stays what it was). On the way back every part learns what all others cost at least, and its own choice gets a
bound for every value: those above what a known program costs can go, tables become smaller, and the next
time fewer buckets are split. When none is, the bound is the optimum.

Equal layers are worked out once: parts that add up equal tables have equal outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.cost.share_cost import Floats
from shardwright.synth.search.eliminate import in_groups, live
from shardwright.synth.search.fold import Scope
from shardwright.synth.search.prune import Kept


@dataclass(slots=True)
class _Part:
    """One part of a bucket: the sum of some tables over its choice and others.

    Attributes:
        table: the number of that sum.
        choice, rest: what it is over, the eliminated choice first.
        message: what it sent to a part of a later bucket.
        children: the parts that sent it messages.
    """

    table: int
    choice: int
    rest: Scope
    message: int
    children: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one way there and back says.

    Attributes:
        bound: no assignment costs less.
        exact: whether no bucket was split, so that some assignment costs no more.
        of_value: per class, what any assignment costs at least in which some choice of it has the value;
            None for classes with one value.
    """

    bound: float
    exact: bool
    of_value: list[Floats | None]


#: Inner loops from which numpy is quick.
_LONG = 32


class _Store:
    """Tables by number; equal ones have one number."""

    def __init__(self) -> None:
        self.tables: list[Floats] = []
        self._known: dict[object, int] = {}

    def add(self, table: Floats) -> int:
        """The number of a table."""
        key = table.shape, table.tobytes()
        if key not in self._known:
            self._known[key] = len(self.tables)
            self.tables.append(table)
        return self._known[key]

    def named(self, name: object, table: Floats) -> int:
        """The number of a table whose name says what is in it."""
        if name not in self._known:
            self._known[name] = len(self.tables)
            self.tables.append(table)
        return self._known[name]


class Buckets:
    """One problem with some values of every choice left.

    Args:
        kept: its tables, and the values left.
        order: in which choices are eliminated; those with one value are left out.
        most_cells: largest table.
        never: seconds that stand for "impossible": more than any program costs.
    """

    def __init__(self, kept: Kept, order: Sequence[int], most_cells: int, never: float) -> None:
        self._folded = kept.folded
        self._sizes = [kept.size(kind) for kind in kept.folded.class_of]
        self._order = [v for v in order if self._sizes[v] > 1]
        self._place = {v: k for k, v in enumerate(self._order)}
        #: The order of a table's axes: the longest last, along which numpy is quick.
        self._rank = {v: (self._sizes[v], k) for k, v in enumerate(self._order)}
        self._most_cells, self._never = most_cells, never
        self._store = _Store()
        self._bound, self._split = 0.0, False
        #: Per choice, what waits for its elimination: table, scope and the part that sent it (-1: none did).
        self._waiting: dict[int, list[tuple[int, Scope, int]]] = {v: [] for v in self._order}
        self._parts: list[_Part] = []
        self._known: dict[object, list[tuple[int, int, float]]] = {}
        self._cut: dict[object, Floats] = {}
        #: Tables are multiples of the step, and so are all sums of them: equal ones are equal to the bit.
        self._step = 2.0 ** math.floor(math.log2(max(never, 1e-300)) - 50)
        for scope, recipe, free in zip(
            self._folded.scopes,
            self._folded.recipe_of,
            live(self._folded, [kept.size(k) for k in range(len(kept.values))]),
            strict=True,
        ):
            kinds = tuple([self._folded.class_of[v] for v in scope])
            name = kept.key(recipe, kinds)
            if name not in self._cut:
                table = np.minimum(kept.table(recipe, kinds).squeeze(), never)
                self._cut[name] = np.floor(table / self._step) * self._step
            self._hand_on(self._store.named(name, self._cut[name]), free, -1)

    def _hand_on(self, table: int, scope: Scope, sender: int) -> None:
        if scope:
            first = min(scope, key=self._place.__getitem__)
            self._waiting[first].append((table, scope, sender))
        else:
            self._bound += float(self._store.tables[table])

    def there(self) -> float:
        """What no assignment costs less than."""
        for v in self._order:
            self._eliminate(v)
        return self._bound

    def bounds(self) -> Bounds:
        """There and back."""
        bound = self.there()
        return Bounds(bound, not self._split, self._back())

    def greedy(self) -> dict[int, int]:
        """The best assignment if nothing was split, else one that seems good: positions of values."""
        at: dict[int, int] = {}
        parts = len(self._parts)
        for v in reversed(self._order):
            total: Floats = np.zeros(())
            while parts and self._parts[parts - 1].choice == v:
                parts -= 1
                part = self._parts[parts]
                total = total + self._store.tables[part.table][(slice(None), *[at[u] for u in part.rest])]
            at[v] = int(np.argmin(total)) if total.ndim else 0
        return at

    # -- there ---------------------------------------------------------------------------------------

    def _eliminate(self, v: int) -> None:
        waiting = self._waiting.pop(v)
        groups = in_groups(
            [((table, k), scope) for k, (table, scope, _) in enumerate(waiting)],
            self._sizes,
            self._most_cells,
        )
        scopes: list[Scope] = []
        for tied, _ in groups:
            scopes.append(tuple(sorted(tied - {v}, key=self._rank.__getitem__)))
        everyone = sorted({u for scope in scopes for u in scope}, key=self._rank.__getitem__)
        axis = {u: k for k, u in enumerate((v, *everyone))}
        content = [
            sorted([(table, tuple([axis[u] for u in scope])) for (table, _), scope in group])
            for _, group in groups
        ]
        shape = tuple([self._sizes[u] for u in axis])
        key = (shape, *map(tuple, content))
        if key not in self._known:
            over = [(0, *[axis[u] for u in scope]) for scope in scopes]
            self._known[key] = self._sent(content, over, shape)
        self._split = self._split or len(groups) > 1
        for (_, group), rest, (table, message, least) in zip(groups, scopes, self._known[key], strict=True):
            number = len(self._parts)
            self._parts.append(_Part(table, v, rest, message))
            for (_, k), _ in group:
                sender = waiting[k][2]
                if sender >= 0:
                    self._parts[number].children.append(sender)
            self._bound += least
            if rest:
                self._hand_on(message, rest, number)

    def _sent(
        self,
        content: Sequence[Sequence[tuple[int, tuple[int, ...]]]],
        over: Sequence[tuple[int, ...]],
        shape: tuple[int, ...],
    ) -> list[tuple[int, int, float]]:
        """Of every part of a bucket its table, its message, and the constant taken out of that."""
        sums = [
            self._sum(tables, axes, tuple([shape[a] for a in axes]))
            for tables, axes in zip(content, over, strict=True)
        ]
        if len(sums) > 1:
            sums = self._agreed(sums, over)
        sent: list[tuple[int, int, float]] = []
        for total in sums:
            message = np.asarray(total.min(axis=0))
            least = float(message.min())
            sent.append((self._store.add(total), self._store.add(message - least), least))
        return sent

    def _sum(
        self, tables: Sequence[tuple[int, tuple[int, ...]]], axes: tuple[int, ...], shape: tuple[int, ...]
    ) -> Floats:
        place = {a: k for k, a in enumerate(axes)}
        spread = [_spread(self._store.tables[t], [place[a] for a in mine], shape) for t, mine in tables]
        spread.sort(key=lambda table: table.size)
        total = spread[0]
        for table in spread[1:]:
            total = total + table
        return np.minimum(np.broadcast_to(total, shape), self._never)

    def _agreed(self, sums: list[Floats], over: Sequence[tuple[int, ...]]) -> list[Floats]:
        """Parts with what they say of their common choices averaged."""
        common = set(over[0]).intersection(*over[1:])
        said: list[Floats] = []
        for total, axes in zip(sums, over, strict=True):
            others = tuple([k for k, a in enumerate(axes) if a not in common])
            said.append(least_over(total, others))
        mean = np.floor(sum(said) / len(said) / self._step) * self._step
        moved = [mean - mine for mine in said[1:]]
        moved = [-np.sum(moved, axis=0), *moved]
        return [
            total + move.reshape([n if a in common else 1 for n, a in zip(total.shape, axes, strict=True)])
            for total, axes, move in zip(sums, over, moved, strict=True)
        ]

    # -- and back ------------------------------------------------------------------------------------

    def _back(self) -> list[Floats | None]:
        """Per class, the excess of its values: what parts say of their choices, knowing of all others."""
        nothing = self._store.add(np.zeros(()))
        coming = [nothing] * len(self._parts)  # what all other parts cost at least, by the rest of a part
        known: dict[object, tuple[Floats, list[int]]] = {}
        of_choice: dict[int, Floats] = {}
        for number in reversed(range(len(self._parts))):
            part = self._parts[number]
            axes = {u: k for k, u in enumerate((part.choice, *part.rest))}
            children = [self._parts[child] for child in part.children]
            asked = tuple([(child.message, tuple([axes[u] for u in child.rest])) for child in children])
            key = part.table, coming[number], asked
            if key not in known:
                known[key] = self._told(*key)
            excess, told = known[key]
            for child, table in zip(part.children, told, strict=True):
                coming[child] = table
            before = of_choice.get(part.choice)
            of_choice[part.choice] = excess if before is None else np.maximum(before, excess)
        found: list[Floats | None] = [None] * len(self._folded.classes)
        for choice, excess in of_choice.items():
            kind = self._folded.class_of[choice]
            before = found[kind]
            found[kind] = excess if before is None else np.minimum(before, excess)
        return found

    def _told(
        self, table: int, coming: int, asked: Sequence[tuple[int, tuple[int, ...]]]
    ) -> tuple[Floats, list[int]]:
        """The excess of the values of a part's choice; and for every message received, what else there is."""
        tables = self._store.tables
        whole = tables[table] + tables[coming]
        excess = least_over(whole, range(1, whole.ndim))
        told: list[int] = []
        for message, axes in asked:
            least = least_over(whole, [k for k in range(whole.ndim) if k not in axes])
            ascending = sorted(axes)
            least = least.transpose([ascending.index(a) for a in axes]) - tables[message]
            told.append(self._store.add(least - least.min()))
        return excess - excess.min(), told


def least_over(table: Floats, axes: Collection[int]) -> Floats:
    """`table.min(axis=axes)`, which takes numpy many times as long where inner loops are short."""
    shape, found = table.shape, table
    before = 1
    axis = 0
    while axis < len(shape):
        reduced, run = axis in axes, shape[axis]
        axis += 1
        while axis < len(shape) and (axis in axes) == reduced:
            run *= shape[axis]
            axis += 1
        if reduced:
            found = _least_of(found.reshape(before, run, -1))
        else:
            before *= run
    return found.reshape([n for k, n in enumerate(shape) if k not in axes])


def _least_of(table: Floats) -> Floats:
    """The least over the second of three axes."""
    outer, many, inner = table.shape
    if outer < _LONG // 4 or inner >= _LONG or (inner == 1 and many >= 2 * _LONG):
        return table.min(axis=1)
    # Along the first axis in place of short stretches.
    turned = np.ascontiguousarray(table.reshape(outer, many * inner).T)
    return turned.reshape(many, inner, outer).min(axis=0).T


def _spread(table: Floats, axes: Sequence[int], shape: tuple[int, ...]) -> Floats:
    """A table with its axes where they belong, and axes of length one for the others."""
    ascending = sorted(range(len(axes)), key=axes.__getitem__)
    wide = [1] * len(shape)
    for axis in axes:
        wide[axis] = shape[axis]
    return table.transpose(ascending).reshape(wide)
