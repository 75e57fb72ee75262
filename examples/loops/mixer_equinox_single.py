"""An MLP-Mixer in equinox that tells where the brightest patch of an image is."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS = int(sys.argv[1])
BATCH, SIDE, PATCH, WIDTH, HIDDEN, LAYERS = 64, 16, 4, 64, 128, 2
PATCHES = (SIDE // PATCH) ** 2


class Mixer(eqx.Module):
    embed: eqx.nn.Linear
    over_patches: list[eqx.nn.MLP]
    over_channels: list[eqx.nn.MLP]
    norms: list[eqx.nn.LayerNorm]
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = iter(jax.random.split(key, 2 * LAYERS + 2))
        self.embed = eqx.nn.Linear(PATCH * PATCH, WIDTH, key=next(keys))
        self.over_patches = [
            eqx.nn.MLP(PATCHES, PATCHES, HIDDEN, 1, jax.nn.gelu, key=next(keys)) for _ in range(LAYERS)
        ]
        self.over_channels = [
            eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, jax.nn.gelu, key=next(keys)) for _ in range(LAYERS)
        ]
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS)]
        self.dropout = eqx.nn.Dropout(0.05)
        self.head = eqx.nn.Linear(WIDTH, PATCHES, key=next(keys))

    def __call__(self, image, key):
        patches = image.reshape(SIDE // PATCH, PATCH, SIDE // PATCH, PATCH).transpose(0, 2, 1, 3)
        x = jax.vmap(self.embed)(patches.reshape(PATCHES, PATCH * PATCH))
        x = self.dropout(x, key=key)
        for i in range(LAYERS):
            x = x + jax.vmap(self.over_patches[i])(jax.vmap(self.norms[2 * i])(x).T).T
            x = x + jax.vmap(self.over_channels[i])(jax.vmap(self.norms[2 * i + 1])(x))
        return self.head(x.mean(axis=0))


def train_step(model, opt_state, images, labels, key):
    @eqx.filter_value_and_grad(has_aux=True)
    def loss_of(model):
        logits = jax.vmap(model)(images, jax.random.split(key, len(images)))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, (logits.argmax(axis=1) == labels).mean()

    (loss, accuracy), gradients = loss_of(model)
    updates, opt_state = optimizer.update(gradients, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss, accuracy


model = Mixer(jax.random.key(0))
optimizer = optax.adam(2e-3)
opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
step = eqx.filter_jit(train_step)
random = np.random.default_rng(0)
for number in range(STEPS):
    images = random.random((BATCH, SIDE, SIDE), np.float32)
    light = images.reshape(BATCH, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH).mean(axis=(2, 4))
    labels = jnp.asarray(light.reshape(BATCH, -1).argmax(axis=1))
    model, opt_state, loss, accuracy = step(model, opt_state, images, labels, jax.random.key(number))
    print(f"step {number}  loss {loss:.4f}  accuracy {accuracy:.2f}")
