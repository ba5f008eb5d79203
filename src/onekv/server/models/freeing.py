"""Returns unreferenced memory to the system, and measures how much there is."""

import gc
import weakref
from dataclasses import dataclass

import mlx.core as mx

from ...footprint import footprint
from ...models.freed import freed, trim
from ...units import format_size
from ..backend import Backend


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


class Parts:
    """The parts of a backend that have its memory: whether they are gone, without holding them."""

    def __init__(self, backend: Backend) -> None:
        llm = backend.llm
        held = (llm, llm.model, llm.engine, llm.engine.memory, llm.engine.runner)
        self._held = [weakref.ref(part) for part in held]

    @property
    def gone(self) -> bool:
        return all(part() is None for part in self._held)


def give_back(parts: Parts | None = None, limit: int | None = None) -> None:
    """All that is free. If `parts` are known to be gone, nothing is searched for.

    With a `limit`, a model is loaded next: what the C library has is kept for that, while the process has no more.
    """
    if parts is None or not parts.gone:
        gc.collect()
    mx.clear_cache()
    if limit is None:
        freed.release()
        trim()
    else:
        freed.keep(limit, footprint)
