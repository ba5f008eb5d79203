"""The graph of a function of MLX arrays, as operations on numbered values.

It comes from MLX (`mx.export_function`). Whatever does not depend on the inputs is computed at once, and identical
operations on the same inputs are merged, such as the angles of RoPE, which every layer computes.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from .primitives import BROADCASTS, ELEMENTWISE, SHAPED, Array, Call, Shape
from .products import GROUPS, Packed, Plain, Product

DTYPES = {
    mx.float32: np.float32,
    mx.int32: np.int32,
    mx.int64: np.int64,
    mx.uint32: np.uint32,
    mx.uint8: np.uint8,
    mx.bool_: np.bool_,
}
# Of QuantizedMatmul: the mode, affine, and weights of one row for each output.
PACKED = [0, True]

_state = threading.local()


def tracing() -> bool:
    """Whether this thread is tracing a function: nothing can be evaluated."""
    return getattr(_state, "tracing", False)


@contextmanager
def traced() -> Iterator[None]:
    """Inside, functions are traced."""
    _state.tracing = True
    try:
        yield
    finally:
        _state.tracing = False


class Unsupported(Exception):
    """A function does something that cannot be run here."""


@dataclass(frozen=True)
class Operation:
    """Value `output` is `call` of the values `inputs`, or a product of the first of them with weights.

    `name` and `arguments` are those of MLX's primitive.
    """

    name: str
    arguments: list[Any]
    call: Call
    inputs: tuple[int, ...]
    output: int
    product: Product | None = None


@dataclass(frozen=True)
class Value:
    """`declared` is its shape as MLX has it, `shape` what it is here, where broadcasting is left to NumPy.

    What is only broadcast is another value, `slot`; any other is its own.
    """

    declared: Shape
    shape: Shape
    dtype: Any
    slot: int
    constant: Array | None


class Graph:
    def __init__(self, function: Callable[..., Any], examples: list[mx.array]) -> None:
        """Calls `function` with what stands for arrays like `examples`. Raises Unsupported."""
        self.values: list[Value] = []
        # Of the function, as numbers of values; which inputs the outputs depend on, as indices.
        self.inputs: list[int] = []
        self.used: set[int] = set()
        self._outputs: list[str] = []
        self._numbers: dict[str, int] = {}
        self._made: dict[int, Operation] = {}
        self._same: dict[Any, int] = {}
        parts: list[dict[str, Any]] = []
        try:
            with traced():
                mx.export_function(parts.append, function, *examples)
        except (ValueError, RuntimeError) as error:
            raise Unsupported(str(error).splitlines()[0][:80]) from error
        for part in parts:
            getattr(self, f"_take_{part['type']}")(part)

    # Each part of what MLX exports

    def _take_inputs(self, part: dict[str, Any]) -> None:
        for name, shape, dtype in part["inputs"]:
            self._numbers[name] = self._new(tuple(shape), DTYPES[dtype])
            self.inputs.append(self._numbers[name])

    def _take_keyword_inputs(self, part: dict[str, Any]) -> None:
        """There are none."""

    def _take_outputs(self, part: dict[str, Any]) -> None:
        self._outputs = [name for name, _, _ in part["outputs"]]

    def _take_constants(self, part: dict[str, Any]) -> None:
        for name, array in part["constants"]:
            self._numbers[name] = self._known(_view(array), array.shape)

    def _take_primitive(self, part: dict[str, Any]) -> None:
        name, arguments = part["name"], part["arguments"]
        inputs = [self._numbers[one] for one, _, _ in part["inputs"]]
        for index, (output, shape, dtype) in enumerate(part["outputs"]):
            if dtype not in DTYPES:
                raise Unsupported(f"{name} of {dtype}")
            key = (name, repr(arguments), tuple(inputs), tuple(shape), index)
            if key not in self._same:
                self._same[key] = self._make(name, arguments, inputs, tuple(shape), DTYPES[dtype], index)
            self._numbers[output] = self._same[key]

    # Operations

    def _make(self, name: str, arguments: list[Any], inputs: list[int], shape: Shape, dtype: Any, index: int) -> int:
        """The value that the primitive's `index`-th output is."""
        if name in BROADCASTS:
            return self._alias(inputs[0], shape)
        if name == "Depends":
            # Its other inputs are computed if they are needed elsewhere; otherwise not at all.
            return self._alias(inputs[index], shape)
        if name in ELEMENTWISE or name == "AsType":
            call = ELEMENTWISE[name](*arguments) if name in ELEMENTWISE else lambda x: x.astype(dtype)
            actual = np.broadcast_shapes(*(self.values[number].shape for number in inputs))
            return self._add(name, arguments, call, inputs, shape, dtype, actual)
        if name == "Arange":
            return self._known(np.arange(*arguments, dtype=dtype)[: shape[0]], shape)
        inputs = [self._whole(number) for number in inputs]
        if name in ("Matmul", "AddMM", "QuantizedMatmul"):
            return self._product(name, arguments, inputs, shape, dtype)
        if name == "Split":
            places, axis = arguments
            bounds = [0, *places, self.values[inputs[0]].shape[axis]]
            cut = (*[slice(None)] * axis, slice(bounds[index], bounds[index + 1]))
            return self._add("Slice", arguments, lambda x: x[cut], inputs, shape, dtype)
        made = SHAPED[name](arguments, shape) if name in SHAPED else None
        if made is None:
            raise Unsupported(f"{name} {arguments}")
        return self._add(name, arguments, made, inputs, shape, dtype)

    def _product(self, name: str, arguments: list[Any], inputs: list[int], shape: Shape, dtype: Any) -> int:
        product = self._weights(name, arguments, inputs)
        if product is not None:
            made = self._add(name, arguments, product, inputs[:1], shape, dtype, product=product)
        elif name == "QuantizedMatmul":
            raise Unsupported(f"{name} {arguments}")
        else:
            made = self._add("Matmul", [], np.matmul, inputs[:2], shape, dtype)
        if name != "AddMM":
            return made
        if tuple(arguments) != (1.0, 1.0):
            raise Unsupported(f"{name} {arguments}")
        return self._add("Add", [], np.add, [made, inputs[2]], shape, dtype)

    def _weights(self, name: str, arguments: list[Any], inputs: list[int]) -> Product | None:
        """What the product multiplies with, if that is a matrix of weights."""
        others = [self.values[number].constant for number in inputs[1:]]
        if others[0] is None:
            return None
        if name != "QuantizedMatmul":
            weight = others[0].T
            plain = weight.ndim == 2 and weight.dtype == np.float32 and weight.flags.c_contiguous
            return Plain(weight) if plain else None
        group, bits, *rest = arguments
        scales, biases = others[1:3] if len(others) == 3 else (None, None)
        if scales is None or biases is None or bits not in (4, 8) or group not in GROUPS or rest != PACKED:
            return None
        return Packed(others[0].view(np.uint8), scales, biases, bits, group)

    def _add(
        self,
        name: str,
        arguments: list[Any],
        call: Call,
        inputs: list[int],
        declared: Shape,
        dtype: Any,
        shape: Shape | None = None,
        product: Product | None = None,
    ) -> int:
        """A value that `call` gives; computed now if it depends on constants alone."""
        known = [self.values[number].constant for number in inputs]
        if product is None and all(one is not None for one in known):
            with np.errstate(all="ignore"):
                return self._known(np.asarray(call(*known)), declared)
        number = self._new(declared, dtype, shape)
        slots = tuple(self.values[one].slot for one in inputs)
        self._made[number] = Operation(name, arguments, call, slots, number, product)
        return number

    # Values

    def _new(self, declared: Shape, dtype: Any, shape: Shape | None = None) -> int:
        shape = declared if shape is None else shape
        self.values.append(Value(declared, shape, dtype, len(self.values), None))
        return len(self.values) - 1

    def _known(self, array: Array, declared: Iterable[int]) -> int:
        self.values.append(Value(tuple(declared), array.shape, array.dtype.type, len(self.values), array))
        return len(self.values) - 1

    def _alias(self, number: int, declared: Shape) -> int:
        self.values.append(replace(self.values[number], declared=declared))
        return len(self.values) - 1

    def _whole(self, number: int) -> int:
        """The value in its declared shape."""
        value = self.values[number]
        if value.shape == value.declared:
            return number
        key = ("whole", number)
        if key not in self._same:
            shape = value.declared
            self._same[key] = self._add(
                "Broadcast", [], lambda x: np.broadcast_to(x, shape), [number], shape, value.dtype
            )
        return self._same[key]

    # What is needed, in which order

    def sections(self, counts: list[int]) -> list[tuple[list[Operation], list[int]]]:
        """The operations of each section, so many outputs for each, and those outputs."""
        wanted = [self.values[self._whole(self._numbers[name])].slot for name in self._outputs]
        assert sum(counts) == len(wanted), "sections have all outputs"
        done: set[int] = set()
        made, start = [], 0
        for count in counts:
            outputs = wanted[start : start + count]
            made.append((self._needed(outputs, done), outputs))
            start += count
        self.used = {index for index, number in enumerate(self.inputs) if number in done}
        return made

    def _needed(self, outputs: list[int], done: set[int]) -> list[Operation]:
        """Operations for `outputs` that are not done, inputs before what uses them."""
        found: list[Operation] = []
        stack = [(number, False) for number in reversed(outputs)]
        while stack:
            number, ready = stack.pop()
            if ready:
                found.append(self._made[number])
            elif number not in done:
                done.add(number)
                if number in self._made:
                    stack.append((number, True))
                    stack += [(one, False) for one in reversed(self._made[number].inputs)]
        return found


def _view(array: mx.array) -> Array:
    """MLX's own memory; single numbers in bfloat16 become float32."""
    mx.eval(array)
    if array.dtype == mx.bfloat16 and array.size == 1:
        array = array.astype(mx.float32)
    if array.dtype not in DTYPES:
        raise Unsupported(f"a constant of {array.dtype}")
    return np.asarray(array)
