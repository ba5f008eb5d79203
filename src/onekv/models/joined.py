"""Products that share their input, made one: q, k and v of attention, gate and up of an MLP.

Starting a product costs the host time, and small ones leave most of a GPU idle. Which layers share their input is seen
by watching the model at work, so nothing depends on names. Their weights are put together, row after row, and each
layer is replaced by a `Part` of the joint product: whichever is called first computes it for all, the others get their
columns of it. A part that is called with something else computes for itself, so the result is always that of the layer
it replaces, up to the order in which a product adds up.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.cache import make_prompt_cache


class Joint:
    """One product for several parts; its result is kept until each of them has had its own."""

    def __init__(self, linear: Linear | QuantizedLinear, parts: int) -> None:
        self.linear, self._parts = linear, parts
        self._input: mx.array | None = None
        self._output: mx.array | None = None
        self._left = 0

    def columns(self, x: mx.array, start: int, end: int) -> mx.array:
        if self._output is None or x is not self._input:
            self._input, self._output, self._left = x, self.linear(x), self._parts
        own = self._output[..., start:end]
        self._left -= 1
        if not self._left:
            self._input = self._output = None
        return own


class Part(Module):
    """Some columns of a joint product. The first part has the weights in the model's tree."""

    def __init__(self, joint: Joint, start: int, end: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._joint, self._start, self._end = joint, start, end
        if start == 0:
            self.joint = joint.linear

    @property
    def weight(self) -> mx.array:
        weight: mx.array = self._joint.linear.weight
        return weight[self._start : self._end]

    def __call__(self, x: mx.array) -> mx.array:
        return self._joint.columns(x, self._start, self._end)


def join_products(model: Module) -> int:
    """Joins what shares its input when the model runs; gives the number of products that are gone."""
    saved = 0
    for parent, names in _find(model):
        for some in _alike(parent, names):
            _join(parent, some)
            saved += len(some) - 1
    return saved


def _find(model: Module) -> list[tuple[Module, list[str]]]:
    """Names of layers that get the same input, and whose they are. What was watched is gone: it holds the weights."""
    with _watch() as calls:
        # Nothing of it is evaluated.
        model(mx.array([[0, 0]]), cache=make_prompt_cache(model))
    found = []
    for parent in model.modules():
        by_input: dict[int, list[str]] = {}
        for name, child in parent.items():
            inputs = calls.get(id(child), [])
            if len(inputs) == 1:
                by_input.setdefault(id(inputs[0]), []).append(name)
        found += [(parent, names) for names in by_input.values() if len(names) > 1]
    return found


@contextmanager
def _watch() -> Iterator[dict[int, list[mx.array]]]:
    """What every linear layer is called with; all of it is kept, so that no two inputs get one id."""
    calls: dict[int, list[mx.array]] = {}

    def watched(stock: Callable[[Any, mx.array], mx.array]) -> Callable[[Any, mx.array], mx.array]:
        def call(layer: Any, x: mx.array) -> mx.array:
            calls.setdefault(id(layer), []).append(x)
            return stock(layer, x)

        return call

    kinds = (Linear, QuantizedLinear)
    stock = [kind.__call__ for kind in kinds]
    try:
        for kind, function in zip(kinds, stock, strict=True):
            setattr(kind, "__call__", watched(function))  # noqa: B010
        yield calls
    finally:
        for kind, function in zip(kinds, stock, strict=True):
            setattr(kind, "__call__", function)  # noqa: B010


def _alike(parent: Module, names: list[str]) -> list[list[str]]:
    """Those of `names` that can be one product: of the same kind, and stored alike."""
    kinds: dict[Any, list[str]] = {}
    for name in names:
        layer = parent[name]
        stored = tuple((key, value.dtype, value.shape[1:]) for key, value in sorted(layer.parameters().items()))
        settings = [getattr(layer, key, None) for key in ("bits", "group_size", "mode")]
        kinds.setdefault((type(layer), stored, *settings), []).append(name)
    return [some for some in kinds.values() if len(some) > 1]


def _join(parent: Module, names: list[str]) -> None:
    layers = [parent[name] for name in names]
    ends = [0]
    for layer in layers:
        ends.append(ends[-1] + layer.weight.shape[0])
    joint = layers[0]
    for key in joint.parameters():
        joint[key] = mx.concatenate([layer[key] for layer in layers])
        mx.eval(joint[key])
        for layer in layers[1:]:
            # Not twice for longer than it takes.
            del layer[key]
    made = Joint(joint, len(names))
    for name, start, end in zip(names, ends, ends[1:], strict=False):
        parent[name] = Part(made, start, end)
