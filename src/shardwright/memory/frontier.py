"""What a step costs against the memory there is: of all plans for parts of it, none dearer than for less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.api import check_tick, synthesize_traced
from shardwright.assemble import as_it_runs
from shardwright.cost.fleet import Fleet, FleetLike
from shardwright.ir.arguments import check_several, is_number
from shardwright.ir.errors import InputError
from shardwright.ir.rewrites.rewriting import original
from shardwright.ir.trace import Traced, trace
from shardwright.memory.remedies import with_memory
from shardwright.money import price_per_hour
from shardwright.pause import collector_paused
from shardwright.plan import Plan
from shardwright.reports.units import duration

#: Nobody asks what more than so many times the memory would do.
_MOST = 1e6

#: Plans whose costs differ by less than this part cost the same.
_SAME = 1e-9


@dataclass(frozen=True)
class Budget:
    """What a step costs where every device may use a part of its memory.

    Attributes:
        part: of the memory of every device; above one, more than there is.
        plan: the best plan found that fits; where none was found, one that lacks little.
        found_at: the part with which it was found: another one where that plan fits here as well, and none
            as good was found with this one.
    """

    part: float
    plan: Plan
    found_at: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        plan = self.plan
        return {
            "part": self.part,
            "found_at": self.found_at,
            "fits": plan.fits,
            "cost_s": plan.cost_s,
            "iteration_s": plan.iteration_s,
            "bound_s": plan.bound_s,
            "gap": plan.gap,
            "memory_bytes": list(plan.memory_bytes),
            "used": list(plan.used),
            "rewriting": plan.rewriting.to_dict(),
            "again_s": plan.again_s,
            "host_s": plan.host_s,
        }


@dataclass(frozen=True)
class Frontier:
    """Plans of one step for different parts of a fleet's memory.

    Attributes:
        budgets: the most memory first. Of two that fit, the one for more memory is no dearer.
    """

    budgets: tuple[Budget, ...]

    @property
    def whole(self) -> Plan:
        """The plan for all of the memory.

        Raises:
            InputError: that is none of the parts.
        """
        for budget in self.budgets:
            if budget.part == 1:
                return budget.plan
        raise InputError(place="memory", reason="1 is none of its parts", remedy="Ask for 1.0, too")

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain data."""
        return [budget.to_dict() for budget in self.budgets]

    def text(self) -> str:
        """A table for people."""
        head = ("memory", "fits", "cost", "at least", "gap", "again", "in host memory", "pieces", "devices")
        rows = [(*head, "found with"), *map(_row, self.budgets)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)


def _row(budget: Budget) -> tuple[str, ...]:
    plan = budget.plan
    layers = plan.rewriting.recompute
    known = (duration(plan.cost_s), duration(plan.bound_s), f"{plan.gap:.1%}") if plan.fits else ("-",) * 3
    return (
        f"{budget.part:g}",
        "yes" if plan.fits else "no",
        *known,
        str(sum(stretch.keep != "all" for stretch in layers)),
        str(sum(stretch.host for stretch in layers)),
        str(max(plan.rewriting.microbatches, plan.rewriting.stages)),
        str(len(plan.used)),
        f"{budget.found_at:g}",
    )


def frontier(
    train_step: Callable[..., Any],
    *args: Any,
    fleet: FleetLike,
    memory: Sequence[float] = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5),
    tick: Callable[[str], None] = lambda what: None,
    **planning: Any,
) -> Frontier:
    """Plan a step for parts of the memory of every device: what less of it costs.

    A plan for less memory is a plan for more, too, and counts as one: by no row does a step cost less than by
    one for more memory, whatever the searches find. A plan that fits into less than it was made for is not
    searched for again; nor is any for less than a part within which none was found.

    Args:
        train_step: see `synthesize`.
        args: see `synthesize`.
        fleet: the devices, or the path of a fleet file.
        memory: parts of the memory of every device, in any order.
        tick: told what begins (for progress displays).
        planning: further arguments of `synthesize`, such as `axes`; with `objective="cost"` it is the money
            that never grows with memory.

    Raises:
        InputError: a part is no number above zero, there is none; or see `synthesize`.
        TraceError: the step cannot be traced or has side effects.
    """
    check_parts(memory)
    fleet = Fleet.of(fleet)
    check_tick(tick)
    tick("tracing the step")
    with collector_paused():
        traced = trace(train_step, *args, state=planning.get("state"))
    return _Search(traced, fleet, tick, planning).over(memory)


def around(
    made: Plan,
    memory: Sequence[float],
    tick: Callable[[str], None] = lambda what: None,
    **planning: Any,
) -> Frontier:
    """`frontier` with all of the memory among its parts, for which a plan was just made in the same way."""
    options: dict[str, Any] = {"state": made.state_override, **planning}
    return _Search(original(made.step()), made.fleet, tick, options).over((1.0, *memory), made)


def check_parts(memory: Sequence[float], place: str = "memory") -> None:
    """Raises InputError if those are no parts of a memory."""
    check_several(place, memory, "[1, .9, .8]")
    strange = [part for part in memory if not is_number(part)]
    if strange:
        remedy = "Pass numbers, such as [1, .9, .8]"
        raise InputError(place=place, reason=f"has {strange[0]!r}", remedy=remedy)
    wrong = [part for part in memory if not 0 < part <= _MOST]
    if wrong or not memory:
        raise InputError(
            place=place,
            reason=f"{wrong[0]:g} is no part of a memory" if wrong else "has no part of a memory",
            remedy=f"Write parts above 0, such as 1, .9, .8, and up to {_MOST:g}",
        )


@dataclass(frozen=True, slots=True)
class _Search:
    """Plans a step for parts of a fleet's memory; `planning` are arguments of `synthesize`."""

    traced: Traced
    fleet: Fleet
    tick: Callable[[str], None]
    planning: dict[str, Any]

    def over(self, memory: Sequence[float], whole: Plan | None = None) -> Frontier:
        """The frontier over some parts of the memory; `whole` is the plan for all of it."""
        found: list[Budget] = []
        for part in sorted({float(part) for part in memory}, reverse=True):
            there = with_memory(self.fleet, part)
            last = found[-1] if found else None
            if whole is not None and part == 1:
                found.append(Budget(part, whole, part))
            elif last is not None and (not last.plan.fits or _has_room(last.plan, there)):
                # Whoever looked for smaller programs with more memory has seen what there is.
                found.append(Budget(part, _moved(last, there), last.found_at))
            else:
                self.tick(f"planning for {part:g} of the memory")
                found.append(Budget(part, self._planned(there), part))
        rows: list[Budget] = []
        for budget in reversed(found):
            less = rows[-1] if rows else None
            beaten = less is not None and self._dearer(budget.plan, less.plan)
            rows.append(self._with_that_for(less, budget) if less is not None and beaten else budget)
        return Frontier(tuple(reversed(rows)))

    def _with_that_for(self, less: Budget, budget: Budget) -> Budget:
        """The plan for less memory where more was searched and none as good found, or one better still.

        What nothing costs less than within less memory says nothing about more: the bound is that of the
        step, changed as that plan has it, within this.
        """
        there, same = budget.plan.fleet, budget.plan
        if same.rewriting != less.plan.rewriting:
            self.tick(f"planning for {budget.part:g} of the memory as with {less.part:g}")
            same = self._planned(there, recompute=less.plan.rewriting)
            if same.fits and not self._dearer(same, less.plan):
                return Budget(budget.part, same, budget.part)
        note = f"found with {less.found_at:g} of the memory: what was found with {budget.part:g} is dearer"
        moved = _moved(less, there)
        carried = moved.but(
            bound_s=min(same.bound_s, less.plan.bound_s), assumptions=(*moved.assumptions, note)
        )
        return Budget(budget.part, carried, less.found_at)

    def _planned(self, fleet: Fleet, **more: Any) -> Plan:
        return synthesize_traced(self.traced, fleet=fleet, tick=self.tick, **{**self.planning, **more})

    def _dearer(self, plan: Plan, other: Plan) -> bool:
        """Whether one that fits is better than a plan."""
        if not (plan.fits and other.fits):
            return other.fits
        return self._price(plan) > self._price(other) * (1 + _SAME)

    def _price(self, plan: Plan) -> float:
        """What a plan is to have least of."""
        if self.planning.get("objective") == "cost":
            return plan.iteration_s * (price_per_hour(plan) or 0.0)
        return plan.cost_s


def _has_room(plan: Plan, fleet: Fleet) -> bool:
    """Whether every device has the memory that a plan takes."""
    pairs = zip(plan.memory_bytes, fleet.devices, strict=True)
    return all(needed <= device.type.memory_bytes for needed, device in pairs)


def _moved(budget: Budget, fleet: Fleet) -> Plan:
    """The plan of a row as one for a fleet that differs in memory alone; it says what it lacks there.

    Exchanges that leave early take memory that the plan's peaks do not count: here none do.
    """
    plan = budget.plan
    fits = _has_room(plan, fleet)
    moved = as_it_runs(plan.but(fleet=fleet, fits=fits, bucket_bytes=None, ample=False))
    said = () if fits else (f"found with {budget.found_at:g} of the memory: so much was searched within",)
    return moved.but(assumptions=tuple(dict.fromkeys((*moved.assumptions, *said))))
