"""Operations of prefill other than products, compiled by numba: attention weights from scores, and gated activations.

They use one thread: BLAS, which runs before and after, has threads of its own that occupy their cores for a while.
Compiled code is cached on disk and compiled again when this file changes, so it must not call compiled functions of
other files.
"""

from typing import Any

import numpy as np
from numba import njit

from . import kept

Array = np.ndarray[Any, Any]

f32, i32, u32, u64 = np.float32, np.int32, np.uint32, np.uint64
# 2 to this and lower is taken for it, which is nothing beside 1; and the other way round.
SMALLEST, LARGEST = f32(-126), f32(126)
LOG2E = f32(np.log2(np.e))
# 2 ** x for x from 0 to 1, within 2e-9 before rounding; highest power first.
POWERS = tuple(
    f32(factor) for factor in (0.000217022549, 0.0012439688, 0.00967884098, 0.055483342, 0.240229836, 0.693146984, 1.0)
)
RULES = {"contract", "nsz"}
# Numbers that are computed at a time: they stay in the nearest cache.
TILE = 1024

compiled = njit(nogil=True, error_model="numpy", fastmath=RULES)
adding = njit(nogil=True, error_model="numpy", fastmath={*RULES, "reassoc"})
# A row with NaN has no largest number, but then its weights are NaN whatever is taken for it.
comparing = njit(nogil=True, error_model="numpy", fastmath={*RULES, "reassoc", "nnan"})


@compiled
def _power(numbers: Array, powers: Array) -> None:
    """2 ** x instead of each x from SMALLEST to LARGEST."""
    bits = powers.view(np.uint32)
    n = u64(numbers.size)
    for i in range(n):
        x = numbers[i]
        whole = np.floor(x)
        x -= whole
        bits[i] = u32(i32(whole) + i32(127)) << u32(23)
        y = POWERS[0]
        y = y * x + POWERS[1]
        y = y * x + POWERS[2]
        y = y * x + POWERS[3]
        y = y * x + POWERS[4]
        y = y * x + POWERS[5]
        numbers[i] = y * x + POWERS[6]
    for i in range(n):
        numbers[i] *= powers[i]


@comparing
def _largest(numbers: Array) -> Any:
    top = numbers[0]
    for i in range(u64(numbers.size)):
        top = max(top, numbers[i])
    return top


@adding
def _sum(numbers: Array) -> Any:
    total = f32(0)
    for i in range(u64(numbers.size)):
        total += numbers[i]
    return total


@kept(fastmath=RULES)
def weigh(scores: Array, tokens: int, causal: bool, sums: Array) -> None:
    """`scores` [rows, keys] become their weights, 2 ** (score - the row's largest), and `sums` the sums of these.

    Row i is of token i % `tokens`, the last of which reads all keys; with `causal` the one before it reads one less,
    and so on, and what is not read has the weight 0.
    """
    powers = np.empty(TILE, np.float32)
    length = scores.shape[1]
    for row in range(scores.shape[0]):
        seen = length - tokens + row % tokens + 1 if causal else length
        top, total = _largest(scores[row, :seen]), f32(0)
        for start in range(0, seen, TILE):
            some = scores[row, start : min(start + TILE, seen)]
            for i in range(u64(some.size)):
                x = some[i] - top
                some[i] = SMALLEST if x < SMALLEST else x
            _power(some, powers[: some.size])
            total += _sum(some)
        scores[row, seen:] = 0
        sums[row] = total


@kept(fastmath=RULES)
def gate(gates: Array, values: Array, out: Array) -> None:
    """`out` = values * gates * sigmoid(gates); all flat."""
    powers, numbers = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for start in range(0, gates.size, TILE):
        end = start + TILE
        of, by, to = gates[start:end], values[start:end], out[start:end]
        n = u64(of.size)
        for i in range(n):
            x = -of[i] * LOG2E
            x = SMALLEST if x < SMALLEST else x
            numbers[i] = LARGEST if x > LARGEST else x
        _power(numbers[: of.size], powers[: of.size])
        for i in range(n):
            to[i] = by[i] * of[i] / (f32(1) + numbers[i])
