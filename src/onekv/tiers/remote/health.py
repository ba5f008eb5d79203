"""Whether a store is in use, and how long it is expected to take.

`Breaker` and `Pace` are pure: they know neither stores nor threads, and are passed the time. `Common.lock` guards them.
"""

from dataclasses import dataclass

# Seconds of a first pause, and of the longest. It doubles while the store fails again soon after it was used again.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# How much a new measurement counts against those before.
WEIGHT = 0.25
# Reading must be expected to take no more than this share of what computing would.
WORTH = 0.8


class Breaker:
    """up -> paused, for a while -> up."""

    def __init__(self) -> None:
        # Why it is paused, until when at least, and since when.
        self.reason: str | None = None
        self.until = self.since = 0.0
        self.pauses = 0
        self._pause = FIRST_PAUSE
        self._up_since: float | None = None

    @property
    def paused(self) -> bool:
        return self.reason is not None

    def fail(self, reason: str, now: float) -> bool:
        """Something failed: pause, or extend the pause. Returns whether it was in use until now."""
        changed = not self.paused
        if self._up_since is None or (changed and now - self._up_since >= LONGEST_PAUSE):
            self._pause = FIRST_PAUSE
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if changed:
            self.since, self.pauses = now, self.pauses + 1
        self._up_since = self._up_since if self._up_since is not None else now
        self.reason, self.until = reason, now + self._pause
        return changed

    def resume(self, now: float) -> float | None:
        """It works again: returns how many seconds it was paused; None if it was in use."""
        if not self.paused:
            return None
        self.reason, self._up_since = None, now
        return now - self.since


@dataclass
class Pace:
    """Running estimates of what reading and computing take; None before anything was measured."""

    # Seconds until an answer begins, seconds for a byte, and for a token of a prompt.
    latency: float | None = None
    byte: float | None = None
    token: float | None = None
    # When a transfer ended last: of several at once, each took what passed since then.
    _ended: float = 0.0

    def answered(self, seconds: float) -> None:
        self.latency = _mean(self.latency, seconds)

    def transferred(self, size: int, began: float, now: float) -> None:
        # Means of seconds per byte, not of bytes per second: what is expected is a time.
        self.byte = _mean(self.byte, (now - max(began, self._ended)) / size)
        self._ended = now

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens and seconds > 0:
            self.token = _mean(self.token, seconds / tokens)

    def transfer(self, size: int) -> float:
        """Expected seconds for `size` bytes, given what is in flight."""
        return (self.latency or 0.0) + size * (self.byte or 0.0)

    def compute(self, tokens: int) -> float | None:
        return tokens * self.token if self.token is not None else None

    def worth(self, size: int, tokens: int) -> bool:
        """Whether to read `size` bytes rather than compute `tokens`; even where that is not known."""
        compute = self.compute(tokens)
        return compute is None or self.transfer(size) <= WORTH * compute


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
