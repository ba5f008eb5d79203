"""One model's arrays in several trees of modules.

The modules of a model have state while it runs: a joint product keeps its result for the next part (`joined`), packed
layers share a buffer (`packed`). So each engine, which has its own thread, has its own tree of modules, and none of
them runs the tree that the others are copied from. The arrays are in memory once: they are evaluated and never written,
so any thread may read them. They are freed with the last tree.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module


def copy_sharing(model: Module) -> Module:
    """A tree of its own, with the arrays of `model`, which has not been run."""
    compute(model)
    # What has been copied already, by identity.
    return deepcopy(model, {id(array): array for array in _arrays(model)})


def compute(model: Module) -> None:
    """All arrays of `model`: what is lazy belongs to the thread that made it."""
    mx.eval(list(_arrays(model)))


def _arrays(tree: Any) -> Iterator[mx.array]:
    """All of them, also those that are no parameters, such as frequencies of RoPE."""
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _arrays(part)
