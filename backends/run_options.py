"""How a plan is run, where there is a choice."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.ir.redundant import RESYNC_EVERY


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of the `mpi` backend.

    Attributes:
        bucket_bytes: exchanges of one kind travel together up to so many bytes, leave as soon as their
            operands are there, and are waited for as late as possible; None: one by one, where the program
            has them.
        resync_every: K: replicated state that ranks compute for themselves is compared every K steps, and
            sent anew by device 0 where it differs; 0: never.
        donate: a step takes the memory of the state that it is given as `ShardedArray`s, as jax.jit does with
            `donate_argnums`: what was passed in cannot be read afterwards.
        finite: stop at the first instruction whose result is infinite or not a number, naming it. Every
            result is looked at, which takes time.
        timeout_s: seconds that a rank may stand still while others wait for it, after which the job ends;
            None: SHARDWRIGHT_TIMEOUT_S, or 8. 0: forever.
    """

    bucket_bytes: int | None = None
    resync_every: int = RESYNC_EVERY
    donate: bool = False
    finite: bool = False
    timeout_s: float | None = None
