"""Which arguments a pattern names: attributes within attributes, keys with slashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import pytest

from shardwright.constraints import matching, path_of, resolve
from shardwright.ir.trace import trace
from shardwright.synth.space.space import Space

SQUARE = jax.ShapeDtypeStruct((8, 8), "float32")


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    weight: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclass
class Model:
    mlp: Layer
    head: Any


def step(params: Any, x: Any) -> Any:
    return jax.tree.map(lambda p: p - x.sum(), params)


def pinned(pattern: str, params: Any) -> set[str]:
    graph = trace(step, params, SQUARE).graph
    (pin,) = resolve({pattern: "R"}, graph, Space(graph))
    return {graph.input_names[graph.inputs.index(value)] for value in pin.values}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("params/mlp/weight", {"params.mlp.weight"}),
        ("params.mlp.weight", {"params.mlp.weight"}),
        ("params/*/weight", {"params.mlp.weight"}),
        ("*.weight", {"params.mlp.weight"}),
        ("params/mlp/*", {"params.mlp.weight", "params.mlp.bias"}),
        ("params.mlp.*", {"params.mlp.weight", "params.mlp.bias"}),
        ("params/h*", {"params.head"}),
    ],
)
def test_attributes_within_attributes(pattern: str, names: set[str]) -> None:
    assert pinned(pattern, Model(Layer(SQUARE, SQUARE), SQUARE)) == names


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("params['a/b']", {"params['a/b']"}),
        ("params['a']['b']", {"params['a']['b']"}),
        ("params/a/b", {"params['a/b']", "params['a']['b']"}),
    ],
)
def test_two_arguments_of_one_path(pattern: str, names: set[str]) -> None:
    assert pinned(pattern, {"a/b": SQUARE, "a": {"b": SQUARE}}) == names


def test_dots_of_keys_stay() -> None:
    assert path_of("model.layers[0].attention.out") == "model/layers/0/attention/out"
    assert path_of("state.a.b['x.y'].c.d") == "state/a/b/x.y/c/d"
    assert matching("params/layer.weight", ["params['layer.weight']"]) == ["params['layer.weight']"]
