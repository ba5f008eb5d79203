"""Deferring Ctrl-C."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Not empty while the main thread, the only one that Ctrl-C interrupts, is in `uninterrupted`.
_held: list[bool] = []


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers Ctrl-C to the end of the block, the outermost one if nested. If it is ignored, it stays ignored."""
    if _held or threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        waiting.append(number)

    before = signal.signal(signal.SIGINT, remember)
    _held.append(True)
    try:
        yield
    finally:
        _held.pop()
        signal.signal(signal.SIGINT, before)
    if waiting and before != signal.SIG_IGN:
        raise KeyboardInterrupt
