"""What a tier is: storage for blocks that do not fit in the pool.

A tier keeps *parts*. A part is one group's block of a node of the prefix index, or the recurrent states at a node's end
(`STATES`). It is named by the node's key and its content is immutable, byte for byte what the pool had, so parts are
added and removed, never changed. Nothing is re-encoded on the way.

Who owns a part while it moves:

    out    the engine's thread copies it from the pool into a buffer of the tier (`offer`; see `staging`). From then on
           the block is free; the buffer is the only copy in RAM until it is stored. If the tier has no buffer left, it
           says so at once and the block is lost: decoding never waits for a tier.
    in     the engine's thread announces early what it will need (`expect`), so that it is kept and can be prefetched
           while other requests are computed. Between two steps it says where parts belong, in blocks reserved in the
           pool, and `read` reads and verifies them and puts them there before it returns, perhaps with the tier's
           threads. Nobody else touches the pool meanwhile, and no thread of the tier does afterwards. The tier keeps
           its clean copy: evicting that block later costs no write.

A shared tier takes copies of what stays in RAM: it says which nodes it wants (`wants`) when they have been used, and is
offered them between later steps, as fast as it has buffers.

A lookup may take long if the tier is remote. `find` and `tails` then return None: not known yet. The tier continues the
lookup, and the caller repeats the call, with the same keys, between two steps. An answer may be outdated: a part that
is gone by the time it is read counts as one that could not be read. Reading may take long, too: then expected parts are
fetched by the tier's threads, `ready` returns those that have arrived, and only those are read.

All methods are called by the engine's thread only. Sizes are in bytes: what a part takes in the tier, including its
header. Budgets are in bytes, too: what the tier holds (`limit`), what it has in RAM (`staging`).

A tier never fails a request. A part that cannot be read counts as missing: it is dropped, counted and logged once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..units import format_size

# The part of a node that is its recurrent states; parts from 0 on are groups.
STATES = -1


@dataclass(frozen=True)
class Address:
    """A node as a tier knows it: the tokens [start, start + len(tokens) / 4) that follow the node `parent`."""

    key: bytes
    parent: bytes
    start: int
    # int32, little-endian, as in the prefix index.
    tokens: bytes


@dataclass(frozen=True)
class Entry:
    """What a tier has of a node."""

    address: Address
    parts: frozenset[int]


@dataclass(frozen=True)
class TierStats:
    """Counts since the tier was opened, except for `blocks` and `bytes`, which are there now.

    A hit is a part that was promoted. `discarded`: parts that were evicted from RAM and not stored, because there was
    no buffer for them, or the tier rejected them. `corrupt`: parts that were found but could not be used.
    """

    name: str
    blocks: int
    bytes: int
    limit: int
    hits: int
    promoted_bytes: int
    promoted_seconds: float
    writes: int
    written_bytes: int
    # Evicted from the tier to stay within its limit.
    evicted: int
    discarded: int
    corrupt: int
    # Bytes currently queued to be written.
    queued_bytes: int
    # Why the tier has stopped working, or is paused, if it is.
    failed: str | None
    # Remote tiers only: how often it was paused; lookups and transfers that took too long; hits that were not used,
    # and lookups that were skipped, because computing is faster; parts written without the secret.
    pauses: int = 0
    late: int = 0
    not_worth: int = 0
    forged: int = 0
    # Running estimates: seconds until a response begins, and bytes per second then; 0 before anything was measured.
    latency: float = 0.0
    bandwidth: float = 0.0

    @property
    def up(self) -> bool:
        return self.failed is None

    @property
    def summary(self) -> str:
        """In a few words; a tier without its own limit does not know its contents."""
        if self.limit:
            return f"{self.blocks} blocks, {format_size(self.bytes)} of {format_size(self.limit)}"
        speed = f", {format_size(self.bandwidth)}/s" if self.bandwidth else ""
        return self.failed or f"{self.hits} blocks read, {self.writes} written{speed}"


@dataclass(frozen=True)
class Target:
    """Where to read a part to: memory of its size, or a function that takes the content.

    A function is called once, perhaps by a thread of the tier, with verified bytes, which it must not keep. Memory is
    written to before verification.
    """

    key: bytes
    part: int
    into: bytearray | Callable[[memoryview], None]
    # Which block of the pool it is for; recurrent states have none.
    block: int | None = None


class Tier(Protocol):
    def find(self, keys: Sequence[bytes], seconds: float = 0.0) -> dict[bytes, Entry] | None:
        """Those of `keys` that the tier has something of, ready to be read.

        None: not known yet; ask again, with the same keys. Waits at most `seconds`. Looking up a prompt takes several
        calls, which are all repeated: what has been answered once is answered at once for some seconds.
        """

    def has(self, key: bytes, part: int) -> bool:
        """Whether a part is known, without a lookup, to be there or in flight."""

    def tails(self, parent: bytes, seconds: float = 0.0) -> list[Entry] | None:
        """The partial blocks that continue `parent`: ends of conversations. None and `seconds`: as for `find`."""

    def recent(self, count: int) -> list[Address]:
        """At most `count` nodes, most recently used first. Called once, at startup; none if the tier cannot tell."""
        return []

    def offer(self, address: Address, part: int, fill: Callable[[memoryview], None], wait: bool = False) -> bool:
        """Accept a part, whose content `fill` copies into the buffer it is given; False if there was no room.

        A part that is already there or in flight is not copied again and returns True. With `wait`, wait for room.
        """

    def expect(self, parts: Sequence[tuple[bytes, int]]) -> None:
        """These will be read soon: until `read` or `unexpect` they are not evicted."""

    def unexpect(self, parts: Sequence[tuple[bytes, int]]) -> None:
        """These will not be read after all. Must not raise; if it does, nothing has changed, and it is called again."""

    def ready(self, parts: Sequence[tuple[bytes, int]], seconds: float = 0.0) -> Sequence[tuple[bytes, int]]:
        """Those of the expected `parts` that `read` can answer at once; waits at most `seconds` for one."""
        return parts

    def read(self, targets: Sequence[Target], seconds: float = math.inf) -> list[bool | None]:
        """Read expected parts, several at once, and start none after `seconds`.

        None: there was no time for it; it is still expected. False: it could not be read; the memory given for it has
        undefined contents.
        """

    def touch(self, keys: Sequence[bytes]) -> None:
        """They were used now, in this order: the last is evicted last."""

    def wants(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those of these nodes, all in RAM, that the tier wants copies of."""
        return []

    def computed(self, tokens: int, seconds: float) -> None:
        """This many prompt tokens were computed in that time: the speed that reading has to beat."""

    def drop(self, keys: Sequence[bytes], wrong: bool = False) -> None:
        """Drop these nodes. In a store that other servers read they stay, unless they may be `wrong`."""

    def clear(self) -> None:
        """Drop everything of this model."""

    def flush(self) -> None:
        """Returns when everything offered is stored."""

    def stats(self) -> TierStats:
        """Counts and contents."""

    def close(self) -> None:
        """Store what was offered, end all threads, release everything. Closing twice is allowed."""
