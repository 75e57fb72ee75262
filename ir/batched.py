"""A `while` of a batch as a loop with one answer.

Under `jax.vmap` every example of a batch may end its loop in an iteration of its own: the condition then
answers for each of them, by which no loop can be run. JAX makes one loop of it when it lowers it: one that
goes on while any example does, and leaves those that have ended as they are. Rules and backends know such
loops alone, so this is done before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex


def answers(params: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of what the condition of a `while` gives: () if it is one answer."""
    return params["cond_jaxpr"].out_avals[0].shape


def with_one_answer(params: Mapping[str, Any]) -> Any:
    """What a `while` of these parameters computes, by a loop that goes on while any of its answers says so.

    The answers are carried. Asked for once by the loop and once by its body, which are compiled apart, they
    may be rounded differently: an example that has ended for the body alone would be waited for without end.
    """
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    goes_on, advance = jex.jaxpr_as_fun(condition), jex.jaxpr_as_fun(body)
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    batch = tuple(range(len(answers(params))))

    def loop(*args: Any) -> Sequence[Any]:
        constants, start = args[: of_cond + of_body], args[of_cond + of_body :]
        for_cond, for_body = constants[:of_cond], constants[of_cond:]

        def turn(state: tuple[Any, Sequence[Any]]) -> tuple[Any, Sequence[Any]]:
            going, carry = state

            def chosen(new: Any, old: Any) -> Any:
                if new is old:  # the body hands it on as it is
                    return old
                return lax.select(lax.broadcast_in_dim(going, old.shape, batch), new, old)

            carry = list(map(chosen, advance(*for_body, *carry), carry))
            return going & goes_on(*for_cond, *carry)[0], carry

        first = goes_on(*for_cond, *start)[0]
        return lax.while_loop(lambda state: lax.reduce_or(state[0], batch), turn, (first, list(start)))[1]

    return jax.make_jaxpr(loop)(*condition.in_avals[:of_cond], *body.in_avals)
