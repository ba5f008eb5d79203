"""Lines of a tape (`tape_kernel`): operations whose operands are all in one array."""

from functools import cache
from typing import Any

import numpy as np

from .graph import Operation
from .primitives import Array, Shape

Line = list[int]


@cache
def _kernel() -> Any:
    # Not before it is needed: this imports numba.
    from . import tape_kernel

    return tape_kernel


@cache
def _codes() -> dict[str, int]:
    """By the names of MLX's primitives."""
    names = ("Abs", "Add", "Divide", "Maximum", "Minimum", "Multiply", "Negative", "Square", "Subtract")
    return {name: getattr(_kernel(), name.upper()) for name in names}


@cache
def _either() -> set[int]:
    """Codes whose operands may change places."""
    return {_codes()[name] for name in ("Add", "Multiply", "Maximum", "Minimum")}


def lines(operation: Operation, arena: Array, inputs: list[Array], out: Array) -> list[Line] | None:
    """The lines that compute `out`; None if there are none for it."""
    name, arguments = operation.name, operation.arguments
    if name == "Concatenate":
        return _concatenated(arena, inputs, out, arguments[0])
    if name == "Reduce":
        return _summed(arena, inputs[0], out, arguments)
    if name in ("Reshape", "Flatten", "Unflatten"):
        return _all(_line(_kernel().COPY, arena, out.reshape(inputs[0].shape), inputs[0]))
    roots = (_kernel().SQRT, _kernel().RSQRT)
    code = roots[arguments[0]] if name == "Sqrt" else _codes().get(name)
    return None if code is None else _all(_line(code, arena, out, *inputs))


def _all(line: Line | None) -> list[Line] | None:
    return None if line is None else [line]


def _concatenated(arena: Array, inputs: list[Array], out: Array, axis: int) -> list[Line] | None:
    made, start = [], 0
    for part in inputs:
        cut = (*[slice(None)] * axis, slice(start, start + part.shape[axis]))
        line = _line(_kernel().COPY, arena, out[cut], part)
        if line is None:
            return None
        made.append(line)
        start += part.shape[axis]
    return made


def _summed(arena: Array, x: Array, out: Array, arguments: list[Any]) -> list[Line] | None:
    """The sum over the last axis, which a line has as its innermost dimension."""
    kind, axes = arguments
    if kind != 2 or list(axes) != [x.ndim - 1] or x.ndim > _kernel().DIMS:
        return None
    to, of = _operand(arena, out, [*_strides(out)[:-1], 0]), _operand(arena, x, _strides(x))
    return [[_kernel().SUM, *_filled(x.shape, 1), *to, *of, *[0] * len(of)]]


def _line(code: int, arena: Array, out: Array, a: Array, b: Array | None = None) -> Line | None:
    operands = [out, *(np.broadcast_to(one, out.shape) for one in (a, a if b is None else b))]
    shape, strides = _merged(out.shape, [_strides(one) for one in operands])
    if len(shape) > _kernel().DIMS:
        return None
    if code in _either() and strides[1] and strides[1][-1] == 0:
        operands[1:], strides[1:] = operands[:0:-1], strides[:0:-1]
    places = [_operand(arena, one, some) for one, some in zip(operands, strides, strict=True)]
    return [code, *_filled(shape, 1), *places[0], *places[1], *places[2]]


def _merged(shape: Shape, strides: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Dimensions that are one in memory for all operands made one, and those of 1 left out."""
    kept = [axis for axis, size in enumerate(shape) if size != 1]
    sizes = [shape[axis] for axis in kept]
    steps = [[some[axis] for axis in kept] for some in strides]
    axis = len(sizes) - 2
    while axis >= 0:
        if all(some[axis] == some[axis + 1] * sizes[axis + 1] for some in steps):
            sizes[axis] *= sizes.pop(axis + 1)
            for some in steps:
                some.pop(axis)
        axis -= 1
    return sizes, steps


def _operand(arena: Array, array: Array, strides: list[int]) -> list[int]:
    offset = (array.__array_interface__["data"][0] - arena.__array_interface__["data"][0]) // arena.itemsize
    return [offset, *_filled(strides, 0)]


def _strides(array: Array) -> list[int]:
    return [stride // array.itemsize for stride in array.strides]


def _filled(numbers: Any, first: int) -> list[int]:
    return [first] * (_kernel().DIMS - len(numbers)) + list(numbers)
