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

from ..device import kind, settle
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

    Where the host has access to the pool (`shared_memory`), through a view of each array. Nothing here keeps the arrays
    alive, so where they lie is looked up each time before anything is copied.

    One view for several arrays would be faster, and was wrong: what lies between them belongs to others. NumPy takes a
    source in there for one that overlaps, and copies it first; if the copy lies in there, too, it copies that, until
    the stack is full.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._addresses: list[int] = []
        # Of each array: [heads, blocks, bytes], and where its bytes begin in those of a block.
        self._arrays: list[tuple[Bytes, int]] = []

    def read(self, block: int, out: memoryview) -> None:
        """Copy a block out of the pool."""
        if shared_memory():
            self.look()
            for rows, start in self._arrays:
                _part(out, rows, start)[...] = rows[:, block]
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
            arrays = [_rows(self._pool, array) for array in self._pool.arrays()]
            starts = accumulate((array.shape[0] * array.shape[2] for array in arrays), initial=0)
            self._arrays, self._addresses = list(zip(arrays, starts, strict=False)), addresses

    def write(self, block: int, data: memoryview) -> None:
        """Copy a block to where the arrays were found; no step may be in flight."""
        for rows, start in self._arrays:
            rows[:, block] = _part(data, rows, start)


@dataclass(frozen=True)
class BlockContent:
    """The content of a block; calling it copies that into a buffer."""

    blocks: Blocks
    block: int

    def __call__(self, out: memoryview) -> None:
        self.blocks.read(self.block, out)


def _part(data: memoryview, rows: Bytes, start: int) -> Bytes:
    """What the bytes of a block have for an array: [heads, bytes]."""
    return np.ndarray((rows.shape[0], rows.shape[2]), np.uint8, data, start)


def write_block(pool: Pool, block: int, data: memoryview) -> None:
    """Copy a block into the pool, where the host has no access to it. No step may be in flight."""
    source = np.frombuffer(data, np.uint8)
    start = 0
    slots = slice(block * pool.block_size, (block + 1) * pool.block_size)
    for array in pool.arrays():
        heads, _, dim = array.shape
        count = heads * pool.block_size * dim * array.dtype.size
        new = mx.array(source[start : start + count]).view(array.dtype)
        array[:, slots] = new.reshape(heads, pool.block_size, dim)
        start += count
    settle(pool.arrays())


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


@dataclass(frozen=True)
class StatesContent:
    """Recurrent states, which must fit; like `BlockContent`."""

    states: Sequence[State]

    def __call__(self, out: memoryview) -> None:
        read_states(self.states, out)


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
    """Whether the host reads and writes the memory the device works on: true except for CUDA."""
    return kind() != "cuda"


def _bytes(array: mx.array) -> Bytes:
    """The bytes of a row-contiguous array, without a copy where the host can see it."""
    return np.frombuffer(memoryview(array), np.uint8)  # type: ignore[arg-type]


def _address(array: mx.array) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(array)))  # type: ignore[arg-type]


def _rows(pool: Pool, array: mx.array) -> Bytes:
    """A view of a pool array, [heads, blocks, bytes]; it does not keep the array alive, so use it at once."""
    return _bytes(array).reshape(array.shape[0], pool.blocks, -1)
