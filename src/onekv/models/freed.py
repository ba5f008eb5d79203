"""Memory that models have freed and that the process still has: the next one is loaded into it.

glibc keeps what is freed (`blas`), and pages that are still there need not be asked for, cleared and mapped again,
which takes as long as reading weights into them. But what is kept is of use only where the next allocation fits into
it: if it does not, the process grows beside it. So whoever unloads a model to load another says how large the process
may become (`keep`). What allocates much while a model is loaded says so first (`take`); if the process might become
larger than that, all that is kept goes back to the system before. When the model is loaded, the rest does (`release`).

The heap is the process's, and so is the one `freed`. One model is loaded at a time; its thread calls `take`.
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
