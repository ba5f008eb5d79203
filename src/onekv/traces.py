"""Records how arrays of a model were computed: while it is traced, calls of `mx.fast.rope` are recorded, and products
that are one for several layers (`models.joined`).

A kernel that is given a rotated array may use the array's inputs instead and rotate them itself, in the same launch;
the array is then unused and never computed. Tracing changes no result, and needs no knowledge of the model: an array
that was not the result of such a call, or has been modified since, is simply not recorded.

Records belong to the thread that traces; functions of MLX and of models' modules are replaced while any thread does.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear


@dataclass(frozen=True)
class Turned:
    """`mx.fast.rope(x, dims, **how)`."""

    x: mx.array
    dims: int
    how: dict[str, Any]


@dataclass(frozen=True)
class Half:
    """The first half (0) or the second (1) of the columns that `layer` makes of `x`, and the other one."""

    layer: Linear
    x: mx.array
    number: int
    other: mx.array


class Notes:
    def __init__(self, alike: bool = False) -> None:
        # Whether rows are tokens of one sequence, each of which has to come to what it would alone.
        self.alike = alike
        # The arrays themselves, too: as long as they are here, no other has their id.
        self._made: dict[int, tuple[mx.array, Turned | Half]] = {}

    def add(self, made: mx.array, source: Turned | Half) -> None:
        self._made[id(made)] = made, source

    def turned(self, array: mx.array) -> Turned | None:
        source = self._source(array)
        return source if isinstance(source, Turned) else None

    def half(self, array: mx.array) -> Half | None:
        source = self._source(array)
        return source if isinstance(source, Half) else None

    def _source(self, array: mx.array) -> Turned | Half | None:
        return self._made[id(array)][1] if id(array) in self._made else None

    def clear(self) -> None:
        self._made.clear()


class _Watcher(threading.local):
    notes: Notes | None = None


_watcher = _Watcher()
_lock = threading.Lock()
_watchers = 0
_rope: Callable[..., mx.array] = mx.fast.rope
# What is replaced while there are watchers: by what, and what it was before.
_replaced: dict[tuple[ModuleType, str], Callable[..., mx.array]] = {}
_before: dict[tuple[ModuleType, str], Any] = {}


def notes() -> Notes | None:
    """Those of this thread, if it watches."""
    return _watcher.notes


@contextmanager
def watching(alike: bool = False) -> Iterator[Notes]:
    """`alike`: some rows are tokens of one sequence, each of which has to come to what it would alone."""
    kept, _watcher.notes = _watcher.notes, Notes(alike)
    _replace(1)
    try:
        yield _watcher.notes
    finally:
        _replace(-1)
        _watcher.notes = kept


def replace_while_watched(where: ModuleType, name: str, by: Callable[..., mx.array]) -> None:
    """`where`'s function of that name is `by` from the next time on that threads begin to watch until none does."""
    with _lock:
        _replaced[where, name] = by


def _replace(more: int) -> None:
    global _watchers
    with _lock:
        _watchers += more
        if _watchers == 0:
            for (where, name), stock in _before.items():
                setattr(where, name, stock)
            _before.clear()
        elif not _before:
            for (where, name), ours in _replaced.items():
                _before[where, name] = getattr(where, name)
                setattr(where, name, ours)


def _noted(a: mx.array, dims: int, **how: Any) -> mx.array:
    out = _rope(a, dims, **how)
    if _watcher.notes is not None:
        _watcher.notes.add(out, Turned(a, dims, how))
    return out


replace_while_watched(mx.fast, "rope", _noted)
