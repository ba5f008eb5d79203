"""KV memory: what a forward pass means on every rank.

A pass is built as a graph first, and then evaluated. Building evaluates nothing (`KVMemory.sharded`), and every rank
evaluates the same outputs of the same graph in the same order, so collectives start in the same order everywhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import mlx.core as mx
import numpy as np
import xxhash

from ..memory.device import settle
from ..memory.kv import KVMemory
from ..memory.layout import Layout
from ..memory.pool.sequence import Sequence
from .guard import Guard


class ShardedMemory(KVMemory):
    sharded = True

    def __init__(
        self, guard: Guard, layout: Layout, blocks: tuple[int, ...], block_size: int, chunk: int, kernels: bool
    ) -> None:
        self._guard = guard
        super().__init__(layout, blocks, block_size, chunk, kernels)

    @property
    def eager(self) -> bool:
        """`run` returns evaluated results: rank 0 needs the tokens to describe the next pass."""
        return True

    def compute(self, out: mx.array, logits: bool) -> None:
        """Evaluate a pass. A failure ends all ranks, because it leaves collectives half done."""
        try:
            settle(out if logits else None, self.arrays())
        except BaseException as error:  # noqa: BLE001  ends the process
            self._guard.broke("computing a pass", error)

    @contextmanager
    def forgettable(self) -> Iterator[None]:
        """On an exception, restore the pool's arrays: no part of a graph, with its collectives, may be left in them."""
        # Copies of the handles, not of the data: assigning to a slice changes an array object in place.
        before = [[copy(array) for array in arrays] for arrays in self.layer_arrays]
        try:
            yield
        except BaseException:
            for arrays, some in zip(self.layer_arrays, before, strict=True):
                arrays[:] = some
            raise


def digest(sequences: list[Sequence]) -> str:
    """A digest of all block tables of `sequences`."""
    seen = xxhash.xxh3_64()
    for sequence in sequences:
        for table in sequence.tables:
            seen.update(np.array([len(table.blocks), *table.blocks], np.int32).tobytes())
    return seen.hexdigest()
