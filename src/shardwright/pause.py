"""Python's garbage collector rests while plans are made and read."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

#: So many objects of earlier plans are looked through before the next one: some 300 MB, half a second.
_MANY = 1_000_000

#: Objects that became old without the collector's knowing, and full collections when the last of them did.
_old = 0
_collections = 0


@contextmanager
def collector_paused() -> Generator[None]:
    """Planning makes many objects that all live on; looking through them again and again takes its time.

    What they leave behind is looked for before another plan is made: that they are old the collector was not
    told, and so it sees no reason to.
    """
    global _old, _collections
    running = gc.isenabled()
    if running:
        if _full_collections() > _collections:
            _old = 0
        if _old > _MANY:
            gc.collect()
            _old = 0
    gc.disable()
    try:
        yield
    finally:
        if running:
            if not gc.get_freeze_count():
                # All that was made counts as old at once: the next collection need not look through it.
                _old += gc.get_count()[0]
                gc.freeze()
                gc.unfreeze()
            _collections = _full_collections()
            gc.enable()


def _full_collections() -> int:
    """How often the collector has looked through everything."""
    return gc.get_stats()[-1]["collections"]
