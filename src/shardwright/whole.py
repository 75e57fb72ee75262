"""What of a step every device does alike, though its primitive has a rule: there is no dimension to cut."""

from __future__ import annotations

from collections import defaultdict

from shardwright.ir.graph import Equation, per_form
from shardwright.ir.jaxpr import source_line
from shardwright.ir.registry import registry, rule_of
from shardwright.ir.repeated import equations_of
from shardwright.plan import Plan
from shardwright.reports.units import duration

#: Part of the cost from which on it is said.
_SHOWS = 0.01


def with_whole(plan: Plan) -> Plan:
    """A plan that was just made, which says what its devices cannot share where that shows in the cost."""
    graph = plan.step().graph
    first: dict[str, Equation] = {}
    if len(plan.used) > 1:
        for equation in graph.all_equations():
            if _is_whole(equation):
                first.setdefault(equation.primitive, equation)
    if not first:
        return plan
    items, model = plan.bill()
    spent: defaultdict[str, float] = defaultdict(float)
    for item, equation in zip(items, equations_of(plan.program, graph), strict=True):
        if equation is not None and _is_whole(equation):
            spent[item.label] += item.seconds(model, plan.used_ratios)
    notes = (
        f"{name} is done whole by every device, as nothing there can be cut: {duration(seconds)} of the cost "
        f"({source_line(first[name])})"
        for name, seconds in spent.items()
        if seconds >= _SHOWS * plan.cost_s > 0
    )
    return plan.but(assumptions=(*plan.assumptions, *notes))


@per_form
def _is_whole(equation: Equation) -> bool:
    """Whether devices cannot share it although its primitive has a rule, and one that says nothing of it."""
    op = registry().get(equation.primitive)
    if op is None or op.kind == "random" or equation.regions:  # what is done with a key takes no time
        return False
    rule = rule_of(equation)
    return not rule.note and not rule.letters and any(tensor.size > 1 for tensor in equation.input_types)
