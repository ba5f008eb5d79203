"""What the prefix cache did: hits, and misses with their reason."""

from collections import Counter, OrderedDict
from dataclasses import dataclass

# Keys of evicted blocks that are remembered, to tell "evicted" from "never seen".
REMEMBERED = 65536

NO_SNAPSHOT = "no snapshot at that length"
EVICTED = "evicted"
OTHER_SALT = "other salt"
NEVER_SEEN = "never seen"


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
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    def hit(self, tokens: int) -> None:
        self.hits += 1
        self.reused += tokens

    def evicted(self, key: bytes) -> None:
        self._evicted[key] = None
        if len(self._evicted) > REMEMBERED:
            self._evicted.popitem(last=False)

    def was_evicted(self, key: bytes) -> bool:
        return key in self._evicted
