"""Deferring Ctrl-C, and keeping it from other processes."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.pool import Pool

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


def pool_of(processes: int) -> "Pool":
    """They are not forked, because MLX has threads. Ctrl-C is for this process, which ends them."""
    # A command's help does not need it.
    import multiprocessing

    return multiprocessing.get_context("spawn").Pool(processes, signal.signal, (signal.SIGINT, signal.SIG_IGN))
