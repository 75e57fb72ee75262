"""Ctrl-C ends a command, also where something swallows the first one.

Python raises an interrupt wherever it happens to be. Where that is a callback whose errors are reported and
dropped, as those of the garbage collector are, the command would go on as if nothing had happened.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

#: Seconds after which an interrupt comes again, unless the command has ended: time enough to clean up.
_AGAIN_S = 5.0


@contextmanager
def heard() -> Generator[None]:
    """Within it an interrupt is raised again and again until it gets through.

    Where Python itself would not raise it, nothing is changed: in other threads, and where it is ignored.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def put_off() -> Generator[None]:
    """Within it an interrupt waits for the end: one crashes extension modules while they are imported."""
    mine = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if mine else None
    if not callable(handler):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
