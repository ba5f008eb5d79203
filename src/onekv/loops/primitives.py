"""MLX's primitives as NumPy calls: those that occur in decode steps of language models.

Each entry turns a primitive's arguments, as MLX exports them, and the shape of its output into a call. Primitives that
are not in the tables cannot be run (`program`). Elementwise calls broadcast by themselves.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Call = Callable[..., Any]
Shape = tuple[int, ...]

ONE = np.float32(1)


def _rsqrt(x: Array) -> Any:
    return ONE / np.sqrt(x)


def _sigmoid(x: Array) -> Any:
    return ONE / (ONE + np.exp(-x))


def _softmax(x: Array) -> Any:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _log(base: int) -> Call:
    return (np.log2, np.log10, np.log)[base]


def _bitwise(operation: int) -> Call:
    return (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)[operation]


# Of the same shape as their inputs, broadcast; with what their arguments choose.
ELEMENTWISE: dict[str, Callable[..., Call]] = {
    "Abs": lambda: np.abs,
    "Add": lambda: np.add,
    "BitwiseBinary": _bitwise,
    "Ceil": lambda: np.ceil,
    "Cos": lambda: np.cos,
    "Divide": lambda: np.divide,
    "Equal": lambda nan: np.equal,
    "Exp": lambda: np.exp,
    "Floor": lambda: np.floor,
    "FloorDivide": lambda: np.floor_divide,
    "Greater": lambda: np.greater,
    "GreaterEqual": lambda: np.greater_equal,
    "Less": lambda: np.less,
    "LessEqual": lambda: np.less_equal,
    "Log": _log,
    "LogAddExp": lambda: np.logaddexp,
    "LogicalAnd": lambda: np.logical_and,
    "LogicalNot": lambda: np.logical_not,
    "LogicalOr": lambda: np.logical_or,
    "Maximum": lambda: np.maximum,
    "Minimum": lambda: np.minimum,
    "Multiply": lambda: np.multiply,
    "Negative": lambda: np.negative,
    "NotEqual": lambda: np.not_equal,
    "Power": lambda: np.power,
    "Remainder": lambda: np.remainder,
    "Round": lambda: np.rint,
    "Select": lambda: np.where,
    "Sigmoid": lambda: _sigmoid,
    "Sin": lambda: np.sin,
    "Sqrt": lambda reciprocal: _rsqrt if reciprocal else np.sqrt,
    "Square": lambda: np.square,
    "Subtract": lambda: np.subtract,
    "Tanh": lambda: np.tanh,
}

# Which give their input as it is, where what follows broadcasts.
BROADCASTS = ("Broadcast", "Full")


def _reduce(arguments: list[Any], shape: Shape) -> Call | None:
    kind, axes = arguments
    function = {2: np.add, 3: np.multiply, 4: np.minimum, 5: np.maximum}.get(kind)
    if function is None:
        return None
    # The last axis is by far the most frequent, and faster without the tuple.
    axis = axes[0] if len(axes) == 1 else tuple(axes)
    reduce = function.reduce
    return lambda x: reduce(x, axis=axis, keepdims=True)


def _gather(arguments: list[Any], shape: Shape) -> Call | None:
    axes, sizes = arguments
    if axes != [0] or sizes[0] != 1:
        return None
    cut: tuple[Any, ...] = tuple(slice(size) for size in sizes[1:])

    def gather(source: Array, index: Array) -> Any:
        return source[(index, *cut)].reshape(shape)

    return gather


def _slice(arguments: list[Any], shape: Shape) -> Call:
    starts, ends, steps = arguments
    # A negative step may end before the first element.
    key = tuple(slice(a, b if b >= 0 or c > 0 else None, c) for a, b, c in zip(starts, ends, steps, strict=True))
    return lambda x: x[key]


def _concatenate(arguments: list[Any], shape: Shape) -> Call:
    axis = arguments[0]
    return lambda *parts: np.concatenate(parts, axis=axis)


def _transpose(arguments: list[Any], shape: Shape) -> Call:
    axes = tuple(arguments[0])
    return lambda x: x.transpose(axes)


def _partition(arguments: list[Any], shape: Shape) -> Call:
    place, axis = arguments
    return lambda x: np.argpartition(x, place, axis=axis).astype(np.uint32)


def _take(arguments: list[Any], shape: Shape) -> Call:
    axis = arguments[0]
    return lambda x, index: np.take_along_axis(x, index.astype(np.int64), axis=axis)


def _reshape(arguments: list[Any], shape: Shape) -> Call:
    return lambda x: x.reshape(shape)


def _matmul(arguments: list[Any], shape: Shape) -> Call:
    return np.matmul


def _softmax_of(arguments: list[Any], shape: Shape) -> Call:
    return _softmax


# Whose inputs must have the very shapes that MLX says; from arguments and the shape of the output. None: not these.
SHAPED: dict[str, Callable[[list[Any], Shape], Call | None]] = {
    "ArgPartition": _partition,
    "Concatenate": _concatenate,
    "ExpandDims": _reshape,
    "Flatten": _reshape,
    "Gather": _gather,
    "GatherAxis": _take,
    "Matmul": _matmul,
    "Reduce": _reduce,
    "Reshape": _reshape,
    "Slice": _slice,
    "Softmax": _softmax_of,
    "Squeeze": _reshape,
    "Transpose": _transpose,
    "Unflatten": _reshape,
}
