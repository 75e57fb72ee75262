"""Programs of a larger step that rents find, whatever the memory: what `synth/segments.py` cuts apart.

Rents from next to none to far too much, at the ratios that are likely to be good, find programs from the
cheapest to the smallest; each is put in the orders that hold least at a time (`sparing.py`). Where memory is
short, none of this asks how much of it there is, but for how the devices' memories compare with each other:
within less of it the linear program of several ratios chooses among the same programs, and does not find a
cheaper plan there (but for rounding, and for what looks at a program correct). Small steps have a pool
(`pool.py`), of more programs and all ratios.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwright.cost.bill import charges
from shardwright.ir.program import Program
from shardwright.synth.memory.budgets import Renting
from shardwright.synth.memory.sparing import Sparing
from shardwright.synth.prices.tables import Prices
from shardwright.synth.programs.emit import emit
from shardwright.synth.shares.turns import Billed, Found, Turns, starts

#: Rents, as multiples of what the best program costs over the bytes that it takes on all devices.
_RENTS = tuple(2.0**k for k in (-8, -2, 0, 3))


def rented(turns: Turns, free: Found, renting: Renting) -> Iterator[Billed]:
    """The programs, each as it is asked for; see the module's docstring.

    Args:
        turns: the search so far.
        free: what it found if memory were no limit.
        renting: makes programs smaller.
    """
    model, graph, memory = turns.model, renting.graph, renting.limits.nbytes
    solution, prices = turns.search(free.ratios)
    best = emit(turns.space, solution.assignment, prices, turns.extra)
    taken = float(turns.judge.footprint(best).peak(np.array(free.ratios)).sum())
    by_memory = tuple(limit / sum(memory) for limit in memory)
    by_speed = [tuple(float(each[c]) for c in model.class_of) for each in starts(model)]
    known: set[Program] = set()
    for ratios in dict.fromkeys([free.ratios, by_memory, *by_speed]):
        prices = Prices.at(turns.listed, ratios)
        for scale in _RENTS:
            if turns.stop():
                return
            with turns.timer.search():
                solution = renting.solve(prices, ratios, scale * free.cost_s / taken, turns.stop)
                turns.searches, turns.expanded = turns.searches + 1, turns.expanded + solution.expanded
            program = emit(turns.space, solution.assignment, prices, turns.extra)
            if program not in known:
                known.add(program)
                sparing = Sparing(program, graph)
                counts = dict.fromkeys([0, len(sparing.gathers)]) if sparing.possible else ()
                for each in [sparing.again(count) for count in counts] or [program]:
                    yield Billed(each, ratios, charges(each, graph, model), turns.judge.footprint(each))
