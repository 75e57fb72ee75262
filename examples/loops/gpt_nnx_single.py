"""A byte-level GPT in flax nnx: a training loop with evaluation, and generation."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

STEPS = int(sys.argv[1])
LENGTH, WIDTH, HEADS, BATCH = 32, 64, 4, 24
LAYERS = int(sys.argv[3]) if len(sys.argv) > 3 else 4
TEXT = np.frombuffer(Path(optax.__file__).read_bytes(), np.uint8).astype(np.int32) % 128
jit = nnx.jit


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.heads = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        heads = self.heads(self.norms[0](x)).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        mixed = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Gpt(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(128, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(x)


def evaluate(model, text):
    return optax.softmax_cross_entropy_with_integer_labels(model(text[:, :-1]), text[:, 1:]).mean()


def train(model, optimizer, text):
    loss, gradients = nnx.value_and_grad(evaluate)(model, text)
    optimizer.update(model, gradients)
    return loss, {"gradient norm": optax.tree.norm(gradients)}


def write(model, text, position, key):
    logits = jax.lax.dynamic_index_in_dim(model(text), position - 1, axis=1, keepdims=False)
    return text.at[:, position].set(jax.random.categorical(key, logits))


model = Gpt(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
train_step, eval_step, write_step = jit(train), jit(evaluate), jit(write)
random = np.random.default_rng(0)
for number in range(STEPS):
    starts = random.integers(0, len(TEXT) - LENGTH, BATCH)
    loss, metrics = train_step(model, optimizer, TEXT[starts[:, None] + np.arange(LENGTH + 1)])
    print(f"step {number}  loss {loss:.4f}  gradient norm {metrics['gradient norm']:.3f}")
print(f"loss of the beginning {eval_step(model, TEXT[None, : LENGTH + 1]):.4f}")
text = jnp.zeros((1, LENGTH), jnp.int32).at[0, :8].set(TEXT[:8])
for position in range(8, 12):
    text = write_step(model, text, position, jax.random.key(position))
print(f"written {bytes(np.asarray(text)[0, :12].tolist())!r}")
