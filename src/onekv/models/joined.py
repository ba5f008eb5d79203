"""Fuses products that share their input: q, k and v of attention, gate and up of an MLP.

Launching a product costs host time, and small ones leave most of a GPU idle. Which layers share their input is found by
tracing the model, so nothing depends on names. Their weights are concatenated by rows, and each layer is replaced by a
`Part` of the joint product: the first one called computes it for all, and the others get their columns. A part that is
called with a different input computes its own product, so the result is always that of the layer it replaces, up to the
order of summation. Few rows are multiplied by a kernel if there is one (`cuda.products`), which returns the parts
separately; if a compiled step gives both halves of such a product to mlx-lm's `swiglu`, the kernel makes that, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.cache import make_prompt_cache

from ..cuda import products
from ..cuda.source import on_cuda
from ..traces import Half, notes, replace_while_watched
from . import packed
from .layers import modules_with, replace_layers


class Joint:
    """One product for several parts; its result is kept until each of them has had its own."""

    def __init__(self, linear: Linear | QuantizedLinear, ends: tuple[int, ...], kernel: bool) -> None:
        """Part i is the columns from where part i - 1 ends to `ends[i]`; `kernel`: one may multiply few rows."""
        self.linear, self.bounds = linear, (0, *ends)
        # Whose few rows a kernel multiplies.
        self._few = linear if kernel and type(linear) is Linear and products.supports(linear, ends) else None
        self._input: mx.array | None = None
        self._outputs: dict[int, mx.array] = {}

    def part(self, x: mx.array, number: int) -> mx.array:
        if x is not self._input or number not in self._outputs:
            self._input, self._outputs = x, dict(enumerate(self._parts(x)))
        own = self._outputs.pop(number)
        if not self._outputs:
            self._input = None
        return own

    def _parts(self, x: mx.array) -> list[mx.array]:
        if self._few is not None and products.fits(self._few, x):
            parts = products.multiply(self._few, x, self.bounds[1:])
            noted = notes()
            if noted is not None and len(parts) == 2 and 2 * self.bounds[1] == self.bounds[2]:
                for number, part in enumerate(parts):
                    noted.add(part, Half(self._few, x, number, parts[1 - number]))
            return parts
        output = self.linear(x)
        return [output[..., start:end] for start, end in pairwise(self.bounds)]


class Part(Module):
    """Some columns of a joint product. The first part has the weights in the model's tree."""

    def __init__(self, joint: Joint, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._joint, self._number = joint, number
        if number == 0:
            self.joint = joint.linear

    @property
    def stored(self) -> Linear | QuantizedLinear:
        """The layer that has its weights, in these `rows`."""
        return self._joint.linear

    @property
    def rows(self) -> slice:
        return slice(self._joint.bounds[self._number], self._joint.bounds[self._number + 1])

    @property
    def weight(self) -> mx.array:
        weight: mx.array = self.stored.weight
        return weight[self.rows]

    def __call__(self, x: mx.array) -> mx.array:
        return self._joint.part(x, self._number)


def fuse(model: Module, kernels: bool = True) -> None:
    """A model as a GPU runs it best: products joined, and few rows by a kernel where there is one."""
    join_products(model, kernels)
    if kernels and on_cuda():
        replace_layers(model, products.few_rows)


def join_products(model: Module, kernels: bool = True) -> int:
    """Joins what shares its input when the model runs; gives the number of products that are gone."""
    saved, kernels = 0, kernels and on_cuda()
    for parent, names in _find(model):
        for some in _alike(parent, names):
            _join(parent, some, kernels)
            saved += len(some) - 1
    if kernels:
        for module in modules_with(model, "swiglu", [packed.stock_swiglu, packed.gated]):
            replace_while_watched(module, "swiglu", _gated)
    return saved


def _gated(gate: mx.array, x: mx.array) -> mx.array:
    """In place of `swiglu`: the same in the launch that multiplies, if both are halves of one product."""
    noted = notes()
    half = noted.half(gate) if noted is not None else None
    if half is not None and half.other is x:
        return products.gated(half.layer, half.x, half.number)
    return packed.stock_swiglu(gate, x)


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


def _join(parent: Module, names: list[str], kernel: bool) -> None:
    layers = [parent[name] for name in names]
    ends = tuple(accumulate(layer.weight.shape[0] for layer in layers))
    joint = layers[0]
    for key in joint.parameters():
        joint[key] = mx.concatenate([layer[key] for layer in layers])
        mx.eval(joint[key])
        for layer in layers[1:]:
            # Not twice for longer than it takes.
            del layer[key]
    made = Joint(joint, ends, kernel)
    for number, name in enumerate(names):
        parent[name] = Part(made, number)
