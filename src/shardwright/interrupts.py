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
    """Within it an interrupt is raised again and again until it gets through."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or not hasattr(signal, "setitimer") or signal.getsignal(signal.SIGINT) in _ELSEWHERE:
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


#: Handlers of others: who ignores interrupts, or hears of them in another way, goes on to.
_ELSEWHERE = (signal.SIG_IGN, signal.SIG_DFL, None)
