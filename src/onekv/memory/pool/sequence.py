"""One sequence's KV: a table per group, its recurrent states, and how many tokens are stored."""

import mlx.core as mx

from .pool import IntegrityError, Pool
from .table import Table

# The parts of one recurrent layer's state; None until the model makes them.
State = list[mx.array | None]


class Sequence:
    """States: open (holds blocks and reservations) until `close`; `length` tokens are stored in every layer."""

    def __init__(self, pools: list[Pool], max_length: int, chunk: int, prefixes: list[list[int]] | None = None) -> None:
        """Reserves in every group what a sequence of `max_length` tokens needs beyond the shared blocks in `prefixes`.

        Where those say WANTED, blocks are to be taken (`Table.take_wanted`) before anything else. Raises OutOfBlocks,
        holding nothing.
        """
        self.max_length = max_length
        self.length = 0
        # While it is ahead of itself: the length that it will return to, from which on windows keep all.
        self.anchor: int | None = None
        self.tables: list[Table] = []
        # Per recurrent layer; empty while the states are with the running batch.
        self.states: list[State] = []
        try:
            for pool, prefix in zip(pools, prefixes or [[] for _ in pools], strict=True):
                self.tables.append(Table(pool, max_length, chunk, prefix))
        except BaseException:
            self.close()
            raise

    def advance(self, count: int) -> None:
        """Make room for `count` more tokens in every table, unless that is done; free blocks are there for them."""
        for table in self.tables:
            table.advance(self.length, count, self.anchor)

    def truncate(self, length: int) -> None:
        """Only the first `length` tokens are left. Raises IntegrityError if a window has given back what they read."""
        for table in self.tables:
            if not table.readable(length):
                raise IntegrityError(f"{table.rule}: what a query at {length} reads was released")
        for table in self.tables:
            table.truncate(length)
        self.length, self.anchor = length, None

    def prefilled(self, step: int = 1) -> None:
        """The prompt is stored: from here there are at most `step` new tokens at a time."""
        for table in self.tables:
            table.prefilled(step)

    def close(self) -> None:
        """Give everything back; closing twice is allowed."""
        for table in self.tables:
            table.close()
        self.tables, self.states = [], []
