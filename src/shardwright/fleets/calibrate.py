"""From measurements on MPI ranks to a fleet file: what is timed (`calibration_cases`), and what follows."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from statistics import median
from typing import Any

import jax
import numpy as np

from shardwright.backends.load import load_now
from shardwright.backends.measuring.job import measure_on, on_cards
from shardwright.backends.measuring.kernel_cases import (
    KernelCase,
    copies,
    is_cold,
    operand_shapes,
    operation,
)
from shardwright.backends.measuring.step_cases import is_piece, piece
from shardwright.backends.measuring.timing import ExchangeCase, Measured, Request, Tick, example, measure
from shardwright.backends.wire import on_host
from shardwright.cost.calibrate.devices import DeviceFit, Kernel, KernelTimes, group_devices
from shardwright.cost.calibrate.estimate import Estimate, refuse
from shardwright.cost.calibrate.links import ExchangeTimes, StrategyFit, fit_line, fit_strategies
from shardwright.cost.device import DeviceType
from shardwright.cost.fleet import Fleet, Link, Node
from shardwright.cost.model import CostModel
from shardwright.cost.op_classes import PRODUCTS, op_class, turned_elements
from shardwright.cost.traffic import traffic
from shardwright.fleets.calibration_cases import CARD, PROCESSOR, exchange_cases, flat, kernel_cases
from shardwright.ir.errors import InputError
from shardwright.ir.graph import TensorType
from shardwright.ir.placement import R
from shardwright.ir.rules import Signature
from shardwright.ir.trace import trace

#: Part of the cores that others may use while we measure.
MOST_LOAD = 0.15


@dataclass(frozen=True, slots=True)
class FittedLink:
    """A link, and the strategies it was fitted from."""

    link: Link
    strategies: tuple[StrategyFit, ...]


@dataclass(frozen=True, slots=True)
class Resuming:
    """What segments take besides their kernels.

    Attributes:
        long_s: those whose kernels take `over_s` or longer.
        short_s: those of no kernels to speak of.
        over_s: see there.
    """

    long_s: Estimate
    short_s: Estimate
    over_s: float


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found.

    Attributes:
        fleet: with measured devices and links.
        devices: per group of alike devices, the fit and the devices' indices.
        between: the link between all ranks, strategy by strategy; None for a single rank.
        resume: what a segment between two exchanges takes besides its kernels; None for a single rank.
        others: part of the cores that others used meanwhile; None if unknown.
    """

    fleet: Fleet
    devices: tuple[tuple[DeviceFit, tuple[int, ...]], ...]
    between: FittedLink | None
    resume: Resuming | None
    others: float | None


def calibrate(
    ranks: int,
    fleet: Fleet | None = None,
    *,
    comm: Any = None,
    force: bool = False,
    rounds: int = 7,
    patience_s: float = 20.0,
    name: str = "measured",
    tick: Tick = lambda done, total: None,
) -> Calibration:
    """Measure `ranks` ranks and make a fleet of them.

    Args:
        ranks: how many to start on this machine (with `comm`: how many it has).
        fleet: whose names, nodes, memory and prices are kept; without it, a node per machine.
        comm: an mpi4py communicator whose ranks all call this; without it, ranks are started here.
        force: use noisy measurements, too, and measure beside other work.
        rounds: samples of each kernel and exchange.
        patience_s: how long to go on in search of undisturbed samples.
        name: of the fleet, if none is given.
        tick: told how many of how many samples are taken.

    Raises:
        InputError: the fleet has another number of devices, ranks lie otherwise on machines than its nodes,
            others use the machine, or the fits are no good.
    """
    if fleet is not None and len(fleet.devices) != ranks:
        raise InputError(
            place=fleet.name,
            reason=f"has {len(fleet.devices)} devices, but {ranks} MPI ranks are to be measured",
            remedy=f"Use {len(fleet.devices)} ranks, or leave --fleet out",
        )
    if comm is None and not force:
        _refuse_load(load_now())
    hosts = [] if comm is None else comm.allgather(socket.gethostname())
    _refuse_torn(hosts, fleet)  # before minutes of measuring
    fast = on_cards() if comm is None else any(comm.allgather(not on_host()))
    kernels = kernel_cases(CARD if fast else PROCESSOR)
    request = Request(tuple(exchange_cases(ranks)), kernels, rounds, patience_s)
    measured = measure_on(ranks, request, tick) if comm is None else measure(request, comm, tick)
    if not force:
        _refuse_load(measured.others)
    devices = fit_devices(request.kernels, measured, fleet)
    between = fit_link(request.exchanges, measured.exchange_s)
    inside = _inside(hosts, comm, request, tick)
    if not force:
        links = [found for found in (between, *inside.values()) if found is not None]
        refuse([fit for fit, _ in devices])
        refuse([fit for found in links for fit in found.strategies])
    resume = fit_resume(measured)
    made = assemble(measured, devices, between, inside, fleet, name, resume)
    return Calibration(made, devices, between, resume, measured.others)


def _inside(hosts: Sequence[str], comm: Any, whole: Request, tick: Tick) -> dict[str, FittedLink | None]:
    """The link of every machine, where the ranks are on several."""
    if len(set(hosts)) <= 1:
        return {}
    node = comm.Split(hosts.index(hosts[comm.rank]), comm.rank)
    cases = tuple(exchange_cases(node.size))
    mine = fit_link(cases, measure(replace(whole, exchanges=cases, kernels=()), node, tick).exchange_s)
    node.Free()
    return dict(zip(hosts, comm.allgather(mine), strict=True))


def _refuse_torn(hosts: Sequence[str], fleet: Fleet | None) -> None:
    """Refuse ranks of one machine that do not follow each other, as devices of a node do, and a fleet with a
    node whose ranks are on several machines: no link that is measured would be that node's.
    """
    if len(set(hosts)) <= 1:
        return
    if len(list(groupby(hosts))) > len(set(hosts)):
        raise InputError(
            place="calibrate",
            reason="the ranks of one machine do not follow each other",
            remedy="Start the job so that ranks fill one machine after another",
        )
    if fleet is None:
        return
    for number, node in enumerate(fleet.nodes):
        machines = {hosts[device.index] for device in fleet.devices if device.node == number}
        if len(machines) > 1:
            raise InputError(
                place="calibrate",
                reason=f"the ranks of {node.name} of {fleet.name} are on {len(machines)} machines",
                remedy="Start the job so that the ranks of a node are on one machine, or leave --fleet out",
            )


def _refuse_load(others: float | None) -> None:
    if others is not None and others > MOST_LOAD:
        raise InputError(
            place="calibrate",
            reason=f"other processes use {others:.0%} of this machine's cores, which would be measured, too",
            remedy="Stop them and try again, or pass --force to calibrate all the same",
        )


def exchange_times(cases: Sequence[ExchangeCase], seconds: Sequence[Sequence[float]]) -> list[ExchangeTimes]:
    """Timed exchanges with what their strategy's price says of rounds and bytes."""
    ranks = len(cases[0].ratios) if cases else 0
    # Links that have a latency and nothing else, and links that have no latency and move a byte a second.
    models = [CostModel(flat(ranks, link)) for link in (Link(np.inf, 1.0), Link(1.0, 0.0))]
    times: list[ExchangeTimes] = []
    for case, samples in zip(cases, seconds, strict=True):
        move, _ = example(case.kind, case.strategy, case.nbytes)
        tensor, at = TensorType((case.nbytes,), "uint8"), np.asarray(case.ratios)
        prices = [m.move(case.kind, case.strategy, tensor, move.pre, move.post) for m in models]
        rounds, link_bytes = (float(price.per_device(at, models[0].class_of).max()) for price in prices)
        name = f"{case.kind}.{case.strategy}"
        times.append(ExchangeTimes(name, case.nbytes, rounds, link_bytes, tuple(samples)))
    return times


def fit_link(cases: Sequence[ExchangeCase], seconds: Sequence[Sequence[float]]) -> FittedLink | None:
    """The link between the ranks of these exchanges; None where there are none."""
    if not cases:
        return None
    times = exchange_times(cases, seconds)
    strategies = fit_strategies(times)
    line = fit_line(times).as_link()
    return FittedLink(
        Link(line.bandwidth_byte_per_s, line.latency_s, tuple(fit.link for fit in strategies)), strategies
    )


def fit_devices(
    cases: Sequence[KernelCase], measured: Measured, fleet: Fleet | None
) -> tuple[tuple[DeviceFit, tuple[int, ...]], ...]:
    """Groups of ranks with alike devices, each with its rates."""
    names = [None] * len(measured.ranks) if fleet is None else [device.type.name for device in fleet.devices]

    def alike(a: int, b: int) -> bool:
        kinds = (measured.ranks[a].device, measured.ranks[b].device)
        return names[a] == names[b] and kinds[0] == kinds[1]

    return tuple(group_devices([_kernel_times(cases, mine) for mine in measured.kernel_s], alike))


def fit_resume(measured: Measured) -> Resuming | None:
    """The median over exchanges of what they take longer beside segments, with its quantile interval."""
    long_s: list[float] = []
    short_s: list[float] = []
    over_s: list[float] = []
    for following_s, resumed in zip(measured.exchange_s, measured.resumed, strict=True):
        if resumed is not None:
            exchange_s, kernels_s = median(following_s), median(resumed.alone_s) - median(resumed.empty_s)
            long_s.append(median(resumed.through_s) - exchange_s - kernels_s)
            short_s.append(max(median(resumed.brief_s) - exchange_s, 0.0))
            over_s.append(max(kernels_s, 0.0))
    if not long_s:
        return None
    short = _middle(short_s)
    return Resuming(_middle([max(each, short.value) for each in long_s]), short, median(over_s))


def _middle(samples: Sequence[float]) -> Estimate:
    """The median, and order statistics around it by the normal approximation of the binomial distribution."""
    times = np.sort(samples)
    half = 0.98 * np.sqrt(len(times))
    low, high = (round(np.clip(len(times) / 2 + d, 0, len(times) - 1)) for d in (-half, half))
    return Estimate(float(np.median(times)), float(times[low]), float(times[high]))


def _kernel_times(cases: Sequence[KernelCase], seconds: Sequence[Sequence[float]]) -> list[KernelTimes]:
    """One rank's kernels, less what it takes to start a compiled function."""
    warm, cold = (
        next(median(s) for case, s in zip(cases, seconds, strict=True) if case.op == op)
        for op in ("dispatch", "start")
    )
    times: list[KernelTimes] = []
    for case, samples in zip(cases, seconds, strict=True):
        if case.op in ("dispatch", "start"):
            continue
        # What it takes to start a segment of a plan is in `resume_s`.
        starting = cold if is_cold(case) else warm
        alone = tuple(max(s - starting / copies(case), s / 10) for s in samples)
        times.append(KernelTimes(_kernels(case), alone, is_piece(case.op)))
    return times


@cache
def _kernels(case: KernelCase) -> tuple[Kernel, ...]:
    """The equations of a case: what each costs where only one thing costs anything."""
    if is_piece(case.op):
        function, arguments = piece(case.op, case.shape, shapes_only=True)
    else:
        function = operation(case)
        arguments = tuple(jax.ShapeDtypeStruct(shape, case.dtype) for shape in operand_shapes(case))
    graph = trace(function, *arguments, state={}).graph
    probes = {
        "launches": DeviceType("launch", np.inf, np.inf, 1, launch_s=1.0),
        "flop": DeviceType("flop", 1.0, np.inf, 1, launch_s=0.0),
        "nbytes": DeviceType("bytes", np.inf, 1.0, 1, launch_s=0.0),
    }
    models = {what: CostModel(Fleet("one", (Node("n0", (t,), None),), None)) for what, t in probes.items()}
    through = traffic(graph)
    kernels: list[Kernel] = []
    for equation in graph.equations:
        whole = Signature((R,) * len(equation.inputs), (R,) * len(equation.outputs))
        cost = {
            what: m.kernel(equation, whole, through[equation]).constant.max() for what, m in models.items()
        }
        kind = op_class(equation)
        # Products of a step are multiplied as JAX does when nobody says how.
        default = case.precision is None and kind in PRODUCTS
        used = case.dtype if case.dtype != "float32" else "default" if default else "float32"
        turned = float(turned_elements(equation))
        kernels.append(Kernel(kind, cost["flop"], cost["nbytes"], cost["launches"], used, turned))
    return tuple(kernel for kernel in kernels if kernel.flop or kernel.nbytes or kernel.launches)


def assemble(
    measured: Measured,
    devices: Sequence[tuple[DeviceFit, tuple[int, ...]]],
    between: FittedLink | None,
    inside: Mapping[str, FittedLink | None],
    fleet: Fleet | None,
    name: str,
    resume: Resuming | None = None,
) -> Fleet:
    """A fleet of what was fitted.

    Args:
        measured: says what runs where.
        devices: groups of ranks with their rates.
        between: all ranks.
        inside: the ranks of each machine, where there are several.
        fleet: whose names, nodes, memory and prices are kept, if any.
        name: the new fleet's, if there was none.
        resume: what segments take besides their kernels.
    """
    resuming = (
        (0.0, 0.0, 0.0) if resume is None else (resume.long_s.value, resume.short_s.value, resume.over_s)
    )
    types: dict[int, DeviceType] = {}
    used: Counter[str] = Counter()
    for fit, members in devices:
        first = members[0]
        base = measured.ranks[first].device if fleet is None else fleet.devices[first].type.name
        used[base] += 1
        label = f"{base}-measured" + (f"-{used[base]}" if used[base] > 1 else "")
        memory = min(
            measured.ranks[i].memory_bytes if fleet is None else fleet.devices[i].type.memory_bytes
            for i in members
        )
        found = fit.as_type(label, memory, _source(fit, measured), resuming)
        # What a device costs nobody measures, and devices of one type may cost different amounts.
        prices = {i: None if fleet is None else fleet.devices[i].type.price_per_hour for i in members}
        types.update({i: replace(found, price_per_hour=price) for i, price in prices.items()})
    hosts = [info.host for info in measured.ranks]
    sizes = (
        [len(node.devices) for node in fleet.nodes] if fleet else [len(list(g)) for _, g in groupby(hosts)]
    )
    nodes: list[Node] = []
    start = 0
    for number, count in enumerate(sizes):
        link = inside.get(hosts[start], between) if count > 1 else None
        members = tuple(types[i] for i in range(start, start + count))
        nodes.append(Node(f"n{number}", members, link.link if link else None))
        start += count
    network = between.link if between and len(nodes) > 1 else None
    return Fleet(fleet.name if fleet else name, tuple(nodes), network)


def _source(fit: DeviceFit, measured: Measured) -> str:
    parts = {
        "launch": fit.launch_s,
        "products": fit.matmul_flop_per_s,
        "others": fit.vector_flop_per_s,
        "memory": fit.byte_per_s,
    }
    margin = ", ".join(f"{what} ±{estimate.relative:.0%}" for what, estimate in parts.items())
    return f"shardwright calibrate, {len(measured.ranks)} ranks at once; 95 % of {margin}"
