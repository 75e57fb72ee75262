"""Less memory never makes the plan cheaper: models × fleets × sequences of budgets."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import pytest
from rewriting_cases import fleet, layered, momentum

from shardwright import Fleet
from shardwright.api import synthesize_traced
from shardwright.factory import load_factory
from shardwright.ir.rewrites.rewriting import Rewriting
from shardwright.ir.trace import Traced, trace
from shardwright.memory.remedies import with_memory


def layers(scan: bool) -> Traced:
    step, args = layered(scan, layers=2)
    return trace(step, *args)


def flat(target: str) -> tuple[Any, ...]:
    """A step and its arguments, as `trace` takes them."""
    step, args = load_factory(target)
    return step, *args


MODELS: dict[str, Callable[[], Traced]] = {
    "layers": lambda: layers(False),
    "scan": lambda: layers(True),
    "momentum": momentum,
}
SPEEDS = ((3, 1), (5, 3, 1), (2, 2, 1, 1))
AS_IT_IS: Any = {"recompute": "off", "microbatches": 1}
PARTS = (0.95, 0.85, 0.75, 0.65, 0.5)


@pytest.mark.parametrize(
    ("model", "speeds", "how", "parts"),
    [
        ("layers", SPEEDS[0], "as it is", PARTS[::2]),
        *(
            pytest.param(model, speeds, how, PARTS, marks=pytest.mark.full)
            for how in ("as it is", "in any way")
            for model in MODELS
            for speeds in (SPEEDS if how == "as it is" else SPEEDS[:1])
        ),
    ],
)
def test_less_memory_never_makes_the_plan_cheaper(
    model: str, speeds: tuple[int, ...], how: str, parts: Sequence[float]
) -> None:
    traced = MODELS[model]()
    options = AS_IT_IS if how == "as it is" else {}
    free = synthesize_traced(traced, fleet=fleet(speeds=speeds), **options)
    most = max(synthesize_traced(traced, fleet=fleet(speeds=speeds), **AS_IT_IS).memory_bytes)
    costs = [free.cost_s]
    for part in parts:
        small = fleet(f"{int(part * most)} B", speeds)
        plan = synthesize_traced(traced, fleet=small, **options)
        costs.append(plan.cost_s if plan.fits else float("inf"))
    assert all(after >= before * (1 - 1e-9) for before, after in itertools.pairwise(costs)), costs
    assert costs[1] < float("inf")


def test_a_scan_keeps_less_where_that_saves_time_whatever_the_memory() -> None:
    """What it keeps is stacked up and taken apart again; with less memory it once was found, and cheaper."""
    step, args = load_factory("examples/gpt2.py:tiny_scan")
    traced = trace(step, *args)
    options: Any = {"fleet": fleet(speeds=(3, 1)), "axes": 1}
    free = synthesize_traced(traced, **options)
    assert free.rewriting.recompute
    assert free.cost_s < synthesize_traced(traced, recompute="off", **options).cost_s


def slow(memory: int) -> Fleet:
    """Devices on a link so fast that all of them take part."""
    types = [
        {
            "name": f"slow-{speed}",
            "flops": f"{speed} MFLOP/s",
            "memory_bandwidth": f"{2 * speed} MB/s",
            "memory": f"{memory} B",
        }
        for speed in (50, 30, 10)
    ]
    link = {"bandwidth": "1 GB/s", "latency": "1 us"}
    return Fleet.from_dict(
        {"name": "slow", "nodes": [{"devices": [{"type": t} for t in types], "link": link}]}
    )


def test_what_fits_with_less_is_found_with_more() -> None:
    """At budgets at which it once was not."""
    traced = momentum()
    most = max(synthesize_traced(traced, fleet=slow(10**9), **AS_IT_IS).memory_bytes)
    parts = (0.95, 0.9, 0.85, 0.82, 0.8)
    costs = [synthesize_traced(traced, fleet=slow(int(p * most)), **AS_IT_IS).cost_s for p in parts]
    assert all(after >= before * (1 - 1e-9) for before, after in itertools.pairwise(costs)), costs


def test_the_best_program_is_found_within_the_memory_that_it_takes() -> None:
    """The model of memory takes it for half as large again."""
    traced = momentum()
    free = synthesize_traced(traced, fleet=slow(10**9), **AS_IT_IS)
    found = synthesize_traced(traced, fleet=slow(max(free.memory_bytes)), **AS_IT_IS)
    assert found.fits and found.cost_s <= free.cost_s * (1 + 1e-9)


def test_what_a_scan_keeps_is_computed_again_where_that_saves_time_on_larger_fleets_too() -> None:
    """Six devices with all the memory they want: what saves time within less of it does so here."""
    card = {"name": "card", "flops": "20 TFLOP/s", "memory_bandwidth": "1.5 TB/s", "memory": "80 GB"}
    link = {"bandwidth": "100 GB/s", "latency": "5 us"}
    six = Fleet.from_dict({"name": "six", "nodes": [{"devices": [{"type": card, "count": 6}], "link": link}]})
    step, args = load_factory("examples/gpt2.py:tiny_scan")
    traced = trace(step, *args)
    plan = synthesize_traced(traced, fleet=six, axes=1)
    kept = synthesize_traced(traced, fleet=six, axes=1, recompute="off")
    assert kept.fits and not kept.rewriting
    assert plan.rewriting.recompute and plan.cost_s < 0.95 * kept.cost_s


def test_within_nearly_its_memory_a_step_hands_on_less_and_gathers_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPT-2 small on the testbed: gathering again would fit as well, and take 2.8 % longer."""
    monkeypatch.syspath_prepend("examples")
    gpt2 = importlib.import_module("gpt2")
    traced = trace(gpt2.train_step, *jax.eval_shape(partial(gpt2.arguments, **gpt2.SMALL | {"batch": 16})))
    testbed = Fleet.load("examples/fleets/hap_testbed.yaml")
    free = synthesize_traced(traced, fleet=testbed, axes=1)
    pairs = zip(free.memory_bytes, testbed.devices, strict=True)
    part = max(needed / device.type.memory_bytes for needed, device in pairs)
    scarce = synthesize_traced(traced, fleet=with_memory(testbed, 0.96 * part), axes=1)
    assert scarce.fits and scarce.program != free.program
    assert scarce.cost_s < free.cost_s * 1.01


@pytest.mark.full
def test_devices_of_no_use_make_a_scanned_step_no_dearer() -> None:
    """Beside two thirds of the devices, of which none is worth using, an A100 computes as much again."""
    step, args = load_factory("examples/gpt2.py:small_scan")
    traced = trace(step, *args)

    def node(*kinds: str) -> dict[str, Any]:
        link = {"bandwidth": "12 GB/s", "latency": "10 us"}
        return {"devices": [{"type": kind} for kind in kinds], "link": link}

    network = {"bandwidth": "25 Gbit/s", "latency": "30 us"}
    nodes = [node("A100-40GB", "T4"), node("V100-16GB", "V100-16GB", "V100-16GB")]
    alone = Fleet.from_dict({"name": "one", "nodes": [node("A100-40GB")]})
    found = synthesize_traced(
        traced, fleet=Fleet.from_dict({"name": "f", "nodes": nodes, "network": network}), axes=1
    )
    assert found.fits
    assert found.cost_s <= synthesize_traced(traced, fleet=alone).cost_s * (1 + 1e-2)


def test_a_scan_that_is_quicker_with_less_kept_is_so_in_pieces() -> None:
    """GPT-2 in a scan, on an A100 with two fifths of its memory and three T4."""
    traced = trace(*flat("examples/gpt2.py:small_scan"))
    unlike = with_memory(Fleet.load("examples/fleets/a100_t4.yaml"), 0.4)
    found = synthesize_traced(traced, fleet=unlike)
    pieces = found.rewriting.microbatches
    assert found.fits and pieces > 1 and found.rewriting.recompute
    kept = synthesize_traced(traced, fleet=unlike, recompute=Rewriting(microbatches=2 * pieces))
    assert kept.fits and found.cost_s < 0.95 * kept.cost_s


@pytest.mark.full
@pytest.mark.parametrize("name", ["a100_t4", "hap_testbed"])
def test_less_memory_never_makes_a_scanned_step_cheaper(name: str) -> None:
    traced = trace(*flat("examples/gpt2.py:small_scan"))
    costs = []
    for part in (1.0, 0.4, 0.3, 0.22, 0.16):
        plan = synthesize_traced(traced, fleet=with_memory(Fleet.load(f"examples/fleets/{name}.yaml"), part))
        assert plan.fits
        costs.append(plan.cost_s)
    assert all(less <= more * (1 + 1e-9) for less, more in itertools.pairwise(costs)), costs
