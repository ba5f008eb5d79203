"""The blocks of one sequence in one group, in order of position.

    position   0 .. keep          forgotten            first .. length        .. capacity
    blocks     [held]             [-1, -1, ...]        [held, held, ...]

Block i of the table holds positions [i * block_size, (i + 1) * block_size). A sliding window forgets blocks that no
later query reads: they go back to the pool at once, but their number stays reserved for the table's own growth.
"""

from .layout import Rule
from .pool import Pool

FORGOTTEN = -1


def blocks_needed(rule: Rule, block_size: int, length: int, chunk: int) -> int:
    """The most blocks a sequence holds at once while it grows to `length` by steps of at most `chunk` tokens."""
    every = -(-length // block_size)
    if rule.span is None:
        return every
    # Positions [p - span + 1, p + chunk) start anywhere in a block.
    live = (rule.span - 1 + chunk - 2) // block_size + 2
    return min(every, live + -(-rule.keep // block_size))


class Table:
    def __init__(self, pool: Pool, length: int, chunk: int) -> None:
        """A table that may grow to `length` tokens in steps of at most `chunk`: reserves what that takes."""
        self.pool = pool
        self.rule = pool.group.rule
        self.length = length
        self.blocks: list[int] = []
        self.first = 0
        # Changes with the blocks: what was derived from them is stale when it differs.
        self.version = 0
        self.kept = -(-self.rule.keep // pool.block_size)
        self._limit = blocks_needed(self.rule, pool.block_size, length, chunk)
        self._reserved = self._limit
        pool.reserve(self._reserved)

    @property
    def held(self) -> list[int]:
        return [block for block in self.blocks if block != FORGOTTEN]

    def live(self) -> list[int]:
        """Indices into `blocks` of those still held, in order."""
        return [*range(min(self.kept, self.first)), *range(self.first, len(self.blocks))]

    def advance(self, position: int, count: int) -> None:
        """Make room for tokens [position, position + count); forget what queries from `position` on do not read."""
        self._forget(self.rule.first(position) // self.pool.block_size)
        missing = -(-(position + count) // self.pool.block_size) - len(self.blocks)
        if missing > 0:
            last = self.blocks[-1] if self.blocks else FORGOTTEN
            room = -(-self.length // self.pool.block_size) - len(self.blocks)
            taken = self.pool.take(missing, None if last == FORGOTTEN else last, room)
            self._reserved -= missing
            self.blocks += taken
            self.version += 1

    def _forget(self, first: int) -> None:
        start = max(self.first, self.kept)
        first = min(first, len(self.blocks))
        if first <= start:
            return
        self.pool.release(self.blocks[start:first])
        self.blocks[start:first] = [FORGOTTEN] * (first - start)
        self.first = first
        self.version += 1
        self._keep_in_reserve(self._limit - len(self.held))

    def _keep_in_reserve(self, count: int) -> None:
        change = max(0, count) - self._reserved
        if change > 0:
            self.pool.reserve(change)
        else:
            self.pool.unreserve(-change)
        self._reserved += change

    def prefilled(self) -> None:
        """The prompt is stored: from here the table grows one token at a time and needs less in reserve."""
        if not self.rule.ring:
            self._limit = blocks_needed(self.rule, self.pool.block_size, self.length, 1)
            self._keep_in_reserve(self._limit - len(self.held))

    def close(self) -> None:
        self.pool.release(self.held)
        self.pool.unreserve(self._reserved)
        self.blocks, self._reserved = [], 0
        self.version += 1
