"""When everything happens: a schedule of each device's computation and of the exchanges between them.

A device computes one kernel after another, in the order of the bill; exchanges follow one another on a stream
that all devices share, since every one of them takes part in every exchange. Two options say how these meet:

- `overlap`: an exchange starts when its input is ready on all devices and the stream is free, and only what
  reads its result waits for it. Without, all devices stop for every exchange, which is what `backend="mpi"`
  does: it runs a compiled segment, a collective, the next segment (`backends/runner.py`);
- `bucket_bytes`: exchanges of one kind are gathered into messages of up to so many bytes, which saves
  latency. One that is bigger goes alone. A message leaves when the next member would not fit, or when a
  kernel needs one of its members. The `mpi` backend does so where a plan says it.

Both take exchanges early, as soon as their input is there; neither looks at what that costs in memory.

The iteration of a loop stands for all of them: its kernels and exchanges take as many times as long, and what
follows within an iteration follows in the whole. Nothing overlaps from one iteration to the next.

Getting into a compiled segment and out of it takes a device up to `DeviceType.resume_s`, in front of the
first kernel after an exchange (`resuming_s`). And what a segment leaves to another goes through memory, where
kernels that are compiled together hand it on in registers: `timed_bill` has that. Both count on devices that
were measured; of others, what a segment's ends cost is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from shardwright.cost.bill import Cut, Item, Pricing, Shares, Token, bill, bill_as_run, counted
from shardwright.cost.device import DeviceType
from shardwright.cost.messages import Step, gathered, seconds_of
from shardwright.cost.model import CostModel
from shardwright.cost.share_cost import CostStack, Floats
from shardwright.ir.graph import Graph
from shardwright.ir.program import Program


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel or a message in time.

    Attributes:
        label: primitive, or collective and strategy.
        exchange: whether it occupies the exchange stream, and that of all devices alike.
        start_s, end_s: by device.
        nbytes: of an exchange.
    """

    label: str
    exchange: bool
    start_s: Floats
    end_s: Floats
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """One iteration in time.

    Attributes:
        iteration_s: all of it.
        compute_s: seconds that each device computes.
        exposed_s: seconds that each device does not compute while an exchange is under way.
        exchange_s: seconds that the exchange stream is busy.
        spans: kernels and messages, in the order in which they were scheduled.
    """

    iteration_s: float
    compute_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    exchange_s: float
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds that each device waits for others, not for an exchange under way."""
        pairs = zip(self.compute_s, self.exposed_s, strict=True)
        return tuple(max(self.iteration_s - compute - exposed, 0.0) for compute, exposed in pairs)


def timed_bill(
    program: Program, graph: Graph, pricing: Pricing, model: CostModel, written: Sequence[Item] | None = None
) -> Sequence[Item]:
    """The bill of a program that is to be laid out in time: on measured devices, as the backends run it.

    Args:
        program: verified.
        graph: what it computes.
        pricing: prices its instructions.
        model: of the devices.
        written: its bill as it stands, where it is known.
    """
    if any(device.resume_s for device in model.types):
        return bill_as_run(program, graph, pricing)
    return bill(program, graph, pricing) if written is None else written


def timeline(
    items: Sequence[Item],
    model: CostModel,
    ratios: Sequence[float],
    *,
    overlap: bool = False,
    bucket_bytes: int = 0,
) -> Timeline:
    """Lay the items of a bill out in time, at the rounded shard sizes.

    Args:
        items: in execution order, with what they read and write; see `timed_bill`.
        model: prices messages that gather several exchanges.
        ratios: share of every device.
        overlap: exchanges may run beside computation. They are taken as early as their inputs are there, or
            where the program has them, whichever ends sooner.
        bucket_bytes: largest message that gathers exchanges; 0 gathers none.
    """
    shares = Shares(ratios, model.class_of)
    types = [model.types[c] for c in model.class_of]
    seconds = {id(item): seconds_of(item, shares) for item in items}
    program = _resumed((Step((item,), seconds[id(item)]) for item in items), types)
    if bucket_bytes:
        return _laid_out(
            _resumed(gathered(items, model, shares, seconds, bucket_bytes), types), len(types), overlap
        )
    if not overlap:
        return _laid_out(program, len(types), overlap)
    early = _resumed(gathered(items, model, shares, seconds, 0), types)
    return min(
        (_laid_out(steps, len(types), overlap) for steps in (program, early)),
        key=lambda found: found.iteration_s,
    )


def predict(items: Sequence[Item], model: CostModel, ratios: Sequence[float]) -> Timeline:
    """`timeline` without overlap and messages, and without its spans: what planning needs, and fast.

    Devices of equal class that hold equal stretches of everything take equally long, and are worked out
    once; the items between two exchanges are added up at once.
    """
    shares = Shares(ratios, model.class_of)
    if not items:
        return Timeline(0.0, (0.0,) * len(shares.ratios), (0.0,) * len(shares.ratios), 0.0)
    cuts: dict[Cut | None, int] = {}
    known: dict[int, int] = {}
    # Of items that are one object (`charges`) one is looked at.
    of_item = [known.setdefault(id(item), len(known)) for item in items]
    distinct = [item for item, _ in counted(items)]
    ways = [None if item.cut is None else Cut(item.cut.units, 1, item.cut.by) for item in distinct]
    cut_of = np.array([cuts.setdefault(way, len(cuts)) for way in ways])
    held = [shares.of(cut) for cut in cuts]
    alike, like = np.unique(np.stack([model.class_of, *held]), axis=1, return_inverse=True)
    class_of = alike[0].astype(np.int64)
    stack = CostStack.of([item.cost for item in distinct])
    weights = np.array([item.weight for item in distinct])
    seconds = np.empty((len(distinct), len(class_of)))
    for number in range(len(cuts)):
        which = np.flatnonzero(cut_of == number)
        seconds[which] = stack.take(which).per_device(alike[number + 1], class_of)
    seconds = (seconds * weights[:, None])[of_item]
    exchange = np.array([item.exchange for item in distinct])[of_item]
    kernels = np.where(exchange[:, None], 0.0, seconds)
    # Segments end at exchanges; the one after the last exchange ends with the step.
    segment = np.concatenate([[0], np.cumsum(exchange)[:-1]])
    by_segment = np.zeros((int(segment[-1]) + 1, len(class_of)))
    np.add.at(by_segment, segment, kernels)
    begun = np.asarray(by_segment.any(axis=1))
    resumed_s = resuming_s(by_segment, [model.types[c] for c in class_of])
    by_segment += np.where(begun[:, None], resumed_s, 0.0)
    exchange_s = float(seconds[exchange].max(axis=1).sum()) if exchange.any() else 0.0
    busy = by_segment.sum(axis=0)[like.ravel()]
    exposed = (exchange_s,) * len(shares.ratios)
    return Timeline(
        float(by_segment.max(axis=1).sum()) + exchange_s, tuple(busy.tolist()), exposed, exchange_s
    )


def resuming_s(kernels_s: Floats, types: Sequence[DeviceType]) -> Floats:
    """What it takes to go into a segment and out of it, besides its kernels.

    Args:
        kernels_s: (…, devices), what these take.
        types: of the devices.
    """
    most, least, over = np.array([[t.resume_s, t.restart_s, t.resume_over_s] for t in types]).T
    part = np.minimum(1.0, kernels_s / np.where(over > 0, over, 1.0))
    return np.where(over > 0, least + (most - least) * part, most)


def _resumed(steps: Iterable[Step], types: Sequence[DeviceType]) -> list[Step]:
    """The steps, with what it takes to begin a segment in its first kernel."""
    found: list[Step] = []
    for exchange, stretch in groupby(steps, lambda step: step.items[0].exchange):
        segment = list(stretch)
        first = next((i for i, step in enumerate(segment) if step.seconds.any()), None)
        if not exchange and first is not None:
            kernels_s = np.sum([step.seconds for step in segment], axis=0)
            begun = segment[first].seconds + resuming_s(kernels_s, types)
            segment[first] = Step(segment[first].items, begun)
        found += segment
    return found


def _laid_out(steps: Sequence[Step], devices: int, overlap: bool) -> Timeline:
    """Every step as early as the streams and what it reads allow, in the order given."""
    compute, stream = np.zeros(devices), 0.0
    there: dict[Token, Floats] = {}
    spans: list[Span] = []
    for step in steps:
        since = np.zeros(devices)
        for item in step.items:
            for token in item.reads:
                if token in there:
                    since = np.maximum(since, there[token])
        first = step.items[0]
        if first.exchange:
            start = max(stream, float((since if overlap else compute).max(initial=0.0)))
            stream = start + float(step.seconds.max(initial=0.0))
            span = Span(
                label=step.label,
                exchange=True,
                start_s=np.full(devices, start),
                end_s=np.full(devices, stream),
                nbytes=sum(item.nbytes for item in step.items),
            )
            if not overlap:
                compute = span.end_s
        elif step.seconds.any():
            start_s = np.maximum(compute, since)
            span = Span(first.label, False, start_s, start_s + step.seconds)
            compute = span.end_s
        else:  # another name for what is there, or a part of it: no kernel waits behind it
            span = Span(first.label, False, since, since)
        there.update((token, span.end_s) for item in step.items for token in item.writes)
        spans.append(span)
    iteration_s = max(stream, float(compute.max(initial=0.0)))
    messages = [span for span in spans if span.exchange]
    busy, exposed = _breakdown([span for span in spans if not span.exchange], messages, devices)
    exchange_s = float(sum(span.end_s[0] - span.start_s[0] for span in messages))
    return Timeline(iteration_s, busy, exposed, exchange_s, tuple(spans))


def _breakdown(
    kernels: Sequence[Span], messages: Sequence[Span], devices: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of computing, and of exchanges beside which it does not compute, of every device."""
    busy, exposed = [0.0] * devices, [0.0] * devices
    starts = np.array([span.start_s[0] for span in messages])
    ends = np.array([span.end_s[0] for span in messages])
    for device in range(devices):
        times = [(span.start_s[device], span.end_s[device]) for span in kernels]
        real = np.array([pair for pair in times if pair[1] > pair[0]]).reshape(-1, 2)
        busy[device] = float((real[:, 1] - real[:, 0]).sum())
        # Seconds computed until any moment: kernels of a device follow one another.
        moments = np.concatenate([[0.0], real.ravel()])
        computing = np.tile([0.0, 1.0], len(real))  # a pause, a kernel, a pause, …
        done = np.concatenate([[0.0], np.cumsum(np.diff(moments) * computing)])
        beside = np.interp(ends, moments, done) - np.interp(starts, moments, done)
        exposed[device] = float((ends - starts - beside).clip(min=0.0).sum())
    return tuple(busy), tuple(exposed)
