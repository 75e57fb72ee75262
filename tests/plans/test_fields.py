"""Plans: their fields and how they are printed."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml
from plan_cases import array, fleet, mlp

from shardwright import (
    Fleet,
    InputError,
    Plan,
    baselines,
    synthesize,
)
from shardwright.ir.program import Compute, Move


def test_fields_of_the_interface(made: Plan) -> None:
    assert 0 < made.bound_s <= made.cost_s
    compared_s = made.comparing_s / made.resync_every
    assert 0 < made.iteration_s <= made.cost_s * (1 + 1e-9) + compared_s
    assert made.gap == (made.cost_s - made.bound_s) / made.cost_s
    assert made.devices == tuple(device.name for device in made.fleet.devices)
    assert len(made.ratios) == 3
    assert math.isclose(sum(made.ratios), 1.0, abs_tol=1e-9)
    assert made.ratios[0] > made.ratios[1] > made.ratios[2] > 0
    stats = made.stats
    assert stats.equations > 20
    assert stats.choices > 5
    assert stats.expanded > 0
    assert stats.searches > 0
    assert min(stats.trace_s, stats.space_s, stats.search_s, stats.ratio_s) > 0
    assert stats.replicated == {}
    assert made.state == {"params": "output[0]", "momentum": "output[1]"}
    assert set(made.held) == {
        *(f"{name}['{leaf}']" for name in ("params", "momentum") for leaf in ("b1", "w1", "w2")), "x", "y",
    }  # fmt: skip
    assert any(placement.startswith("S") for placement in made.held.values())
    assert {type(i) for i in made.program.instructions} >= {Compute, Move}
    assert made.exchanges
    assert made.fits
    assert len(made.memory_bytes) == 3
    assert made.versions["jax"] == jax.__version__


def test_gap_of_a_plan_that_costs_nothing(made: Plan) -> None:
    assert replace(made, cost_s=2.0, bound_s=1.5).gap == 0.25
    assert replace(made, cost_s=0.0, bound_s=0.0).gap == 0.0


def test_what_nobody_can_cut_is_named_where_it_shows() -> None:
    """In loops, too; of batches devices take parts."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def ones(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.linalg.qr(c)[0] + 0.01 * (x.T @ x) @ c, None

        c, _ = jax.lax.scan(ones, w, None, length=2)
        return c + jnp.linalg.cholesky(jnp.zeros((40, 12, 12)) + jnp.exp(x[:1, :12]) * jnp.eye(12)).sum()

    plan = synthesize(step, array(24, 24), array(400, 24, seed=1), fleet=fleet(50, 20), devices="all")
    (said,) = [note for note in plan.assumptions if "whole" in note]
    assert said.startswith("qr is done whole by every device") and "test_fields.py" in said


def test_the_printout_has_what_one_wants_to_know(made: Plan) -> None:
    text = str(made)
    for wanted in ("slow-30", "slow-10", "params -> output[0]", "gap", "S(0)", *made.devices):
        assert wanted in text
    for ratio in made.ratios:
        assert f"{ratio:.2%}" in text
    for exchange in made.exchanges:
        assert exchange.name.split(".")[0] in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_printout_says_when_there_is_no_state() -> None:
    plan = synthesize(lambda x: x.sum(), array(4, 4), fleet=fleet(2, 1))
    assert plan.state == {}
    assert re.search(r"state\s+none found", str(plan))


def test_the_printout_says_which_exchanges_pass_through_the_host(made: Plan) -> None:
    data = made.fleet.to_dict()
    assert "staged" not in str(made), "their memory is the host's"
    first, second, *_ = data["nodes"][0]["devices"]
    first["host_link"] = {"bandwidth": "24 GB/s", "latency": "5 us"}
    second["type"]["sms"] = 40
    said = "staged through host memory (host-mpi): slow-30 at 24 GB/s, 5 µs; slow-20 at 12 GB/s, 10 µs"
    assert f"{said} (assumed)" in str(replace(made, fleet=Fleet.from_dict(data)))
    assert "staged" not in str(replace(made, fleet=Fleet.from_dict(data | {"transport": "cuda-mpi"})))


def test_planning_runs_nothing_and_shapes_will_do(made: Plan) -> None:
    step, args = mlp()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    planned = synthesize(step, *shapes, fleet=fleet(30, 20, 10))
    assert planned.program == made.program
    assert planned.ratios == made.ratios
    assert planned.fingerprint == made.fingerprint
    assert planned.verify(step, *args).ok


def test_progress_is_told() -> None:
    told: list[str] = []
    synthesize(jnp.sin, array(4), fleet=fleet(1, 2), tick=told.append)
    assert told[0] == "tracing the step"
    assert "searching programs" in told


def test_a_fleet_may_be_given_as_the_path_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet(1, 2).to_dict()))
    given = (fleet(1, 2), path, str(path))
    assert {synthesize(jnp.sin, array(4), fleet=each).fleet for each in given} == {fleet(1, 2)}
    costs = [[b.cost_s for b in baselines(jnp.sin, array(4), fleet=each)] for each in given]
    assert costs[0] and costs == costs[:1] * 3


def test_what_is_no_fleet_is_named() -> None:
    with pytest.raises(InputError, match=r"fleet: is a dict\. Pass a shardwright\.Fleet or the path"):
        synthesize(jnp.sin, array(4), fleet={})  # type: ignore[arg-type]
