"""Memory freed by models that the process still holds: the next model is loaded into it.

glibc keeps freed memory (`blas`), and pages that are kept need not be requested, cleared and mapped again, which takes
as long as reading weights into them. But kept memory is useful only if the next allocation fits into it: otherwise the
process grows. So when a model is unloaded to load another one, the caller sets how large the process may become
(`keep`). Large allocations during the load are announced (`take`); if the process might exceed the limit, all kept
memory is returned to the system first. When the model is loaded, the rest is returned (`release`).

The heap belongs to the process, and so does the single `freed`. One model is loaded at a time; its thread calls `take`.
"""

import ctypes
from collections.abc import Callable


class Freed:
    def __init__(self) -> None:
        self._limit: int | None = None
        self._taken: Callable[[], int] = int

    @property
    def kept(self) -> bool:
        return self._limit is not None

    def keep(self, limit: int, taken: Callable[[], int]) -> None:
        """From here on, until it is released; at most `limit` bytes of what `taken` says that the process has."""
        self._limit, self._taken = limit, taken

    def take(self, nbytes: int) -> None:
        """So many bytes at most are going to be allocated."""
        if self._limit is not None and self._taken() + nbytes > self._limit:
            self.release()

    def release(self) -> None:
        if self.kept:
            self._limit = None
            trim()


def trim() -> None:
    """Back to the system; C libraries other than glibc do so by themselves."""
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    malloc_trim(0)


freed = Freed()
