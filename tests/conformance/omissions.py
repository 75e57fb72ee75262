"""What brute force confirms and the rules leave out on purpose, with the reason.

The conformance test accepts a missing signature only if a row here covers it, and every row must cover
at least one missing signature of every primitive it names: a row that is no longer needed fails, unless
only some versions of JAX need it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwright.ir.rules import Signature


@dataclass(frozen=True)
class Omission:
    """Signatures of `primitives` that match the regular expression `pattern` are left out."""

    primitives: str
    pattern: str
    reason: str
    sample: str = ""
    #: Every version of JAX that is supported confirms them.
    always: bool = True

    def covers(self, primitive: str, sample: str, signature: Signature) -> bool:
        return (
            primitive in self.primitives.split()
            and self.sample in ("", sample)
            and re.search(self.pattern, str(signature)) is not None
        )


_TO_MAX, _TO_MIN = r"P\(max\).*-> P\(max\)$", r"P\(min\).*-> P\(min\)$"

OMISSIONS = (
    Omission(
        "neg not erfc igammac rsqrt sub shift_right_logical regularized_incomplete_beta "
        "ge gt le lt le_to lt_to",
        r"P\(max\).* -> P\(min\)|P\(min\).* -> P\(max\)",
        "a decreasing operation turns maxima into minima: only increasing ones pass Partial(max|min), and "
        "an exchange before the operation moves as much",
    ),
    Omission(
        "igamma igammac",
        r"^P\((min|max)\), R -> P",
        "monotone in the first operand too, but not as every version of JAX rounds",
        always=False,
    ),
    Omission(
        "ge gt le lt le_to lt_to",
        f"{_TO_MAX}|{_TO_MIN}",
        "a comparison with what is not a number is false, which a maximum over the devices would hide",
    ),
    Omission(
        "add sub add_any polynomial scatter-add scatter-sub select_and_scatter_add reduce reduce_window",
        f"{_TO_MAX}|{_TO_MIN}",
        "a replicated term may be added before or after a maximum, but an exchange before it moves as much, "
        "and an infinite term would meet the infinity that devices without work hold",
    ),
    Omission(
        "convert_element_type",
        r"^P\(sum\) -> P\(sum\)$",
        "exact between integers of one width, or to a narrower one, but sums never pass into integers",
    ),
    Omission("is_finite", r"P\(sum\) -> P\(min\)", "the sum of finite parts may overflow"),
    Omission(
        "reduce reduce_window",
        r"P\(sum\).* -> P\(sum\)$",
        "the function is not known to be linear; lax.add has a primitive of its own",
    ),
    Omission(
        "scatter",
        r"P\(",
        "where updates meet, which of them wins may differ from device to device",
        sample="set_drop",
    ),
    Omission(
        "scatter",
        r"^\S+ \S+ P\(",
        "a function of what is there does not look at the updates, which are zero",
        sample="applied",
    ),
    Omission(
        "device_put",
        r".",
        "operands have nothing to do with each other; tracing makes one equation per operand",
        sample="two_operands",
    ),
    Omission(
        "sort",
        r"^R, P\((\w+)\) -> \S+ P\(\1\)$",
        "values carried along may be Partial, but the exchange before the sort moves as much",
        sample="sorted_pairs",
    ),
    Omission(
        "dynamic_slice",
        r"^\S+ \S+ P\(",
        "the index into a dimension that is taken whole is not looked at",
        sample="at_position",
    ),
    Omission(
        "dynamic_update_slice",
        r"^\S+ \S+ \S+ P\(",
        "the index into a dimension that is taken whole is not looked at",
        sample="cache_update",
    ),
)
