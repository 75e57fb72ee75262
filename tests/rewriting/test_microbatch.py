"""Micro-batches: the same step, in pieces; and what cannot be done in pieces is refused."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewriting_cases import compiled_bytes, evaluated, fleet, layered, on_reference

from shardwright import Fleet, Plan, synthesize
from shardwright.backends.single import evaluate_graph
from shardwright.commands.options import parse_pieces
from shardwright.cost.fleet import Node
from shardwright.ir.errors import InputError
from shardwright.ir.rewrites.microbatch import microbatched
from shardwright.ir.rewrites.pieces import NotInPiecesError
from shardwright.ir.trace import trace
from shardwright.memory import rewritings

EXAMPLES = Path(__file__).parents[2] / "examples"


def normal(*sizes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=sizes).astype(np.float32)


def descent(loss_of: Any) -> Any:
    """A step that also hands out something per row."""

    def step(params: Any, x: Any, y: Any) -> Any:
        (loss, rows), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, x, y)
        norm = sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients))
        return jax.tree.map(lambda p, g: p - 0.1 * g / (1 + norm), params, gradients), loss, rows

    return step


def embedding(params: Any, tokens: Any, y: Any) -> Any:
    """Tied weights, a mask of positions, rows merged with positions, indices."""
    x = params["table"][tokens] + jnp.arange(tokens.shape[1])[:, None] * 0.01
    flat = jax.nn.gelu(x.reshape(-1, x.shape[-1]) @ params["w"])
    scores = flat.reshape(x.shape) @ params["table"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(scores), y[..., None], axis=-1)
    return -jnp.mean(picked), picked[..., 0]


def convolution(params: Any, x: Any, y: Any) -> Any:
    x = jax.lax.conv_general_dilated(
        x, params["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    out = x.mean((1, 2))
    return jnp.mean((out - y) ** 2), out


def recurrent(params: Any, x: Any, y: Any) -> Any:
    def turn(h: Any, at: Any) -> Any:
        h = jnp.tanh(h @ params["w"] + at)
        return h, h.sum(-1)

    h, sums = jax.lax.scan(turn, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))
    return jnp.mean((h - y) ** 2) + 0.01 * sums.mean(), sums


def scaled(params: Any, x: Any, y: Any) -> Any:
    """Layers that keep something of the batch, and something of their weights alone."""

    def layer(h: Any, p: Any) -> Any:
        return jnp.tanh(h @ p["w"]) * jnp.exp(p["scale"] * 2), None

    h, _ = jax.lax.scan(layer, x, params)
    return jnp.mean((h - y) ** 2), h


def skipping(params: Any, x: Any, y: Any) -> Any:
    """Layers of which some are skipped, and a head that looks at the batch or at its bias alone."""

    def layer(h: Any, p: Any) -> Any:
        return jax.lax.cond(p["kept"] > 0, lambda: h + jnp.tanh(h @ p["w"]), lambda: h), None

    h, _ = jax.lax.scan(layer, x, params["layers"])
    way = params["way"].astype(int)
    bias = params["bias"]
    ways = [lambda: h * bias, lambda: jnp.zeros_like(h), lambda: jnp.broadcast_to(jnp.exp(bias), h.shape)]
    out = h + jax.lax.switch(way, ways)
    return jnp.mean((out - y) ** 2), out


def skipping_at(way: int) -> tuple[Any, Any, Any]:
    layers = {"w": 0.3 * normal(3, 4, 4), "kept": np.array([1.0, -1.0, 1.0], np.float32)}
    params = {"layers": layers, "bias": normal(4), "way": np.float32(way)}
    return params, normal(8, 4), normal(8, 4, seed=1)


def resetting(params: Any, x: Any, y: Any) -> Any:
    """A loop that carries on rows, at last the same for all."""
    h, seen = jax.lax.scan(lambda h, w: (jnp.ones_like(h), jnp.tanh(h @ w)), x, params)
    return jnp.mean((seen - y) ** 2) + h.mean(), seen


def watched(params: Any, x: Any, y: Any) -> Any:
    """What is logged is the largest, the smallest, and whether all is well; over layers, too."""

    def layer(carry: Any, w: Any) -> Any:
        h, most = carry
        h = jnp.tanh(h @ w)
        seen = jax.lax.stop_gradient(h)
        return (h, jnp.maximum(most, jnp.abs(seen).max())), seen.min()

    (h, most), least = jax.lax.scan(layer, (x, jnp.float32(0.1)), params)
    fine = jnp.isfinite(h).all() & (h < 0.9).any()
    rows = h.argmax(-1).max()
    return jnp.mean((h - y) ** 2), (most, -(h.max() * 2), least, fine, rows)


def integers(*sizes: int, top: int) -> Any:
    return np.random.default_rng(1).integers(0, top, sizes).astype(np.int32)


STEPS = {
    "embedding": (
        descent(embedding),
        ({"table": normal(11, 8), "w": normal(8, 8)}, integers(8, 5, top=11), integers(8, 5, top=11)),
    ),
    "convolution": (
        descent(convolution),
        ({"k": normal(3, 3, 2, 4)}, normal(8, 6, 6, 2), normal(8, 4)),
    ),
    "scaled": (
        descent(scaled),
        ({"w": 0.3 * normal(3, 4, 4), "scale": 0.1 * normal(3, 4)}, normal(8, 4), normal(8, 4)),
    ),
    **{f"skipping {way}": (descent(skipping), skipping_at(way)) for way in range(3)},
    "watched": (descent(watched), (0.3 * normal(3, 4, 4), normal(8, 4), normal(8, 4))),
    "resetting": (descent(resetting), (0.3 * normal(3, 4, 4), normal(8, 4), normal(8, 4))),
    "recurrent": (descent(recurrent), ({"w": 0.3 * normal(4, 4)}, normal(8, 5, 4), normal(8, 4))),
}


@pytest.mark.parametrize("name", STEPS)
def test_pieces_add_up_to_the_whole(name: str) -> None:
    step, args = STEPS[name]
    wanted = jax.tree.leaves(jax.jit(step)(*args))
    for count in (2, 8):
        found = microbatched(trace(step, *args), count)
        (loop,) = [e for e in found.graph.equations if e.regions and e.params["length"] == count]
        parts = {equation.part for region in loop.regions for equation in region.equations}
        assert {"forward", "backward"} <= parts
        for got, expected in zip(evaluated(found, jax.tree.leaves(args)), wanted, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


def test_what_comes_after_the_loop_keeps_its_forms_and_those_say_which_literals_there_are() -> None:
    """A number that JAX works out on the way is a literal in pieces, though the step has a tensor for it."""

    def step(w: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        two, three = (jax.jit(lambda number: number)(number) for number in (2.0, 3.0))
        return w - 0.1 * gradient, 0.1 * loss + two, 0.1 * loss + three

    args = normal(4, 4), normal(8, 4)
    whole = trace(step, *args)
    cut = microbatched(whole, 2)
    for got, expected in zip(evaluated(cut, list(args)), step(*args), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5)
    for added in (whole, cut):
        two, three = (equation for equation in added.graph.equations if equation.primitive == "add")
        assert (two.form is three.form) == (added is whole)
    assert [str(atom) for atom in (two.inputs[1], three.inputs[1])] == ["2.0", "3.0"]
    (before,), (after,) = (
        [e for e in found.graph.equations if e.primitive == "sub" and not e.part] for found in (whole, cut)
    )
    assert after.form is before.form and after.source is before.source


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
@pytest.mark.filterwarnings("ignore::shardwright.ReplicatedWarning")
def test_typed_keys_are_arguments_and_state(generator: str) -> None:
    def step(params: Any, key: Any, x: Any) -> Any:
        key, own = jax.random.split(key)

        def loss_of(params: Any) -> Any:
            kept = jax.random.bernoulli(own, 0.5, (len(x), params.shape[1]))
            return jnp.mean(jnp.where(kept, x @ params, 0.0) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(params)
        return params - 0.1 * gradient, key, loss

    args = (normal(8, 6), jax.random.key(3, impl=generator), normal(12, 8, seed=1))
    cut = microbatched(trace(step, *args), 3)
    found = evaluate_graph(cut.graph, cut.primitives, list(args))
    wanted = jax.tree.leaves(step(*args))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(jax.random.key_data(found[1]), jax.random.key_data(wanted[1]))
    np.testing.assert_allclose(found[2], wanted[2], rtol=1e-5)


def test_what_needs_the_whole_batch_is_refused() -> None:
    def normalised(params: Any, x: Any, y: Any) -> Any:
        hidden = x @ params["w"]
        hidden = (hidden - hidden.mean(0)) / (1 + hidden.var(0))
        return jnp.mean((hidden - y) ** 2), hidden

    args = ({"w": normal(4, 4)}, normal(8, 4), normal(8, 4, seed=1))
    with pytest.raises(NotInPiecesError, match=r"test_microbatch.*needs a sum over the whole batch"):
        microbatched(trace(descent(normalised), *args), 2)
    with pytest.raises(NotInPiecesError, match="works on the whole batch at once"):
        microbatched(trace(descent(lambda p, x, y: (jnp.mean(jnp.cumsum(x @ p["w"], 0)), y)), *args), 2)
    step, args = STEPS["recurrent"]
    with pytest.raises(NotInPiecesError, match=r"a batch of 8 has no 3 equal pieces\. .*=2 or 4$"):
        microbatched(trace(step, *args), 3)
    with pytest.raises(InputError, match="Pass 'auto', or a number from 1 on"):
        synthesize(step, *args, fleet=fleet(), microbatches=0)


def branching(w: Any, x: Any) -> Any:
    return w * jax.lax.cond(w.sum() > 0, jnp.sum, lambda h: w.sum(), x @ w)


def deciding(w: Any, x: Any) -> Any:
    return w * jnp.mean(jax.lax.cond((x @ w).sum() > 0, jnp.sin, jnp.cos, x @ w))


def looping(w: Any, x: Any) -> Any:
    return w * jnp.mean(jax.lax.while_loop(lambda h: h.max() < 9, lambda h: h * 2, x @ w))


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (branching, "makes of the batch in one branch what it does not in another"),
        (deciding, "needs a sum over the whole batch before all of it was seen"),
        (looping, "decides by the data where control goes"),
    ],
)
def test_control_flow_that_reads_the_batch_is_refused(step: Any, why: str) -> None:
    with pytest.raises(NotInPiecesError, match=why):
        microbatched(trace(step, jnp.ones((4, 4)), jnp.ones((8, 4))), 2)


@pytest.mark.parametrize("chosen", [False, True])
def test_what_is_made_in_the_loop_is_not_there_ahead_of_it(chosen: bool) -> None:
    """A number that pieces have in common, which a scan or a cond over the batch makes beside others."""

    def step(w: Any, x: Any) -> Any:
        def layer(carry: Any, one: Any) -> Any:
            h, total = carry
            return (jnp.tanh(h @ one), 0.5 * total + jnp.abs(one).sum()), None

        def loss_of(w: Any) -> Any:
            start = x, jnp.float32(1)
            if chosen:
                h, total = jax.lax.cond(w.sum() > 0, lambda: layer(start, w[0])[0], lambda: start)
            else:
                (h, total), _ = jax.lax.scan(layer, start, w)
            most = jax.lax.stop_gradient((x * total).max())
            return (h * x / most).sum()

        return w - 0.1 * jax.grad(loss_of)(w)

    with pytest.raises(NotInPiecesError, match="over the whole batch before all of it was seen"):
        microbatched(trace(step, normal(3, 4, 4), normal(8, 4)), 2)


def counted(params: Any, tokens: Any, y: Any) -> Any:
    """The mean over the labels that count, as losses of language models are."""
    counts = (y > 3).astype(jnp.float32)
    losses = embedding(params, tokens, y)[1]
    return (losses * counts).sum() / counts.sum(), losses * counts


def weighted(params: Any, x: Any, y: Any) -> Any:
    """Weights by the largest row of the batch, by the mean of all and by the number of rows before."""
    weights = jnp.abs(y).max(-1)
    weights = weights / weights.max() + 0.1 * jnp.cumsum((y > y.mean()).any(-1))
    out = jnp.tanh(x @ params["w"])
    return jnp.sum(weights[:, None] * (out - y) ** 2) / weights.sum(), weights


@pytest.mark.parametrize(
    ("loss_of", "args"),
    [
        (counted, STEPS["embedding"][1]),
        (weighted, ({"w": normal(4, 4)}, normal(8, 4), normal(8, 4, seed=1))),
    ],
)
def test_what_the_loop_wants_to_know_of_the_whole_batch_is_worked_out_ahead(loss_of: Any, args: Any) -> None:
    step = descent(loss_of)
    wanted = jax.tree.leaves(jax.jit(step)(*args))
    for count in (2, 8):
        found = microbatched(trace(step, *args), count)
        for got, expected in zip(evaluated(found, jax.tree.leaves(args)), wanted, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
        loop = next(e for e in found.graph.equations if e.regions and e.params["length"] == count)
        ahead = found.graph.equations[: loop.index]
        assert sum(e.primitive.startswith(("reduce", "cumsum")) for e in ahead) >= 1
    plan = synthesize(step, *args, fleet=fleet(), devices="all", microbatches=2)
    assert plan.rewriting.microbatches == 2 and plan.verify(step, *args).ok


def test_what_takes_much_is_not_worked_out_ahead() -> None:
    """Weights that a layer makes are sums over the batch as the layer is."""

    def gated(params: Any, x: Any, y: Any) -> Any:
        weights = jax.nn.sigmoid(x @ params["w"]).sum(-1)
        return jnp.sum(weights[:, None] * y**2) / weights.sum(), weights

    def spread(params: Any, x: Any, y: Any) -> Any:
        """Larger than all of the batch."""
        weights = jnp.exp(x[:, :, None] * y[:, None, :])
        return jnp.sum((x @ params["w"]) ** 2 * weights.sum(2)) / weights.sum(), x

    for loss_of in (gated, spread):
        args = ({"w": normal(4, 4)}, normal(8, 4), normal(8, 4, seed=1))
        with pytest.raises(NotInPiecesError, match=r"test_microbatch.*needs a sum over the whole batch"):
            microbatched(trace(descent(loss_of), *args), 2)


def test_a_plan_in_pieces_is_verified_saved_and_needs_less(tmp_path: Any) -> None:
    step, args = layered(False, batch=256)
    whole = synthesize(step, *args, fleet=fleet(), devices="all", recompute="off")
    plan = synthesize(step, *args, fleet=fleet(), devices="all", microbatches=4)
    assert plan.rewriting.microbatches == 4 and "4 micro-batches" in str(plan)
    assert max(plan.memory_bytes) < max(whole.memory_bytes)
    assert plan.verify(step, *args).ok
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    results = jax.tree.leaves(loaded.compile(step, "reference")(*args))
    for got, expected in zip(results, on_reference(plan, args), strict=True):
        np.testing.assert_array_equal(np.asarray(got), expected)
    # Within pieces layers are computed again as well; the loop is then run piece by piece by the host.
    both = synthesize(step, *args, fleet=fleet(), devices="all", microbatches=4, recompute="all")
    assert len(both.rewriting.recompute) >= 2 and both.rewriting.microbatches == 4
    assert compiled_bytes(both) < compiled_bytes(plan) < compiled_bytes(whole)
    for got, expected in zip(on_reference(both, args), on_reference(plan, args), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_pieces_are_found_where_one_device_of_several_is_worth_using(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of GPT-2 that fit nowhere whole, on a quick card beside three slow ones."""
    inventory = Fleet.load(EXAMPLES / "fleets" / "a100_t4.yaml")

    def quarter(node: Node) -> Node:
        kinds = (replace(kind, memory_bytes=kind.memory_bytes // 4) for kind in node.devices)
        return replace(node, devices=tuple(kinds))

    scarce = replace(inventory, nodes=tuple(map(quarter, inventory.nodes)))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    gpt2 = importlib.import_module("gpt2")
    sizes = {"batch": 64, "vocabulary": 50257, "sequence": 1024, "layers": 2, "d": 768, "heads": 12}
    args = jax.eval_shape(partial(gpt2.arguments, **sizes))
    plan = synthesize(gpt2.train_step, *args, fleet=scarce)
    eight = synthesize(gpt2.train_step, *args, fleet=scarce, microbatches=8)
    assert eight.fits
    assert plan.fits
    assert plan.cost_s <= eight.cost_s * (1 + 1e-9)


def test_a_step_whose_old_and_new_state_are_too_much_is_tried_in_no_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its inputs alone would fit; donated, the new state lies where the old one did."""
    step, args = layered(False, layers=1, width=64, batch=8)
    given = sum(leaf.nbytes for leaf in jax.tree.leaves(args))
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(args[0]))
    scarce = fleet(f"{int((given + 0.8 * state) / 2)} B")
    asked: list[Any] = []
    monkeypatch.setattr(rewritings, "counts_of", lambda traced: asked.append(traced) or iter(()))
    assert not synthesize(step, *args, fleet=scarce).fits
    assert not asked
    synthesize(step, *args, fleet=scarce, donate=True)
    assert asked


@pytest.mark.parametrize("given", ["0", "two", "-1", "9" * 5000])
def test_a_number_of_pieces_that_is_none(given: str) -> None:
    with pytest.raises(InputError, match=r"^--microbatches: is "):
        parse_pieces(given, "--microbatches")
