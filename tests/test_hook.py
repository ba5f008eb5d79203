"""The attention hook while several models are loaded at once."""

import threading

import mlx.core as mx

from onekv.memory.hook import attention, watch


def call(heads: int) -> None:
    queries, keys = mx.zeros((1, heads, 1, 8)), mx.zeros((1, 1, 4, 8))
    attention(queries, keys, keys, None, 1.0, None)


def test_each_thread_sees_its_own_calls():
    """Another thread begins and ends in between, as when two models are loaded at the same time."""

    def other() -> None:
        with watch() as heads:
            pass
        call(5)
        seen.append(heads)

    seen: list[list[int]] = []
    with watch() as heads:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        call(3)
    assert (heads, seen) == ([3], [[]])
