"""Digits in haiku, built like its MNIST tutorial: a state of parameters, their average and the optimizer's.

The digits are drawn here: seven-segment figures under noise. Nothing is downloaded.
"""

import sys
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardwright

STEPS = int(sys.argv[1])
BATCH = 100
#: Segments that are lit, a bit each: top, upper left and right, middle, lower left and right, bottom.
LIT = [119, 18, 93, 91, 58, 107, 111, 82, 127, 123]
jit = shardwright.parallelize(fleet=sys.argv[2])


class State(NamedTuple):
    params: Any
    average: Any
    opt_state: Any


def batches(seed):
    random = np.random.default_rng(seed)
    segments = np.array([[lit >> bit & 1 for bit in range(7)] for lit in LIT], np.float32)
    strokes = random.random((7, 28 * 28)) < 0.15  # where each segment is drawn
    while True:
        labels = random.integers(0, 10, BATCH)
        clean = (segments[labels] @ strokes).clip(0, 1)
        noise = random.normal(0, 0.3, clean.shape)
        yield {"image": (clean + noise).reshape(-1, 28, 28, 1).astype(np.float32), "label": labels}


def network(images):
    mlp = [hk.Flatten(), hk.Linear(300), jax.nn.relu, hk.Linear(100), jax.nn.relu, hk.Linear(10)]
    return hk.Sequential(mlp)(images)


def loss_of(params, batch):
    logits = model.apply(params, batch["image"])
    decay = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean() + 1e-4 * decay


def update(state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(state.params, batch)
    updates, opt_state = optimizer.update(gradients, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    average = optax.incremental_update(params, state.average, step_size=0.01)
    return State(params, average, opt_state), loss


def evaluate(params, batch):
    return jnp.mean(model.apply(params, batch["image"]).argmax(axis=-1) == batch["label"])


model = hk.without_apply_rng(hk.transform(network))
optimizer = optax.adam(1e-3)
train_batches, test_batches = batches(0), batches(0)
params = model.init(jax.random.key(42), next(train_batches)["image"])
state = State(params, params, optimizer.init(params))
train_step, eval_step = jit(update), jit(evaluate)
for number in range(STEPS):
    state, loss = train_step(state, next(train_batches))
    if number % 5 == 0 or number == STEPS - 1:
        print(f"step {number}  loss {loss:.4f}  accuracy {eval_step(state.average, next(test_batches)):.2f}")
