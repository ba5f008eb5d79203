"""The bytes of one block, and of recurrent states, outside of the pool: the form in which they move between tiers.

A block is its tensors one after the other: per layer of the group keys, then values, or their encoded parts, each
[heads, block_size, width] in C order, byte for byte as in the pool. Copying happens between two steps, while the
engine's thread does nothing else with the pool. Views of the pool do not keep it alive and must not outlive that.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .layout import Group, Layout
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
            f"{layer.name}.{side}" if codec.plain else f"{layer.name}.{side}.{part.name}",
            (layer.heads, block_size, part.width),
            part.dtype,
        )
        for layer in group.layers
        for side, codec in (("keys", layer.keys), ("values", layer.values))
        for part in codec.parts
        if layer.heads * part.width
    ]


def state_tensors(layout: Layout) -> list[Tensor]:
    """What the recurrent states of one sequence are made of, in order."""
    return [
        Tensor(f"{state.name}.{index}", (1, *part[0]), part[1])
        for state in layout.states
        for index, part in enumerate(state.parts)
        if part is not None
    ]


def read_block(pool: Pool, block: int, out: memoryview) -> None:
    """Copy a block out of the pool."""
    target = np.frombuffer(out, np.uint8)
    start = 0
    for array in pool.arrays():
        rows = _rows(pool, array)[:, block] if shared_memory() else _bytes(pool.gather(array, block))
        target[start : start + rows.size] = rows.reshape(-1)
        start += rows.size


def block_views(pool: Pool, block: int) -> list[Bytes] | None:
    """The memory of a block, to be written to before anything else is done with the pool; no step may be in the air.

    None where the host has no access to it: then use `write_block`.
    """
    if not shared_memory():
        return None
    return [row for array in pool.arrays() for row in _rows(pool, array)[:, block]]


def write_block(pool: Pool, block: int, data: memoryview) -> None:
    """Copy a block into the pool. No step may be in the air."""
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
    return mx.default_device() == mx.cpu or mx.metal.is_available()


def _bytes(array: mx.array) -> Bytes:
    """The bytes of a row-contiguous array, without a copy where the host can see it."""
    return np.frombuffer(memoryview(array), np.uint8)  # type: ignore[arg-type]


def _rows(pool: Pool, array: mx.array) -> Bytes:
    """A view of a pool array, [heads, blocks, bytes]; it does not keep the array alive, so use it at once."""
    return _bytes(array).reshape(array.shape[0], pool.blocks, -1)
