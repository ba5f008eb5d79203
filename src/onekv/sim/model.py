"""The simulated model: hashes instead of keys and values, in the real pool, at the places that the real tables specify.

It sees what a real model sees, the new tokens and the current step, and uses the pool's own memory. Everything it reads
is compared with the truth at once (`Expected`), so a wrong block is found when it is first read, not when an answer
happens to differ; and its output is computed from what it read.
"""

from collections.abc import Callable
from weakref import WeakSet

import mlx.core as mx
import numpy as np
import xxhash
from mlx.nn.layers.base import Module

from ..engine import Request
from ..engine.runner import Runner
from ..engine.sampling import Drawn, add_rules
from ..memory.kv import KVMemory
from ..memory.pool import Pool
from ..memory.pool.sequence import Sequence
from ..memory.pool.table import Table
from .truth import Hashes, Scores, Truth, as_rows, chain, logits, readable

# The prefix hashes of a sequence's tokens, as far as they are known; None for a sequence that is not checked.
Expected = Callable[[Sequence], Hashes | None]
Positions = np.ndarray[tuple[int], np.dtype[np.int64]]
View = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]


# Of this many tokens one is taken for too close to another when it was guessed.
DOUBTFUL = 9


class Violation(BaseException):
    """Something that must hold does not. No handler of the engine may take it for a failed request."""


class Known:
    """The prefix hashes of a request's tokens, as far as there are tokens."""

    def __init__(self, request: Request, start: int) -> None:
        self.request, self._last, self._count = request, start, 0
        self._hashes = np.empty(len(request.prompt) + request.max_tokens, np.uint64)

    def hashes(self) -> Hashes:
        if self._count < len(self.request.prompt) + len(self.request.tokens):
            new = chain(self._last, self.request.all_tokens[self._count :])
            self._hashes[self._count : self._count + len(new)] = new
            self._count, self._last = self._count + len(new), new[-1]
        return self._hashes[: self._count]


class HashModel(Module):
    def __init__(self, truth: Truth) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.truth = truth
        # Where it finds the current step: the memory of the runner that runs it.
        self.memory: KVMemory
        self.expected: Expected = lambda sequence: None
        self._compared: WeakSet[Sequence] = WeakSet()
        # Called before each forward with the sequences it is for; may raise, or return rows that become NaN.
        self.before: Callable[[list[Sequence]], list[int]] = lambda sequences: []

    def __call__(self, inputs: mx.array, cache: list[object]) -> mx.array:
        tokens: list[list[int]] = np.array(inputs).tolist()
        return mx.array(self.forward(tokens)[:, None])

    def forward(self, tokens: list[list[int]]) -> Scores:
        """Logits [rows, vocabulary] after the new tokens of the current step."""
        memory = self.memory
        step = memory.current
        spoilt = self.before(step.rows)
        views = [pool_views(pool) for pool in memory.pools]
        parts = [None if part is None else np.array(part) for layer in memory.state_layers for part in layer.cache]
        rows = []
        for row, (sequence, length) in enumerate(zip(step.rows, step.lengths, strict=True)):
            states = [b"" if part is None else part[row].tobytes() for part in parts] if length else []
            # What follows a row's own tokens is padding.
            rows.append(self._row(views, states, sequence, length, tokens[row][: step.counts[row]]))
        if self.truth.states:
            self._write_states(memory, [prefix for _, prefix in rows])
        scores = np.stack([logits(digest) for digest, _ in rows])
        scores[spoilt] = np.nan
        return scores

    def _row(
        self, views: list[list[View]], states: list[bytes], sequence: Sequence, length: int, tokens: list[int]
    ) -> tuple[int, int]:
        """Store `tokens` after `length` of `sequence`; a digest of what the last one reads, and its prefix hash."""
        before = self._before(views, sequence, length, states)
        hashes = np.array(chain(before, tokens), np.uint64)
        last = length + len(tokens) - 1
        digest = xxhash.xxh3_64()
        for group, table in enumerate(sequence.tables):
            new = slots(table, np.arange(length, last + 1))
            for view, (mark, width, _) in zip(views[group], self.truth.arrays[group], strict=True):
                view[:, new] = as_rows(hashes, mark, width)
            read = slots(table, np.append(readable(table.rule, last), last))
            for view in views[group]:
                digest.update(view[0, read].tobytes())
        prefix = int(hashes[-2]) if len(hashes) > 1 else before
        for number in range(self.truth.states):
            passed_on = states[number] if states and len(tokens) == 1 else self.truth.state(prefix, number)
            digest.update(passed_on)
        return digest.intdigest(), int(hashes[-1])

    def _before(self, views: list[list[View]], sequence: Sequence, length: int, states: list[bytes]) -> int:
        """The prefix hash of `length` tokens of `sequence`, by its last rows and its states, which must agree."""
        if not length:
            return self.truth.start
        # Behind what it has stored are guesses of this step, which may be wrong.
        if length == sequence.length and (expected := self.expected(sequence)) is not None:
            self._compare(views, sequence, states, expected)
        found = {int.from_bytes(state, "little") ^ self.truth.marks[number] for number, state in enumerate(states)}
        for group, table in enumerate(sequence.tables):
            mark = self.truth.arrays[group][0][0]
            slot = table.blocks[(length - 1) // table.pool.block_size] * table.pool.block_size
            row = views[group][0][0, slot + (length - 1) % table.pool.block_size, :8]
            found.add(int.from_bytes(row.tobytes(), "little") ^ mark)
        if len(found) != 1:
            raise Violation(f"rows and states do not agree on what the {length} tokens of a sequence are")
        return found.pop()

    def _compare(self, views: list[list[View]], sequence: Sequence, states: list[bytes], expected: Hashes) -> None:
        """All that is read, with what it should be: where it is read for the first time, and now and then.

        In the other steps a wrong row shows in the answer.
        """
        length = sequence.length
        for number, state in enumerate(states):
            if state != self.truth.state(int(expected[length - 1]), number):
                raise Violation(f"a recurrent state is not that of {length} tokens")
        if sequence in self._compared and length % 8:
            return
        self._compared.add(sequence)
        for group, table in enumerate(sequence.tables):
            positions = readable(table.rule, length)
            read = slots(table, positions)
            for view, (mark, width, _) in zip(views[group], self.truth.arrays[group], strict=True):
                if not (view[:, read] == as_rows(expected[positions], mark, width)).all():
                    raise Violation(f"{table.rule}: what was read for token {length} is not what was stored")

    def _write_states(self, memory: KVMemory, hashes: list[int]) -> None:
        number = 0
        for layer in memory.state_layers:
            for part in range(len(layer.cache)):
                rows = b"".join(self.truth.state(prefix, number) for prefix in hashes)
                layer.cache[part] = mx.array(np.frombuffer(rows, np.uint8).reshape(len(hashes), 8))
                number += 1


class HostRunner(Runner):
    """Steps without a device: tokens are chosen where the model computes, which is faster for one so small."""

    model: HashModel

    def store(self, sequences: list[Sequence], tokens: list[list[int]]) -> None:
        with self.memory.step(sequences, [len(row) for row in tokens]):
            self.model.forward(tokens)

    def forward(self, sequences: list[Sequence], inputs: mx.array, counts: list[int] | None = None) -> mx.array:
        tokens: list[int] = inputs.tolist()  # type: ignore[assignment]
        with self.memory.step(sequences, counts or 1, spread=True):
            return mx.array(self.model.forward([[token] for token in tokens]))

    def draw(
        self, requests: list[Request], logits: mx.array, drawn: list[int], tolerance: float | None = None
    ) -> Drawn:
        scores = np.array(logits)
        sound = np.isfinite(scores[:, 0])
        factor = np.ones(scores.shape[1:], np.float32)
        for row, request in enumerate(requests):
            if request.constraint is not None:
                add_rules(request, False, scores[row], factor)
                sound[row] &= request.error is None
        best = scores.argmax(axis=-1)
        # Some are in doubt, for no reason.
        sure = mx.array(best % DOUBTFUL != 1) if tolerance is not None else None
        # The numbers are no log probabilities; what counts is that each token has one.
        return Drawn(mx.array(best), mx.array(sound), mx.array(scores.max(axis=-1)), sure=sure)


def pool_views(pool: Pool) -> list[View]:
    """The pool's own memory, [heads, slots, bytes] per array; to be used at once."""
    return [
        np.frombuffer(memoryview(array), np.uint8).reshape(array.shape[0], array.shape[1], -1)  # type: ignore[arg-type]
        for array in pool.arrays()
    ]


def slots(table: Table, positions: Positions) -> Positions:
    """Where a table keeps these positions."""
    size = table.pool.block_size
    blocks = np.array(table.blocks, np.int64)[positions // size]
    if (blocks < 0).any():
        raise Violation(f"{table.rule}: a position that is read has no block")
    result: Positions = blocks * size + positions % size
    return result
