"""A log of tokens in which the longest recent occurrence of a suffix is found in microseconds.

As in LZ77, `heads` has, for every hash of GRAM tokens, the latest position where such tokens end, and `previous`, for
every position, the one before it in the same bucket. A search walks one bucket, the latest position first.

    position   0 1 2 3 4 5 6 7 8 9        suffix ... b c d
    token      a b c d x a b c d y        heads[hash(b c d)] -> 8, previous[8] -> 3, previous[3] -> none

A full log drops its older half and is relinked, which happens once for every half capacity of tokens. So it always has
at least the last half of its capacity, and its contents depend only on its tokens, not on how many of them were added
at a time.
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Tokens = np.ndarray[Any, np.dtype[np.int32]]

# Tokens that an occurrence has in common with the suffix at least.
GRAM = 3
# Tokens of a suffix that are looked at.
WINDOW = 64
# Positions of a bucket that are looked at. In a crowded bucket the latest are the best guess.
CANDIDATES = 32
# A border between unrelated tokens.
BREAK = -1

TOKEN_BYTES = 4
# Fewer tokens than this are linked one by one.
_MANY = 16
_LEAST_BUCKETS = 1024
_NONE = -1
_BREAK_BYTES = struct.pack("<i", BREAK)
_GRAM_TOKENS = struct.Struct(f"<{GRAM}i")
# Odd and without a pattern. Buckets are the high bits of the sum: what a small table keeps apart, a larger one does.
_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_HASH_BITS = 32


class Match(NamedTuple):
    """An occurrence of the last `length` tokens (WINDOW at most), and the tokens that followed it."""

    length: int
    tokens: list[int]


class TokenLog:
    def __init__(self, capacity: int) -> None:
        """Holds at most `capacity` tokens, borders included."""
        self.capacity = max(capacity, 2 * GRAM)
        # Tokens that were ever added.
        self.total = 0
        self._length = 0
        self._make_room(1)

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._previous.nbytes + self._heads.nbytes

    @staticmethod
    def most_bytes(capacity: int) -> int:
        """What a log of this capacity takes at most."""
        room = max(capacity, 2 * GRAM)
        return TOKEN_BYTES * (2 * room + _buckets(room))

    # Adding

    def append(self, token: int) -> None:
        length = self._length
        if length == self._room:
            self.extend([token])
            return
        tokens = self._at
        tokens[length] = token
        self._length = length + 1
        self.total += 1
        if length >= GRAM - 1 and token >= 0:
            first, second = tokens[length - 2], tokens[length - 1]
            if first >= 0 and second >= 0:
                bucket = self._bucket(first, second, token)
                self._before[length] = self._latest[bucket]
                self._latest[bucket] = length

    def extend(self, tokens: Sequence[int] | Tokens) -> None:
        count, length = len(tokens), self._length
        if count < _MANY and length + count <= self._room:
            for token in tokens:
                self.append(int(token))
            return
        new = np.asarray(tokens, np.int32)
        self.total += count
        excess = length + count - self.capacity
        if excess > 0:
            self._forget(excess, new)
            return
        start = length
        if length + count > self._room:
            self._make_room(length + count)
            start = 0
        self._tokens[length : length + count] = new
        self._length = length + count
        self._link(start)

    def _forget(self, excess: int, new: Tokens) -> None:
        """Add tokens that the log is too full for, as if they came one by one."""
        half = self.capacity // 2
        kept = half + (excess - 1) % (self.capacity - half) + 1
        oldest = self._length - max(kept - len(new), 0)
        held = np.concatenate([self._tokens[oldest : self._length], new[-kept:]])
        if self._room < self.capacity:
            self._make_room(self.capacity)
        self._heads.fill(_NONE)
        self._tokens[:kept] = held
        self._length = kept
        self._link(0)

    def _make_room(self, length: int) -> None:
        """Buffers for `length` tokens; nothing is linked in them."""
        held = self._tokens[: self._length] if self._length else np.empty(0, np.int32)
        self._room = min(_buckets(length), self.capacity)
        buckets = _buckets(self._room)
        self._shift = _HASH_BITS - (buckets.bit_length() - 1)
        self._tokens: Tokens = np.empty(self._room, np.int32)
        self._tokens[: len(held)] = held
        self._previous: Tokens = np.empty(self._room, np.int32)
        self._heads: Tokens = np.full(buckets, _NONE, np.int32)
        # A number is read from a view in a third of the time that an array takes.
        self._at, self._before, self._latest = self._tokens.data, self._previous.data, self._heads.data

    def _bucket(self, first: int, second: int, third: int) -> int:
        a, b, c = _FACTORS
        return ((first * a + second * b + third * c) & 0xFFFFFFFF) >> self._shift

    def _link(self, start: int) -> None:
        """Put the positions from `start` on into their buckets."""
        first = max(start, GRAM - 1)
        if self._length <= first:
            return
        columns = [self._tokens[first - GRAM + 1 + i : self._length - GRAM + 1 + i] for i in range(GRAM)]
        sums = sum(column.astype(np.uint32) * np.uint32(k) for column, k in zip(columns, _FACTORS, strict=True))
        whole = np.minimum.reduce(columns) >= 0
        # Sorted by bucket, then by position.
        order = ((sums >> np.uint32(self._shift)).astype(np.int64) << 32) + np.arange(first, self._length)
        order = np.sort(order[whole])
        if not len(order):
            return
        buckets, positions = order >> 32, (order & 0xFFFFFFFF).astype(np.int32)
        changes = np.flatnonzero(buckets[1:] != buckets[:-1]) + 1
        starts, ends = np.concatenate([[0], changes]), np.concatenate([changes, [len(order)]]) - 1
        self._previous[positions[1:]] = positions[:-1]
        self._previous[positions[starts]] = self._heads[buckets[starts]]
        self._heads[buckets[ends]] = positions[ends]

    # Finding

    def tail(self, count: int = WINDOW) -> bytes:
        """The last tokens, as `find` takes them."""
        return self._at[max(self._length - count, 0) : self._length].tobytes()

    def find(self, suffix: bytes, limit: int) -> Match | None:
        """Where the tokens `suffix` ends with (int32) have occurred before, and at most `limit` tokens after that.

        Of the latest CANDIDATES positions in the bucket of its last GRAM tokens, the one that has most tokens in
        common with the end of `suffix` and is followed by one; of equals the latest. Where the log itself ends with
        `suffix` and the tokens that follow are fewer than `limit`, they are repeated: a text with a period goes on.
        """
        # Only a border has four such bytes in a row: the last byte of a token is less.
        suffix = suffix[-WINDOW * TOKEN_BYTES :].rpartition(_BREAK_BYTES)[2]
        width = len(suffix) // TOKEN_BYTES
        if width < GRAM or limit < 1:
            return None
        position, length = self._longest(suffix, width)
        if length < GRAM:
            return None
        found = self._at[position + 1 : min(position + 1 + limit, self._length)].tolist()
        if BREAK in found:
            del found[found.index(BREAK) :]
        elif len(found) < limit and suffix == self.tail(width):
            found = (found * (limit // len(found) + 1))[:limit]
        return Match(length, found)

    def _longest(self, suffix: bytes, width: int) -> tuple[int, int]:
        """The position of the longest occurrence, and its length; less than GRAM if there is none."""
        tokens, before, end = self._at, self._before, self._length - 1
        # The first token is the lowest of its digits: the highest one that differs tells how many are the same.
        wanted, ends = int.from_bytes(suffix, "little"), memoryview(suffix).cast("i")
        best, length = _NONE, GRAM - 1
        position = self._latest[self._bucket(*_GRAM_TOKENS.unpack_from(suffix, len(suffix) - _GRAM_TOKENS.size))]
        for _ in range(CANDIDATES):
            # Those before it are too close to the log's start, too.
            if position < length:
                break
            # The token that a longer one has in common as well is compared first.
            if tokens[position - length] == ends[-1 - length] and position < end and tokens[position + 1] != BREAK:
                seen = min(position + 1, width)
                there = int.from_bytes(tokens[position + 1 - seen : position + 1].tobytes(), "little")
                differs = there ^ (wanted >> (width - seen) * 32)
                common = seen - (differs.bit_length() + 31) // 32
                if common > length:
                    best, length = position, common
                    if length == width:
                        break
            position = before[position]
        return best, length


def _buckets(tokens: int) -> int:
    """A power of two: about one for each token."""
    return max(1 << (tokens - 1).bit_length(), _LEAST_BUCKETS)
