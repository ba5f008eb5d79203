"""The blocks of one sequence in one group, in order of position.

    position   0 .. keep          forgotten            first .. length        .. capacity
    blocks     [held]             [-1, -1, ...]        [held, held, ...]

Block i of the table holds positions [i * block_size, (i + 1) * block_size). A sliding window forgets blocks that no
later query reads: they are returned to the pool at once, but the same number stays reserved for the table's own growth.
The blocks of a cached prefix are shared: they are referenced, never written. Those that are cached in a colder tier are
`WANTED` until the table takes blocks of its own for them, which are filled from there.
"""

from ..layout import Rule
from .pool import OutOfBlocks, Pool

FORGOTTEN = -1
WANTED = -2


def blocks_needed(rule: Rule, block_size: int, length: int, chunk: int) -> int:
    """The most blocks a sequence holds at once while it grows to `length` by steps of at most `chunk` tokens."""
    every = -(-length // block_size)
    if rule.span is None:
        return every
    # Positions [p - span + 1, p + chunk) start anywhere in a block.
    live = (rule.span - 1 + chunk - 2) // block_size + 2
    return min(every, live + -(-rule.keep // block_size))


class Table:
    def __init__(self, pool: Pool, length: int, chunk: int, prefix: list[int] | None = None) -> None:
        """A table that may grow to `length` tokens in steps of at most `chunk`: reserves the blocks that takes.

        It starts with the blocks of `prefix`, which are shared; where that says WANTED, `take_wanted` takes new ones.
        Raises OutOfBlocks, holding nothing.
        """
        self.pool = pool
        self.rule = pool.group.rule
        self.length = length
        self.blocks = list(prefix or [])
        self.kept = -(-self.rule.keep // pool.block_size)
        self.first = max((i + 1 for i, block in enumerate(self.blocks) if block == FORGOTTEN), default=0)
        # Changes with the blocks: what was derived from them is stale when it differs.
        self.version = 0
        # Blocks that the pool has promised to it.
        self.reserved = 0
        self._limit = blocks_needed(self.rule, pool.block_size, length, chunk)
        # Held before anything is reserved, so that the reservation does not count on evicting them.
        pool.share(self.held)
        try:
            self._keep_in_reserve()
        except OutOfBlocks:
            pool.release(self.held)
            raise

    @property
    def wanted(self) -> int:
        """Blocks that `take_wanted` takes."""
        return self.blocks.count(WANTED)

    def take_wanted(self) -> None:
        """Take blocks for what is to be read from a colder tier; so many must be free."""
        wanted = [i for i, block in enumerate(self.blocks) if block == WANTED]
        if not wanted:
            return
        last = self.blocks[wanted[0] - 1] if wanted[0] else FORGOTTEN
        taken = self.pool.take(len(wanted), None if last < 0 else last, self._missing)
        self.reserved -= len(wanted)
        for index, block in zip(wanted, taken, strict=True):
            self.blocks[index] = block

    @property
    def held(self) -> list[int]:
        return [block for block in self.blocks if block >= 0]

    def live(self) -> list[int]:
        """Indices into `blocks` of those still held, in order."""
        return [*range(min(self.kept, self.first)), *range(self.first, len(self.blocks))]

    @property
    def _missing(self) -> int:
        """Blocks between what there is and the full length."""
        return -(-self.length // self.pool.block_size) - len(self.blocks) + self.wanted

    def _keep_in_reserve(self) -> None:
        """Reserve what the table may take before it gives a block back."""
        change = max(0, min(self._limit - len(self.held), self._missing)) - self.reserved
        if change >= 0:
            # Also for nothing: sharing idle blocks must not break what was promised to others.
            self.pool.reserve(change)
        else:
            self.pool.unreserve(-change)
        self.reserved += change

    def advance(self, position: int, count: int, oldest: int | None = None) -> None:
        """Make room for tokens [position, position + count); forget what queries from there on do not read.

        `oldest`, if it is given, is where the first of these queries may be instead.
        """
        self.forget(position if oldest is None else oldest)
        self.extend(position + count)

    def forget(self, position: int) -> None:
        """Give back the blocks that queries from `position` on do not read."""
        start = max(self.first, self.kept)
        first = min(self.rule.first(position) // self.pool.block_size, len(self.blocks))
        if first <= start:
            return
        self.pool.release(self.blocks[start:first])
        self.blocks[start:first] = [FORGOTTEN] * (first - start)
        self.first = first
        self.version += 1
        self._keep_in_reserve()

    def lacking(self, end: int) -> int:
        """Blocks to take before there is room for all positions below `end`."""
        return max(0, -(-end // self.pool.block_size) - len(self.blocks))

    def extend(self, end: int) -> None:
        """Make room for all positions below `end`; as many blocks as are `lacking` must be free."""
        count = self.lacking(end)
        if count:
            last = self.blocks[-1] if self.blocks else FORGOTTEN
            taken = self.pool.take(count, None if last == FORGOTTEN else last, self._missing)
            self.reserved -= count
            self.blocks += taken
            self.version += 1

    def readable(self, length: int) -> bool:
        """Whether a query at `length` finds all that it reads, or has a window moved on?"""
        return self.first <= self.kept or self.rule.first(length) // self.pool.block_size >= self.first

    def truncate(self, length: int) -> None:
        """Give back the blocks after the first `length` positions; their number stays reserved."""
        count = -(-length // self.pool.block_size)
        if count < len(self.blocks):
            self.pool.release(self.blocks[count:])
            del self.blocks[count:]
            self.version += 1
            self._keep_in_reserve()

    def prefilled(self, step: int = 1) -> None:
        """The prompt is stored: from here the table grows by `step` tokens at most and needs less in reserve."""
        if not self.rule.ring:
            self._limit = min(self._limit, blocks_needed(self.rule, self.pool.block_size, self.length, step))
            self._keep_in_reserve()

    def adopt(self, block: int) -> None:
        """The next block of this table is one that is held for it already."""
        self.blocks.append(block)
        self.version += 1
        self._keep_in_reserve()

    def replace(self, index: int, block: int) -> None:
        """Use a cached block of the same content instead of the own one."""
        self.pool.share([block])
        self.pool.release([self.blocks[index]])
        self.blocks[index] = block
        self.version += 1

    def close(self) -> None:
        self.pool.release(self.held)
        self.pool.unreserve(self.reserved)
        self.blocks, self.reserved = [], 0
        self.version += 1
