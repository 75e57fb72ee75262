"""Where planning time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Timer:
    """Where planning time goes, and when it is over.

    `tick` is told what begins, for progress displays; `limit_s` are seconds from now on, None for no end.
    """

    def __init__(self, tick: Callable[[str], None] = lambda what: None, limit_s: float | None = None) -> None:
        self.search_s = 0.0
        self.ratio_s = 0.0
        self._tick = tick
        self._end = None if limit_s is None else time.perf_counter() + limit_s

    @property
    def limited(self) -> bool:
        """Whether there is a time limit."""
        return self._end is not None

    def late(self) -> bool:
        """Whether the time limit has passed."""
        return self._end is not None and time.perf_counter() >= self._end

    @contextmanager
    def search(self) -> Generator[None]:
        """Time spent in the block is search time."""
        self._tick("searching programs")
        start = time.perf_counter()
        yield
        self.search_s += time.perf_counter() - start

    @contextmanager
    def ratios(self) -> Generator[None]:
        """Time spent in the block is ratio time."""
        self._tick("setting ratios")
        start = time.perf_counter()
        yield
        self.ratio_s += time.perf_counter() - start
