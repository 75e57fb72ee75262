"""Two mesh axes: pairs of signatures compute what the whole equation does, and moves mean what they say.

On nodes of unequal size, with shares that leave devices and whole nodes without work.
"""

from __future__ import annotations

import itertools
import random

import jax
import numpy as np
import pytest
from tests.conformance.checker import cases
from tests.conformance.samples import SAMPLES, Draw
from tests.conformance.trial import Case, parts, to_numpy

from shardwright.backends.layout import cut, from_numpy, gather
from shardwright.backends.local import evaluate
from shardwright.backends.reference import collective
from shardwright.ir.collectives import between, step
from shardwright.ir.graph import TensorType
from shardwright.ir.pairs import paired
from shardwright.ir.placement import (
    Partial,
    Placement,
    R,
    Shard,
    components,
    grid,
    node_members,
    parse_placement,
    reduction,
    region,
)
from shardwright.ir.program import Move
from shardwright.ir.registry import rule_of
from shardwright.ir.rules import Signature, allows, signatures

Nodes = tuple[int, ...]
Ratios = tuple[float, ...]
MESHES: tuple[tuple[Nodes, Ratios], ...] = (
    ((1, 3), (0.4, 0.3, 0.1, 0.2)),
    ((2, 3), (0.25, 0.25, 0.0, 0.3, 0.2)),
    ((2, 2), (0.0, 0.0, 0.7, 0.3)),
)


def spread(
    whole: jax.Array,
    tensor: TensorType,
    placement: Placement,
    nodes: Nodes,
    ratios: Ratios,
    rng: np.random.Generator,
) -> list[jax.Array]:
    """What every device holds of `whole`; what is Partial is split at random."""
    devices = range(len(ratios))
    op = reduction(placement)
    if op is None:
        return [cut(whole, tensor, placement, device, ratios) for device in devices]
    across, within = components(placement)
    data, found = np.asarray(whole), list[jax.Array]()
    of_nodes = (
        parts(op, data, [False] * len(nodes), rng) if isinstance(across, Partial) else [data] * len(nodes)
    )
    for mine, members in zip(of_nodes, node_members(nodes), strict=True):
        own = (
            parts(op, mine, [False] * len(members), rng)
            if isinstance(within, Partial)
            else [mine] * len(members)
        )
        for device, part in zip(members, own, strict=True):
            held = region(tensor.shape, placement, device, ratios)
            found.append(from_numpy(part[tuple(slice(o, o + n) for o, n in held)], tensor.dtype))
    return found


def wrong(case: Case, signature: Signature, nodes: Nodes, ratios: Ratios, rng: np.random.Generator) -> str:
    equation = case.equation
    ins = [
        spread(x, t, p, nodes, ratios, rng)
        for x, t, p in zip(case.operands, equation.input_types, signature.ins, strict=True)
    ]
    by_device = [
        evaluate(equation, signature, case.primitive, d, ratios, [x[d] for x in ins])
        for d in range(len(ratios))
    ]
    for j, (tensor, placement) in enumerate(zip(equation.output_types, signature.outs, strict=True)):
        held = [results[j] for results in by_device]
        for d, x in enumerate(held):
            shape = tuple(n for _, n in region(tensor.shape, placement, d, ratios))
            if x.shape != shape:
                return f"device {d} has {x.shape} of result {j}, not {shape}"
        whole = to_numpy(gather(held, tensor, placement))
        off = 2e-2 if tensor.dtype in ("float16", "bfloat16") else 1e-4
        if not np.allclose(
            whole.astype(case.results[j].dtype), case.results[j], rtol=off, atol=off, equal_nan=True
        ):
            return f"result {j} differs"
    return ""


def check(primitive: str, most: int, meshes: tuple[tuple[Nodes, Ratios], ...]) -> int:
    """Try up to `most` pairs of signatures of the first sample of a primitive; how many there were."""
    sample = next(s for s in SAMPLES if s.primitive == primitive)
    return check_case(cases(*sample.make(Draw(0)), primitive)[0], most, meshes)


def check_case(case: Case, most: int, meshes: tuple[tuple[Nodes, Ratios], ...]) -> int:
    """The same of a case."""
    equation = case.equation
    rng, pick = np.random.default_rng(3), random.Random(equation.primitive)
    if any(t.dtype.startswith("key<") for t in (*equation.input_types, *equation.output_types)):
        return 0
    single = list(signatures(rule_of(equation), equation))
    pairs = list(itertools.product(single, single))
    tried = 0
    for across, within in pick.sample(pairs, min(most, len(pairs))):
        for nodes, ratios in meshes:
            signature = paired(across, within, nodes)
            if signature is not None:
                assert allows(rule_of(equation), equation, signature), str(signature)
                assert not (found := wrong(case, signature, nodes, ratios, rng)), f"{signature}: {found}"
                tried += 1
    return tried


@pytest.mark.parametrize(
    ("primitive", "name", "dims"),
    [
        ("gather", "two_indices", (0, 2)),
        ("scatter-add", "two_indices", (0, 2)),
        ("dynamic_update_slice", "update_at_the_end", (0, 1)),
    ],
)
def test_what_is_indexed_along_two_dimensions_may_be_cut_along_both(
    primitive: str, name: str, dims: tuple[int, int]
) -> None:
    """Each device has a block of it: an index is its own where both coordinates are."""
    rng, blocks = np.random.default_rng(3), {Shard(dim) for dim in dims}
    sample = next(s for s in SAMPLES if s.primitive == primitive and s.make.__name__ == name)
    case = cases(*sample.make(Draw(0)), primitive)[0]
    single = list(signatures(rule_of(case.equation), case.equation))
    for nodes, ratios in MESHES:
        tried = 0
        for across, within in itertools.permutations(single, 2):
            signature = paired(across, within, nodes)
            if signature is not None and {across.ins[0], within.ins[0]} == blocks:
                assert not (found := wrong(case, signature, nodes, ratios, rng)), f"{signature}: {found}"
                tried += 1
        assert tried


COMMON = (
    "dot_general",
    "add",
    "mul",
    "reduce_sum",
    "reduce_max",
    "exp",
    "scatter-add",
    "gather",
    "iota",
    "transpose",
)


@pytest.mark.parametrize("primitive", COMMON)
def test_pairs_of_signatures(primitive: str) -> None:
    assert check(primitive, 12, MESHES[:1]) > 0


@pytest.mark.full
@pytest.mark.parametrize("primitive", sorted({sample.primitive for sample in SAMPLES}))
def test_all_pairs_of_signatures(primitive: str) -> None:
    check(primitive, 100, MESHES)
    # Of others, in which more dimensions are cut at a time, some.
    for sample in [s for s in SAMPLES if s.primitive == primitive][1:]:
        for case in cases(*sample.make(Draw(0)), primitive):
            check_case(case, 8, MESHES[-1:])
    jax.clear_caches()


SINGLE = (R, Shard(0), Shard(1), Partial("sum"))


@pytest.mark.parametrize(("nodes", "ratios"), MESHES)
def test_moves_keep_the_value(nodes: Nodes, ratios: Ratios) -> None:
    """Whatever a single move turns into whatever else stands for the same tensor before and after."""
    tensor = TensorType((7, 6), "float32")
    whole = jax.numpy.arange(42, dtype="float32").reshape(7, 6)
    rng = np.random.default_rng(0)
    pairs = [(a, b) for a in SINGLE for b in SINGLE if not isinstance(a, Shard) or a != Shard(0, 2)]
    placements = list(dict.fromkeys(grid(a, b, nodes) for a, b in pairs))
    moves = 0
    for pre, post in itertools.permutations(placements, 2):
        kind = between(pre, post)
        if kind is None:
            continue
        held = spread(whole, tensor, pre, nodes, ratios, rng)
        move = Move(kind.kind, 0, pre, post, kind.strategies[0])
        after = collective(move, tensor, held, ratios)
        for d, x in enumerate(after):
            assert x.shape == tuple(n for _, n in region(tensor.shape, post, d, ratios)), f"{move} on {d}"
        assert np.allclose(gather(after, tensor, post), whole, atol=1e-4), str(move)
        found = step(pre, post)
        assert found is not None
        if kind.local:  # what is free must need nothing from elsewhere
            assert isinstance(found.pre, type(R)), str(move)
        moves += 1
    assert moves > 60


def test_texts_of_grids() -> None:
    nodes = (1, 3)
    for a in SINGLE:
        for b in SINGLE:
            placement = grid(a, b, nodes)
            assert parse_placement(str(placement), nodes) == placement
    assert grid(R, R, nodes) == R and grid(Partial("max"), Partial("max"), nodes) == Partial("max")
