"""How many threads loops use: all cores, or one thread if that is faster.

A loop ends when the last of its threads does. If other programs compete for the cores, a thread waits to be scheduled,
some milliseconds each time, and a step of some hundred loops takes many times as long as with one thread. So both are
timed: an occasional step uses the other number, less and less often while that is not faster. Results do not depend on
the number.
"""

import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from . import has_threads

# Steps until the other number is tried again: at first, and at most.
SOON, LATE = 8, 1024
# What the other must save to be taken.
SAVED = 0.1

_now: int | None = None


@functools.cache
def most() -> int:
    """As many as OpenBLAS starts; one where numba has none for us."""
    if not has_threads():
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = [os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS")]
    return min([cores, *(max(1, int(text)) for text in wanted if text.isdecimal())])


def threads() -> int:
    """Threads of a loop that is called now."""
    return most() if _now is None else _now


class Choice:
    """Between one thread and all, for steps that take about as long as each other."""

    def __init__(self, all_threads: int) -> None:
        self._all, self.number = all_threads, all_threads
        self._seconds = 0.0
        self._steps, self._trying, self._wait = 0, False, SOON

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, loops have the number of threads that was chosen, or the other one, to see."""
        global _now
        self._trying = self._all > 1 and (self._steps == 1 or self._steps >= self._wait)
        before, _now = _now, self._other if self._trying else self.number
        begin = time.perf_counter()
        try:
            yield
        finally:
            _now = before
        self._took(time.perf_counter() - begin)

    @property
    def _other(self) -> int:
        return 1 if self.number > 1 else self._all

    def _took(self, seconds: float) -> None:
        if not self._trying:
            self._seconds = 0.7 * self._seconds + 0.3 * seconds if self._seconds else seconds
            self._steps += 1
            return
        if seconds < self._seconds * (1 - SAVED):
            self.number, self._seconds, self._wait = self._other, seconds, SOON
        elif self._steps > 1:
            self._wait = min(2 * self._wait, LATE)
        # From the second step on, which tries: the first has nothing to compare with.
        self._steps = 2
