"""Python's garbage collector rests while plans are made and read."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """Planning makes many objects that all live on; looking through them again and again takes its time."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if not gc.get_freeze_count():
                # All that was made counts as old at once: the next collection need not look through it.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
