"""Layers and phases of a step, and placements and collectives in words."""

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.api import synthesize
from shardwright.backends.mpi import moves as mpi_moves
from shardwright.cost.bill import bill
from shardwright.cost.fleet import Fleet
from shardwright.cost.model import CostModel
from shardwright.ir.collectives import registry
from shardwright.ir.trace import trace
from shardwright.outline import WHOLE, instruction_places, outline
from shardwright.reports.words import COLLECTIVES, STRATEGIES, exchanged, placed

BLOCKS = ("blocks[0]", "blocks[1]")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loads a module of the examples, and forgets it."""
    loaded = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module
    for name in [name for name in sys.modules if name not in loaded]:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "examples")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "factory", "layers"),
    [
        ("gpt2", "tiny", ("tokens", "positions", *BLOCKS, "norm", WHOLE)),
        ("gpt2", "tiny_scan", ("tokens", "positions", "blocks", "norm", WHOLE)),
        (
            "vit",
            "tiny",
            ("patch", "class_token", "positions", "blocks[0]", "blocks[1]", "norm", "head", WHOLE),
        ),
    ],
)
def test_layers_of_examples(example: Any, module: str, factory: str, layers: tuple[str, ...]) -> None:
    step, args = getattr(example(module), factory)()
    graph = trace(step, *args).graph
    found = outline(graph)
    assert found.layers == layers
    of_all = {
        value for position in graph.state.values() for value in [graph.inputs[position]] if value.type.rank
    }
    assert {graph.inputs[position] for position in found.of_input} == of_all, (
        "moments lie with their parameters"
    )
    for layer in layers[:-1]:
        phases = Counter(place.phase for place in found.of_equation if place.layer == layer)
        assert phases["forward"] and phases["update"], layer


def test_every_matrix_product_of_a_block_is_in_its_phase(example: Any) -> None:
    """Six products forward; each has two gradients."""
    step, args = example("gpt2").tiny()
    graph = trace(step, *args).graph
    found = outline(graph)
    for block in ("blocks[0]", "blocks[1]"):
        products = Counter(
            found.of_equation[e.index].phase
            for e in graph.equations
            if e.primitive == "dot_general" and found.of_equation[e.index].layer == block
        )
        assert products == {"forward": 6, "backward": 12}


def mlp(params: Any, x: jax.Array) -> Any:
    def loss_of(params: Any) -> jax.Array:
        hidden = jnp.tanh(x @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] + params["b2"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))
    return jax.tree.map(lambda p, g: p - g / norm, params, gradients), loss


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


PARAMS = {"w1": shape(8, 16), "b1": shape(16), "w2": shape(16, 4), "b2": shape(4)}


def test_what_is_numbered_alike_is_one_layer() -> None:
    graph = trace(mlp, PARAMS, shape(12, 8)).graph
    found = outline(graph)
    assert found.layers == ("b1, w1", "b2, w2", WHOLE)
    of_weight_gradients = [
        found.of_equation[e.index]
        for e in graph.equations
        if e.primitive == "dot_general" and found.of_equation[e.index].phase == "backward"
    ]
    assert Counter(place.layer for place in of_weight_gradients) == {"b1, w1": 1, "b2, w2": 2}
    assert any(p.layer == WHOLE and p.phase == "update" for p in found.of_equation), "the norm is no layer's"


def test_without_gradients_all_is_forward() -> None:
    def predict(params: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]

    found = outline(trace(predict, PARAMS, shape(12, 8)).graph)
    assert found.layers == ("b1, w1", "b2, w2")
    assert {place.phase for place in found.of_equation} == {"forward"}


def test_a_step_without_parameters_is_one_whole() -> None:
    found = outline(trace(lambda x: jnp.sin(x).sum(), shape(12)).graph)
    assert found.layers == (WHOLE,) and not found.of_input and not found.parameters


def test_every_line_of_a_bill_has_a_place(example: Any) -> None:
    step, args = example("gpt2").tiny_scan()
    fleet = Fleet.load(ROOT / "examples/fleets/laptop.yaml")
    plan = synthesize(step, *args, fleet=fleet, devices="all")
    assert plan.traced is not None
    graph = plan.traced.graph
    places = list(instruction_places(plan.program, graph))
    items = bill(plan.program, graph, CostModel(fleet))
    assert len(places) == len(items)
    for (instruction, place), item in zip(places, items, strict=True):
        assert item.move is None or item.move is instruction
        assert place.layer in outline(graph).layers


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ("R", "whole on every device"),
        ("S(1)", "cut along dimension 1"),
        ("S(0:64)", "cut along dimension 0, in whole pieces of 64"),
        ("P(sum)", "partial sums, one per device"),
        ("P(max)", "partial maxima, one per device"),
        ("R/S(0)", "whole on every node; within a node cut along dimension 0"),
        (
            "S(1:8)/P(sum)",
            "cut along dimension 1 over the nodes, in whole pieces of 8; "
            "within a node partial sums, one per device",
        ),
        ("of a later version", "of a later version"),
    ],
)
def test_placements_in_words(placement: str, words: str) -> None:
    assert placed(placement) == words


def test_every_collective_and_strategy_has_words() -> None:
    for collective in registry().values():
        if not collective.local:
            assert collective.kind in COLLECTIVES
    own = {name for _, name in mpi_moves.lowerings()}
    assert own <= STRATEGIES.keys()
    assert exchanged("all_gather.exact").startswith("every device gets the whole tensor")
    assert exchanged("swap.mine") == "swap, mine"
