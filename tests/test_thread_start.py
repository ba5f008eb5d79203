"""An engine's thread that never gets as far as running."""

import threading
import time

import pytest

from onekv.engine import Engine, EngineThread
from onekv.errors import TooLongError


def test_a_start_that_fails_leaves_no_thread_behind():
    """Else a program that ends after such an error may abort: MLX frees the thread's own arrays too late."""
    freed = []

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.2)
            freed.append(True)

    own = threading.local()

    def fails() -> Engine:
        own.kept = Slow()
        raise TooLongError("no such model")

    with pytest.raises(TooLongError):
        EngineThread(fails).start()
    assert freed


def test_what_building_raises_reaches_who_starts_it():
    def fails() -> Engine:
        raise TooLongError("no such model")

    thread = EngineThread(fails)
    with pytest.raises(TooLongError, match="no such model"):
        thread.start()
