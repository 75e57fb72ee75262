"""Matrix products in the kernel model's words: which devices it knows, which dtypes, and its seconds.

`shardwright.cost.model` prices contractions by this on device types that follow the kernel model.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from shardwright.cost.catalogue import catalogue
from shardwright.cost.device import DeviceType, arithmetic
from shardwright.cost.kernels.contractions import Sizes
from shardwright.cost.kernels.seconds import DTYPES, products_s
from shardwright.cost.share_cost import Floats


def follows_kernel_model(device: DeviceType) -> bool:
    """Whether kernels are priced by shape: types of the catalogue, and others that state multiprocessors.

    What was measured on a device of the fleet's own (`measured: true` in a fleet file) stands as it is.
    """
    known = catalogue().get(device.name) == device
    return device.sm_count is not None and (known or not device.measured)


class Products:
    """Seconds of matrix products on types of device that follow the kernel model, memory aside; remembered.

    Args:
        types: of device.
    """

    def __init__(self, types: Sequence[DeviceType]) -> None:
        self.types = tuple(types)
        self._known: dict[tuple[str, bool], dict[Sizes, Floats]] = {}

    def of(self, dtype: str, linear: bool, shapes: Sequence[Sizes]) -> Floats:
        """(shapes, types): seconds of products of these sizes; all new ones are priced in one go."""
        known = self._known.setdefault((dtype, linear), {})
        fresh = [shape for shape in dict.fromkeys(shapes) if shape not in known]
        if fresh:
            # TF32 is allowed, not demanded: a card without it uses float32.
            used = ["float32" if dtype == "tf32" and t.tf32_flop_per_s is None else dtype for t in self.types]
            prices = products_s(self.types, used, fresh, linear=linear, memory=False)
            known.update(zip(fresh, prices.T, strict=True))
        return np.array([known[shape] for shape in shapes])


def local_sizes(sizes: Sizes, cut: int | None, share: float) -> Sizes:
    """Sizes of a device's part if it holds `share` of size `cut`."""
    b, m, n, k = (max(ceil(size * share - 1e-9), 1) if i == cut else size for i, size in enumerate(sizes))
    return b, m, n, k


def kernel_dtype(dtype: str, precision: str | None) -> str | None:
    """What such operands are multiplied in, in the kernel model's words; None where it has none."""
    used, passes = arithmetic(dtype, precision)
    return None if passes != 1 or used not in DTYPES or dtype.startswith("complex") else used
