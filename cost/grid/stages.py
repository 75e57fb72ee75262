"""What layers cost as stages on two mesh axes: every node is one, and its devices share out the pieces.

With P pieces and S stages, a device with a share q of the pieces, in a node with a share r of the layers, has
q P + S - 1 beats, and in each of them r L layers to do and a piece to hand on:

    t(r, q) = (q P + S - 1) (r L layer + handed)                seconds; see `shardwright.cost.stages`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardwright.cost.grid.kernels import Kernels, grid_cut
from shardwright.cost.grid.prices import FEATURES, ONE, RQ, WHOLE, Q, R
from shardwright.cost.lines import beats_of
from shardwright.cost.share_cost import Floats
from shardwright.cost.stages import Model, layer_s
from shardwright.ir.graph import Equation
from shardwright.ir.rules import Signature
from shardwright.ir.stages import in_stages, layers_of


def staged_kernels(
    equation: Equation,
    found: Sequence[Signature],
    model: Model,
    nodes: int,
    handed_s: Callable[[int], Floats],
) -> Kernels:
    """Costs and cuts of stages under each of their signatures.

    Args:
        equation: the stages.
        found: the signatures.
        model: prices kernels on the devices of a fleet.
        nodes: of the fleet.
        handed_s: of bytes, seconds in which every device hands on as many, by class.
    """
    layers = layers_of(equation)
    assert layers is not None, "it is one of stages"
    line = beats_of(layers, sharded=True)
    every = line.length * layer_s(model, line)
    handed, idle = handed_s(line.handed_bytes), min(nodes, line.length) - 1
    whole, cut = np.zeros((2, FEATURES, 1, len(every)))
    whole[ONE] = line.pieces * every
    cut[RQ], cut[R] = line.pieces * every, idle * every
    cut[Q], cut[ONE] = line.pieces * handed, idle * handed
    staged = [in_stages(signature) for signature in found]
    tensors, first = (*equation.input_types, *equation.output_types), found[staged.index(max(staged))]
    ways = {False: WHOLE, True: grid_cut(tensors, (*first.ins, *first.outs))}
    which, at = np.unique(staged, return_inverse=True)
    terms = np.stack([whole, cut])[which.astype(np.intp)]
    return Kernels(terms, tuple([ways[bool(each)] for each in which]), at.reshape(-1))
