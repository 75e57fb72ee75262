"""ResNet-50 in plain JAX, as a whole training step: batch norm in training mode, SGD with momentum.

Batch norm normalises by the mean and variance of the whole batch, wherever its images lie, and keeps running
averages of them as state beside the parameters.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _layers import Params, dense, dense_shapes, initial, norm_shapes

Shapes = dict[str, Any]

BLOCKS = (3, 4, 6, 3)
WIDEN = 4
MOMENTUM, EPSILON = 0.9, 1e-5

optimizer = optax.sgd(0.1, momentum=0.9)


def block_shapes(inputs: int, width: int, project: bool) -> Params:
    """A bottleneck: 1 x 1, 3 x 3 and 1 x 1 convolutions, each with a batch norm."""
    outputs = WIDEN * width
    sizes = {
        "reduce": (1, 1, inputs, width),
        "spatial": (3, 3, width, width),
        "widen": (1, 1, width, outputs),
    }
    if project:
        sizes["project"] = (1, 1, inputs, outputs)
    return {name: {"kernel": shape, "norm": norm_shapes(shape[-1])} for name, shape in sizes.items()}


def parameter_shapes(width: int, blocks: tuple[int, ...], classes: int) -> Params:
    shapes: Shapes = {"stem": {"kernel": (7, 7, 3, width), "norm": norm_shapes(width)}}
    inputs = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for block in range(count):
            shapes[f"stage{stage}_block{block}"] = block_shapes(inputs, inner, project=block == 0)
            inputs = WIDEN * inner
    shapes["head"] = dense_shapes(inputs, classes)
    return shapes


def statistics_of(params: Params) -> Params:
    """Running mean and variance of every batch norm."""
    if "norm" in params:
        bias = params["norm"]["bias"]
        return {"mean": jnp.zeros_like(bias), "variance": jnp.ones_like(bias)}
    return {name: statistics_of(inner) for name, inner in params.items() if name != "head"}


def he_normal(shapes: Params) -> Params:
    def scaled(weight: jax.Array) -> jax.Array:
        return weight * math.sqrt(2 / math.prod(weight.shape[:-1])) if weight.ndim > 1 else weight

    return jax.tree.map(scaled, initial(shapes, deviation=1.0))


def convolution(kernel: jax.Array, x: jax.Array, stride: int) -> jax.Array:
    sides = [((size - 1) // 2,) * 2 for size in kernel.shape[:2]]
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), sides, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def conv_norm(p: Params, s: Params, x: jax.Array, stride: int = 1) -> tuple[jax.Array, Params]:
    """Convolution and batch norm of x (batch, height, width, channels); and the new running averages."""
    x = convolution(p["kernel"], x, stride)
    mean = x.mean(axis=(0, 1, 2))
    centred = x - mean
    variance = jnp.square(centred).mean(axis=(0, 1, 2))
    y = centred * (jax.lax.rsqrt(variance + EPSILON) * p["norm"]["scale"]) + p["norm"]["bias"]
    kept = {"mean": mean, "variance": variance}
    kept = {name: MOMENTUM * s[name] + (1 - MOMENTUM) * jax.lax.stop_gradient(kept[name]) for name in kept}
    return y, kept


def bottleneck(p: Params, s: Params, x: jax.Array, stride: int) -> tuple[jax.Array, Params]:
    kept: Params = {}
    y, kept["reduce"] = conv_norm(p["reduce"], s["reduce"], x)
    y, kept["spatial"] = conv_norm(p["spatial"], s["spatial"], jax.nn.relu(y), stride)
    y, kept["widen"] = conv_norm(p["widen"], s["widen"], jax.nn.relu(y))
    if "project" in p:
        x, kept["project"] = conv_norm(p["project"], s["project"], x, stride)
    return jax.nn.relu(x + y), kept


def logits_of(params: Params, statistics: Params, images: jax.Array) -> tuple[jax.Array, Params]:
    kept: Params = {}
    x, kept["stem"] = conv_norm(params["stem"], statistics["stem"], images, stride=2)
    x = jax.lax.reduce_window(
        jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)]
    )
    for name in statistics:
        if name != "stem":
            stride = 2 if name.endswith("block0") and not name.startswith("stage0") else 1
            x, kept[name] = bottleneck(params[name], statistics[name], x, stride)
    return dense(params["head"], x.mean(axis=(1, 2))), kept


def loss_of(
    params: Params, statistics: Params, images: jax.Array, labels: jax.Array
) -> tuple[jax.Array, Params]:
    scores, statistics = logits_of(params, statistics, images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(), statistics


def train_step(
    params: Params, opt_state: optax.OptState, statistics: Params, images: jax.Array, labels: jax.Array
) -> tuple[Params, optax.OptState, Params, jax.Array]:
    (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(
        params, statistics, images, labels
    )
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, statistics, loss


def arguments(batch: int, pixels: int, width: int, blocks: tuple[int, ...], classes: int) -> tuple[Any, ...]:
    params = he_normal(parameter_shapes(width, blocks, classes))
    images_key, labels_key = jax.random.split(jax.random.key(1))
    images = jax.random.normal(images_key, (batch, pixels, pixels, 3))
    labels = jax.random.randint(labels_key, (batch,), 0, classes)
    return params, optimizer.init(params), statistics_of(params), images, labels


BASE = {"batch": 256, "pixels": 224, "width": 64, "blocks": BLOCKS, "classes": 1000}
TINY = {"batch": 8, "pixels": 32, "width": 8, "blocks": (1, 1, 1), "classes": 10}


def base() -> tuple[Any, Any]:
    """ResNet-50: 25,557,032 parameters; batch 256 of 224 x 224 pixels, shapes only."""
    return train_step, jax.eval_shape(partial(arguments, **BASE))


def tiny() -> tuple[Any, Any]:
    """The same bottlenecks, three of them, narrower: 34,194 parameters; 32 x 32 pixels."""
    return train_step, arguments(**TINY)
