"""Pins: placements of arguments that the user fixes, and what each of them costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from re import sub
from typing import TypeAlias, cast

from shardwright.cost.bill import bill, seconds
from shardwright.cost.grid.model import GridModel
from shardwright.cost.grid.settled import Settled
from shardwright.cost.model import CostModel
from shardwright.ir.arguments import is_whole
from shardwright.ir.errors import InputError, PlanError, ProgramError
from shardwright.ir.graph import Graph, TensorType, Value
from shardwright.ir.placement import (
    Grid,
    Partial,
    Placement,
    Replicate,
    Shard,
    cuts,
    parse_placement,
    reduction,
)
from shardwright.ir.program import Program, nodes_of
from shardwright.plans.parts import PinPrice
from shardwright.synth.alternate import Synthesis
from shardwright.synth.grid.pricing import GridPriceList, grid_prices
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.programs.judge import Judge, Look
from shardwright.synth.search.priced import solve
from shardwright.synth.space.conversions import shards
from shardwright.synth.space.factors import Use
from shardwright.synth.space.pins import pin
from shardwright.synth.space.space import Space

#: Path pattern -> placement, or a function of name and type that returns one, or None where it fixes nothing.
Constraints: TypeAlias = Mapping[str, Placement | str] | Callable[[str, TensorType], Placement | str | None]

#: What a plan with pins says that leaves devices out.
ELSEWHERE = "pins are priced on the devices that are used: without them, others might be worth using"

#: Costs of a program differ by no more than this part of them for the order in which they were added up.
_ROUNDING = 1e-12

#: So many arguments of a step are named where a pattern matches none.
_MOST_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Pin:
    """One pin: what the user called it, the placement, and the arguments that it fixes."""

    name: str
    placement: Placement
    values: tuple[Value, ...]

    def __str__(self) -> str:
        return f"{self.name} = {self.placement}"


def path_of(name: str) -> str:
    """`params/mlp/0/kernel` of `params.mlp[0].kernel` or `params['mlp'][0].kernel`; a path stays as it is."""
    attributes = sub(r"(?:\]|^\w+)(?:\.(?:[A-Za-z_]\w*|\*))+", lambda found: found[0].replace(".", "/"), name)
    return sub(r"\[(?:'([^']*)'|\"([^\"]*)\"|(\d+|\*))\]", r"/\1\2\3", attributes)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Of the names of arguments those that a pattern stands for.

    One that is a name stands for that alone: a key such as `a/b` may give another argument its path.
    """
    among = {name: path_of(name) for name in names}
    if pattern in among:
        return [pattern]
    wanted = path_of(pattern)
    return [
        name
        for name, path in among.items()
        if path == wanted or fnmatchcase(path, wanted) or fnmatchcase(name, pattern)
    ]


def resolve(constraints: Constraints, graph: Graph, space: Space) -> tuple[Pin, ...]:
    """The pins that constraints stand for.

    A pattern is a path (`params/*/kernel`, or as in the plan, `params['w']`), matched as file names are; `*`
    also matches `/`. What a function fixes in one placement is one pin.

    Raises:
        InputError: a pattern matches nothing, a placement is none or not possible for an argument, or two
            pins ask for different placements of one argument.
    """
    arguments = dict(zip(graph.input_names, graph.inputs, strict=True))
    _check_kind(constraints)
    if callable(constraints):
        found = _by_function(constraints, arguments)
    else:
        found = [_by_pattern(pattern, given, arguments) for pattern, given in constraints.items()]
    names = {value: name for name, value in arguments.items()}
    for each in found:
        for value in each.values:
            _check(each, names[value], value, space)
    _refuse_contradictions(found, names, space)
    return tuple(found)


def factors(pins: Sequence[Pin], space: Space) -> tuple[Use, ...]:
    """The factors that enforce pins in a search."""
    return tuple(
        pin(space.root.choice[value], lambda p, wanted=each.placement: _agrees(p, wanted))
        for each in pins
        for value in each.values
    )


def fixed_by(each: PinPrice, names: Iterable[str]) -> tuple[str, ...]:
    """Of the names of a plan's arguments those that a pin fixes; older files do not say it of a function."""
    return each.arguments or tuple(matching(each.name, names))


def pins_of(prices: Sequence[PinPrice], graph: Graph, free: Collection[Value] = ()) -> tuple[Pin, ...]:
    """The pins that a plan was made with, for its step.

    Args:
        prices: what the plan says of them.
        graph: the step.
        free: arguments that they are not to fix.
    """
    arguments = dict(zip(graph.input_names, graph.inputs, strict=True))
    values = [tuple(arguments[name] for name in fixed_by(each, arguments)) for each in prices]
    return tuple(
        Pin(each.name, parse_placement(each.placement, nodes=()), tuple(v for v in some if v not in free))
        for each, some in zip(prices, values, strict=True)
    )


def takes_two_axes(pins: Sequence[Pin], possible: bool) -> bool:
    """Whether some pin says one thing of the nodes and another of the devices in them.

    Args:
        pins: all of them.
        possible: whether two mesh axes are to be planned on.

    Raises:
        InputError: they are not.
    """
    first = next((each for each in pins if isinstance(each.placement, Grid)), None)
    if first is not None and not possible:
        raise InputError(
            place=f"pin {first.name!r}",
            reason=f"{first.placement} is over two mesh axes, and one is to be planned on",
            remedy="Give one placement for all devices, or plan with axes=2 where nodes have several devices",
        )
    return first is not None


def conflict(pins: Sequence[Pin], graph: Graph, space: Space, model: CostModel) -> InputError:
    """The error for pins that no program keeps to: a smallest set of them, none of which can be left out."""
    even = (1 / len(model.class_of),) * len(model.class_of)
    two = takes_two_axes(pins, possible=True)
    if two:
        space = Space(graph, tuple(len(node.devices) for node in model.fleet.nodes))
    prices = grid_prices(GridPriceList(GridModel(model)), even) if two else Prices.at(model, even)

    def possible(some: Sequence[Pin]) -> bool:
        uses = factors(some, space)
        try:
            _ = GridSolver(space, uses).solve(prices, enough=1.0) if two else solve(space, prices, extra=uses)
        except PlanError:
            return False
        return True

    left = list(pins)
    for each in pins:
        others = [other for other in left if other is not each]
        if not possible(others):
            left = others
    return _contradiction(left)


def priced(
    pins: Sequence[Pin], graph: Graph, space: Space, model: CostModel, plan: Synthesis, look: Look
) -> tuple[PinPrice, ...]:
    """What each pin costs: the plan's cost less that of the best program without it, at the same ratios.

    Where that does not fit into memory, the plan may be dearer for want of it alone: then two programs are
    compared that are the best memory aside.

    Args:
        pins: all of them.
        graph: the step.
        space: its programs on one mesh axis.
        model: prices.
        plan: what was found; where it is of two axes, so is the program without a pin.
        look: what says how much memory a program takes.
    """
    if not pins:
        return ()
    nodes, ratios = nodes_of(plan.program), plan.ratios
    grid = None if nodes is None else GridModel(model)
    if nodes is not None:
        space = Space(graph, nodes)
    prices = Prices.at(model, ratios) if grid is None else grid_prices(GridPriceList(grid), ratios)
    judge = Judge(graph, model, look)
    names = dict(zip(graph.inputs, graph.input_names, strict=True))

    def best(kept: Sequence[Pin]) -> tuple[float, Program]:
        """What the best program costs that keeps to some pins, memory aside."""
        uses = factors(kept, space)
        solution = solve(space, prices, extra=uses) if grid is None else GridSolver(space, uses).solve(prices)
        program = emit(space, solution.assignment, prices)
        by = model if grid is None else Settled(grid, ratios)
        return seconds(bill(program, graph, by), model, ratios), program

    pinned_s = cache(lambda: best(pins)[0])
    found: list[PinPrice] = []
    for each in pins:
        without_s, program = best([other for other in pins if other is not each])
        with_s = plan.cost_s if judge.fits(program, ratios) else pinned_s()
        saved_s = with_s - without_s
        price_s = saved_s if saved_s > _ROUNDING * with_s else 0.0
        fixed = tuple(names[value] for value in each.values)
        found.append(PinPrice(each.name, str(each.placement), price_s, fixed))
    return tuple(found)


def _by_pattern(pattern: str, given: Placement | str, arguments: Mapping[str, Value]) -> Pin:
    matched = matching(pattern, arguments)
    if not matched:
        remedy = _near(path_of(pattern), dict.fromkeys(map(path_of, arguments)))
        raise InputError(place=f"pin {pattern!r}", reason="matches no argument of the step", remedy=remedy)
    return Pin(pattern, _placement(pattern, given), tuple(arguments[name] for name in matched))


def _near(wanted: str, paths: Collection[str]) -> str:
    """What is like a path that is not there; where it begins as none does, also what the arguments are.

    Those that come as `*a` have names which nobody may have seen: `a/0`, or `arg0`.
    """
    near = get_close_matches(wanted, paths, n=3, cutoff=0.4)
    heads = {path.partition("/")[0] for path in paths}
    if near and any(fnmatchcase(head, wanted.partition("/")[0]) for head in heads):
        return f"Near matches: {', '.join(near)}"
    depth = 1 if len(heads) > 1 else 2
    tops = dict.fromkeys("/".join(path.split("/")[:depth]) for path in paths)
    shown = [top if top in paths else f"{top}/…" for top in tops]
    arguments = ", ".join(shown[:_MOST_SHOWN]) + (", …" if shown[_MOST_SHOWN:] else "")
    return f"Near matches: {', '.join(near)}; there are {arguments}" if near else f"There are {arguments}"


def _check_kind(constraints: object) -> None:
    """Raises InputError for what is neither a mapping from patterns nor a function of two arguments."""
    reason = ""
    if callable(constraints):
        try:
            inspect.signature(constraints).bind("params['w']", TensorType((), "float32"))
        except (TypeError, ValueError) as error:
            reason = f"cannot be called with an argument's name and type: {error}"
    elif not isinstance(constraints, Mapping):
        reason = f"are {constraints!r}"
    elif wrong := [key for key in cast(Mapping[object, object], constraints) if not isinstance(key, str)]:
        reason = f"name {wrong[0]!r}, which is no text"
    if reason:
        raise InputError(
            place="constraints",
            reason=reason,
            remedy="Pass {'params/*/kernel': Shard(0), …}, or a function (name, type) -> placement or None",
        )


def _by_function(
    constraints: Callable[[str, TensorType], Placement | str | None], arguments: Mapping[str, Value]
) -> list[Pin]:
    called = getattr(constraints, "__name__", "constraints")
    chosen: dict[Placement, list[Value]] = {}
    for name, value in arguments.items():
        given = constraints(name, value.type)
        if given is not None:
            chosen.setdefault(_placement(name, given), []).append(value)
    return [Pin(f"{called} -> {p}", p, tuple(values)) for p, values in chosen.items()]


def _placement(name: str, given: object) -> Placement:
    remedy = (
        "Give shardwright.Shard(dim), shardwright.Replicate(), or one of the texts 'S(dim)' and 'R'; two of "
        "them on two mesh axes, such as 'R/S(1)' for whole on every node and cut within it"
    )
    found: object = given
    if isinstance(given, str):
        try:
            found = parse_placement(given.strip(), nodes=())
        except ProgramError as error:
            raise InputError(
                place=f"pin {name!r}", reason=f"{given!r} is no placement", remedy=remedy
            ) from error
    if isinstance(found, Replicate | Shard | Partial | Grid) and reduction(found):
        raise InputError(
            place=f"pin {name!r}", reason="an argument is a whole tensor, no part of a sum", remedy=remedy
        )
    if not isinstance(found, Replicate | Shard | Grid) or any(not is_whole(cut.dim) for cut in cuts(found)):
        raise InputError(place=f"pin {name!r}", reason=f"{given!r} is no placement", remedy=remedy)
    return found


def _agrees(placement: Placement, wanted: Placement) -> bool:
    """Whether a placement is the one wanted; the planner knows best in which units a dimension is cut.

    On two mesh axes a pin of one placement is kept on both, and on one axis a pin of two agrees with both.
    """
    if isinstance(placement, Grid) or isinstance(wanted, Grid):
        pairs = zip(_on_both(placement), _on_both(wanted), strict=True)
        return all(_agrees(own, given) for own, given in pairs)
    if isinstance(placement, Shard) and isinstance(wanted, Shard):
        return placement.dim == wanted.dim and wanted.unit in (1, placement.unit)
    return placement == wanted


def _on_both(placement: Placement) -> tuple[Placement, Placement]:
    """Over the nodes and within them; what lies on all devices alike does on both."""
    return (placement.across, placement.within) if isinstance(placement, Grid) else (placement, placement)


def _check(each: Pin, name: str, value: Value, space: Space) -> None:
    options = shards(space.units.of(value))
    wanted = [p for p in _on_both(each.placement) if isinstance(p, Shard)]
    if not all(any(_agrees(s, shard) for s in options) for shard in wanted):
        can = ", ".join(f"{s.dim}" if s.unit == 1 else f"{s.dim} (in units of {s.unit})" for s in options)
        raise InputError(
            place=f"pin {each.name!r}",
            reason=f"{name} of shape {value.type.shape} cannot be cut as {each.placement}",
            remedy=f"Dimensions that can be cut: {can}" if can else "It can only be whole: 'R'",
        )


def _refuse_contradictions(pins: Sequence[Pin], names: Mapping[Value, str], space: Space) -> None:
    """Two pins of one choice to different placements; the search need not be asked."""
    first: dict[object, tuple[Pin, Value]] = {}
    for each in pins:
        for value in each.values:
            other, of = first.setdefault(space.root.choice[value], (each, value))
            if not (_agrees(each.placement, other.placement) or _agrees(other.placement, each.placement)):
                why = (
                    f"{names[value]} is given both"
                    if value is of
                    else f"{names[of]} and {names[value]} are computed together, in one placement"
                )
                raise _contradiction([other, each], why)


def _contradiction(pins: Sequence[Pin], why: str = "no program keeps to all of them") -> InputError:
    return InputError(
        place="pins",
        reason=f"{' and '.join(map(str, pins))} contradict each other: {why}",
        remedy="Leave one of them out",
    )
