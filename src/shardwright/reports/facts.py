"""What the report page says of a plan, as plain records: numbers and words, no markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardwright.cost.bill import Item, Shares
from shardwright.cost.share_cost import Floats
from shardwright.cost.timeline import Span, timeline
from shardwright.fleets.summary import Summary, summary
from shardwright.ir.trace import Traced
from shardwright.outline import PHASES, Phase, Place, instruction_places
from shardwright.plan import Plan
from shardwright.plans.parts import Spent
from shardwright.reports.layers import LayerGroup, layer_groups
from shardwright.reports.text import Held, changed, held, notes, unshared
from shardwright.synth.baselines import Baseline, Baselines

#: Columns of a lane: as wide as a page, and no more than an eye can tell apart.
COLUMNS = 480
#: Steps of a column's height.
LEVELS = 24


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices of which the page has the same to say.

    Attributes:
        names: of its members.
        kind: name of their type.
        colour: number of the type among the fleet's.
        share: of each.
        memory_bytes, limit_bytes: predicted peak and what there is, of each.
        spent: where the step goes, of each.
        seat: the first member's position among the devices that the plan uses.
    """

    names: tuple[str, ...]
    kind: str
    colour: int
    share: float
    memory_bytes: int
    limit_bytes: int
    spent: Spent
    seat: int

    @property
    def label(self) -> str:
        """Its members in short."""
        if len(self.names) <= 2:
            return ", ".join(self.names)
        return f"{self.names[0]} … {self.names[-1]}"


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of a lane: so many columns from one on, filled to these parts of their height."""

    start: int
    columns: int
    compute: float
    exchange: float


@dataclass(frozen=True, slots=True)
class Lane:
    """A device group's step in time."""

    group: DeviceGroup
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of time in which mostly one phase of the step runs, in columns."""

    start: int
    columns: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Kind:
    """A primitive or an exchange, and what all of its kind cost."""

    name: str
    exchange: bool
    count: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the page says beside what the plan itself has.

    Attributes:
        plan: the plan.
        title: what was planned.
        groups: devices that the plan uses.
        lanes: their step in time, of `COLUMNS` columns.
        bands: phases along it.
        layers: the program by layer.
        kinds: what costs most, the rest summed up under "everything else".
        baselines: beside the plan.
        left_out: baselines that do not apply, and why.
        fleet: added up.
        notes: assumptions, and what ran replicated.
    """

    plan: Plan
    title: str
    groups: tuple[DeviceGroup, ...]
    lanes: tuple[Lane, ...]
    bands: tuple[Band, ...]
    layers: tuple[LayerGroup, ...]
    kinds: tuple[Kind, ...]
    baselines: tuple[Baseline, ...]
    left_out: dict[str, str]
    fleet: Summary
    notes: tuple[str, ...]

    @property
    def unshared(self) -> str:
        """What to say if nothing is cut at all, as the printout says it."""
        return unshared(self.plan)

    @property
    def changed(self) -> tuple[str, ...]:
        """How the step is changed to take less memory."""
        return tuple(changed(self.plan))

    @property
    def held(self) -> tuple[Held, ...]:
        """Inputs by argument and placement."""
        return held(self.plan)

    @property
    def fullest(self) -> float:
        """The largest part of its memory that a device needs."""
        return max((group.memory_bytes / group.limit_bytes for group in self.groups), default=0.0)

    @property
    def best_baseline(self) -> Baseline | None:
        """The cheapest baseline that fits."""
        return min((b for b in self.baselines if b.fits), key=lambda b: b.cost_s, default=None)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that cost anything."""
        return tuple(
            phase
            for phase in PHASES
            if any(layer.compute_s[phase] or layer.exchange_s[phase] for layer in self.layers)
        )

    @property
    def phase_words(self) -> str:
        """How long each phase mostly runs."""
        columns = Counter[Phase]()
        for band in self.bands:
            columns[band.phase] += band.columns
        return ", ".join(f"{phase} {columns[phase] / COLUMNS:.0%}" for phase in PHASES if columns[phase])


def facts(plan: Plan, traced: Traced, title: str, baselines: Sequence[Baseline] = ()) -> Facts:
    """Everything the page needs.

    Args:
        plan: what the page is about.
        traced: the step it was made for.
        title: what was planned, for the heading.
        baselines: what is priced beside it.
    """
    graph = traced.graph
    items, model = plan.bill(traced)
    shares = Shares(plan.used_ratios, model.class_of)
    seconds = [item.weight * shares.per_device(item.cost, item.cut) for item in items]
    places = list(instruction_places(plan.program, graph))
    groups = _groups(plan)
    spans = timeline(items, model, plan.used_ratios).spans
    return Facts(
        plan=plan,
        title=title,
        groups=groups,
        lanes=tuple(Lane(g, _runs(spans, g.seat, plan.iteration_s)) for g in groups),
        bands=_bands(spans, [place for _, place in places], plan.iteration_s),
        layers=layer_groups(plan, graph, places, items, seconds),
        kinds=_kinds(items, seconds),
        baselines=tuple(baselines),
        left_out=dict(baselines.left_out) if isinstance(baselines, Baselines) else {},
        fleet=summary(plan.fleet),
        notes=notes(plan),
    )


def _groups(plan: Plan) -> tuple[DeviceGroup, ...]:
    """Of one type, share, memory and, in three digits, times."""
    devices = plan.fleet.devices
    colours = {kind: n for n, kind in enumerate(dict.fromkeys(d.type.name for d in devices))}
    members: dict[tuple[object, ...], list[int]] = {}
    for d in plan.used:
        spent = plan.spent[d]
        times = (f"{s:.3g}" for s in (spent.compute_s, spent.exchange_s, spent.idle_s))
        key = (devices[d].type.name, plan.ratios[d], plan.memory_bytes[d], *times)
        members.setdefault(key, []).append(d)
    seat = {d: position for position, d in enumerate(plan.used)}
    return tuple(
        DeviceGroup(
            names=tuple(devices[d].name for d in some),
            kind=devices[some[0]].type.name,
            colour=colours[devices[some[0]].type.name],
            share=plan.ratios[some[0]],
            memory_bytes=plan.memory_bytes[some[0]],
            limit_bytes=devices[some[0]].type.memory_bytes,
            spent=plan.spent[some[0]],
            seat=seat[some[0]],
        )
        for some in members.values()
    )


# ---------------------------------------------------------------------------------------------------
# Time


def _runs(spans: Sequence[Span], seat: int, total_s: float) -> tuple[Run, ...]:
    """Columns of a device's lane, neighbours of equal height in one."""
    compute = _filled([s for s in spans if not s.exchange], seat, total_s)
    exchange = _filled([s for s in spans if s.exchange], seat, total_s)
    heights = np.round(np.stack([compute, exchange]) * LEVELS).astype(int)
    heights[1] = np.minimum(heights[1], LEVELS - heights[0])
    edges = [0, *(np.flatnonzero((heights[:, 1:] != heights[:, :-1]).any(axis=0)) + 1).tolist(), COLUMNS]
    return tuple(
        Run(start, end - start, float(heights[0, start]) / LEVELS, float(heights[1, start]) / LEVELS)
        for start, end in pairwise(edges)
        if heights[:, start].any()
    )


def _filled(spans: Sequence[Span], seat: int, total_s: float) -> Floats:
    """The part of every column that spans of one stream, which follow one another, take up."""
    times = np.array([(s.start_s[seat], s.end_s[seat]) for s in spans]).reshape(-1, 2)
    times = times[times[:, 1] > times[:, 0]]
    if not len(times) or total_s <= 0:
        return np.zeros(COLUMNS)
    busy = np.concatenate([[0.0], np.cumsum(np.tile([0.0, 1.0], len(times)) * _steps(times))])
    moments = np.concatenate([[0.0], times.ravel()])
    until = np.interp(np.linspace(0.0, total_s, COLUMNS + 1), moments, busy)
    return np.clip(np.diff(until) * COLUMNS / total_s, 0.0, 1.0)


def _steps(times: Floats) -> Floats:
    """Lengths of pause, span, pause, span, …"""
    return np.diff(np.concatenate([[0.0], times.ravel()]))


def _bands(spans: Sequence[Span], places: Sequence[Place], total_s: float) -> tuple[Band, ...]:
    """The phase that most of each column belongs to, by the device that is first in the program."""
    parts: list[Floats] = []
    for phase in PHASES:
        some = [s for s, place in zip(spans, places, strict=True) if place.phase == phase]
        parts.append(_filled(some, 0, total_s))
    filled = np.stack(parts)
    most = filled.argmax(axis=0)
    # A column in which the device waits belongs to what it did before.
    for column in range(1, COLUMNS):
        if not filled[:, column].any():
            most[column] = most[column - 1]
    edges = [0, *(np.flatnonzero(most[1:] != most[:-1]) + 1).tolist(), COLUMNS]
    return tuple(Band(a, b - a, PHASES[int(most[a])]) for a, b in pairwise(edges))


def _kinds(items: Sequence[Item], seconds: Sequence[Floats], most: int = 8) -> tuple[Kind, ...]:
    """Primitives and exchanges by what they cost; the small ones together."""
    count: Counter[tuple[str, bool]] = Counter()
    cost: Counter[tuple[str, bool]] = Counter()
    for item, spent in zip(items, seconds, strict=True):
        key = item.label, item.exchange
        count[key] += item.weight  # pyright: ignore[reportArgumentType]
        cost[key] += float(spent.max())  # pyright: ignore[reportArgumentType]
    ranked = [Kind(*key, float(count[key]), float(s)) for key, s in cost.most_common() if s > 0]
    head, rest = ranked[:most], ranked[most:]
    if rest:
        times, left_s = sum(kind.count for kind in rest), sum(kind.seconds for kind in rest)
        head.append(Kind("everything else", False, times, left_s))
    return tuple(head)
