"""What the threads of a remote tier share: what it was opened with, and what changes (`Common`)."""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from ..files import CLOCK, Clock
from ..image import Image
from .health import Breaker, Pace
from .seal import FORGED, Sealer
from .stores import Store

log = logging.getLogger("onekv.tiers")

# A part: the node's key, and a group or STATES.
Part = tuple[bytes, int]

# Seconds that a lookup may take: a share of what computing would, within bounds; and where that is not known yet.
LOOK_SHARE, LOOK_LEAST, LOOK_MOST, LOOK_UNKNOWN = 0.05, 0.1, 1.0, 0.5
# Seconds for which a part that could not be read is not looked for again.
GONE_SECONDS = 30.0
# Things remembered by key at most.
REMEMBERED = 65536


@dataclass(frozen=True)
class Setup:
    """What a remote tier was opened with."""

    store: Store
    # For messages.
    shown: str
    sealer: Sealer
    images: Mapping[int, Image]
    block_tokens: int
    # How many last blocks of each part a sequence reads to continue; None is all.
    reads: Mapping[int, int | None]
    # Seconds, if the user has set it.
    timeout: float | None
    write: str
    clock: Clock = CLOCK
    # Whether there are threads; else the caller runs one task at a time (`RemoteTier.work`).
    threads: bool = True

    def bytes_of(self, nodes: int) -> int:
        """Bytes read for this many blocks of a prompt."""
        return sum(
            image.size * (nodes if (most := self.reads[part]) is None else min(nodes, most))
            for part, image in self.images.items()
        )


Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(OrderedDict[Key, Value]):
    """Remembers so many; what was put first is forgotten first."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def put(self, key: Key, value: Value) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


@dataclass
class Counts:
    hits: int = 0
    promoted_bytes: int = 0
    promoted_seconds: float = 0.0
    writes: int = 0
    written_bytes: int = 0
    discarded: int = 0
    corrupt: int = 0
    forged: int = 0
    late: int = 0
    not_worth: int = 0


class Common:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.lock = threading.Lock()
        # Something has come, ended, or is to be done.
        self.changed = threading.Condition(self.lock)
        self.breaker = Breaker()
        # The store answers, and refuses to be written to.
        self.refusal = Breaker()
        self.pace = Pace()
        self.counts = Counts()
        self.closed = False
        # Parts that could not be read, and until when they count as not there.
        self.gone: Recent[Part, float] = Recent(REMEMBERED)
        # Values that are wrong and are to be removed.
        self.wrong: deque[str] = deque(maxlen=REMEMBERED)
        # Called with the lock held when there are some.
        self.clean: Callable[[], None] = lambda: None
        self._logged: set[str] = set()
        self.now = setup.clock.monotonic
        # Without threads: what they would do, in order.
        self.tasks: deque[Callable[[], None]] = deque()

    def wait(self, event: Callable[[], bool], seconds: float | None) -> None:
        """Wait for the event, at most `seconds`; without threads, nothing could trigger it. The lock is held."""
        if self.setup.threads:
            self.changed.wait_for(event, seconds)

    def limit(self, tokens: int) -> float:
        """How long a lookup for this many tokens may take. The lock is held."""
        if self.setup.timeout is not None:
            return self.setup.timeout
        compute = self.pace.compute(tokens)
        return LOOK_UNKNOWN if compute is None else min(max(LOOK_SHARE * compute, LOOK_LEAST), LOOK_MOST)

    def too_short(self, tokens: int) -> bool:
        """Whether so few tokens are computed so fast that an answer alone would take more than its share of that. The
        lock is held.
        """
        compute, latency = self.pace.compute(tokens), self.pace.latency
        if self.setup.timeout is not None or compute is None or latency is None:
            return False
        return latency > LOOK_SHARE * compute

    def patience(self, size: int) -> float:
        """How long one transfer of that size may take. The lock is held."""
        return max(self.setup.timeout or LOOK_MOST, 4 * self.pace.transfer(size))

    def fail(self, reason: str) -> None:
        """Something failed: the store is paused. The lock is held."""
        if self.closed:
            return
        if self.breaker.fail(reason, self.now()):
            log.warning("The remote tier %s is paused: %s. Prompts are computed until it works.", self._shown, reason)
        self.changed.notify_all()

    def resume(self) -> None:
        with self.lock:
            seconds = self.breaker.resume(self.now())
            if seconds is not None:
                log.warning("The remote tier %s is in use again, after %.0f s.", self._shown, seconds)
            self.changed.notify_all()

    def refused(self, reason: str) -> None:
        """The store cannot be written to for a while. The lock is held."""
        if self.refusal.fail(reason, self.now()):
            log.warning("The remote tier %s rejects writes: %s. Reads continue.", self._shown, reason)

    def written(self) -> None:
        """It can be written to. The lock is held."""
        if self.refusal.resume(self.now()) is not None:
            log.warning("The remote tier %s accepts writes again.", self._shown)

    @property
    def writable(self) -> bool:
        """Whether something could be written now. The lock is held."""
        waits = self.refusal.paused and self.now() < self.refusal.until
        return not (self.closed or self.breaker.paused or waits or self.setup.write == "off")

    @property
    def failed(self) -> str | None:
        """Why it is paused, or rejects writes. The lock is held."""
        if self.breaker.paused:
            return f"paused: {self.breaker.reason}"
        return f"rejects writes: {self.refusal.reason}" if self.refusal.paused else None

    def is_wrong(self, part: Part, problem: str) -> None:
        """A stored value cannot be used: it is removed, and not requested again soon."""
        name = self.setup.sealer.name(*part)
        with self.lock:
            self.counts.corrupt += 1
            self.counts.forged += problem == FORGED
            self.is_gone(part)
            if self.setup.write != "off":
                self.wrong.append(name)
                self.clean()
            if problem in self._logged:
                return
            self._logged.add(problem)
        log.warning(
            "A block in the remote tier %s cannot be used: %s (%s). It is recomputed; further cases are counted.",
            self._shown,
            problem,
            name,
        )

    def is_gone(self, part: Part) -> None:
        """It is not looked for again soon. The lock is held."""
        self.gone.put(part, self.now() + GONE_SECONDS)

    @property
    def _shown(self) -> str:
        return self.setup.shown


def unforeseen(error: Exception) -> str:
    return f"an unexpected error ({type(error).__name__}: {error})"


class Threads:
    """Threads that run what they are given, started on demand. They do not keep the process from exiting."""

    def __init__(self, common: Common, count: int, name: str) -> None:
        self._common, self._count, self._name = common, count, name
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def do(self, task: Callable[[], None]) -> None:
        if not self._common.setup.threads:
            self._common.tasks.append(task)
            return
        self._tasks.put(task)
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The process may have no more threads: the next task tries again, and deadlines hold meanwhile.
                return
            self._threads.append(thread)

    def stop(self, seconds: float) -> None:
        """Wait for busy threads; one that waits longer for a store is abandoned."""
        for _ in self._threads:
            self._tasks.put(None)
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def repeat(self, step: Callable[[], bool]) -> None:
        """In a thread: step while there is something to do. Without threads, one step is a task."""
        while step():
            if not self._common.setup.threads:
                self.do(lambda: self.repeat(step))
                return

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
