"""A stream of MLX for a thread that comes and goes.

MLX gives every thread that computes a stream of its own, and on CPU that stream a thread, which stays when the first
one has ended: a server that loads and unloads models would have one more for each load, with its part of the heap. So
an engine's thread borrows a stream on CPU and gives it back; the next takes it over. One thread at a time has it.
On a GPU each thread keeps MLX's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

_FREE: list[mx.Stream] = []


@contextmanager
def borrowed_stream() -> Iterator[None]:
    """The calling thread computes on it meanwhile."""
    if mx.default_device().type != mx.cpu:
        yield
        return
    try:
        stream = _FREE.pop()
    except IndexError:
        stream = mx.new_thread_unsafe_stream(mx.cpu)
    mx.set_default_stream(stream)
    try:
        yield
    finally:
        mx.synchronize(stream)
        _FREE.append(stream)
