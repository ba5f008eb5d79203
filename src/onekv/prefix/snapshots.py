"""Recurrent states kept in the index: references to immutable arrays, within a budget, the oldest dropped first."""

from collections import OrderedDict
from dataclasses import dataclass

from ..memory.pool.sequence import State


@dataclass(frozen=True)
class Snapshot:
    """The recurrent states after exactly `length` tokens."""

    length: int
    states: list[State]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for state in self.states for part in state if part is not None)


class Snapshots:
    """Owns every snapshot; a key is whatever the snapshot belongs to, and has one at most."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        # Peak bytes kept.
        self.peak = 0
        self._kept: OrderedDict[bytes, Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> Snapshot | None:
        return self._kept.get(key)

    def use(self, key: bytes) -> None:
        """It counts as used now."""
        if key in self._kept:
            self._kept.move_to_end(key)

    def put(self, key: bytes, snapshot: Snapshot) -> list[tuple[bytes, Snapshot]]:
        """Keep a snapshot, unless it is there or larger than the budget; returns those that made room for it."""
        size = snapshot.nbytes
        if key in self._kept or size > self.budget:
            self.use(key)
            return []
        gone = []
        while self.nbytes + size > self.budget:
            oldest, dropped = next(iter(self._kept.items()))
            self.drop(oldest)
            gone.append((oldest, dropped))
        self._kept[key] = snapshot
        self.nbytes += size
        self.peak = max(self.peak, self.nbytes)
        return gone

    def drop(self, key: bytes) -> None:
        snapshot = self._kept.pop(key, None)
        if snapshot is not None:
            self.nbytes -= snapshot.nbytes

    def items(self) -> list[tuple[bytes, Snapshot]]:
        return list(self._kept.items())


def message_ends(prompt: list[int], stop_tokens: set[int]) -> list[int]:
    """Where later prompts are likely to leave this one: after its first message, often the system's; before its last;
    and after that, where the answer begins, which a later prompt may have without its thinking. Templates end a
    message with the token that ends an answer.
    """
    ends = [index + 1 for index, token in enumerate(prompt) if token in stop_tokens]
    return sorted({*ends[:1], *ends[-2:]})
