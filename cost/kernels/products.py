"""Matrix products in the kernel model's words: which devices it knows, which dtypes, and its seconds.

`shardwright.cost.model` prices contractions by this on device types that follow the kernel model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from shardwright.cost.catalogue import catalogue
from shardwright.cost.device import DeviceType, arithmetic
from shardwright.cost.kernels.contractions import Sizes
from shardwright.cost.kernels.seconds import DTYPES, peak_flop_per_s, products_s
from shardwright.cost.share_cost import Floats


def follows_kernel_model(device: DeviceType) -> bool:
    """Whether kernels are priced by shape: types of the catalogue, and others that state multiprocessors.

    What was measured on a device of the fleet's own (`measured: true` in a fleet file) stands as it is. How
    much memory a fleet leaves of a card's does not make it another card.
    """
    same = catalogue().get(device.name)
    known = same is not None and replace(device, memory_bytes=same.memory_bytes) == same
    return device.sm_count is not None and (known or not device.measured)


class Products:
    """Seconds of matrix products on types of device that follow the kernel model, memory aside; remembered.

    Args:
        types: of device.
    """

    def __init__(self, types: Sequence[DeviceType]) -> None:
        self.types = tuple(types)
        #: By dtype and layout, rows of the shapes known, and these rows.
        self._known: dict[tuple[str, bool], tuple[dict[Sizes, int], Floats]] = {}

    def of(self, dtype: str, linear: bool, shapes: Sequence[Sizes]) -> Floats:
        """(shapes, types): seconds of products of these sizes; all new ones are priced in one go."""
        rows, table = self._known.setdefault((dtype, linear), ({}, np.zeros((0, len(self.types)))))
        fresh = [shape for shape in dict.fromkeys(shapes) if shape not in rows]
        if fresh:
            prices = products_s(self.types, self._used(dtype), fresh, linear=linear, memory=False)
            rows.update(zip(fresh, range(len(rows), len(rows) + len(fresh)), strict=True))
            table = np.concatenate([table, prices.T])
            self._known[dtype, linear] = rows, table
        return table[[rows[shape] for shape in shapes]]

    def peaks(self, dtype: str) -> Floats:
        """(types,): operations per second that no product exceeds."""
        pairs = zip(self.types, self._used(dtype), strict=True)
        return np.array([peak_flop_per_s(device, used) for device, used in pairs])

    def _used(self, dtype: str) -> list[str]:
        """What every type multiplies in: TF32 is allowed, not demanded; a card without it uses float32."""
        return ["float32" if dtype == "tf32" and t.tf32_flop_per_s is None else dtype for t in self.types]


def local_sizes(sizes: Sizes, cut: int | None, share: float) -> Sizes:
    """Sizes of a device's part if it holds `share` of size `cut`."""
    b, m, n, k = (max(ceil(size * share - 1e-9), 1) if i == cut else size for i, size in enumerate(sizes))
    return b, m, n, k


def kernel_dtype(dtype: str, precision: str | None) -> str | None:
    """What such operands are multiplied in, in the kernel model's words; None where it has none."""
    used, passes = arithmetic(dtype, precision)
    return None if passes != 1 or used not in DTYPES or dtype.startswith("complex") else used
