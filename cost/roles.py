"""What tensors of a training step are for (parameters, optimizer state, gradients), and in which layers.

All of it is read off the graph: state is what comes back (`Graph.state`), parameters are the floating point
state that the differentiated part reads, gradients what the backward part hands to the rest. A layer is a
stretch of the step that begins where a parameter of another layer is read, parameters being grouped by paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.ir.graph import Equation, Graph, Value, per_graph

#: Layer of what belongs to none.
NO_LAYER = "-"

_KEYS = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


@dataclass(frozen=True, slots=True)
class Roles:
    """Of a step's tensors.

    Attributes:
        parameters: inputs that are trained.
        weights: these, and what the forward part makes of those of one layer alone, such as a cast to another
            type: a layer begins where they are applied to something, not where they are made.
        optimizer: other state.
        data: inputs that are no state.
        gradients: what the backward part makes and the rest of the step reads.
        saved: what the forward part makes and a backward equation reads.
        layer_of_value: layer of each input, and of what equations make.
        layer_of: layer of each equation.
    """

    parameters: tuple[Value, ...]
    weights: frozenset[Value]
    optimizer: tuple[Value, ...]
    data: tuple[Value, ...]
    gradients: tuple[Value, ...]
    saved: tuple[Value, ...]
    layer_of_value: Mapping[Value, str]
    layer_of: Mapping[Equation, str]


@per_graph
def roles(graph: Graph) -> Roles:
    """Roles of the tensors of a whole step."""
    state = [graph.inputs[position] for position in sorted(set(graph.state.values()))]
    kept = set(state)
    differentiated = {v for e in graph.equations if e.part for v in e.input_values}
    if not any(equation.part for equation in graph.equations):
        differentiated = kept
    parameters = tuple(v for v in state if v in differentiated and v.type.is_float)
    trained = set(parameters)
    made = {value: equation for equation in graph.equations for value in equation.outputs}
    gradients: dict[Value, None] = {}
    for equation in graph.equations:
        if not equation.part:
            gradients.update((v, None) for v in equation.input_values if v in made and _backward(made[v]))
    for atom in graph.outputs:
        if isinstance(atom, Value) and atom in made and _backward(made[atom]):
            gradients[atom] = None
    layers = _of_inputs(graph, parameters)
    weights = _weights(graph, trained, layers)
    of_equation = _of_equations(graph, weights, layers)
    for gradient, parameter in _trains(graph, gradients, made).items():
        layers[gradient] = layers[parameter]
    return Roles(
        parameters=parameters,
        weights=frozenset(weights),
        optimizer=tuple(v for v in state if v not in trained),
        data=tuple(v for v in graph.inputs if v not in kept),
        gradients=tuple(gradients),
        saved=tuple(dict.fromkeys(v for _, v in graph.residuals if v is not None)),
        layer_of_value=layers,
        layer_of=of_equation,
    )


def _trains(
    graph: Graph, gradients: Mapping[Value, None], made: Mapping[Value, Equation]
) -> dict[Value, Value]:
    """The parameter of each gradient: its new value depends on the gradient through tensors of its shape."""
    found: dict[Value, Value] = {}
    for out, position in graph.state.items():
        parameter = graph.inputs[position]
        waiting = [graph.outputs[out]]
        seen: set[Value] = set()
        while waiting:
            value = waiting.pop()
            if not isinstance(value, Value) or value in seen or value.type.shape != parameter.type.shape:
                continue
            seen.add(value)
            if value in gradients:
                found.setdefault(value, parameter)
            elif value in made:
                waiting.extend(made[value].inputs)
    return found


def _backward(equation: Equation) -> bool:
    return equation.part == "backward"


def _path(name: str) -> tuple[str, ...]:
    """Keys of an input's name, without the argument's own: `params['a'][0]` is ("a", "0")."""
    keys = ["".join(found) for found in _KEYS.findall(name)]
    return tuple(part for key in keys for part in key.split("/"))


def layer_name(path: Sequence[str]) -> str:
    """The layer of a parameter: its path up to the first number, or else without its last key."""
    for position, key in enumerate(path):
        if key.isdigit():
            return "/".join(path[: position + 1])
    return "/".join(path[:-1] if len(path) > 1 else path) or NO_LAYER


def _of_inputs(graph: Graph, parameters: Sequence[Value]) -> dict[Value, str]:
    """Layer of every input; optimizer state belongs to the parameter whose path its own ends in."""
    names = dict(zip(graph.inputs, graph.input_names, strict=False))
    paths = {_path(names[v]): v for v in parameters if v in names}
    found = {value: layer_name(path) for path, value in paths.items()}
    for value in graph.inputs:
        if value in found:
            continue
        path = _path(names.get(value, ""))
        ends = (paths.get(path[start:]) for start in range(len(path)))
        owner = next((v for v in ends if v is not None and v.type.shape == value.type.shape), None)
        found[value] = NO_LAYER if owner is None else found[owner]
    return found


def _weights(graph: Graph, trained: set[Value], layers: Mapping[Value, str]) -> dict[Value, str]:
    """Layer of parameters, and of what is made of those of one layer alone."""
    found = {value: layers[value] for value in graph.inputs if value in trained}
    for equation in graph.equations:
        if equation.part != "forward" or equation.regions or not equation.input_values:
            continue
        if all(value in found for value in equation.input_values):
            read = {found[value] for value in equation.input_values}
            if len(read) == 1:
                found.update(dict.fromkeys(equation.outputs, read.pop()))
    return found


def _of_equations(
    graph: Graph, weights: Mapping[Value, str], layers: dict[Value, str]
) -> dict[Equation, str]:
    """Layer of every equation; that of what it makes is added to `layers`."""
    found: dict[Equation, str] = {}
    ahead = {value for e in graph.equations if e.part == "forward" for value in e.outputs} | set(weights)
    current = NO_LAYER
    behind: str | None = None
    for equation in graph.equations:
        if equation.part == "forward":
            read = [weights[v] for v in equation.input_values if v in weights]
            if any(value in weights for value in equation.outputs):
                layer = weights[equation.outputs[0]]
            else:
                layer = current = read[-1] if read else current
        elif equation.part == "backward":
            # The layer of what it needs from the forward part, or else of the equation before it.
            needed = [layers[v] for v in equation.input_values if v in ahead and layers[v] != NO_LAYER]
            layer = behind = needed[0] if needed else behind or current
        else:
            needed = [layers[v] for v in equation.input_values if layers.get(v, NO_LAYER) != NO_LAYER]
            layer = needed[0] if len(set(needed)) == 1 else NO_LAYER
        found[equation] = layer
        layers.update(dict.fromkeys(equation.outputs, layer))
    return found
