"""What is computed again on cards, and in which order kernels run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.memory.buffers import layout
from shardwright.cost.memory.compilers import COMPILERS
from shardwright.cost.memory.fusion import Fusion
from shardwright.cost.memory.lowering import Lowering
from shardwright.cost.memory.nodes import Node
from shardwright.cost.memory.schedule import least_memory
from shardwright.cost.memory.siblings import siblings
from shardwright.ir.graph import TensorType
from shardwright.ir.trace import marked, trace

#: 16 MiB of float32: a kernel that reads it takes longer than to start one.
WIDE = (2048, 2048)
wide = jax.ShapeDtypeStruct(WIDE, "float32")


def written(function: Callable[..., Any], *args: Any) -> list[str]:
    """What is written to memory at full size or near it, beside results."""
    graph = marked(trace(function, *args), compiler="gpu").graph
    return [
        buffer.what
        for buffer in layout(graph).buffers
        if buffer.nbytes >= 1 << 22 and buffer.what != "workspace"
    ]


def summed(some: Callable[[Any], Any], times: int, *args: Any) -> list[str]:
    """What is written where so many sums read a result."""

    def function(*args: Any) -> Any:
        found = some(*args)
        return tuple(jnp.sum(found * (number + 2)) for number in range(times))

    return written(function, *args)


def test_bytes_decide_what_is_computed_again() -> None:
    add = lambda x, y: x + y  # noqa: E731
    # Of two tensors: read twice by two kernels they are 4, written 2 + 3; by four 8, and 2 + 5.
    assert summed(add, 2, wide, wide) == []
    assert summed(add, 4, wide, wide) == ["add"]
    # Of one it never takes more to read it again.
    assert summed(lambda x: jnp.exp(x) + 1, 8, wide) == []
    # What is small is computed sooner than a kernel is started.
    small = jax.ShapeDtypeStruct((64, 64), "float32")
    graph = marked(
        trace(lambda x, y: [jnp.sum((x + y) * n) for n in range(4)], small, small), compiler="gpu"
    ).graph
    assert not any(buffer.what == "add" for buffer in layout(graph).buffers)
    # What a product reads is there, and all others may as well read it.
    assert written(lambda x, y: ((x + y) @ x, jnp.sum(x + y)), wide, wide) == ["add"]


@pytest.mark.parametrize("costly", [jnp.tanh, jax.lax.erfc])
def test_long_polynomials_are_not_computed_twice(costly: Callable[[Any], Any]) -> None:
    assert len(summed(costly, 1, wide)) == 0
    assert len(summed(costly, 2, wide)) == 1


def test_a_mask_is_kept_rather_than_drawn_again() -> None:
    """A byte for every element: the bits themselves are written nowhere."""

    def function(x: Any) -> Any:
        keep = jax.random.bernoulli(jax.random.key(0), 0.9, WIDE)
        return jnp.sum(jnp.where(keep, x, 0.0)), jnp.sum(jnp.where(keep, x * x, 1.0))

    graph = marked(trace(function, wide), compiler="gpu").graph
    sizes = [buffer.nbytes for buffer in layout(graph).buffers]
    assert sizes.count(WIDE[0] * WIDE[1]) == 1 and max(sizes) == WIDE[0] * WIDE[1]


def test_what_is_made_of_many_is_written() -> None:
    """A norm of forty gradients is no operand of every update, its forty sums are not."""
    vectors = [jax.ShapeDtypeStruct((1 << 20,), "float32")] * 40

    def function(*args: Any) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(x * x) for x in args))
        return [x / norm for x in args]

    graph = marked(trace(function, *vectors), compiler="gpu").graph
    found = layout(graph)
    assert found.kernels <= 2 * 40 + 3


def peak_of(order: list[Node], ins: dict[int, tuple[Node, ...]], last: set[int]) -> int:
    """By hand: the most bytes between any two kernels."""
    time = {node.number: at for at, node in enumerate(order)}
    until = dict(time)
    for node in order:
        for operand in ins[node.number]:
            until[operand.number] = max(until[operand.number], time[node.number])
    for number in last:
        until[number] = len(order)
    return max(
        sum(n.type.nbytes for n in order if time[n.number] <= at <= until[n.number])
        for at in range(len(order))
    )


@given(st.data())
def test_kernels_run_in_an_order_that_takes_little(data: st.DataObject) -> None:
    """Operands first, each once; and no more than in the order in which they were asked for."""
    count = data.draw(st.integers(1, 14))
    nodes: list[Node] = []
    reads: dict[int, tuple[Node, ...]] = {}
    for number in range(count):
        ins = tuple(node for node in nodes if data.draw(st.booleans()) and data.draw(st.booleans()))
        size = data.draw(st.integers(0, 9))
        nodes.append(Node(number, "add", "loop", ins, TensorType((size,), "float32"), None))
        reads[number] = ins
    # Kernels that read the same as an earlier one may have to run beside it.
    first: dict[tuple[Node, ...], int] = {}
    elders = {number: first.setdefault(ins, number) for number, ins in reads.items()}
    together = {n: elder for n, elder in elders.items() if n != elder and data.draw(st.booleans())}
    used = {operand.number for ins in reads.values() for operand in ins}
    last = {number for number in range(count) if number not in used}
    found = least_memory(nodes, reads, lambda node: node, last, together)
    place = {node.number: at for at, node in enumerate(found)}
    for elder in together.values():
        family = sorted(place[n] for n in (elder, *(n for n, of in together.items() if of == elder)))
        assert family == list(range(family[0], family[0] + len(family)))
    assert sorted(node.number for node in found) == list(range(count))
    assert all(place[operand.number] < place[number] for number, ins in reads.items() for operand in ins)
    if not together:
        assert peak_of(found, reads, last) <= peak_of(nodes, reads, last)


def test_of_branches_the_one_that_frees_more_runs_first() -> None:
    """Four wide branches that end in something small: one after another, not side by side."""

    def function(x: Any, end: Any, *weights: Any) -> Any:
        return [(x @ w) @ end for w in weights]

    shape = partial(jax.ShapeDtypeStruct, dtype="float32")
    traced = trace(function, shape((8192, 256)), shape((256, 1)), *[shape((256, 256))] * 4)
    one = 8192 * 256 * 4
    here, there = (layout(marked(traced, compiler=name).graph).scratch_bytes for name in ("cpu", "gpu"))
    assert there < 1.1 * one + (4 << 20) and here >= 4 * one


def kernels_of(
    function: Callable[..., Any], *args: Any, compiler: str = "gpu"
) -> tuple[list[Node], dict[int, tuple[Node, ...]]]:
    """Of a compiled function: its kernels, operands first, and what each reads."""
    graph = marked(trace(function, *args), compiler=compiler).graph
    fusion = Fusion(Lowering(graph, lambda equation: (), COMPILERS[compiler]))
    return [node for node in fusion.asked if node.number in fusion.reads], fusion.reads


def pairs(function: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
    """What is made beside what."""
    kernels, reads = kernels_of(function, *args)
    named = {kernel.number: f"{kernel.what} {kernel.type.shape}" for kernel in kernels}
    return [(named[one], named[other]) for one, other in siblings(kernels, reads).items()]


def test_what_reads_the_same_is_made_at_once() -> None:
    """Unless what one of them makes lies otherwise, and neither lies as what they read."""
    shape = jax.ShapeDtypeStruct((4, 64, 32), "float32")

    def turned(*orders: tuple[int, ...]) -> Callable[[Any, Any], Any]:
        def function(x: Any, y: Any) -> Any:
            made = x @ y
            return [(made * (number + 2)).transpose(order) for number, order in enumerate(orders)]

        return function

    other = jax.ShapeDtypeStruct((32, 32), "float32")
    assert len(pairs(turned((0, 1, 2), (0, 2, 1)), shape, other)) == 1
    assert len(pairs(turned((2, 1, 0), (2, 1, 0)), shape, other)) == 1
    # Arguments are there at any time: nothing is made before it is wanted.
    assert pairs(lambda x, y: [x * 2, x.transpose(0, 2, 1) * 3], shape, other) == []
    halves = [jax.ShapeDtypeStruct(each.shape, "bfloat16") for each in (shape, other)]
    assert pairs(turned((2, 1, 0), (1, 0, 2)), *halves) == []
    # What is cut lies otherwise than any of them.
    cut = lambda x, y: [(x @ y) * 2, jnp.pad((x @ y)[:, :32], ((0, 0), (0, 32), (0, 0))) * 3]  # noqa: E731
    assert pairs(cut, shape, other) == []


@pytest.mark.parametrize(("width", "operands", "made"), [(4, 3, 1), (4, 0, 0), (32, 3, 0)])
def test_what_is_turned_few_elements_at_a_time_has_one_source(width: int, operands: int, made: int) -> None:
    """In halves: of several operands it is written as it lies, once, and turned from there for both."""
    shape = jax.ShapeDtypeStruct((64, 64, width), "bfloat16")
    beside = [jax.ShapeDtypeStruct((64, 64, 1), "bfloat16")] * operands

    def function(x: Any, y: Any, *beside: Any) -> Any:
        found = x @ y
        for other in beside:
            found = found + jnp.sum(other, -1, keepdims=True)
        return [(found * 2).transpose(2, 1, 0), (found * 3).transpose(1, 2, 0)]

    square = jax.ShapeDtypeStruct((width, width), "bfloat16")
    assert len(pairs(function, shape, square, *beside)) == made


def test_products_read_what_lies_as_a_matrix() -> None:
    """Of (batch, rows, columns) either side may be contracted; turned are what others had turned before."""
    scores = jax.ShapeDtypeStruct((4, 256, 512), "float32")
    up, left = jax.ShapeDtypeStruct((512, 64), "float32"), jax.ShapeDtypeStruct((4, 256, 32), "float32")

    def function(x: Any, up: Any, left: Any) -> Any:
        x = jnp.sin(x)
        return x @ up, jnp.einsum("bsv,bsd->vd", x, left)

    def transposes(function: Callable[..., Any], compiler: str = "gpu") -> int:
        kernels, _ = kernels_of(function, scores, up, left, compiler=compiler)
        return sum(kernel.what == "transpose" for kernel in kernels)

    assert (transposes(function), transposes(function, "cpu")) == (0, 1)

    def turned(x: Any, up: Any, left: Any) -> Any:
        return function(x.reshape(256, 4, 512).transpose(1, 0, 2), up, left)

    assert transposes(turned) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_costly_is_kept_in_float32(dtype: str) -> None:
    halves = jax.ShapeDtypeStruct(WIDE, dtype)
    graph = marked(
        trace(lambda x: [jnp.sum(jnp.tanh(x) * n) for n in range(2)], halves), compiler="gpu"
    ).graph
    assert [b.nbytes for b in layout(graph).buffers if b.what == "tanh"] == [4 * WIDE[0] * WIDE[1]]
