"""What the prefix cache did: hits, and misses with their reason."""

from collections import Counter, OrderedDict
from dataclasses import dataclass

# Keys of removed blocks, remembered with the reason, to distinguish that from "never seen".
REMEMBERED = 65536

NO_SNAPSHOT = "no snapshot at that length"
EVICTED = "evicted"
DAMAGED = "could not be read from a colder tier"
OTHER_SALT = "other salt"
NEVER_SEEN = "never seen"
LATE = "a colder tier has not answered yet"


@dataclass(frozen=True)
class PrefixStats:
    """`misses` counts requests by the reason why no more of their prompt was cached."""

    hits: int
    tokens_reused: int
    misses: dict[str, int]
    nodes: int
    evicted_blocks: int
    snapshots: int
    snapshot_bytes: int
    peak_snapshot_bytes: int


class Figures:
    def __init__(self) -> None:
        self.hits = self.reused = self.evicted_blocks = 0
        self.misses: Counter[str] = Counter()
        self._gone: OrderedDict[bytes, str] = OrderedDict()

    def started(self, cached: int, missed: str | None) -> None:
        """A request found `cached` tokens, and not more for the reason `missed`, if there were more."""
        if cached:
            self.hits += 1
            self.reused += cached
        if missed is not None:
            self.misses[missed] += 1

    def remember(self, key: bytes, reason: str) -> None:
        """The block `key` is no longer cached."""
        self._gone[key] = reason
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def why_gone(self, key: bytes) -> str | None:
        return self._gone.get(key)
