"""The KV memory of one model: pools, the caches the model sees, and the sequences that are open.

A forward pass: `step` makes room in the tables, loads the recurrent states of those sequences into the layers, and
makes the step current; the model runs; the sequences grow by what was stored. Everything is lazy until the caller
evaluates `arrays()`, except where layers are `eager`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from . import device
from .attention import LayerKV, choose
from .figures import KVStats
from .layers import ChunkedLayer, Pace, PagedLayer, StateCache, StepHolder
from .layout import Group, Layout, Leaf
from .pool import IntegrityError, Pool
from .pool.blocks import make_states
from .pool.sequence import Sequence, State
from .step import Step


class KVMemory:
    # Whether the model is one rank's shard (`onekv.parallel`). Its graphs contain collectives, which all ranks must
    # start in the same order: nothing may be evaluated while a graph is built, and nothing outside of MLX.
    sharded = False

    def __init__(
        self, layout: Layout, blocks: tuple[int, ...], block_size: int, chunk: int, kernels: bool = True
    ) -> None:
        """Allocates pools of `blocks[g]` blocks for group g; prefill steps are of at most `chunk` tokens.

        Without `kernels`, only operations of MLX compute.
        """
        self.layout, self.block_size, self.chunk, self.kernels = layout, block_size, chunk, kernels
        # Why kernels that support this device are not used, each reason once.
        self.unused_kernels: list[str] = []
        self.pools = [self._pool(number, *each) for number, each in enumerate(zip(layout.groups, blocks, strict=True))]
        self.device = device.kind()
        # Ranks may not evaluate while a graph is built; on CPU, MLX itself is never far ahead.
        self._holder = StepHolder(Pace(chunk) if self.device != "cpu" and not self.sharded else None)
        self._layers: list[PagedLayer] = []
        self.state_layers: list[StateCache] = []
        # The model's own argument: one cache per layer, in its order.
        self.caches: list[Any] = layout.build(self._make)
        self._open: set[Sequence] = set()
        self._previous: Step | None = None
        # Whose recurrent states are in the layers, row by row.
        self._batch: list[Sequence] = []

    def _pool(self, number: int, group: Group, blocks: int) -> Pool:
        return Pool(group, blocks, self.block_size)

    def _make(self, leaf: Leaf) -> PagedLayer | StateCache:
        if leaf.group < 0:
            state = StateCache(len(self.layout.states[leaf.layer].parts))
            self.state_layers.append(state)
            return state
        pool = self.pools[leaf.group]
        stored = pool.group.layers[leaf.layer], pool.layers[leaf.layer]
        kv = LayerKV(*stored, self._holder.turns, self.device, self.kernels)
        kind = PagedLayer if pool.group.rule.chunk is None else ChunkedLayer
        query_heads = self.layout.query_heads
        chosen, reasons = choose(kv, self.block_size, pool.group.rule, query_heads, eager=not self.sharded)
        self.unused_kernels += [reason for reason in reasons if reason not in self.unused_kernels]
        layer = kind(self._holder, leaf.group, kv, chosen)
        self._layers.append(layer)
        return layer

    def open(self, max_length: int, prefixes: list[list[int]] | None = None) -> Sequence:
        """A new sequence with room for `max_length` tokens, on the shared blocks in `prefixes` (one list per group).

        Raises OutOfBlocks if that cannot be promised.
        """
        sequence = Sequence(self.pools, max_length, self.chunk, prefixes)
        self._open.add(sequence)
        return sequence

    def close(self, sequence: Sequence) -> None:
        self._open.discard(sequence)
        sequence.close()
        if not self._open:
            self._drop_batch()

    @contextmanager
    def step(self, sequences: list[Sequence], count: int | list[int], spread: bool = False) -> Iterator[list[Any]]:
        """Inside, the model may be called once with the caches given; `sequences` get `count` tokens each.

        A list of counts is for rows of different lengths; the model is given rows as long as the longest, with any
        tokens after the others. Recurrent states would take those for real: there all counts must be equal. With
        `spread` the model is given a row for each token, those of one sequence after each other. If the step is
        interrupted, the sequences are as they were and it can be made again.
        """
        counts = [count] * len(sequences) if isinstance(count, int) else count
        assert not self.state_layers or len(set(counts)) == 1, "rows of a recurrent model have the same length"
        assert not self.state_layers or not spread or max(counts) == 1, "a recurrent state has one token a step"
        step = Step(sequences, counts, self._previous, spread)
        self._load_states(sequences)
        self._holder.step, self._holder.writes = step, False
        for layer in self._layers:
            layer.attended = None
        before = [list(layer.cache) for layer in self.state_layers]
        try:
            yield self.caches
            for layer in self._layers:
                layer.finish()
        except BaseException:
            for state_layer, state in zip(self.state_layers, before, strict=True):
                state_layer.cache = state
            raise
        finally:
            self._holder.step = None
            if self._holder.pace is not None:
                self._holder.pace.end()
            for layer in self._layers:
                layer.release()
        self._previous = step
        for sequence, added in zip(sequences, counts, strict=True):
            sequence.length += added

    def run(
        self,
        model: Module,
        tokens: mx.array,
        sequences: list[Sequence],
        counts: list[int],
        spread: bool = False,
        logits: bool = True,
    ) -> mx.array:
        """Call `model` on `tokens` in a step (see `step`) and return its logits, lazy.

        `logits`: whether the caller is going to evaluate them; if not, it only evaluates what was stored.
        """
        with self.step(sequences, counts, spread) as caches:
            out: mx.array = model(tokens, cache=caches)
        return out

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Take back the last tokens of a sequence: `length` are left, not fewer than before its last step.

        A recurrent state cannot be taken back.
        """
        assert not self.state_layers or length == sequence.length, "a recurrent state cannot be rolled back"
        sequence.truncate(length)

    @contextmanager
    def traced(self, make: Callable[[Step], Step], arrays: list[list[mx.array]]) -> Iterator[list[Any]]:
        """In a step: inside, the model is called to be compiled, with what `make` makes of the step.

        `arrays` stand for those of the layers, as `layer_arrays` gives them.
        """
        step, held = self.current, self.layer_arrays
        try:
            self._holder.step = make(step)
            for layer, some in zip(self._layers, arrays, strict=True):
                layer.kv.arrays.all = some
            yield self.caches
            for layer in self._layers:
                layer.finish()
        finally:
            self._holder.step = step
            for layer, some in zip(self._layers, held, strict=True):
                layer.kv.arrays.all = some
                layer.release()

    @property
    def layer_arrays(self) -> list[list[mx.array]]:
        """The pool's arrays, layer by layer."""
        return [layer.kv.arrays.all for layer in self._layers]

    @property
    def writes(self) -> bool:
        """Whether operations of MLX write the pool in the last step: it may not start before the one before has ended.

        What kernels write, MLX does not know of: nothing would be copied.
        """
        return self._holder.writes

    @property
    def current(self) -> Step:
        """The step that is being made."""
        step = self._holder.step
        assert step is not None, "no step is in progress"
        return step

    @property
    def attended(self) -> list[PagedLayer]:
        """The layers that attended over the pool in the last step."""
        return [layer for layer in self._layers if layer.attended]

    @property
    def direct(self) -> list[bool]:
        """Of each layer, whether it returns stand-ins from decode steps. Of several ranks, the first one's self-test
        decides.
        """
        return [layer.direct for layer in self._layers]

    @direct.setter
    def direct(self, flags: Iterable[bool]) -> None:
        for layer, flag in zip(self._layers, flags, strict=True):
            layer.direct = flag

    @property
    def has_kernels(self) -> bool:
        """Whether every layer has a kernel that stores what is new, when the step is evaluated."""
        return all(layer.stores for layer in self._layers) and not self.eager

    @property
    def by_kernels(self) -> bool:
        """Whether these did all of the attention in the last decode step, be it of a draft model alone."""
        others = any(layer.attended is False for layer in self._layers)
        return self.has_kernels and bool(self.attended) and not others and not self.writes

    @property
    def eager(self) -> bool:
        """Whether decode steps are computed, in part, while the model is called."""
        return any(layer.eager for layer in self._layers)

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def exact(self) -> bool:
        """Whether the KV is in float32, so that results agree to the last few bits."""
        dtypes = {layer.dtype for group in self.layout.groups for layer in group.layers}
        return dtypes <= {mx.float32}

    def arrays(self) -> list[mx.array]:
        """All that a step may have changed: evaluate these to have it stored."""
        pools = [array for pool in self.pools for layer in pool.layers for array in layer.all]
        states = [part for layer in self.state_layers for part in layer.cache if part is not None]
        return pools + states

    # Recurrent states: with their sequence, or stacked in the layers while the batch stays the same.

    def _load_states(self, sequences: list[Sequence]) -> None:
        if not self.state_layers or sequences == self._batch:
            return
        self._unload_states()
        for index, layer in enumerate(self.state_layers):
            rows = [s.states[index] if s.states else None for s in sequences]
            layer.cache = _stack(rows, len(layer.cache))
        for sequence in sequences:
            sequence.states = []
        self._batch = list(sequences)

    def keep_states(self, sequence: Sequence) -> list[State]:
        """The recurrent states of an open sequence now, for `restore`."""
        return self.states_of(sequence)

    def restore(self, sequence: Sequence, states: list[State]) -> None:
        """Let a sequence that has no states yet continue from those that `keep_states` or `make_states` gave."""
        sequence.states = states

    def make_states(self, data: memoryview) -> list[State]:
        """Recurrent states from their bytes."""
        return make_states(self.layout, data)

    def states_of(self, sequence: Sequence) -> list[State]:
        """The recurrent states of an open sequence now: immutable arrays, which may be kept."""
        if sequence not in self._batch:
            return [list(state) for state in sequence.states]
        if len(self._batch) == 1:
            return [list(layer.cache) for layer in self.state_layers]
        row = self._batch.index(sequence)
        states = [[_row(part, row) for part in layer.cache] for layer in self.state_layers]
        # A lazy row would keep the whole batch alive.
        mx.eval(states)
        return states

    def _unload_states(self) -> None:
        for sequence in self._batch:
            if sequence in self._open:
                sequence.states = self.states_of(sequence)
        self._drop_batch()

    def _drop_batch(self) -> None:
        self._batch = []
        self._previous = None
        for layer in self.state_layers:
            layer.cache = [None] * len(layer.cache)

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state held now."""
        layers: int = sum(layer.nbytes for layer in self.state_layers)
        waiting = [part for s in self._open for state in s.states for part in state]
        return layers + sum(part.nbytes for part in waiting if part is not None)

    def close_all(self) -> None:
        """The engine is closed: there will be no more steps."""

    def stats(self) -> KVStats:
        pools = tuple(pool.stats() for pool in self.pools)
        return KVStats(pools, sum(pool.nbytes for pool in self.pools), self.state_bytes)

    def check_integrity(self, cached: list[list[int]] | None = None) -> None:
        """Every block is free, held by the open sequences that say so, or in `cached`; raises IntegrityError."""
        for index, pool in enumerate(self.pools):
            held = [b for s in self._open for b in s.tables[index].held]
            reserved = sum(s.tables[index].reserved for s in self._open)
            pool.check_integrity(held, cached[index] if cached else [], reserved)
        if not self._open and self.state_bytes:
            raise IntegrityError(f"{self.state_bytes} bytes of recurrent state are held by nobody")


def _row(part: mx.array | None, row: int) -> mx.array | None:
    return None if part is None else mx.contiguous(part[row : row + 1])


def _stack(rows: list[State | None], parts: int) -> State:
    """The states of several sequences as one batch; a sequence that has none yet starts from zeros."""
    if len(rows) == 1:
        return list(rows[0] or [None] * parts)
    return [_stack_part([row[i] if row else None for row in rows]) for i in range(parts)]


def _stack_part(parts: Iterable[mx.array | None]) -> mx.array | None:
    parts = list(parts)
    example = next((part for part in parts if part is not None), None)
    if example is None:
        return None
    return mx.concatenate([mx.zeros_like(example) if part is None else part for part in parts])
