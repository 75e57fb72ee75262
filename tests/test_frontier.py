"""What a step costs against the memory there is."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import shardwright.memory.frontier as module
from shardwright import Fleet, Frontier, InputError, frontier, synthesize
from shardwright.api import synthesize_traced
from shardwright.assemble import as_it_runs
from shardwright.cli import main
from shardwright.ir.rewrites.rewriting import Rewriting
from shardwright.memory.remedies import with_memory
from shardwright.plan import Plan
from shardwright.synth.programs.judge import SHORT
from shardwright.synth.unsearched import NONE_FITS


def step(params: Any, x: Any) -> Any:
    def loss_of(params: Any) -> Any:
        return jnp.mean((jax.nn.gelu(x @ params[0]) @ params[1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return [w - 0.1 * g for w, g in zip(params, gradients, strict=True)], loss


def shape(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, "float32")


ARGS = ([shape(48, 20), shape(20, 48)], shape(32, 48))
#: Planned in a moment.
ALONE: Any = {"recompute": "off", "microbatches": 1, "axes": 1}


def unlike(memory: str = "1 GB") -> Fleet:
    """Devices on a link so fast that all of them take part."""
    types = [
        {"name": f"s{s}", "flops": f"{s} MFLOP/s", "memory_bandwidth": f"{2 * s} MB/s", "memory": memory}
        for s in (50, 20)
    ]
    link = {"bandwidth": "1 GB/s", "latency": "1 us"}
    return Fleet.from_dict(
        {"name": "unlike", "nodes": [{"devices": [{"type": t} for t in types], "link": link}]}
    )


@pytest.fixture(scope="module")
def tight() -> Fleet:
    """With as much memory as the best plan of the step takes on one of the devices."""
    free = synthesize(step, *ARGS, fleet=unlike(), **ALONE)
    return unlike(f"{max(free.memory_bytes)} B")


def costs(found: Frontier) -> list[float]:
    """The most memory first; infinite where nothing fits."""
    return [budget.plan.cost_s if budget.plan.fits else math.inf for budget in found.budgets]


class Searches:
    """Plans as `synthesize_traced` does, but with no time to search in where there is the most memory."""

    def __init__(self, hasty: Fleet | None = None) -> None:
        self.hasty, self.asked = hasty, list[tuple[Fleet, dict[str, Any]]]()

    def __call__(self, traced: Any, *, fleet: Fleet, **planning: Any) -> Plan:
        self.asked.append((fleet, planning))
        if fleet == self.hasty:
            planning["time_limit_s"] = 0
        return synthesize_traced(traced, fleet=fleet, **planning)


def test_less_memory_costs_more_and_every_plan_fits(tight: Fleet) -> None:
    found = frontier(step, *ARGS, fleet=tight, memory=(0.8, 1, 0.05), **ALONE)
    assert [budget.part for budget in found.budgets] == [1, 0.8, 0.05]
    assert all(more <= less for more, less in itertools.pairwise(costs(found)))
    assert (
        costs(found)[0] == synthesize(step, *ARGS, fleet=tight, **ALONE).cost_s < costs(found)[1] < math.inf
    )
    for budget in found.budgets:
        limits = [device.type.memory_bytes for device in with_memory(tight, budget.part).devices]
        assert [device.type.memory_bytes for device in budget.plan.fleet.devices] == limits
        inside = all(b <= limit for b, limit in zip(budget.plan.memory_bytes, limits, strict=True))
        assert budget.plan.fits == inside == (budget.part > 0.5)


def test_a_plan_that_fits_into_less_is_not_searched_for_again(
    tight: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = Searches()
    monkeypatch.setattr(module, "synthesize_traced", searches)
    found = frontier(step, *ARGS, fleet=tight, memory=(3, 2, 1, 0.04, 0.03), **ALONE)
    assert [asked.devices[0].type.memory_bytes for asked, _ in searches.asked] == [
        with_memory(tight, part).devices[0].type.memory_bytes for part in (3, 0.04)
    ]
    assert [budget.found_at for budget in found.budgets] == [3, 3, 3, 0.04, 0.04]
    assert [budget.plan.fits for budget in found.budgets] == [True, True, True, False, False]
    assert found.whole is found.budgets[2].plan
    with pytest.raises(InputError, match="1 is none of its parts"):
        _ = module.Frontier(found.budgets[3:]).whole


@pytest.mark.parametrize("parts", [(0.6, 0.5), (0.06, 0.03, 0.02)])
def test_what_does_not_fit_says_what_it_lacks_of_the_memory_that_there_is(
    tight: Fleet, parts: tuple[float, ...]
) -> None:
    """Whether a search or a baseline lacks least: no row says what another one would need."""
    found = frontier(step, *ARGS, fleet=tight, memory=parts, **ALONE)
    baseline = "what was searched needs more memory; this is "
    for budget in found.budgets:
        limits = [device.type.memory_bytes for device in budget.plan.fleet.devices]
        over = max(b / limit for b, limit in zip(budget.plan.memory_bytes, limits, strict=True))
        assert budget.found_at == parts[0] and not budget.plan.fits and over > 1
        notes = budget.plan.assumptions
        (said,) = [note for note in notes if "times the memory everywhere" in note]
        times = re.search(r"with ([\d.]+) times", said)
        assert said.startswith(SHORT) and times is not None
        assert float(times[1]) == pytest.approx(over, rel=0.01)
        assert any(note.startswith(baseline) for note in notes) == (parts[0] == 0.6)
        moved = [note for note in notes if note.startswith(f"found with {parts[0]:g} of the memory")]
        assert len(moved) == (budget.part != parts[0])


def test_a_closer_look_takes_back_that_nothing_fits(tight: Fleet) -> None:
    plan = synthesize(step, *ARGS, fleet=with_memory(tight, 0.6), **ALONE)
    roomy = replace(plan, fleet=with_memory(tight, 4), assumptions=(*plan.assumptions, NONE_FITS))
    found = as_it_runs(roomy)
    assert found.fits and not roomy.fits
    assert set(roomy.assumptions) - set(found.assumptions) == {
        NONE_FITS,
        *(note for note in plan.assumptions if note.startswith(SHORT)),
    }
    assert as_it_runs(found) == found


def test_a_plan_for_less_memory_is_one_for_more(tight: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more memory was searched in vain, what less of it costs is what more of it costs."""
    less = synthesize(step, *ARGS, fleet=with_memory(tight, 0.8), **ALONE)
    hasty = synthesize(step, *ARGS, fleet=tight, time_limit_s=0, **ALONE)
    assert less.cost_s < hasty.cost_s
    monkeypatch.setattr(module, "synthesize_traced", Searches(hasty=tight))
    most, least = frontier(step, *ARGS, fleet=tight, memory=(1, 0.8), **ALONE).budgets
    assert most.plan.cost_s == least.plan.cost_s == less.cost_s
    assert (most.found_at, least.found_at) == (0.8, 0.8)
    assert most.plan.fits and most.plan.fleet == tight
    assert "found with 0.8 of the memory" in most.plan.assumptions[-1]
    # What nothing within less memory goes below says nothing about more.
    assert most.plan.bound_s == min(hasty.bound_s, less.bound_s)


def test_the_step_is_changed_as_with_less_memory_where_that_is_cheaper(
    tight: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = Searches()

    def planned(traced: Any, *, fleet: Fleet, **planning: Any) -> Plan:
        dearer = {"microbatches": 4} if fleet == tight and planning["recompute"] == "off" else {}
        return searches(traced, fleet=fleet, **{**planning, **dearer})

    monkeypatch.setattr(module, "synthesize_traced", planned)
    most, least = frontier(step, *ARGS, fleet=tight, memory=(1, 0.8), **ALONE).budgets
    assert [planning["microbatches"] for _, planning in searches.asked] == [4, 1, 1]
    fleet, planning = searches.asked[-1]
    assert fleet == tight and planning["recompute"] == least.plan.rewriting
    assert (most.found_at, least.found_at) == (1, 0.8)
    assert most.plan.cost_s < least.plan.cost_s
    assert most.plan.rewriting == least.plan.rewriting


@pytest.mark.parametrize(
    ("memory", "reason"), [((), "has no part"), ((1, 0), "0 is no part"), ((math.nan,), "nan is no part")]
)
def test_what_is_no_part_of_a_memory_is_refused(memory: tuple[float, ...], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        frontier(step, *ARGS, fleet=unlike(), memory=memory)


def test_the_command_shows_what_less_memory_costs(tmp_path: Path, tight: Fleet) -> None:
    (tmp_path / "small.py").write_text(
        "import jax\nimport jax.numpy as jnp\n\n\ndef make():\n"
        "    args = (jax.ShapeDtypeStruct((16, 16), 'float32'), jax.ShapeDtypeStruct((32, 16), 'float32'))\n"
        "    return (lambda w, x: w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)), args\n"
    )
    (tmp_path / "fleet.json").write_text(json.dumps(tight.to_dict()))

    def run(*more: str) -> Any:
        arguments = ["plan", f"{tmp_path}/small.py:make", "--fleet", f"{tmp_path}/fleet.json", *more]
        return CliRunner().invoke(main, arguments)

    result = run("--frontier", ".9,.01", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    rows = data["frontier"]
    assert [(row["part"], row["fits"]) for row in rows] == [(1, True), (0.9, True), (0.01, False)]
    assert rows[0]["cost_s"] == data["cost_s"] <= rows[1]["cost_s"]
    head, whole, _, none = run("--frontier", ".9,.01").output.splitlines()[-4:]
    assert head.split()[:3] == ["memory", "fits", "cost"]
    assert whole.split()[:2] == ["1", "yes"] and none.split()[:5] == ["0.01", "no", "-", "-", "-"]
    refused = run("--frontier", ".9,much")
    assert refused.exit_code == 2 and "is no list of numbers" in refused.output


@pytest.mark.parametrize("pieces", [{"microbatches": 8}, {"stages": 8}])
def test_a_row_says_in_how_many_pieces_the_batch_comes(pieces: dict[str, int]) -> None:
    plan = synthesize(step, *ARGS, fleet=unlike(), **ALONE).but(rewriting=Rewriting(**pieces))
    lines = Frontier((module.Budget(1.0, plan, 1.0),)).text().splitlines()
    head, row = (re.split(" {2,}", line.strip()) for line in lines)
    assert row[head.index("pieces")] == "8"
