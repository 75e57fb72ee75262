"""Small steps within memory: the pool is no worse than what larger steps get, whose programs rents find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rewriting_cases import fleet, momentum, perceptron

from shardwright.api import synthesize_traced
from shardwright.ir.trace import Traced
from shardwright.synth import freely
from shardwright.synth.memory import pool

AS_IT_IS: Any = {"recompute": "off", "microbatches": 1}


@pytest.mark.parametrize(
    ("step", "speeds", "part"),
    [
        # Best where the second device takes what the first has no room for: 10 % dearer at other ratios.
        pytest.param(lambda: perceptron([16, 8, 8, 16], 512), (5, 3, 1), 0.622, marks=pytest.mark.full),
        # Best with ratios of its own for the weights: 7 % dearer with one vector.
        (lambda: perceptron([16, 32, 16, 32, 8], 64), (5, 3, 1), 0.6),
        # Best with less handed on between segments: 2 % dearer at the ratios at which it fits as it stands.
        (momentum, (2, 2, 1, 1), 0.95),
    ],
)
def test_a_small_step_is_planned_no_worse_than_a_larger_one(
    monkeypatch: pytest.MonkeyPatch, step: Callable[[], Traced], speeds: tuple[int, ...], part: float
) -> None:
    traced = step()
    roomy = synthesize_traced(traced, fleet=fleet(speeds=speeds), **AS_IT_IS)
    small = fleet(f"{int(part * max(roomy.memory_bytes))} B", speeds)
    found = synthesize_traced(traced, fleet=small, **AS_IT_IS)
    assert found.fits and found.cost_s > roomy.cost_s
    for module in (freely, pool):
        monkeypatch.setattr(module, "FEW_CHOICES", 0)
    as_larger = synthesize_traced(traced, fleet=small, **AS_IT_IS)
    assert as_larger.fits and found.cost_s <= as_larger.cost_s * (1 + 1e-3)
