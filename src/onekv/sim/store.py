"""A shared store, as a dict: it outlives the process, and faults are injected into its calls.

site                  effect
store unreachable     any call fails
store slow            any call takes longer than the deadline
store full            a put is rejected
store flips           a bit of what is read is flipped
store forgets         the requested value is gone
"""

from collections.abc import Sequence

import numpy as np

from ..tiers.remote.stores import Trouble
from .faults import REMOTE_SITES, Faults, SimClock

UNREACHABLE, SLOW, FULL, FLIPS, FORGETS = REMOTE_SITES


class SimStore:
    def __init__(self, faults: Faults, clock: SimClock) -> None:
        self._faults, self._clock = faults, clock
        self.values: dict[str, bytes] = {}

    def _call(self) -> None:
        if self._faults.strikes(UNREACHABLE):
            raise Trouble("nobody answers")
        if self._faults.strikes(SLOW):
            self._clock.seconds += 3.0

    def heads(self, names: Sequence[str], size: int) -> list[bytes | None]:
        self._call()
        return [self.values[name][:size] if name in self.values else None for name in names]

    def get(self, name: str, size: int) -> memoryview | None:
        self._call()
        if self._faults.strikes(FORGETS):
            self.values.pop(name, None)
        if name not in self.values:
            return None
        value = bytearray(self.values[name][:size])
        if value and self._faults.strikes(FLIPS):
            value[len(value) // 2] ^= 4
        return memoryview(value)

    def put(self, name: str, value: memoryview) -> bool:
        self._call()
        if self._faults.strikes(FULL):
            raise Trouble("there is no room", refused=True)
        if name in self.values:
            return False
        self.values[name] = bytes(value)
        return True

    def delete(self, name: str) -> None:
        self._call()
        self.values.pop(name, None)

    def close(self) -> None:
        """Nothing is held."""

    def damage(self, a: int, b: int) -> bool:
        """Somebody changes a value: a bit, its length, or its place."""
        if not self.values:
            return False
        names = sorted(self.values)
        name, other = names[a % len(names)], names[b % len(names)]
        value = np.frombuffer(self.values[name], np.uint8).copy()
        if b % 3 == 0:
            value[b % len(value)] ^= 1 << (a % 8)
        elif b % 3 == 1:
            value = value[: b % len(value) + 1]
        self.values[name] = value.tobytes() if b % 3 < 2 else self.values[other]
        return True
