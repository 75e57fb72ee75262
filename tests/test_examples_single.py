"""The examples by themselves, on one device: they run, they learn, they are the size they say."""

import importlib
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

TINY = {
    "gpt2:tiny": 29_216,
    "gpt2:tiny_scan": 29_216,
    "vit:tiny": 32_554,
    "bert:tiny": 31_013,
    "bert_moe:tiny": 72_965,
    "vgg19:tiny": 20_029_514,
    "llama3:tiny": 21_984,
    "resnet50:tiny": 34_194,
    "demo_model:byte_gpt": 254_592,
}
FULL = {
    "gpt2:small": 124_439_808,
    "gpt2:small_scan": 124_439_808,
    "vit:base": 86_567_656,
    "bert:base": 109_514_298,
    "bert_moe:base": 3_708_597_306,
    "vgg19:base": 143_667_240,
    "llama3:base": 8_030_261_248,
    "llama3:llama2": 6_738_415_616,
    "resnet50:base": 25_557_032,
}


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def load(example: str) -> Any:
    """The module of an example, and the name of its factory."""
    module, factory = example.split(":")
    return importlib.import_module(module), factory


def made(example: str) -> tuple[Any, Any]:
    module, factory = load(example)
    return getattr(module, factory)()


def parameter_count(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def signature(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


@pytest.mark.parametrize("example", TINY)
def test_tiny_step_changes_every_parameter(example: str) -> None:
    train_step, args = made(example)
    if example == "vgg19:tiny":  # its widths are fixed: one image is cheaper by half than eight
        args = *args[:2], *(batch[:1] for batch in args[2:])
    params, opt_state, *rest = jax.jit(train_step)(*args)
    loss = next(leaf for leaf in jax.tree.leaves(rest) if leaf.shape == ())

    assert parameter_count(args[0]) == TINY[example]
    assert np.isfinite(loss)
    assert signature((params, opt_state)) == signature(args[:2])
    before, after = jax.tree.leaves_with_path(args[0]), jax.tree.leaves(params)
    for (path, old), new in zip(before, after, strict=True):
        assert np.isfinite(new).all(), jax.tree_util.keystr(path)
        assert not np.array_equal(old, new), jax.tree_util.keystr(path)


@pytest.mark.parametrize("example", FULL)
def test_full_size_is_shapes(example: str) -> None:
    _, args = made(example)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    assert parameter_count(args[0]) == FULL[example]


#: Whose code another one traces: the same with a scan, with experts, or with fewer heads for keys.
ALIKE = "gpt2:small", "bert:base", "llama3:llama2"


@pytest.mark.parametrize(
    "example", [pytest.param(e, marks=pytest.mark.full) if e in ALIKE else e for e in FULL]
)
def test_full_size_step_traces_from_shapes(example: str) -> None:
    train_step, args = made(example)
    outputs = jax.make_jaxpr(train_step)(*args).out_avals
    state = jax.tree.leaves(args[:2])
    kept, rest = outputs[: len(state)], outputs[len(state) :]
    assert [(out.shape, out.dtype) for out in kept] == [(leaf.shape, leaf.dtype) for leaf in state]
    assert any(out.shape == () for out in rest), "a loss"


@pytest.mark.parametrize("example", TINY | FULL)
def test_docstring_states_the_parameter_count(example: str) -> None:
    module, factory = load(example)
    stated = re.findall(r"([\d,]+)\s+parameters", getattr(module, factory).__doc__)
    assert stated == [f"{(TINY | FULL)[example]:,}"]


def test_scan_computes_the_same_loss() -> None:
    from gpt2 import loss_of, tiny

    _, (params, _, tokens) = tiny()
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *params["blocks"])
    scanned = loss_of({**params, "blocks": stacked}, tokens)
    np.testing.assert_allclose(loss_of(params, tokens), scanned, rtol=1e-6)


def test_experts_drop_what_exceeds_their_capacity() -> None:
    from bert_moe import route

    x = np.ones((2, 16, 4), np.float32)  # equal tokens all want the same two of 8 experts
    router = np.linspace(0, 1, 4 * 8, dtype=np.float32).reshape(4, 8)
    combine, _ = route(router, x)

    assert combine.shape == (2, 16, 8, 5)  # capacity: 2.5 * 16 / 8
    per_slot = (np.asarray(combine) > 0).sum(axis=1)
    np.testing.assert_array_equal(per_slot[:, -2:], 1)
    np.testing.assert_array_equal(per_slot[:, :-2], 0)
    gates = np.asarray(combine).sum(axis=(2, 3))
    np.testing.assert_allclose(gates[:, :5], 1, rtol=1e-6)
    np.testing.assert_array_equal(gates[:, 5:], 0)


def test_demo_learns_and_its_batches_repeat() -> None:
    import demo_model

    train_step, (params, opt_state, first) = demo_model.byte_gpt()
    np.testing.assert_array_equal(first, next(demo_model.batches(1)))
    step = jax.jit(train_step)
    losses: list[float] = []
    for tokens in demo_model.batches(50):  # of which a quarter is enough to learn from
        params, opt_state, loss = step(params, opt_state, tokens[:6])
        losses.append(float(loss))
    assert losses[0] > 5
    assert np.mean(losses[-5:]) < 3.6


@pytest.fixture(scope="module", autouse=True)
def forget_examples() -> Any:
    """Modules with names as common as `bert` stay out of the other tests' way."""
    yield
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)
