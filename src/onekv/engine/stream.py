"""An MLX stream for short-lived threads.

MLX gives every thread that computes its own stream, and on CPU that stream has a thread, which outlives the first one:
a server that loads and unloads models would gain one with each load, with its share of the heap. So on CPU an engine's
thread borrows a stream and returns it for the next one; only one thread uses it at a time. On a GPU each thread keeps
MLX's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

_FREE: list[mx.Stream] = []


@contextmanager
def borrowed_stream() -> Iterator[None]:
    """The calling thread computes on it inside the context."""
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
