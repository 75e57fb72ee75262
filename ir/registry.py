"""What is known of each primitive: its rule, and how it runs on a shard.

`shardwright.ir.ops` fills the registry, one `OpDef` per primitive; a primitive without one runs replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from shardwright.ir.graph import Equation, TensorType, per_form
from shardwright.ir.placement import Placement
from shardwright.ir.rules import Rule, counted

Kind: TypeAlias = Literal[
    "elementwise", "contraction", "reduction", "movement", "index", "random", "region", "host", "stages"
]


@dataclass(frozen=True, slots=True)
class Extent:
    """What one device holds of one dimension: `length` elements from `offset` on, of `size` in all."""

    size: int
    offset: int
    length: int

    @property
    def whole(self) -> bool:
        return self.length == self.size


@dataclass(frozen=True, slots=True)
class Local:
    """An equation as one device sees it; handed to localizers.

    Attributes:
        params: the equation's parameters, those that repeat the output shape already made local.
        inputs: extents of every dimension of every operand.
        outputs: the same for the results.
        placements: placements of the operands.
        bind: the equation's own primitive; `bind(*args, **params)` returns one array, or a list where
            the primitive has several results.
        jax: the jax module (handed in, so that rules can be read and tested without importing it).
    """

    params: Mapping[str, Any]
    inputs: tuple[tuple[Extent, ...], ...]
    outputs: tuple[tuple[Extent, ...], ...]
    placements: tuple[Placement, ...]
    bind: Callable[..., Any]
    jax: Any

    def local_type(self, result: int) -> tuple[int, ...]:
        """Local shape of a result."""
        return tuple(extent.length for extent in self.outputs[result])


Localizer: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class OpDef:
    """All that Shardwright knows of one primitive.

    Attributes:
        primitive: its name in a jaxpr.
        rule: equation -> Rule.
        kind: how the cost model and the fusion see it.
        localize: `(local, *args) -> result(s)`, where parameters embed positions; by default the
            primitive itself is bound on the shards.
        shape_params: names of parameters that repeat the shape of result 0.
        omitted: placements left out of the rule on purpose although they would be right, and why.
    """

    primitive: str
    rule: Callable[[Equation], Rule]
    kind: Kind
    localize: Localizer | None = None
    shape_params: tuple[str, ...] = ()
    omitted: str = ""


_REGISTRY: dict[str, OpDef] = {}


def register(op: OpDef) -> OpDef:
    """Add a primitive. Called by the modules of `shardwright.ir.ops` as they are imported."""
    assert op.primitive not in _REGISTRY, f"{op.primitive} is registered twice"
    _REGISTRY[op.primitive] = op
    return op


def registry() -> Mapping[str, OpDef]:
    """All known primitives by name."""
    import shardwright.ir.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (fills the registry)

    return _REGISTRY


def is_contraction(primitive: str) -> bool:
    """Whether a primitive is a product: of matrices, a convolution, or the like."""
    op = registry().get(primitive)
    return op is not None and op.kind == "contraction"


def replicated_rule(equation: Equation, note: str = "") -> Rule:
    """Everything blocked: the rule of an unknown primitive or, with a note, of one that cannot shard."""
    names = iter(f"x{i}" for i in range(10_000))

    def side(types: Sequence[TensorType]) -> str:
        return ", ".join(" ".join(f"{next(names)}!" for _ in tensor.shape) or "." for tensor in types)

    rule = Rule(f"{side(equation.input_types)} -> {side(equation.output_types)}", reduce=None, note=note)
    return counted(rule, equation, sum(tensor.size for tensor in equation.output_types))


@per_form
def rule_of(equation: Equation) -> Rule:
    """The rule of an equation, the replicated one where the primitive is unknown."""
    op = registry().get(equation.primitive)
    return op.rule(equation) if op is not None else replicated_rule(equation)
