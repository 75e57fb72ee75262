"""VGG19 as keras.applications ships it, as a whole training step with adamw.

The forward pass is code that is not ours: Keras traces it on its JAX backend.
"""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax
from _layers import Params, initial

Step = Callable[..., tuple[Params, optax.OptState, jax.Array]]

optimizer = optax.adamw(1e-4, weight_decay=5e-4)


def model_of(pixels: int, classes: int, full_head: bool) -> Any:
    """A Keras model that holds no values: they are arguments of the train step.

    Within a stateless scope Keras only declares variables, and leaves them so. The full
    head is VGG19's own (three dense layers); the small one averages the last feature map
    into one dense layer.
    """
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    with keras.StatelessScope(initialize_variables=False):
        model = keras.applications.VGG19(
            weights=None,
            input_shape=(pixels, pixels, 3),
            include_top=full_head,
            pooling=None if full_head else "avg",
            classes=classes,
            classifier_activation=None,
        )
        if not full_head:
            scores = keras.layers.Dense(classes, name="predictions")(model.output)
            model = keras.Model(model.input, scores)
    return model


def train_step_of(model: Any) -> Step:
    names = [variable.path for variable in model.trainable_variables]

    def loss_of(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        import keras

        values = [params[name] for name in names]
        with keras.StatelessScope(initialize_variables=False):
            scores, _ = model.stateless_call(values, [], images, training=True)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    def train_step(
        params: Params, opt_state: optax.OptState, images: jax.Array, labels: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def he_normal(shapes: Params) -> Params:
    def scaled(weight: jax.Array) -> jax.Array:
        return weight * math.sqrt(2 / math.prod(weight.shape[:-1]))

    return jax.tree.map(scaled, initial(shapes, deviation=1.0))


def arguments(shapes: Params, batch: int, pixels: int, classes: int) -> tuple[Any, ...]:
    params = he_normal(shapes)
    images_key, labels_key = jax.random.split(jax.random.key(1))
    images = jax.random.normal(images_key, (batch, pixels, pixels, 3))
    labels = jax.random.randint(labels_key, (batch,), 0, classes)
    return params, optimizer.init(params), images, labels


def built(batch: int, pixels: int, classes: int, full_head: bool) -> tuple[Step, Any]:
    """The train step of a model, and the function that makes its arguments."""
    model = model_of(pixels, classes, full_head)
    shapes = {variable.path: tuple(variable.shape) for variable in model.trainable_variables}
    return train_step_of(model), partial(arguments, shapes, batch, pixels, classes)


def base() -> tuple[Any, Any]:
    """VGG19: 143,667,240 parameters; batch 256 of 224 x 224 pixels, shapes only."""
    train_step, make = built(batch=256, pixels=224, classes=1000, full_head=True)
    return train_step, jax.eval_shape(make)


def tiny() -> tuple[Any, Any]:
    """The same 16 convolutions on 32 x 32 pixels: 20,029,514 parameters.

    Their widths are fixed, so this is as small as an honest VGG19 gets: parameters and
    optimizer state take 240 MB.
    """
    train_step, make = built(batch=8, pixels=32, classes=10, full_head=False)
    return train_step, jax.jit(make)()
