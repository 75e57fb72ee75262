"""What is not searched for, or looked at, because what it would say is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from synth_cases import fleet, space, traced
from test_rivals import limited, step

from shardwright.cost.model import CostModel
from shardwright.ir.program import Program
from shardwright.synth import alternate, part
from shardwright.synth.alternate import synthesize
from shardwright.synth.freely import Free, freely
from shardwright.synth.memory import lean, within
from shardwright.synth.part import Part
from shardwright.synth.subfleets import Choosing
from shardwright.synth.timer import Timer

#: Less than the perceptron needs on a device.
MEMORY = 100_000


@pytest.fixture(autouse=True)
def without_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of steps of more choices."""
    monkeypatch.setattr(Free, "pool", None)


class Looks:
    """Looks that say every device takes so many bytes, and which programs they were at."""

    def __init__(self, nbytes: float) -> None:
        self.nbytes, self.programs = int(nbytes), list[Program]()

    def __call__(self, program: Program, ratios: Sequence[float]) -> tuple[int, ...]:
        self.programs.append(program)
        return (self.nbytes,) * len(ratios)


def counted(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[object]:
    """Calls of a function, which are carried out."""
    calls: list[object] = []
    carried_out: Callable[..., Any] = getattr(module, name)

    def noted(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return carried_out(*args, **more)

    monkeypatch.setattr(module, name, noted)
    return calls


@pytest.mark.parametrize(
    ("large", "times", "searched"), [(True, 1.015, False), (True, 1.1, True), (False, 1.015, True)]
)
def test_beside_a_near_rival_a_large_step_is_not_searched_for_what_fits(
    large: bool, times: float, searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best program takes a fifth more than there is, and no other one is known to fit or not to."""
    graph, choices, most = step()
    monkeypatch.setattr(alternate, "SMALL", 0 if large else len(graph.equations))
    monkeypatch.setattr(within, "hopeless", lambda *_: False)
    free = freely(graph, choices, CostModel(limited(most)), Timer(), look=Looks(1.2 * most))
    leaner = counted(monkeypatch, within, "leaner")
    found = alternate.within_memory(free, times * free.found.cost_s)
    assert bool(leaner) == searched
    assert found.dearer and found.bound_s <= free.found.cost_s


@pytest.mark.parametrize(
    ("speeds", "again", "tried"),
    [((2.0,), False, False), ((2.0,), True, True), ((4.0, 2.0, 1.0), False, True)],
)
def test_one_device_runs_one_program_whatever_its_order(
    speeds: tuple[float, ...], again: bool, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed again is in another one; of several devices, another order is what is tried first."""
    monkeypatch.setattr(within, "repeats", lambda graph: again)
    ordered = counted(monkeypatch, within, "ordered")
    look = Looks(1.2 * MEMORY)
    model = CostModel(fleet(speeds, memory=f"{MEMORY} B"))
    found = synthesize(traced("mlp").graph, space("mlp"), model, Timer(), look=look)
    assert look.programs and found.notes
    assert bool(ordered) == tried


@pytest.mark.parametrize(("less", "looks"), [(1.0, 1), (lean._LESS, 2)])
def test_an_order_that_should_take_no_less_is_not_looked_at(
    less: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the model another order takes an eighth less: that is enough unless all of it should be saved."""
    look = Looks(1.2 * MEMORY)
    model = CostModel(fleet((2.0, 2.0, 2.0), memory=f"{MEMORY} B"))
    free = freely(traced("mlp").graph, space("mlp"), model, Timer(), look=look)
    monkeypatch.setattr(lean, "_handing_on", lambda several, found, peaks: (found, peaks))
    monkeypatch.setattr(lean, "_LESS", less)
    alternate.within_memory(free, briefly=True)
    assert len(look.programs) == looks


@pytest.mark.parametrize("briefly", [True, False])
def test_briefly_what_is_far_too_large_is_not_looked_at(
    briefly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the model all need more than twice the memory; else somebody may see what lacks least."""
    graph, choices, most = step()
    look = Looks(2.5 * most)
    free = freely(graph, choices, CostModel(limited(most / 2.5)), Timer(), look=look)
    found = alternate.within_memory(free, briefly=briefly)
    assert found.dearer and bool(look.programs) != briefly


@pytest.mark.parametrize(
    ("over", "bound_s", "whole", "tried"),
    [
        (1.3, 1.1, True, True),
        (1.05, 1.1, True, False),
        (1.3, 1.3, True, False),
        (1.3, 1.1, False, False),
    ],
)
def test_what_lacks_little_on_a_part_is_not_tried_on_another(
    over: float, bound_s: float, whole: bool, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what is far dearer there, nor on a part of the fleet."""
    monkeypatch.setattr(part, "fullest", lambda found, model: over)
    graph, choices, most = step()
    search = Choosing(graph, choices, limited(most), Timer())
    assert search.below(math.inf, briefly=True) is not None
    here = next(each for each in search.parts if each.found is not None)
    other = Choosing(graph, choices, limited(most), Timer()).parts[0]
    assert isinstance(here, Part) and isinstance(other, Part)
    here.bound_s, other.bound_s, other.whole = 1.0, bound_s, whole
    assert here.gives_way(other) == tried
