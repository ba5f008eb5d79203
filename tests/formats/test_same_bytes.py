"""A row has the same bytes whether a prompt or a decode step encodes it: MLX's operations, or compiled loops."""

import mlx.core as mx
import numpy as np
import pytest

from encoded_reference import HEADS, Case
from onekv.memory.attention.numba.encoded import Numba, encoded_decode
from onekv.memory.attention.turns import Turns
from onekv.memory.device import kind
from onekv.memory.formats.centre import Rope
from onekv.memory.formats.rotation import rotation
from onekv.memory.layout import Rule

FORMATS = ("q8", "q6", "q5", "q4", "tq4", "tq3", "tq2", "k8v4", "k5v4")
DIMS = (80, 64, 96, 112, 128, 192, 256)
SLOW = tuple(1.5**i for i in range(32))
ROPES = (Rope(64, False, 10000.0), None, Rope(32, True, 500.0, 0.5), Rope(64, False, None, 1.0, SLOW))
# Of a batch; each has HEADS keys and as many values.
ROWS = 240


def rows_of_all_kinds(dim: int) -> np.ndarray:
    """[ROWS, HEADS, dim]: as a model's, and zeros, constant, huge, tiny, alike but for a bit, on edges of codes."""
    random = np.random.default_rng(dim)
    rows = random.standard_normal((ROWS, HEADS, dim)) * (1 + 4 * (np.arange(dim) % 16 == 3)) + 1
    rows[100:120] *= np.logspace(-45, 36, 20)[:, None, None]
    rows[120] = 0
    rows[121] = -0.0
    rows[122:130] = np.array([1, -1, 3e-8, 7e4, -7e4, 1e-40, 1e37, 0.1])[:, None, None]
    rows[130:140] = np.eye(dim)[random.integers(0, dim, 10)][:, None] * 100
    # Rotated: halves up to 7.5, which are ties of 4-bit codes, and up to 127.5, of 8-bit ones.
    rotated = np.stack(
        [random.integers(-15, 16, (40, HEADS, dim)) / 2, random.integers(-255, 256, (40, HEADS, dim)) / 2]
    )
    rows[140:220] = np.array(rotation(dim).undo(mx.array(rotated.reshape(80, HEADS, dim).astype(np.float32))))
    rows[220:230] = rows[:10]
    rows = rows.astype(np.float32)
    rows[220:230] = np.nextafter(rows[220:230], np.float32(np.inf))
    return rows


def stored_by_a_step(kv_format: str, dim: int, rope: Rope | None, dtype: mx.Dtype) -> tuple[Case, list[int]]:
    lengths = tuple(1 + i % 30 if i else 900 for i in range(ROWS))
    case = Case(kv_format, dtype, 1, lengths, Rule(), 16, False, rope, dim)
    rows = rows_of_all_kinds(dim)
    case.new = tuple(mx.array(new)[:, :, None].astype(dtype) for new in (rows, rows[::-1].copy()))
    assert Numba.supports(case.stored, 16, kind())
    step, turns = case.step, None
    if case.stored.centre is not None:
        # Without their centres, some keys are near edges of codes.
        case.new = ((case.new[0] + centres_of(case)).astype(dtype), case.new[1])
        turns = Turns().table(step, rope, dim)
    new, reach = (case.new, step.grid, step.lengths), step.reach(None)
    mx.eval(encoded_decode(case.queries, case.arrays, case.stored, *new, reach, 0.1, None, turns))
    slots = [table.blocks[at // 16] * 16 + at % 16 for table, at in case.rows]
    return case, slots


def centres_of(case: Case) -> mx.array:
    """[ROWS, HEADS, 1, dim], as they are made for a prompt."""
    positions = mx.array([at for _, at in case.rows])
    centres = case.stored.centre.rows(0, 1, int(positions.max()) + 1)[0].swapaxes(0, 1)
    return centres[positions][:, :, None]


CASES = [
    (kv_format, dim, ROPES[i % len(ROPES)], mx.bfloat16 if dim == 128 else mx.float32)
    for kv_format in FORMATS
    for i, dim in enumerate(DIMS)
    if dim % 32 == 0 or "tq" in kv_format
]
CASES += [("q4", 64, rope, mx.float32) for rope in ROPES]


@pytest.mark.parametrize("kv_format, dim, rope, dtype", CASES)
def test_a_decode_step_stores_the_bytes_of_a_prompt(kv_format, dim, rope, dtype):
    case, slots = stored_by_a_step(kv_format, dim, rope, dtype)
    stored, (keys, values) = case.stored, case.new
    if stored.centre is not None:
        keys = keys - centres_of(case)
    for codec, parts, rows in ((stored.keys, case.arrays.keys, keys), (stored.values, case.arrays.values, values)):
        for part, own, wanted in zip(codec.planes, parts, codec.encode(rows[:, :, 0]), strict=True):
            own = np.array(own[:, mx.array(slots)].swapaxes(0, 1)).view(np.uint8)
            other = (own != np.array(wanted).view(np.uint8)).any(axis=2)
            assert not other.any(), (part.name, np.argwhere(other)[:5].tolist(), int(other.sum()))
