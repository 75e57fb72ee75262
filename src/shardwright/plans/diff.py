"""What changed between two plans, and why one is cheaper: from the plans alone, without their step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.cost.quantity import size
from shardwright.plan import Plan
from shardwright.reports.units import duration
from shardwright.reports.words import placed

#: What the cost is made of beside exchanges.
COMPUTING = "computing"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the cost in both plans.

    Attributes:
        name: `COMPUTING`, or a collective and its strategy.
        a_s, b_s: seconds; 0 where a plan has none of it.
        a_count, b_count: how often per step; None for computing.
    """

    name: str
    a_s: float
    b_s: float
    a_count: float | None = None
    b_count: float | None = None

    @property
    def change_s(self) -> float:
        """What it costs more in the second plan."""
        return self.b_s - self.a_s


@dataclass(frozen=True, slots=True)
class Moved:
    """Inputs that lie differently: how many, and one of them. "" is no such input."""

    argument: str
    before: str
    after: str
    tensors: int
    example: str


@dataclass(frozen=True, slots=True)
class Held:
    """What a device holds in both plans; None where a fleet has no such device."""

    device: str
    a_share: float | None
    b_share: float | None
    a_bytes: int | None
    b_bytes: int | None


@dataclass(frozen=True)
class Diff:
    """Two plans side by side.

    Attributes:
        a, b: the plans.
        parts: of their costs, the largest change first.
        moved: inputs that lie differently.
        held: devices whose share or memory differs.
    """

    a: Plan
    b: Plan
    parts: tuple[Part, ...]
    moved: tuple[Moved, ...]
    held: tuple[Held, ...]

    @property
    def change_s(self) -> float:
        """What the second plan costs more."""
        return self.b.cost_s - self.a.cost_s

    @property
    def same(self) -> bool:
        """Whether the plans do the same with the same devices."""
        alike = self.a.ratios == self.b.ratios and self.a.used == self.b.used
        return alike and self.a.program == self.b.program and not self.moved

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        numbers = ("cost_s", "iteration_s", "bound_s", "gap")
        return {
            "same": self.same,
            "same_step": self.a.fingerprint == self.b.fingerprint,
            "same_fleet": self.a.fleet.fingerprint() == self.b.fleet.fingerprint(),
            **{name: {"a": getattr(self.a, name), "b": getattr(self.b, name)} for name in numbers},
            "change_s": self.change_s,
            "parts": [
                {
                    "name": part.name,
                    "a_s": part.a_s,
                    "b_s": part.b_s,
                    "change_s": part.change_s,
                    "a_count": part.a_count,
                    "b_count": part.b_count,
                }
                for part in self.parts
            ],
            "moved": [{name: getattr(m, name) for name in Moved.__slots__} for m in self.moved],
            "devices": [{name: getattr(h, name) for name in Held.__slots__} for h in self.held],
            "why": list(self.why()),
        }

    def why(self) -> Iterator[str]:
        """What changed, and what that does to the cost, in sentences."""
        a, b = self.a, self.b
        if a.fingerprint != b.fingerprint:
            yield "They are plans of two different steps: compare what follows with care."
        yield from _fleets(a, b)
        if self.same:
            yield "Both run the same program with the same shares."
            if a.cost_s == b.cost_s:
                return
        yield _verdict(a, b)
        least_s = max(0.02 * abs(self.change_s), 1e-3 * a.cost_s)
        shown = [p for p in self.parts if p.change_s and abs(p.change_s) >= least_s]
        yield from map(_said, shown)
        if len(b.used) != len(a.used):
            yield f"It uses {len(b.used)} device{'s' if len(b.used) > 1 else ''}, not {len(a.used)}."
        for unused in b.unused:
            if set(unused.devices) & set(a.used_devices):
                yield f"It leaves out {_some(unused.devices)}: {unused.why}."
        if a.fits != b.fits:
            yield "It fits into memory, the first did not." if b.fits else "It does not fit into memory."
        for pin in b.pins:
            if pin not in a.pins and pin.price_s:
                yield f"The pin {pin.name} = {pin.placement} alone makes it {duration(pin.price_s)} dearer."


def diff(a: Plan, b: Plan) -> Diff:
    """Compare two plans."""
    return Diff(a, b, tuple(_parts(a, b)), tuple(_moved(a, b)), tuple(_held(a, b)))


def _parts(a: Plan, b: Plan) -> list[Part]:
    seconds: list[Counter[str]] = []
    counts: list[Counter[str]] = []
    for plan in (a, b):
        spent, count = Counter[str](), Counter[str]()
        for each in plan.exchanges:
            spent[each.name] += each.seconds  # pyright: ignore[reportArgumentType]
            count[each.name] += each.count  # pyright: ignore[reportArgumentType]
        spent[COMPUTING] = plan.cost_s - sum(spent.values())  # pyright: ignore[reportArgumentType]
        seconds.append(spent)
        counts.append(count)
    names = dict.fromkeys((*seconds[0], *seconds[1]))
    parts = [
        Part(
            name,
            float(seconds[0][name]),
            float(seconds[1][name]),
            *((None, None) if name == COMPUTING else (float(counts[0][name]), float(counts[1][name]))),
        )
        for name in names
    ]
    return sorted(parts, key=lambda part: (-abs(part.change_s), part.name))


def _moved(a: Plan, b: Plan) -> Iterator[Moved]:
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for name in dict.fromkeys((*a.held, *b.held)):
        before, after = a.held.get(name, ""), b.held.get(name, "")
        if before != after:
            argument = name.partition("[")[0].partition(".")[0]
            kinds.setdefault((argument, before, after), []).append(name)
    for (argument, before, after), names in kinds.items():
        yield Moved(argument, before, after, len(names), names[0])


def _held(a: Plan, b: Plan) -> Iterator[Held]:
    of_a = {n: (r, m) for n, r, m in zip(a.devices, a.ratios, a.memory_bytes, strict=True)}
    of_b = {n: (r, m) for n, r, m in zip(b.devices, b.ratios, b.memory_bytes, strict=True)}
    for name in dict.fromkeys((*of_a, *of_b)):
        before, after = of_a.get(name, (None, None)), of_b.get(name, (None, None))
        if before != after:
            yield Held(name, before[0], after[0], before[1], after[1])


def _fleets(a: Plan, b: Plan) -> Iterator[str]:
    if str(a.fleet) != str(b.fleet):
        yield f"The first is for {a.fleet}, the second for {b.fleet}."
    elif a.fleet.fingerprint() != b.fleet.fingerprint():
        yield "Their fleets have the same devices by name, but other numbers: rates, memory or links."
    changed = [name for name in ("shardwright", "jax") if a.versions.get(name) != b.versions.get(name)]
    for name in changed:
        yield f"They were made with {name} {a.versions.get(name)} and {b.versions.get(name)}."


def _verdict(a: Plan, b: Plan) -> str:
    change = b.cost_s - a.cost_s
    if abs(change) <= 1e-6 * a.cost_s:
        return f"Both cost {duration(a.cost_s)}."
    if not a.cost_s:
        return f"The first costs nothing, the second {duration(b.cost_s)}."
    if b.cost_s > 2 * a.cost_s:
        much = f"costs {b.cost_s / a.cost_s:.3g} times as much"
    else:
        much = f"is {abs(change) / a.cost_s:.1%} {'dearer' if change > 0 else 'cheaper'}"
    return f"The second {much}: {duration(b.cost_s)}, not {duration(a.cost_s)}."


def _said(part: Part) -> str:
    change = f"{'costs' if part.change_s > 0 else 'saves'} {duration(abs(part.change_s))}"
    times = ""
    if part.a_count != part.b_count and part.a_count is not None and part.b_count is not None:
        times = f", {part.a_count:g} → {part.b_count:g} times"
    return f"{part.name} {change}: {duration(part.a_s)} → {duration(part.b_s)}{times}."


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names)})"


def layout(found: Diff) -> Group:
    """The printout."""
    why = Text("\n".join(found.why()))
    if found.same and found.change_s == 0:
        return Group(why)
    tables: list[Table] = []
    costs = _table("what the cost is made of", "", "first", "second", "change", left=1)
    for part in found.parts:
        if part.a_s or part.b_s:
            sign = "+" if part.change_s > 0 else "−" if part.change_s < 0 else ""
            change = f"{sign}{duration(abs(part.change_s))}"
            costs.add_row(part.name, duration(part.a_s), duration(part.b_s), change)
    tables.append(costs)
    if found.held:
        devices = _table("devices", "", "share", "", "memory", "", left=1)
        rows: dict[tuple[str, ...], list[str]] = {}
        for held in found.held:
            shares = ("-" if share is None else f"{share:.2%}" for share in (held.a_share, held.b_share))
            memory = ("-" if used is None else size(used) for used in (held.a_bytes, held.b_bytes))
            rows.setdefault((*shares, *memory), []).append(held.device)
        for row, names in rows.items():
            devices.add_row(_some(tuple(names)), *row)
        tables.append(devices)
    if found.moved:
        moved = _table("inputs that lie differently", "argument", "first", "second", "tensors", left=3)
        moved.add_column("such as")
        for each in found.moved:
            before, after = (placed(p) if p else "no such input" for p in (each.before, each.after))
            moved.add_row(each.argument, before, after, str(each.tensors), each.example)
        tables.append(moved)
    return Group(why, *(Padding(table, (1, 0, 0, 0)) for table in tables))


def _table(title: str, *columns: str, left: int) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right", overflow="fold")
    return table
