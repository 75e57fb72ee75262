"""The small byte-level GPT of `make demo`, trained on Python's own standard library.

SGD with momentum, whose updates do not amplify rounding noise: runs on different devices
can be compared loss by loss.
"""

import sysconfig
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from _layers import Params, initial
from gpt2 import loss_of, shapes

SEQUENCE, BATCH = 64, 24
SIZES = {"vocabulary": 256, "sequence": SEQUENCE, "layers": 2, "d": 96, "heads": 4}

optimizer = optax.sgd(0.05, momentum=0.9)


def train_step(
    params: Params, opt_state: optax.OptState, tokens: jax.Array
) -> tuple[Params, optax.OptState, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@cache
def corpus(size: int = 1_000_000) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The first `size` bytes of the standard library's top-level modules, by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return np.frombuffer(bytes(text[:size]), np.uint8)


def batches(count: int, seed: int = 0) -> Iterator[np.ndarray[Any, np.dtype[np.int32]]]:
    """`count` batches (BATCH, SEQUENCE + 1) of int32 bytes, the same for one seed."""
    text, random = corpus(), np.random.default_rng(seed)
    for _ in range(count):
        starts = random.integers(0, len(text) - SEQUENCE, BATCH)
        yield text[starts[:, None] + np.arange(SEQUENCE + 1)].astype(np.int32)


def byte_gpt() -> tuple[Any, Any]:
    """Two layers of width 96, 254,592 parameters, with the first batch of `batches`."""
    params = jax.jit(partial(initial, shapes(**SIZES)))()
    return train_step, (params, optimizer.init(params), jax.numpy.asarray(next(batches(1))))
