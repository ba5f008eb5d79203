"""Parts on their way out: sealed and put by one thread, at a limited rate, unless they are already there.

Whatever the store does, an accepted part leaves its buffer: it is stored, was already there, or is lost.
"""

from collections import deque
from collections.abc import Sequence

from ..staging import Staging
from .common import REMEMBERED, Common, Part, Recent, Threads, unforeseen
from .stores import Trouble

# Puts and removals in a second, at most.
OPERATIONS = 200
# Seconds for which a part that was there is not offered again.
KNOWN_SECONDS = 600.0


class Rate:
    """Limits bytes and operations per second: when the next may begin."""

    def __init__(self, bytes_per_second: float, operations: float = OPERATIONS) -> None:
        self._byte, self._operation = 1 / bytes_per_second, 1 / operations
        self._next = 0.0

    def wait(self, size: int, now: float) -> float:
        """Seconds until an operation of `size` bytes may begin, which it does then."""
        begin = max(now, self._next)
        self._next = begin + max(size * self._byte, self._operation)
        return begin - now


class Writes:
    def __init__(self, common: Common, staging: Staging, rate: Rate) -> None:
        self._common, self._setup = common, common.setup
        self.staging, self._rate = staging, rate
        self._queue: deque[tuple[Part, memoryview]] = deque()
        self._pending: set[Part] = set()
        # Parts that the store had, and until when that is believed.
        self._known: Recent[Part, float] = Recent(REMEMBERED)
        self._thread = Threads(common, 1, "onekv-remote-write")
        self._working = False
        self._hurry = False
        common.clean = self.work

    def has(self, part: Part) -> bool:
        """Whether it is there, or on its way. The lock is held."""
        now = self._common.now()
        there = self._known.get(part, 0.0) > now and self._common.gone.get(part, 0.0) <= now
        return there or part in self._pending

    def there(self, parts: Sequence[Part]) -> None:
        """The store has these. The lock is held."""
        until = self._common.now() + KNOWN_SECONDS
        for part in parts:
            self._known.put(part, until)

    def forget(self, parts: Sequence[Part] | None = None) -> None:
        """The store may not have these, or any. The lock is held."""
        for part in list(self._known) if parts is None else parts:
            self._known.pop(part, None)

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def put(self, part: Part, buffer: memoryview) -> None:
        with self._common.lock:
            self._pending.add(part)
            self._queue.append((part, buffer))
            self.work()

    def work(self) -> None:
        """There is something to do. The lock is held."""
        if not self._working and (self._queue or self._common.wrong):
            self._working = True
            self._thread.do(self._run)

    def flush(self, seconds: float | None = None) -> None:
        """Returns when everything is stored or lost, or after `seconds`."""
        with self._common.lock:
            self._common.wait(lambda: not self._pending, seconds)

    def stop(self, seconds: float) -> None:
        """What is not stored within `seconds` is lost."""
        self.flush(seconds)
        with self._common.lock:
            self._hurry = True
            self._lose_all()
            self._common.changed.notify_all()
        self._thread.stop(1.0)

    # In the thread

    def _run(self) -> None:
        self._thread.repeat(self._one)

    def _one(self) -> bool:
        """Remove something that is wrong, or put the next one; False if there is nothing to do."""
        common = self._common
        with common.lock:
            if not common.writable:
                common.wrong.clear()
                self._lose_all()
            if not common.wrong and not self._queue:
                self._working = False
                return False
            wrong = common.wrong.popleft() if common.wrong else None
            part, buffer = self._queue.popleft() if wrong is None else (None, None)
            delay = self._rate.wait(len(buffer) if buffer is not None else 0, common.now())
            # The end of the process does not wait for it.
            common.wait(lambda: self._hurry, delay)
        stored = False
        try:
            if wrong is not None:
                self._setup.store.delete(wrong)
            elif part is not None and buffer is not None:
                stored = self._put(part, buffer)
        except Trouble as trouble:
            with common.lock:
                (common.refused if trouble.refused else common.fail)(str(trouble))
        except Exception as error:  # noqa: BLE001
            # Nobody may wait forever for a thread that is gone.
            with common.lock:
                common.fail(unforeseen(error))
        if part is not None and buffer is not None:
            with common.lock:
                self._end(part, buffer, stored)
        return True

    def _put(self, part: Part, buffer: memoryview) -> bool:
        common, store = self._common, self._setup.store
        name = self._setup.sealer.name(*part)
        new = False
        # Asked first: bytes that are there need not be sent.
        head = store.heads([name], 1)[0]
        if head is None:
            self._setup.sealer.seal(name, buffer)
            new = store.put(name, buffer)
            # Another server's; or an empty value, which Valkey does not tell from none.
            head = None if new else store.heads([name], 1)[0]
        if not new and not head:
            common.is_wrong(part, "it is empty")
            return False
        with common.lock:
            if new:
                common.counts.writes += 1
                common.counts.written_bytes += len(buffer)
                common.written()
            self.there([part])
            common.gone.pop(part, None)
        return True

    def _end(self, part: Part, buffer: memoryview, stored: bool) -> None:
        self._pending.discard(part)
        self.staging.give(buffer)
        self._common.counts.discarded += not stored
        self._common.changed.notify_all()

    def _lose_all(self) -> None:
        while self._queue:
            self._end(*self._queue.popleft(), stored=False)
