"""How a plan changes the step, jointly with placements and ratios: recomputation, host memory, pieces.

Where the plan of the step as it is fits into memory and memory made it no dearer, that is the plan: computing
twice takes more arithmetic, though less traffic if it was cheap, which is looked for in small steps alone.
Otherwise the cheapest of these is taken, quick ones first, so that they are rivals for the rest:

    briefly     the step as it is, and in 2, 4, 8, … micro-batches, without a search for smaller programs;
                on two mesh axes, where such searches take long, a rung of the ladder that should fit, first,
                and before the step as it is where hardly any program of that would fit
    within      the same, searched for what fits, as long as something may be cheaper than what fits already
    a ladder    rewritings, placements, ratios and all, each of which keeps less for the backward part than
                the one before (`shardwright.synth.stretches.rungs_of`): those that may fit, or be cheaper;
                of small steps, all combinations (`shardwright.synth.combinations`)
    stages      last, with the layers of scans on different devices (`staging.py`), where that may be faster;
                of a large step first: a rival for all of the above, or instead of it
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardwright.cost.fleet import Fleet
from shardwright.cost.topology import without_host
from shardwright.ir.arguments import check_choice
from shardwright.ir.errors import InputError
from shardwright.ir.rewrites.rewriting import Rewriting, differentiated, rewritten
from shardwright.ir.trace import Traced
from shardwright.memory.in_pieces import InPieces
from shardwright.memory.ladder import Ladder
from shardwright.memory.microbatches import Pieces, counts_of
from shardwright.memory.rivals import (
    GAIN,
    WORTH,
    Planning,
    better,
    cost_of,
    dearer,
    existing,
    noted,
    overfill,
    tolerance,
)
from shardwright.memory.staging import Staging
from shardwright.plan import Plan
from shardwright.synth.combinations import SMALL
from shardwright.synth.memory.rent import overfull
from shardwright.synth.stretches import BOTH, OFFLOADING, RECOMPUTING, Policy, in_scans

#: What may be computed again: whatever makes the plan better, nothing, everything; or what exactly is.
Recompute: TypeAlias = Literal["auto", "off", "all"] | Rewriting

#: What may wait in host memory: whatever makes the plan better, nothing, everything that is kept.
Offload: TypeAlias = Literal["auto", "off", "all"]

#: In how many pieces the batch may come: as many as need be, or so many.
Microbatches: TypeAlias = Literal["auto"] | int

#: Whether layers of scans may lie on different devices: where that is faster, or not at all; or how many
#: pieces of the batch these hand on to each other.
Stages: TypeAlias = Literal["auto", "off"] | int

#: Where nothing fits, so many numbers of pieces one after the other lack no less memory than fewer.
_IN_VAIN = 2


def check_rewriting(
    recompute: object, microbatches: object, offload: object, fleet: Fleet, stages: object = "off"
) -> None:
    """Raises InputError if that is no way to say what is computed again, waits in host memory or is cut.

    A `Rewriting` says all of it: what is said beside it may not be something else.
    """
    whole = isinstance(microbatches, int) and not isinstance(microbatches, bool) and microbatches >= 1
    if microbatches != "auto" and not whole:
        raise InputError(
            place="microbatches", reason=f"is {microbatches!r}", remedy="Pass 'auto', or a number from 1 on"
        )
    _check_stages(stages, recompute, microbatches)
    if not isinstance(recompute, Rewriting):
        check_choice("recompute", recompute, ("auto", "off", "all"))
    check_choice("offload", offload, ("auto", "off", "all"))
    spills = isinstance(recompute, Rewriting) and any(stretch.host for stretch in recompute.recompute)
    if isinstance(recompute, Rewriting) and microbatches not in ("auto", recompute.microbatches):
        raise InputError(
            place="microbatches",
            reason=f"is {microbatches}, and the Rewriting that recompute is has {recompute.microbatches}",
            remedy=f"Leave it out, or pass Rewriting(…, microbatches={microbatches})",
        )
    if spills and offload == "off":
        raise InputError(
            place="offload",
            reason="is 'off', and of the Rewriting that recompute is something waits in host memory",
            remedy="Leave it out, or pass a Rewriting of stretches with host=False",
        )
    lacking = without_host(fleet) if offload == "all" or spills else ()
    if lacking:
        raise InputError(
            place=f"fleet {fleet.name}",
            reason=f"gives no host link for {', '.join(lacking[:3])}{' …' if lacking[3:] else ''}: "
            "its memory is the host's, and nothing can be moved out of it",
            remedy="Add host_link: {bandwidth: 16 GB/s, latency: 10 us}, with your numbers, or plan with "
            "offload='off'",
        )


def _check_stages(stages: object, recompute: object, microbatches: object) -> None:
    if stages not in ("auto", "off") and (
        isinstance(stages, bool) or not isinstance(stages, int) or stages < 1
    ):
        raise InputError(
            place="stages",
            reason=f"is {stages!r}",
            remedy="Pass 'auto', 'off', or a number of pieces from 1 on",
        )
    pieces = recompute.microbatches if isinstance(recompute, Rewriting) else microbatches
    given = recompute.stages if isinstance(recompute, Rewriting) else stages
    if isinstance(given, int) and given > 1 and pieces not in ("auto", 1):
        raise InputError(
            place="stages",
            reason=f"hand on {given} pieces of the batch, of which there are {pieces} already",
            remedy="Leave microbatches out: what stages hand on are micro-batches",
        )
    if isinstance(recompute, Rewriting) and stages not in ("auto", "off", recompute.stages):
        raise InputError(
            place="stages",
            reason=f"is {stages}, and the Rewriting that recompute is has {recompute.stages}",
            remedy=f"Leave it out, or pass Rewriting(…, stages={stages})",
        )


def best_plan(
    traced: Traced,
    fleet: Fleet,
    recompute: Recompute,
    microbatches: Microbatches,
    offload: Offload,
    planner: Planning,
    late: Callable[[], bool],
    stages: Stages = "off",
) -> Plan:
    """The best plan of a step over its rewritings.

    Args:
        traced: the step as it was traced.
        fleet: the devices.
        recompute: what may be computed again.
        microbatches: in how many pieces the batch may come.
        offload: what may wait in host memory.
        planner: plans a step, within a rival's cost.
        late: whether no further plan may be made.
        stages: whether layers of scans may lie on different devices.

    Raises:
        InputError: the step cannot be run in so many micro-batches, its layers are no stages, or it is to be
            changed in both ways.
    """
    if isinstance(recompute, Rewriting):
        return existing(planner.plan(rewritten(traced, recompute)))
    every = "all" in (recompute, offload)
    asked = _Asked(traced, fleet, _policies(recompute, offload, fleet), every, planner, late)
    if stages not in ("auto", "off", 1):
        return Staging(traced, fleet, asked.policies, every, planner, late).plan(int(stages))
    staging = Staging(traced, fleet, asked.policies, every, planner, late)
    wanted = stages == "auto" and microbatches in ("auto", 1)
    early, enough = staging.early() if wanted else (None, False)
    if early is not None and enough:
        return early
    if microbatches != "auto":
        found = asked.plan(microbatches, rival_s=cost_of(early))
    else:
        found = asked.plan(1, Pieces(traced, fleet, planner, late), cost_of(early))
        found = found if early is not None else asked.in_more(found)
    if early is not None:
        return better(early, found) or early
    return staging.beside(found) if wanted else found


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be planned: see `best_plan`; `every` layer is computed again, or waits in host memory."""

    traced: Traced
    fleet: Fleet
    policies: tuple[Policy, ...]
    every: bool
    planner: Planning
    late: Callable[[], bool]

    def plan(self, pieces: int, cut: Pieces | None = None, rival_s: float = math.inf) -> Plan:
        """The best plan in so many pieces, or also in those of `cut` that fit sooner or are cheaper.

        Args:
            pieces: of the batch.
            cut: plans it in more pieces.
            rival_s: what a plan costs already that fits: what is cheaper alone is searched for.
        """
        ladder = Ladder(self.traced, self.fleet, self.policies, pieces, self.planner, self.late)
        return ladder.top() if self.every else InPieces(ladder, cut, rival_s).best()

    def in_more(self, found: Plan) -> Plan:
        """The best of a plan and of those in every number of pieces that "auto" knows.

        Where nothing fits yet, each number is planned as if it had been asked for, until something does. Of a
        small step that memory made dearer each is, unless a bound says that nothing in so many pieces is
        cheaper by a hundredth (with scans, which may gain by keeping less, that nothing is nearly as cheap):
        that takes a moment, and the fewest pieces that fit need not be the cheapest. Of a large step that
        lacks no less memory in twice and in four times as many pieces, more of them are not planned.
        """
        small = len(self.traced.graph.equations) <= SMALL
        if found.fits and not (small and dearer(found, unasked=not self.every)):
            return found
        if overfull(self.traced.graph, [device.type.memory_bytes for device in self.fleet.devices]):
            return found
        best, least = better(None, found), found
        worth = tolerance(self.traced, self.fleet, WORTH)
        gain = GAIN if small and in_scans(differentiated(self.traced), self.policies) else 1.0
        in_vain, lacked = 0, math.inf
        # In one piece it was planned beside a rival, if anything fitted in more.
        for pieces in (*([1] if found.rewriting.microbatches > 1 else []), *counts_of(self.traced)):
            if self.late():
                return noted(
                    best or least, f"{pieces} micro-batches and more were not searched for want of time"
                )
            step = rewritten(self.traced, Rewriting(microbatches=pieces))
            most_s = cost_of(best) * (1 - worth) * gain
            glimpse = self.planner.plan(step, most_s, briefly=True)
            if glimpse is None or glimpse.bound_s >= most_s:
                continue
            plan = self.plan(pieces, rival_s=cost_of(best))
            best = better(best, plan)
            if best is None:
                lacks = overfill(plan)
                in_vain, lacked = (0, lacks) if lacks < lacked else (in_vain + 1, lacked)
                least = plan if lacks < overfill(least) else least
            if in_vain == _IN_VAIN and not small:
                most = max(pieces, least.rewriting.microbatches)
                return noted(least, f"more than {most} micro-batches were not searched: fewer lack no more")
            if best is not None and not small:
                break
        return best or least


def _policies(recompute: Recompute, offload: Offload, fleet: Fleet) -> tuple[Policy, ...]:
    """What may be done with a layer."""
    if offload == "all":
        # With everything computed again, only what layers are handed is left to wait there.
        return (("nothing", True),) if recompute == "all" else OFFLOADING
    if offload == "off" or recompute == "all" or without_host(fleet):
        return () if recompute == "off" else RECOMPUTING
    return OFFLOADING if recompute == "off" else BOTH
