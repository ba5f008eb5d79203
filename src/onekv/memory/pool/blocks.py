"""The bytes of one block, and of recurrent states, outside of the pool: the form in which they move between tiers.

A block is its tensors one after the other: per layer of the group keys, then values, or the planes of their codecs,
each [heads, block_size, width] in C order, byte for byte as in the pool. Copying happens between two steps, while the
engine's thread does nothing else with the pool. Views of the pool do not keep it alive and must not outlive that.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from ..device import kind
from ..layout import Group, Layout
from .pool import Pool
from .sequence import State

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size


def block_tensors(group: Group, block_size: int) -> list[Tensor]:
    """What one block of `group` is made of, in order."""
    return [
        Tensor(
            f"{layer.name}.{side}" if codec.plain else f"{layer.name}.{side}.{plane.name}",
            (layer.heads, block_size, plane.width),
            plane.dtype,
        )
        for layer in group.layers
        for side, codec in (("keys", layer.keys), ("values", layer.values))
        for plane in codec.planes
        if layer.heads * plane.width
    ]


def state_tensors(layout: Layout) -> list[Tensor]:
    """What the recurrent states of one sequence are made of, in order."""
    return [
        Tensor(f"{state.name}.{index}", (1, *part[0]), part[1])
        for state in layout.states
        for index, part in enumerate(state.parts)
        if part is not None
    ]


class Blocks:
    """The blocks of a pool, copied out of it and into it.

    Where the host has access to the pool (`shared_memory`), arrays of one shape that lie at equal distances are copied
    in one go: a thread that copies does not take the interpreter from others. Nothing here keeps the arrays alive, so
    where they lie is looked up each time before anything is copied.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._addresses: list[int] = []
        self._runs: list[_Run] = []

    def read(self, block: int, out: memoryview) -> None:
        """Copy a block out of the pool."""
        if shared_memory():
            self.look()
            for run in self._runs:
                run.part_of(out)[...] = run.rows[:, :, block]
        else:
            target, start = np.frombuffer(out, np.uint8), 0
            for array in self._pool.arrays():
                rows = _bytes(self._pool.gather(array, block))
                target[start : start + rows.size] = rows
                start += rows.size

    def look(self) -> None:
        """Find out where the arrays are. Until something else is done with the pool, any thread may `write`."""
        addresses = [_address(array) for array in self._pool.arrays()]
        if addresses != self._addresses:
            self._runs, self._addresses = _runs(self._pool, addresses), addresses

    def write(self, block: int, data: memoryview) -> None:
        """Copy a block to where the arrays were found; no step may be in the air."""
        for run in self._runs:
            run.rows[:, :, block] = run.part_of(data)


@dataclass(frozen=True)
class _Run:
    """Arrays at equal distances, both in memory and in a block's bytes: the first has the bytes from `start` on."""

    # [arrays, heads, blocks, bytes]
    rows: Bytes
    start: int
    distance: int

    def part_of(self, data: memoryview) -> Bytes:
        """[arrays, heads, bytes] of the bytes of a block."""
        count, heads, _, size = self.rows.shape
        part: Bytes = np.ndarray((count, heads, size), np.uint8, data, self.start, (self.distance, size, 1))
        return part


def _runs(pool: Pool, addresses: list[int]) -> list[_Run]:
    """The arrays of a pool, as few runs: each begins with one of the first layer's arrays, if all layers are alike."""
    arrays = [_rows(pool, array) for array in pool.arrays()]
    if not arrays:
        return []
    starts = list(accumulate((array.shape[0] * array.shape[2] for array in arrays), initial=0))
    period = max(1, sum(array.size > 0 for array in pool.layers[0].all))
    runs = []
    for first in range(period):
        numbers = range(first, len(arrays), period)
        while numbers:
            some = _alike(numbers, arrays, starts, addresses)
            i, j = some[0], some[min(1, len(some) - 1)]
            strides = (addresses[j] - addresses[i], *arrays[i].strides)
            rows = np.lib.stride_tricks.as_strided(arrays[i], (len(some), *arrays[i].shape), strides)
            runs.append(_Run(rows, starts[i], starts[j] - starts[i]))
            numbers = numbers[len(some) :]
    return runs


def _alike(numbers: range, arrays: list[Bytes], starts: list[int], addresses: list[int]) -> range:
    """The first of `numbers`, as far as their arrays are of one shape and at equal distances."""

    def step(n: int) -> tuple[object, ...]:
        before, i = numbers[n - 1], numbers[n]
        return arrays[i].shape, starts[i] - starts[before], addresses[i] - addresses[before]

    if len(numbers) < 2 or arrays[numbers[0]].shape != arrays[numbers[1]].shape:
        return numbers[:1]
    count = 2
    while count < len(numbers) and step(count) == step(1):
        count += 1
    return numbers[:count]


def write_block(pool: Pool, block: int, data: memoryview) -> None:
    """Copy a block into the pool, where the host has no access to it. No step may be in the air."""
    source = np.frombuffer(data, np.uint8)
    start = 0
    slots = slice(block * pool.block_size, (block + 1) * pool.block_size)
    for array in pool.arrays():
        heads, _, dim = array.shape
        count = heads * pool.block_size * dim * array.dtype.size
        new = mx.array(source[start : start + count]).view(array.dtype)
        array[:, slots] = new.reshape(heads, pool.block_size, dim)
        start += count
    mx.eval(pool.arrays())


def states_fit(states: Sequence[State], tensors: Sequence[Tensor]) -> bool:
    """Whether `states` are of the shapes and dtypes that the layout says."""
    parts = list(_parts(states))
    if len(parts) != len(tensors):
        return False
    return all(p.shape == t.shape and p.dtype == t.dtype for p, t in zip(parts, tensors, strict=True))


def read_states(states: Sequence[State], out: memoryview) -> None:
    """Copy recurrent states, which must fit (`states_fit`)."""
    target = np.frombuffer(out, np.uint8)
    start = 0
    for part in _parts(states):
        target[start : start + part.nbytes] = _bytes(mx.contiguous(part)).reshape(-1)
        start += part.nbytes


def make_states(layout: Layout, data: memoryview) -> list[State]:
    """Recurrent states from their bytes."""
    source = np.frombuffer(data, np.uint8)
    states: list[State] = []
    start = 0
    for layer in layout.states:
        state: State = []
        for part in layer.parts:
            if part is None:
                state.append(None)
                continue
            tensor = Tensor("", (1, *part[0]), part[1])
            state.append(mx.array(source[start : start + tensor.nbytes]).view(tensor.dtype).reshape(tensor.shape))
            start += tensor.nbytes
        states.append(state)
    mx.eval(states)
    return states


def _parts(states: Sequence[State]) -> Iterator[mx.array]:
    return (part for state in states for part in state if part is not None)


def shared_memory() -> bool:
    """Whether the host reads and writes the memory the device works on: true but for CUDA."""
    return kind() != "cuda"


def _bytes(array: mx.array) -> Bytes:
    """The bytes of a row-contiguous array, without a copy where the host can see it."""
    return np.frombuffer(memoryview(array), np.uint8)  # type: ignore[arg-type]


def _address(array: mx.array) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(array)))  # type: ignore[arg-type]


def _rows(pool: Pool, array: mx.array) -> Bytes:
    """A view of a pool array, [heads, blocks, bytes]; it does not keep the array alive, so use it at once."""
    return _bytes(array).reshape(array.shape[0], pool.blocks, -1)
