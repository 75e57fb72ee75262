"""Programs of a plan's step, priced anew: what each other placement of a tensor costs, and when it wins.

They keep to the plan's pins, but for that of the tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.constraints import factors, pins_of
from shardwright.cost.bill import Item, Tally, bill
from shardwright.cost.grid.model import GridModel
from shardwright.cost.grid.settled import pricing
from shardwright.cost.quantity import size
from shardwright.ir.errors import PlanError
from shardwright.ir.graph import Value
from shardwright.ir.placement import Placement
from shardwright.ir.program import Program, nodes_of
from shardwright.ir.trace import Traced
from shardwright.memory.device_memory import peaks
from shardwright.plan import Plan
from shardwright.synth.grid.pricing import GridPriceList, grid_prices
from shardwright.synth.grid.solve import GridSolver
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.search.priced import solve
from shardwright.synth.space.pins import pin
from shardwright.synth.space.space import Space

#: What an alternative may cost more, as a part of the plan, and still count as equally good.
EQUAL = 1e-6

#: On two mesh axes an alternative may cost so much more, as a part of it, than the best program that has it.
GOOD_ENOUGH = 1e-3


@dataclass(frozen=True, slots=True)
class Priced:
    """A program's cost taken apart.

    Attributes:
        cost_s: all of it.
        exchange_s: what exchanges take.
        memory_bytes: predicted peak per device that the plan uses.
        fits: whether that is within every device's memory.
    """

    cost_s: float
    exchange_s: float
    memory_bytes: tuple[int, ...]
    fits: bool

    @property
    def compute_s(self) -> float:
        """What is computed."""
        return self.cost_s - self.exchange_s


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another placement of a tensor, with the best program that keeps to it.

    Attributes:
        tensor: its name.
        placement: as it would lie.
        priced: that program.
        change_s: what it costs more than the plan.
        wins: what would have to change for it to win, in words.
    """

    tensor: str
    placement: str
    priced: Priced
    change_s: float
    wins: str

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {
            "tensor": self.tensor,
            "placement": self.placement,
            "cost_s": self.priced.cost_s,
            "change_s": self.change_s,
            "compute_s": self.priced.compute_s,
            "exchange_s": self.priced.exchange_s,
            "memory_bytes": list(self.priced.memory_bytes),
            "fits": self.priced.fits,
            "wins": self.wins,
        }


class Bench:
    """Prices programs of a plan's step on the devices it uses, at its shares."""

    def __init__(self, plan: Plan, traced: Traced) -> None:
        self.plan = plan
        self.traced = traced
        self.items, self.model = plan.bill(traced)
        self.ratios = plan.used_ratios
        self.nodes = nodes_of(plan.program)

    @cached_property
    def space(self) -> Space:
        """The programs of the step, on as many mesh axes as the plan has."""
        return Space(self.traced.graph, self.nodes)

    @cached_property
    def prices(self) -> Prices:
        """What their instructions cost at the plan's shares."""
        if self.nodes is None:
            return Prices.at(self.model, self.ratios)
        return grid_prices(GridPriceList(GridModel(self.model)), self.ratios)

    @cached_property
    def current(self) -> Priced:
        """The plan itself."""
        return self.price(self.plan.program)

    def price(self, program: Program) -> Priced:
        """A program at the plan's shares."""
        items = self.bill(program, self.ratios)
        exchanges = [item for item in items if item.exchange]
        types = self.model.fleet.types
        memory = peaks(program, self.traced.graph, self.ratios, types)
        limits = (each.memory_bytes for each in types)
        return Priced(
            cost_s=Tally(items, self.model).seconds(self.ratios),
            exchange_s=Tally(exchanges, self.model).seconds(self.ratios) if exchanges else 0.0,
            memory_bytes=memory,
            fits=all(used <= limit for used, limit in zip(memory, limits, strict=True)),
        )

    def bill(self, program: Program, ratios: tuple[float, ...]) -> list[Item]:
        """A program's instructions with what they cost; on two axes at these shares only."""
        priced = pricing(self.plan.program, self.model, ratios)
        return bill(program, self.traced.graph, priced)

    def seconds(self, ratios: tuple[float, ...]) -> float:
        """What the plan's program costs at other shares of the devices it uses."""
        items = self.items if self.nodes is None else self.bill(self.plan.program, ratios)
        return Tally(items, self.model).seconds(ratios)

    def alternatives(self, name: str) -> tuple[Alternative, ...]:
        """All other placements of an argument, the cheapest first.

        The search stays on as many mesh axes as the plan has. On one device there is no difference.
        """
        if len(self.plan.used) == 1:
            return ()
        names = self.traced.graph.input_names
        value = self.traced.graph.inputs[names.index(name)]
        choice = self.space.root.choice[value]
        found: list[Alternative] = []
        for placement in dict.fromkeys(holding.base for holding in choice.domain.holdings):
            if str(placement) != self.plan.held[name]:
                program = self._best(value, placement)
                if program is not None:
                    found.append(self._alternative(name, placement, self.price(program)))
        return tuple(sorted(found, key=lambda each: each.priced.cost_s))

    def _best(self, value: Value, placement: Placement) -> Program | None:
        """The best program that hands in `value` so, and the rest as it is pinned; None if there is none."""
        choices = self.space.root.choice
        together = [other for other in self.traced.graph.inputs if choices[other] == choices[value]]
        kept = factors(pins_of(self.plan.pins, self.traced.graph, free=together), self.space)
        uses = (pin(choices[value], lambda other: other == placement), *kept)
        try:
            if self.nodes is None:
                found = solve(self.space, self.prices, extra=uses)
            else:
                found = GridSolver(self.space, uses).solve(self.prices, enough=GOOD_ENOUGH)
            return emit(self.space, found.assignment, self.prices)
        except PlanError:
            return None

    def _alternative(self, name: str, placement: Placement, priced: Priced) -> Alternative:
        change_s = priced.cost_s - self.current.cost_s
        wins = _wins(self.current, priced, [device.type.name for device in self.model.fleet.devices])
        return Alternative(name, str(placement), priced, change_s, wins)


def _wins(now: Priced, other: Priced, kinds: Sequence[str]) -> str:
    """What would have to change for another program to win, as far as these two go."""
    over = "; it does not fit into memory as it is" if now.fits and not other.fits else ""
    noise_s = EQUAL * now.cost_s
    changes = (other.compute_s - now.compute_s, other.exchange_s - now.exchange_s)
    compute_s, exchange_s = (0.0 if abs(change_s) <= noise_s else change_s for change_s in changes)
    if abs(compute_s + exchange_s) <= noise_s:
        return f"nothing: it costs the same{over}"
    if compute_s + exchange_s < 0:
        return f"it is cheaper{over}" if over else "nothing: it is cheaper at these shares"
    if compute_s < 0:
        said = f"links {exchange_s / -compute_s:.3g} times as fast"
    elif exchange_s < 0:
        slower = compute_s / -exchange_s
        said = f"links {slower:.3g} times as slow, or devices {slower:.3g} times as fast"
    else:
        said = "no change of speeds, since it computes and exchanges no less"
    less = {
        kind: (was, needs)
        for kind, was, needs in zip(kinds, now.memory_bytes, other.memory_bytes, strict=True)
        if needs < 0.99 * was
    }
    for kind, (was, needs) in less.items():
        said += f"; or less than {size(was)} of memory on {kind}, where it needs {size(needs)}"
    return said + over
