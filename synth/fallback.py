"""What is planned where nothing that was searched fits, or memory made it dearer: a baseline."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from shardwright.cost.memory.liveness import Footprint, Peaks
from shardwright.cost.model import CostModel
from shardwright.ir.graph import Graph
from shardwright.synth.alternate import Synthesis
from shardwright.synth.baselines import Draft, Workshop
from shardwright.synth.combinations import SMALL
from shardwright.synth.memory.rent import too_small
from shardwright.synth.programs.judge import Judge, Look, shortage
from shardwright.synth.space.space import Space
from shardwright.synth.timer import Timer


def fits(found: Synthesis, model: CostModel) -> bool:
    """Whether what was found is within every device's memory."""
    return fullest(found, model) <= 1


def fullest(found: Synthesis, model: CostModel) -> float:
    """The largest part of its memory that what was found takes on a device."""
    limits = np.array([device.type.memory_bytes for device in model.fleet.devices], dtype=np.float64)
    return float((found.memory.peak(np.asarray(found.ratios)) / limits).max())


def fitting(
    graph: Graph,
    space: Space,
    model: CostModel,
    found: Synthesis,
    timer: Timer,
    look: Look | None = None,
    below_s: float = math.inf,
) -> Synthesis:
    """What was found if it fits and memory did not make it dearer; else the best baseline if that is better.

    Under tight budgets the search may miss programs, so that a baseline on all devices may be cheaper. Where
    nothing fits, it is what lacks least.

    Args:
        graph: the step.
        space: its programs.
        model: prices of the whole fleet.
        found: what was found there.
        timer: is told where time goes.
        look: see `shardwright.synth.alternate.synthesize`.
        below_s: what a baseline has to cost less than.
    """
    limits = [device.type.memory_bytes for device in model.fleet.devices]
    fitted = fits(found, model)
    # On one device exchanges with nobody cut the step into compiled segments, which may take less memory. Of
    # a large step keeping less saves more, and a plan that fits already would be in its way.
    one = len(limits) == 1 and len(graph.equations) > SMALL
    if (fitted and found.search_gap == 0.0) or one or too_small(graph, limits):
        return found
    judge = Judge(graph, model, look)
    least = 1.0 if fitted else fullest(found, model)
    chosen: tuple[Draft, Footprint | Peaks] | None = None
    with timer.search():
        most_s = min(below_s, found.cost_s) if fitted else below_s
        for best in Workshop(graph, space, model).cheaper(most_s):
            memory = judge.peaks(best.program, best.ratios, judge.footprint(best.program))
            over = judge.excess(memory)
            if over <= 1 or (over < least and below_s == math.inf):
                chosen, least = (best, memory), over
            if over <= 1:
                break
    if chosen is None:
        return found
    best, memory = chosen
    missing = "is dearer within memory" if fitted else "does not fit into memory"
    # What is lacking is a note of its own: whoever looks closer says it anew.
    lacks = (shortage(best.ratios, memory, model),) if least > 1 else ()
    note = f"what was searched {'needs more memory' if lacks else missing}; this is {best.name}"
    notes = (*(n for n in found.notes if "fits into every device" not in n), *lacks, note)
    # At other ratios than those of the search, the bound over all ratios is what is known.
    least_s = found.bound_s
    if best.ratios == found.ratios:
        least_s = max(least_s, (1 - found.search_gap) * found.cost_s)
    return replace(
        found,
        program=best.program,
        ratios=best.ratios,
        cost_s=best.cost_s,
        search_gap=max(0.0, 1 - least_s / best.cost_s),
        notes=notes,
        items=tuple(best.items),
        memory=memory,
    )
