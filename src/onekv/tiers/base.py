"""What a tier is: a place for blocks that the pool has no room for.

A tier keeps *parts*. A part is one group's block of a node of the prefix index, or the recurrent states at a node's end
(`STATES`). It is named by the node's key and has one content for ever, byte for byte what the pool had, so a part is
added and removed, never changed. Nothing is encoded on the way.

Who owns a part while it moves:

    out    the engine's thread copies it from the pool into a buffer of the tier (`offer`; see `staging`). From then on
           the block is free; the buffer is the one copy in RAM until it is stored. A tier that has no buffer left says
           so at once and the block is lost: decoding never waits for a tier.
    in     the engine's thread says early what it will need (`expect`), so that it stays and can be brought nearer,
           while other requests are computed. Between two steps it says where parts belong, in blocks that are reserved
           in the pool, and until it returns `read` reads, checks and puts them there, perhaps with threads of the tier.
           Nobody else touches the pool meanwhile, and no thread of the tier does afterwards. What the tier has stays
           there, as a clean copy: evicting that block later costs no write.

A tier that others read, too, takes copies of what RAM keeps: it says which nodes it wants (`wants`) when they have
been used, and is offered them between later steps, as fast as it has buffers.

Looking up may take long where a tier has to ask elsewhere. `find` and `tails` then give None: not known yet. The tier
goes on finding out, and who asked asks again, with the same keys, between two steps. An answer is as good as when it
was given: a part that is gone by the time it is read is one that could not be read. Reading may take long, too: then
what is expected comes in threads of the tier, `ready` says what has come, and only that is read.

All methods are called by the engine's thread alone. Sizes are bytes: of what a part takes in the tier, header and
all. Budgets are bytes, too: what the tier holds (`limit`), what it has in RAM (`staging`).

A tier never fails a request. What cannot be read is a part that is not there: it is dropped, counted and logged once.
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
    """Counts since the tier was opened, but for `blocks` and `bytes`, which are there now.

    A hit is a part that was promoted. `discarded`: parts that were evicted from RAM and not stored, because there was
    no buffer for them, or the tier could not take them. `corrupt`: parts that were there and could not be used.
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
    # Evicted from the tier to hold its limit.
    evicted: int
    discarded: int
    corrupt: int
    # Bytes that wait to be written now.
    queued_bytes: int
    # Why the tier has stopped working, or is paused, if it is.
    failed: str | None
    # Of tiers on other machines. How often it was paused; look-ups and transfers that took too long; hits that were not
    # used, and look-ups that were not made, because computing is faster; parts written by somebody without the secret.
    pauses: int = 0
    late: int = 0
    not_worth: int = 0
    forged: int = 0
    # Running estimates: seconds until an answer begins, and bytes per second then; 0 before anything was measured.
    latency: float = 0.0
    bandwidth: float = 0.0

    @property
    def up(self) -> bool:
        return self.failed is None

    @property
    def summary(self) -> str:
        """A few words; a tier without a limit of its own does not know what it has."""
        if self.limit:
            return f"{self.blocks} blocks, {format_size(self.bytes)} of {format_size(self.limit)}"
        speed = f", {format_size(self.bandwidth)}/s" if self.bandwidth else ""
        return self.failed or f"{self.hits} blocks read, {self.writes} written{speed}"


@dataclass(frozen=True)
class Target:
    """Where a part is to be read to: memory as long as its content, or what is to be done with the content.

    A function is called once, perhaps by a thread of the tier, with bytes that were checked, which it must not keep.
    Memory is written to before they are.
    """

    key: bytes
    part: int
    into: bytearray | Callable[[memoryview], None]
    # Which block of the pool it is for; recurrent states have none.
    block: int | None = None


class Tier(Protocol):
    def find(self, keys: Sequence[bytes], seconds: float = 0.0) -> dict[bytes, Entry] | None:
        """Those of `keys` that the tier has something of, ready to be read.

        None: it is not known yet; ask again, with the same keys. Waits for that for at most `seconds`. Looking up a
        prompt takes several questions, which are all asked again: what has been answered once is answered at once for
        some seconds.
        """

    def has(self, key: bytes, part: int) -> bool:
        """Whether it is known, without asking anybody, that a part is there or on its way there."""

    def tails(self, parent: bytes, seconds: float = 0.0) -> list[Entry] | None:
        """The partial blocks that continue `parent`: ends of conversations. None and `seconds`: as for `find`."""

    def recent(self, count: int) -> list[Address]:
        """At most `count` nodes, those used last first. Asked once, at the start; a tier that cannot say has none."""
        return []

    def offer(self, address: Address, part: int, fill: Callable[[memoryview], None], wait: bool = False) -> bool:
        """Take a part, whose content `fill` copies into the buffer it is given; False if there was no room.

        A part that is there already, or on its way there, is not taken again, and that is True. With `wait`, wait for
        room.
        """

    def expect(self, parts: Sequence[tuple[bytes, int]]) -> None:
        """These will be read soon: until `read` or `unexpect` they are not evicted."""

    def unexpect(self, parts: Sequence[tuple[bytes, int]]) -> None:
        """These will not be read after all."""

    def ready(self, parts: Sequence[tuple[bytes, int]], seconds: float = 0.0) -> Sequence[tuple[bytes, int]]:
        """Those of the expected `parts` that `read` has an answer for at once; waits for one for at most `seconds`."""
        return parts

    def read(self, targets: Sequence[Target], seconds: float = math.inf) -> list[bool | None]:
        """Read parts that were expected, several at once, and begin none after `seconds`.

        None: there was no time for it; it is still expected. False: it could not be read; what memory was given for it
        holds is worthless.
        """

    def touch(self, keys: Sequence[bytes]) -> None:
        """They were used now, the last of them last: it is the last to be evicted."""

    def wants(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those of these nodes, all in RAM, that are to be offered although they stay there."""
        return []

    def computed(self, tokens: int, seconds: float) -> None:
        """So many tokens of prompts were computed in that time: what reading has to beat."""

    def drop(self, keys: Sequence[bytes], wrong: bool = False) -> None:
        """Forget these nodes. What other servers read, too, stays, unless it may be `wrong`."""

    def clear(self) -> None:
        """Forget everything of this model."""

    def flush(self) -> None:
        """Returns when all that was offered is stored."""

    def stats(self) -> TierStats:
        """What it did and has."""

    def close(self) -> None:
        """Store what was offered, end all threads, let go of what it holds. Closing twice is allowed."""
