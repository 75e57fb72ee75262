"""A step as people think of it: forward, backward and update, layer by layer.

Nothing that plans or runs depends on this; it is for pages and explanations. *Phases* come from JAX's name
stacks, in which differentiation leaves `jvp` and `transpose(jvp)`; what is traced apart from them is
forward or backward if it feeds such an equation, and else part of the update. *Layers* come from the names
of parameters: `params['blocks'][3]['mlp']['up']` belongs to `blocks[3]`. An equation belongs to the layer
whose parameter it reads; one that reads none, to that of the activation it reads, the latest one; the
product that makes a parameter's gradient, to the layer of the parameter; a loop that reads parameters of
several layers, as the one over micro-batches does, to none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardwright.ir.graph import Equation, Graph, Value, per_graph
from shardwright.ir.program import Instruction, Loop, Move, Program
from shardwright.ir.registry import is_contraction

Phase: TypeAlias = Literal["forward", "both", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "both", "backward", "update")

#: What belongs to no single layer: the norm of all gradients, a counter.
WHOLE = "the whole step"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the step something happens."""

    layer: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Outline:
    """Layers and phases of a graph.

    Attributes:
        layers: in the order in which the step first comes by; `WHOLE` last, if there is such a thing.
        of_input: layer of inputs that are parameters, or state that belongs to one, by position.
        parameters: positions of inputs that the forward or backward pass reads, which lie in a layer.
        of_equation: by index.
    """

    layers: tuple[str, ...]
    of_input: Mapping[int, str]
    parameters: tuple[int, ...]
    of_equation: tuple[Place, ...]


@per_graph
def outline(graph: Graph) -> Outline:
    """The outline of a step."""
    phases = _phases(graph)
    parameters = _parameters(graph, phases)
    paths = {p: _parts(graph.input_names[p]) for p in parameters}
    layer_of_parameter = _layer_names(paths, _loops(graph, parameters))
    of_input = layer_of_parameter | _companions(graph, layer_of_parameter)
    layers = _equation_layers(graph, phases, parameters, of_input)
    layer_of = {graph.inputs[p]: layer for p, layer in layer_of_parameter.items()}
    seen = {layer_of[v]: None for e in graph.equations for v in e.input_values if v in layer_of}
    whole = () if all(layer not in ("", WHOLE) for layer in layers) else (WHOLE,)
    places = tuple(Place(layer or WHOLE, phase) for layer, phase in zip(layers, phases, strict=True))
    return Outline((*seen, *whole), of_input, parameters, places)


def instruction_places(program: Program, graph: Graph) -> Iterator[tuple[Instruction, Place]]:
    """Every instruction that does something, loop bodies included, in the order of a bill; and where it is.

    An exchange is where its tensor was made; that of an input, where it is used.
    """
    found = outline(graph)
    made = {value.index: equation.index for equation in graph.equations for value in equation.outputs}
    position = {value.index: p for p, value in enumerate(graph.inputs)}
    users = _first_users(program, graph)
    for number, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Move):
            place = found.of_equation[instruction.equation]
        elif instruction.value in made:
            place = found.of_equation[made[instruction.value]]
        else:
            user = users.get(number)
            phase = found.of_equation[user].phase if user is not None else "update"
            layer = found.of_input.get(position.get(instruction.value, -1))
            place = Place(layer or (found.of_equation[user].layer if user is not None else WHOLE), phase)
        if isinstance(instruction, Loop):
            inner = (i for body in instruction.bodies for i in body.all_instructions())
            yield from ((i, place) for i in inner if not isinstance(i, Loop))
        else:
            yield instruction, place


def _first_users(program: Program, graph: Graph) -> dict[int, int]:
    """The equation that first reads what a move leaves, by the move's number."""
    waiting: dict[int, list[int]] = {}
    found: dict[int, int] = {}
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Move):
            waiting.setdefault(instruction.value, []).append(number)
            continue
        for value in graph.equations[instruction.equation].input_values:
            for move in waiting.pop(value.index, ()):
                found[move] = instruction.equation
    return found


# ---------------------------------------------------------------------------------------------------
# Phases


def _mark(equation: Equation) -> Phase | None:
    """What differentiation wrote on an equation, or on what is in it."""
    if equation.copy:
        return "backward"
    stack = str(getattr(equation.source, "name_stack", ""))
    if "transpose(" in stack:
        return "backward"
    inner: set[Phase | None] = {_mark(e) for region in equation.regions for e in region.all_equations()}
    inner.discard(None)
    if "jvp(" in stack:  # micro-batches are a loop with both in it
        return "both" if inner - {"forward"} else "forward"
    return "both" if len(inner) > 1 else next(iter(inner), None)


def _phases(graph: Graph) -> list[Phase]:
    marks: list[Phase | None] = [_mark(equation) for equation in graph.equations]
    if not any(marks):
        return ["forward"] * len(marks)
    feeds = [False] * len(marks)
    needed: set[Value] = set()
    for equation in reversed(graph.equations):
        feeds[equation.index] = any(value in needed for value in equation.outputs)
        if marks[equation.index] is not None or feeds[equation.index]:
            needed.update(equation.input_values)
    cotangents: set[Value] = set()
    phases: list[Phase] = []
    for equation, mark, feeding in zip(graph.equations, marks, feeds, strict=True):
        back = any(value in cotangents for value in equation.input_values)
        phase: Phase = mark or _unmarked(feeding, back)
        if phase == "backward":
            cotangents.update(equation.outputs)
        phases.append(phase)
    return phases


def _unmarked(feeding: bool, back: bool) -> Phase:
    if not feeding:
        return "update"
    return "backward" if back else "forward"


# ---------------------------------------------------------------------------------------------------
# Layers of inputs


def _parts(name: str) -> tuple[str, ...]:
    """`("params", "blocks", "3", "w")` of `params['blocks'][3].w`."""
    found = re.findall(r"\['([^']*)'\]|\[\"([^\"]*)\"\]|\[([^\]]*)\]|\.?([^\[\].]+)", name)
    whole = (next(filter(None, groups), "") for groups in found)
    return tuple(part for text in whole for part in text.split("/"))


def _parameters(graph: Graph, phases: Sequence[Phase]) -> tuple[int, ...]:
    """Positions of tensors that a pass reads: of the state, or, where there is none, of whole trees."""
    read = {
        value
        for equation, phase in zip(graph.equations, phases, strict=True)
        if phase != "update"
        for value in equation.input_values
    }
    positions: Sequence[int] = sorted(set(graph.state.values()))
    if not positions:
        arguments = [_parts(name)[0] for name in graph.input_names]
        positions = [p for p, name in enumerate(arguments) if arguments.count(name) > 1]
    return tuple(p for p in positions if graph.inputs[p].type.rank and graph.inputs[p] in read)


def _loops(graph: Graph, parameters: Sequence[int]) -> list[set[int]]:
    """Parameters that the same loop reads: those of stacked layers."""
    position = {graph.inputs[p]: p for p in parameters}
    loops = [equation for equation in graph.equations if equation.regions]
    read = [{position[v] for v in equation.input_values if v in position} for equation in loops]
    return [positions for positions in read if len(positions) > 1]


def _common(paths: Sequence[tuple[str, ...]]) -> int:
    """How many leading parts are equal, the last one of any path not counted."""
    least = min((len(path) for path in paths), default=1) - 1
    return next((i for i in range(least) if len({path[i] for path in paths}) > 1), least)


def _layer_names(paths: Mapping[int, tuple[str, ...]], loops: Sequence[set[int]]) -> dict[int, str]:
    """The layer of every parameter, from its path: up to the first number, or all but the last part.

    What a loop over stacked layers reads is one layer, as far as the paths have a beginning in common.
    """
    shared = _common(list(paths.values()))
    if shared and any(path[shared].isdigit() for path in paths.values()):
        shared -= 1  # a number by itself is no name
    keys: dict[int, tuple[str, ...]] = {}
    for position, path in paths.items():
        rest = path[shared:]
        numbered = next((i for i, part in enumerate(rest) if re.search(r"\d$", part)), None)
        if numbered is not None and numbered < len(rest) - 1:
            keys[position] = rest[: numbered + 1]
        elif numbered is not None:  # w1 and b1 are one layer
            keys[position] = (*rest[:numbered], f"#{re.sub(r'^.*?(?=[0-9]+$)', '', rest[numbered])}")
        else:
            keys[position] = rest[:-1] or rest
    for together in loops:
        begin = _common([paths[position] for position in together])
        if begin > shared:
            some = next(iter(sorted(together)))
            keys.update(dict.fromkeys(together, paths[some][shared:begin]))
    last: dict[tuple[str, ...], list[str]] = {}
    for position, key in keys.items():
        last.setdefault(key, []).append(paths[position][-1])
    return {position: _layer_name(key, last[key]) for position, key in keys.items()}


def _layer_name(key: Sequence[str], members: Sequence[str]) -> str:
    if key[-1].startswith("#"):
        key = (*key[:-1], ", ".join(dict.fromkeys(members)))
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in key).lstrip(".")


def _companions(graph: Graph, layers: Mapping[int, str]) -> dict[int, str]:
    """Other state by the parameter whose path its own ends in, and whose type it has: moments, averages."""
    paths = {p: _parts(graph.input_names[p]) for p in layers}
    by_end: dict[tuple[str, ...], list[int]] = {}
    for position, path in paths.items():
        for start in range(len(path)):
            by_end.setdefault(path[start:], []).append(position)
    found: dict[int, str] = {}
    for position in sorted(set(graph.state.values()) - set(layers)):
        path, tensor = _parts(graph.input_names[position]), graph.inputs[position].type
        for start in range(len(path)):
            same = [p for p in by_end.get(path[start:], ()) if graph.inputs[p].type == tensor]
            if same:
                found[position] = layers[same[0]]
                break
    return found


# ---------------------------------------------------------------------------------------------------
# Layers of equations


def _equation_layers(
    graph: Graph, phases: Sequence[Phase], parameters: Sequence[int], of_input: Mapping[int, str]
) -> list[str]:
    """The layer of every equation, "" for none."""
    direct = {graph.inputs[p]: layer for p, layer in of_input.items()}
    weights = {graph.inputs[p] for p in parameters}
    gradients = _gradient_layers(graph, phases, of_input)
    made: dict[Value, int] = {}
    layers = [""] * len(phases)
    for equation, phase in zip(graph.equations, phases, strict=True):
        read = [value for value in equation.input_values if value in direct]
        # A cast or transpose of a weight alone is still that weight.
        if read and all(value in weights for value in equation.input_values) and len(read) == 1:
            weights.update(equation.outputs)
            direct.update(dict.fromkeys(equation.outputs, direct[read[0]]))
        if equation.regions and len({direct[value] for value in read if value in weights}) > 1:
            layer = WHOLE  # a loop over micro-batches, or one that applies several layers
        elif read:
            layer = direct[max(read, key=lambda value: value.type.nbytes)]
        elif equation.index in gradients:
            layer = gradients[equation.index]
        else:
            before = [made[v] for v in equation.input_values if v in made and layers[made[v]]]
            if phase == "update":  # what scales all gradients alike is no part of any
                before = [i for i in before if any(v.type.rank for v in graph.equations[i].outputs)]
            elif phase == "backward":
                before = [i for i in before if phases[i] == "forward"] or before
            layer = layers[max(before)] if before else ""
        layers[equation.index] = layer
        made.update(dict.fromkeys(equation.outputs, equation.index))
    _from_users(graph, phases, layers)
    return layers


def _from_users(graph: Graph, phases: Sequence[Phase], layers: list[str]) -> None:
    """What is made before the first layer (a mask, an embedding's indices) belongs to who uses it first."""
    user: dict[Value, int] = {}
    for equation in reversed(graph.equations):
        if not layers[equation.index] and phases[equation.index] != "update":
            after = [user[value] for value in equation.outputs if value in user]
            if after:
                layers[equation.index] = layers[min(after)]
        user.update(dict.fromkeys(equation.input_values, equation.index))


def _gradient_layers(graph: Graph, phases: Sequence[Phase], of_input: Mapping[int, str]) -> dict[int, str]:
    """Products of the backward pass from which, without another product, a parameter's new value is made."""
    makes = {value: equation for equation in graph.equations for value in equation.outputs}
    found: dict[int, str] = {}
    seen: set[Value] = set()
    for out, position in graph.state.items():
        atom = graph.outputs[out]
        if position not in of_input or not isinstance(atom, Value):
            continue
        pending = [atom]
        while pending:
            value = pending.pop()
            equation = makes.get(value)
            # A scalar ties every parameter to every other: the norm of all gradients.
            if equation is None or value in seen or not value.type.rank:
                continue
            seen.add(value)
            if phases[equation.index] == "backward" and is_contraction(equation.primitive):
                found.setdefault(equation.index, of_input[position])
            elif not equation.regions:
                pending.extend(equation.input_values)
    return found
