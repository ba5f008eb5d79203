"""Sequences of small operations, compiled by numba: a whole tape of them is one call.

All operands are in one float32 array. A line of the tape encodes the operation, the shape, and the places of the output
and both inputs:

    code | shape [4] | out: offset, strides [4] | a: offset, strides [4] | b: offset, strides [4]

Shapes are padded with ones at the front, and a stride of 0 repeats a value. Compiled code is cached on disk and
compiled again when this file changes, so it must not call compiled functions of other files.
"""

from typing import Any

import numpy as np
from numba import njit

from . import kept

Array = np.ndarray[Any, Any]

COPY, ADD, SUBTRACT, MULTIPLY, DIVIDE, MAXIMUM, MINIMUM, SQUARE, SQRT, RSQRT, NEGATIVE, ABS, SUM = range(13)
DIMS = 4

f32, u64 = np.float32, np.uint64
compiled = njit(nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
# Sums may be added up in any order, which is then the same for all sums of that length.
adding = njit(nogil=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})


@kept(fastmath={"contract", "nsz"})
def run(arena: Array, tape: Array) -> None:
    """All lines of a tape."""
    for number in range(tape.shape[0]):
        line = tape[number]
        code, n = line[0], line[4]
        for i in range(line[1]):
            for j in range(line[2]):
                for k in range(line[3]):
                    out = line[5] + i * line[6] + j * line[7] + k * line[8]
                    a = line[10] + i * line[11] + j * line[12] + k * line[13]
                    b = line[15] + i * line[16] + j * line[17] + k * line[18]
                    if code == SUM:
                        arena[out] = _sum(arena, u64(a), u64(line[14]), u64(n))
                    elif line[9] == 1 and line[14] == 1 and line[19] == 1:
                        _pairs(code, arena[out : out + n], arena[a : a + n], arena[b : b + n])
                    elif line[9] == 1 and line[14] == 1 and line[19] == 0:
                        _by_one(code, arena[out : out + n], arena[a : a + n], arena[b])
                    else:
                        _strided(code, arena, u64(out), u64(a), u64(b), line[9], line[14], line[19], n)


@adding
def _sum(arena: Array, at: int, stride: int, n: int) -> Any:
    total = f32(0)
    if stride == 1:
        for i in range(n):
            total += arena[at + i]
    else:
        for i in range(n):
            total += arena[at + i * stride]
    return total


@compiled
def _one(code: int, a: Any, b: Any) -> Any:
    if code == COPY:
        return a
    if code == ADD:
        return a + b
    if code == SUBTRACT:
        return a - b
    if code == MULTIPLY:
        return a * b
    if code == DIVIDE:
        return a / b
    if code == MAXIMUM:
        # NaN stays NaN.
        return a if a > b or a != a else b
    if code == MINIMUM:
        return a if a < b or a != a else b
    if code == SQUARE:
        return a * a
    if code == SQRT:
        return np.sqrt(a)
    if code == RSQRT:
        return f32(1) / np.sqrt(a)
    if code == NEGATIVE:
        return -a
    return abs(a)


@compiled
def _pairs(code: int, out: Array, a: Array, b: Array) -> None:
    """The frequent ones as loops of their own, which become vector instructions."""
    n = u64(out.size)
    if code == ADD:
        for i in range(n):
            out[i] = a[i] + b[i]
    elif code == MULTIPLY:
        for i in range(n):
            out[i] = a[i] * b[i]
    elif code == SQUARE:
        for i in range(n):
            out[i] = a[i] * a[i]
    elif code == COPY:
        for i in range(n):
            out[i] = a[i]
    else:
        for i in range(n):
            out[i] = _one(code, a[i], b[i])


@compiled
def _by_one(code: int, out: Array, a: Array, b: Any) -> None:
    n = u64(out.size)
    if code == ADD:
        for i in range(n):
            out[i] = a[i] + b
    elif code == MULTIPLY:
        for i in range(n):
            out[i] = a[i] * b
    else:
        for i in range(n):
            out[i] = _one(code, a[i], b)


@compiled
def _strided(
    code: int, arena: Array, out: int, a: int, b: int, out_stride: int, a_stride: int, b_stride: int, n: int
) -> None:
    for i in range(n):
        arena[out + u64(i * out_stride)] = _one(code, arena[a + u64(i * a_stride)], arena[b + u64(i * b_stride)])
