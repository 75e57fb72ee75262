"""What the programs of each baseline keep to.

A recipe restricts the space of programs by what tensors are for (`shardwright.synth.space.roles`), never by
their names: under which signatures forward and backward pass compute, where parameters and the optimizer's
state lie, and which exchanges there may be. docs/baselines.md defines every one in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardwright.ir.graph import Equation, Graph, Value
from shardwright.ir.placement import Placement, R, Shard
from shardwright.ir.rules import Signature
from shardwright.synth.space.factors import Choice, Use
from shardwright.synth.space.frame import Frame
from shardwright.synth.space.pins import is_shard, pin, shardable
from shardwright.synth.space.restrict import RestrictedSpace
from shardwright.synth.space.roles import Roles
from shardwright.synth.space.space import Space
from shardwright.synth.space.units import Dim, Units

#: Along what the operands of forward and backward pass may be cut.
Along: TypeAlias = Literal["batch", "batch or experts", "anything but the batch"]

#: Where tensors lie between steps; "mostly cut": as many bytes of them as possible are cut.
Lie: TypeAlias = Literal["whole", "cut", "mostly cut", "free"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What programs of a baseline keep to.

    Attributes:
        name: what people call it.
        along: how forward and backward pass are cut.
        exchanges: collectives that may be used.
        parameters: where parameters lie; those of experts are cut along their experts.
        contracted: where those lie that contractions read.
        optimizer: where the rest of the state lies.
        proportional: shares by arithmetic speed; else even ones.
        placed: whether gathers and reduce-scatters are made just in time.
        again: whether parameters are gathered anew for their next use.
    """

    name: str
    along: Along
    exchanges: frozenset[str]
    parameters: Lie
    contracted: Lie
    optimizer: Lie
    proportional: bool = False
    placed: bool = False
    again: bool = False


_SUM = frozenset({"all_reduce"})
_GATHER = _SUM | {"all_gather"}
_SCATTER = _GATHER | {"reduce_scatter"}

RECIPES = (
    Recipe("even data parallelism", "batch", _SUM, "whole", "whole", "whole"),
    Recipe("proportional data parallelism", "batch", _SUM, "whole", "whole", "whole", proportional=True),
    Recipe("ZeRO-1", "batch", _GATHER, "whole", "whole", "cut"),
    Recipe("ZeRO-2", "batch", _SCATTER, "whole", "whole", "cut", placed=True),
    Recipe("ZeRO-3", "batch", _SCATTER, "cut", "cut", "cut", placed=True, again=True),
    Recipe("fully sharded", "batch", _SCATTER, "cut", "cut", "cut", placed=True),
    Recipe("tensor parallelism", "anything but the batch", _SUM, "free", "mostly cut", "free"),
    Recipe("expert parallelism", "batch or experts", _SUM | {"all_to_all"}, "whole", "whole", "whole"),
)


def obstacle(recipe: Recipe, graph: Graph, space: Space, found: Roles) -> str:
    """Why a recipe does not apply to a step, "" if it does."""

    def none_can_be_cut(values: tuple[Value, ...]) -> bool:
        return not any(shardable(space.root.choice[value]) for value in values)

    if not found.inputs:
        return "no argument besides the state has a leading dimension that could be the batch"
    if recipe.along == "batch or experts" and not found.expert_parameters:
        return "no contraction runs a dimension of a parameter along with one of the data"
    if recipe.optimizer == "cut" and recipe.parameters == "whole" and none_can_be_cut(found.optimizer):
        return "there is no optimizer state that could be cut"
    if recipe.parameters == "cut" and none_can_be_cut(found.parameters):
        return "there is no parameter that could be cut"
    if recipe.contracted == "mostly cut" and none_can_be_cut(found.contracted):
        return "no contraction reads a parameter that could be cut"
    return ""


def restricted(along: Along, whole: bool, graph: Graph, units: Units, found: Roles) -> Space:
    """The programs whose forward and backward pass is cut as `along` says.

    With `whole`, and where the batch is cut, what passes read besides data is made by every device by itself.
    """

    def keep(equation: Equation, signature: Signature) -> bool:
        if not found.batched(equation):
            alone = whole and along != "anything but the batch" and found.prepares(equation)
            return not alone or all(p == R for p in (*signature.ins, *signature.outs))
        if along == "anything but the batch":
            return not found.splits_batch(equation, signature)
        by_expert = along == "batch or experts" and found.splits_experts(equation, signature, units)
        return by_expert or found.splits_batch(equation, signature)

    return RestrictedSpace(graph, keep)


def pins(recipe: Recipe, graph: Graph, space: Space, found: Roles) -> Iterator[Use]:
    """Where the arguments lie, and layers of stacked parameters inside of loops."""
    batch = "whole" if recipe.along == "anything but the batch" else "cut"
    of_experts = {_axes(value, space.units) for value in found.expert_parameters}
    for value in graph.inputs:
        choice = space.root.choice[value]
        if value in found.inputs:
            yield pin(choice, _first_dimension if batch == "cut" else _whole)
        elif recipe.along == "batch or experts" and _axes(value, space.units) in of_experts:
            yield pin(choice, _along_experts(value, space.units, found))
        elif recipe.along == "batch or experts" and found.experts.intersection(_axes(value, space.units)):
            continue  # a bias follows what it is added to
        elif value in found.contracted:
            if recipe.contracted != "mostly cut":
                yield from _lie(choice, recipe.contracted)
        elif value in found.parameters:
            yield from _lie(choice, recipe.parameters)
        else:
            yield from _lie(choice, recipe.optimizer if value in found.optimizer else "whole")
    if recipe.parameters == "cut":
        for choice in _inside(space.root, set(found.stacked)):
            yield from _lie(choice, "cut")


def leanings(recipe: Recipe, space: Space, found: Roles, large_s: float) -> list[Use]:
    """What should be cut if it can be, at a price by bytes: `large_s`, which outweighs all else, for all."""
    if recipe.contracted != "mostly cut":
        return []
    choices = [(space.root.choice[value], value.type.nbytes) for value in found.contracted]
    total = max(sum(nbytes for _, nbytes in choices), 1)  # a layer may have no units
    return [pin(c, is_shard, large_s * nbytes / total) for c, nbytes in choices if shardable(c)]


def _lie(choice: Choice, where: Lie) -> Iterator[Use]:
    if where == "whole":
        yield pin(choice, _whole)
    elif where == "cut" and shardable(choice):
        yield pin(choice, is_shard)


def _inside(frame: Frame, values: set[Value]) -> Iterator[Choice]:
    """Choices of some inputs of loop bodies."""
    for children in frame.children.values():
        for child in children:
            yield from (child.choice[value] for value in child.graph.inputs if value in values)
            yield from _inside(child, values)


def _whole(placement: Placement) -> bool:
    return placement == R


def _first_dimension(placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.dim == 0


def _axes(value: Value, units: Units) -> tuple[Dim, ...]:
    """What its dimensions are tied to: the same for a parameter and its moments."""
    return tuple(units.group(value, dim) for dim in range(value.type.rank))


def _along_experts(value: Value, units: Units, found: Roles) -> Callable[[Placement], bool]:
    return lambda p: isinstance(p, Shard) and units.group(value, p.dim) in found.experts
