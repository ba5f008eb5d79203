"""What arrays were made from is noted while a model is watched, by the thread that watches, and nowhere else."""

import threading

import mlx.core as mx
import mlx.nn as nn
import pytest

from onekv.traces import notes, watching


def rope(x, offset=3):
    return nn.RoPE(8)(x, offset=offset)


def test_ropes_are_noted():
    x = mx.random.normal((2, 1, 8))
    with watching() as noted:
        assert notes() is noted
        turned = rope(x)
        found = noted.turned(turned)
        assert found.x is x and found.dims == 8 and found.how["offset"] == 3
        # Of what was made from it, nothing is known.
        for other in (x, turned + 0, turned[:1]):
            assert noted.turned(other) is None
        noted.clear()
        assert noted.turned(turned) is None
    assert mx.allclose(turned, rope(x))


def test_mlx_is_as_it_was_when_nobody_watches():
    before = mx.fast.rope
    with watching():
        with watching():
            pass
        assert mx.fast.rope is not before
    assert mx.fast.rope is before and notes() is None
    with pytest.raises(KeyError), watching():
        raise KeyError
    assert mx.fast.rope is before and notes() is None


def test_other_threads_note_nothing():
    seen = []

    def other():
        seen.append((rope(mx.zeros((1, 1, 8))), notes()))

    with watching() as noted:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        own = rope(mx.zeros((1, 1, 8)))
        ((made, theirs),) = seen
        assert theirs is None and noted.turned(made) is None and noted.turned(own) is not None


def test_what_nobody_uses_is_not_computed():
    """A compiled function in which a kernel takes the source: the rotated array is gone from it."""

    def step(x):
        with watching() as noted:
            return noted.turned(rope(x)).x * 2

    x, graph = mx.random.normal((4, 1, 8)), []
    mx.export_function(lambda entry: graph.append(entry), step, x)
    assert mx.allclose(mx.compile(step)(x), x * 2)
    count = len(graph)
    graph.clear()
    mx.export_function(lambda entry: graph.append(entry), lambda x: rope(x) * 2, x)
    # A product of a number and an array; with RoPE, more than that.
    assert count < len(graph)
