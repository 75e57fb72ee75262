"""ViT: a vision transformer, as a whole training step with adamw.

Patches are embedded by a strided convolution; the step also returns its accuracy.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _layers import (
    Params,
    block_shapes,
    dense,
    dense_shapes,
    exact_gelu,
    initial,
    layer_norm,
    norm_shapes,
    pre_norm_block,
)

optimizer = optax.adamw(3e-4, weight_decay=0.1)


def logits(params: Params, images: jax.Array) -> jax.Array:
    """(batch, height, width, 3) images to (batch, classes) scores."""
    kernel = params["patch"]["weight"]
    patches = jax.lax.conv_general_dilated(
        images,
        kernel,
        window_strides=kernel.shape[:2],
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    batch, rows, columns, d = patches.shape
    x = patches.reshape(batch, rows * columns, d) + params["patch"]["bias"]
    class_token = jnp.broadcast_to(params["class_token"], (batch, 1, d))
    x = jnp.concatenate([class_token, x], axis=1) + params["positions"]
    for p in params["blocks"]:
        x = pre_norm_block(p, x, activation=exact_gelu, epsilon=1e-6)
    return dense(params["head"], layer_norm(params["norm"], x[:, 0], epsilon=1e-6))


def loss_of(params: Params, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    scores = logits(params, images)
    loss = optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()
    accuracy = (scores.argmax(axis=-1) == labels).mean()
    return loss, {"accuracy": accuracy}


def train_step(
    params: Params, opt_state: optax.OptState, images: jax.Array, labels: jax.Array
) -> tuple[Params, optax.OptState, jax.Array, dict[str, jax.Array]]:
    (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, images, labels)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, metrics


def shapes(pixels: int, patch: int, classes: int, layers: int, d: int, heads: int) -> Params:
    return {
        "patch": {"weight": (patch, patch, 3, d), "bias": (d,)},
        "class_token": (1, 1, d),
        "positions": (1 + (pixels // patch) ** 2, d),
        "blocks": [block_shapes(d, heads, 4 * d)] * layers,
        "norm": norm_shapes(d),
        "head": dense_shapes(d, classes),
    }


def arguments(batch: int, pixels: int, classes: int, **sizes: Any) -> tuple[Any, ...]:
    params = initial(shapes(pixels, classes=classes, **sizes))
    images_key, labels_key = jax.random.split(jax.random.key(1))
    images = jax.random.normal(images_key, (batch, pixels, pixels, 3))
    labels = jax.random.randint(labels_key, (batch,), 0, classes)
    return params, optimizer.init(params), images, labels


BASE = {"batch": 256, "pixels": 224, "patch": 16, "classes": 1000, "layers": 12, "d": 768, "heads": 12}
TINY = {"batch": 8, "pixels": 32, "patch": 8, "classes": 10, "layers": 2, "d": 32, "heads": 4}


def base() -> tuple[Any, Any]:
    """ViT-B/16: 86,567,656 parameters; batch 256 of 224 x 224 pixels, shapes only."""
    return train_step, jax.eval_shape(partial(arguments, **BASE))


def tiny() -> tuple[Any, Any]:
    """Two layers, 17 positions, 32,554 parameters, concrete arrays."""
    return train_step, jax.jit(partial(arguments, **TINY))()
