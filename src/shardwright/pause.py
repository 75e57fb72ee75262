"""Python's garbage collector rests while plans are made and read."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

#: So many objects of earlier plans are looked through before the next one: some 300 MB, half a second.
_MANY = 1_000_000


@dataclass(slots=True)
class _Left:
    """What plans of this process left: it has one collector.

    Attributes:
        objects: that became old without the collector's knowing.
        collections: full ones when the last of them did.
    """

    objects: int = 0
    collections: int = 0

    def look(self) -> None:
        """Look through them, if they are many and the collector has not done so since."""
        if _full_collections() == self.collections and self.objects > _MANY:
            gc.collect()
        if _full_collections() > self.collections:
            self.objects = 0


_LEFT = _Left()


@contextmanager
def collector_paused() -> Generator[None]:
    """Planning makes many objects that all live on; looking through them again and again takes its time.

    What they leave behind is looked for before another plan is made: that they are old the collector was not
    told, and so it sees no reason to.
    """
    running = gc.isenabled()
    if running:
        _LEFT.look()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if not gc.get_freeze_count():
                # All that was made counts as old at once: the next collection need not look through it.
                _LEFT.objects += gc.get_count()[0]
                gc.freeze()
                gc.unfreeze()
            _LEFT.collections = _full_collections()
            gc.enable()


def _full_collections() -> int:
    """How often the collector has looked through everything."""
    return gc.get_stats()[-1]["collections"]
