"""Small immutable records of which there are thousands.

A frozen dataclass sets its fields by `object.__setattr__`, which takes nine times as long as assigning them:
with ten records to an equation that is felt. A `record` is frozen for the type checker, which is where
somebody who assigns to a field is told; at run time it is a dataclass with slots, hashed by its fields unless
`eq=False`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:
    from dataclasses import dataclass

    def record(*, frozen: bool, slots: bool, eq: bool = True):
        """`dataclass`, without what guards the fields at run time."""
        assert frozen, "records are immutable"
        return dataclass(slots=slots, eq=eq, unsafe_hash=eq)


__all__ = ["record"]
