"""Memory that nobody refers to any more goes back to the system; how much there is of it."""

import ctypes
import gc
from dataclasses import dataclass

import mlx.core as mx

from ...footprint import footprint
from ...units import format_size


@dataclass(frozen=True)
class Taken:
    """Bytes: what MLX's arrays take, what MLX keeps of freed ones, and what the system counts as the process's."""

    active: int
    buffer_cache: int
    process: int

    @classmethod
    def now(cls) -> "Taken":
        return cls(mx.get_active_memory(), mx.get_cache_memory(), footprint())

    def until(self, after: "Taken") -> str:
        """How each has changed."""
        pairs = {
            "active": (self.active, after.active),
            "buffer cache": (self.buffer_cache, after.buffer_cache),
            "process": (self.process, after.process),
        }
        return ", ".join(f"{name} {format_size(old)} -> {format_size(new)}" for name, (old, new) in pairs.items())


def give_back() -> None:
    gc.collect()
    mx.clear_cache()
    _trim()


def _trim() -> None:
    """glibc keeps what was freed, as it was told to (models/blas.py); other C libraries have no such call."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(0)
