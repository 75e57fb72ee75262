"""Better ratios for a program that fits with room to spare: the last step within memory, after `within`."""

from __future__ import annotations

from dataclasses import replace

from shardwright.cost.memory.liveness import Footprint, Peaks
from shardwright.synth.shares.bounds import ENOUGH
from shardwright.synth.shares.turns import Candidate, Turns

#: Looks at most, each at ratios that the model allows after the look before.
_LOOKS = 3

#: Part of its cost that other ratios should save.
_WORTH = 0.005

#: What takes this part of some device's memory leaves no room for better ratios.
_FULL = 0.98


def stretched(
    turns: Turns, best: Candidate, memory: Footprint | Peaks, free_s: float
) -> tuple[Candidate, Footprint | Peaks]:
    """A program that fits, at better ratios where the model took it for larger than it is.

    Args:
        turns: the search so far.
        best: what it found.
        memory: of that.
        free_s: what was found if memory were no limit.
    """
    judge, learned = turns.judge, turns.judge.budgets
    near, peaks = best.ratios, memory
    for rounds in range(_LOOKS):
        if not isinstance(peaks, Peaks) or not peaks.seen or len(turns.model.types) == 1 or turns.stop():
            break
        if best.cost_s <= free_s * (1 + ENOUGH) or _FULL < judge.excess(peaks) <= 1:
            break
        with turns.timer.ratios():
            judge.learn(peaks, near, best.memory, rounds)
            near, cost_s = turns.best_ratios(list(best.items), best.ratios, best.memory)
            if near == best.ratios or cost_s >= best.cost_s * (1 - _WORTH):
                break
            peaks = judge.peaks(best.program, near, best.memory)
            over = judge.excess(peaks)
        if over <= 1:
            best, memory = replace(best, ratios=near, cost_s=cost_s, over=over), peaks
    judge.budgets = learned
    return best, memory
