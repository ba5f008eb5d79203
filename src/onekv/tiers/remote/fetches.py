"""Parts on their way in: fetched and verified by threads, several at once; the engine's thread takes what has arrived.

    queued -> running -> here, or failed
       \\________\\________\\__-> nobody wants it any more

Those running or here are within a budget of bytes, so that fetching proceeds as fast as the engine takes them. A part
is late if its own transfer takes too long: time spent waiting for the engine is not the store's fault.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..base import Address, Target
from ..image import Image
from .common import Common, Part, Threads, unforeseen
from .seal import SEAL
from .stores import Trouble

FETCHERS = 4


@dataclass(eq=False)
class Fetch:
    part: Part
    address: Address | None
    image: Image
    # Tokens that are computed if something of its load does not come.
    tokens: int
    # How many loads want it.
    wanted: int = 0
    began: float | None = None
    content: memoryview | None = None
    failed: bool = False

    @property
    def ready(self) -> bool:
        return self.failed or self.content is not None


class Fetches:
    def __init__(self, common: Common, budget: int) -> None:
        self._common, self._setup = common, common.setup
        self._budget = max(budget, max(image.size for image in self._setup.images.values()) + SEAL)
        # Bytes that run or are here.
        self.taken = 0
        self._fetches: dict[Part, Fetch] = {}
        self._queue: deque[Fetch] = deque()
        self._threads = Threads(common, FETCHERS, "onekv-remote-fetch")
        self._working = 0

    def expect(self, parts: Sequence[Part], address: Callable[[bytes], Address | None]) -> None:
        """Fetch these; `address` says what a node should be, with the lock held."""
        tokens = len({key for key, _ in parts}) * self._setup.block_tokens
        with self._common.lock:
            for part in parts:
                if part not in self._fetches:
                    fetch = self._fetches[part] = Fetch(part, address(part[0]), self._setup.images[part[1]], tokens)
                    fetch.failed = fetch.address is None
                    self._queue.append(fetch)
                self._fetches[part].wanted += 1
            self._work()

    def unexpect(self, parts: Sequence[Part]) -> None:
        with self._common.lock:
            for part in parts:
                self._drop(part)
            self._work()

    def ready(self, parts: Sequence[Part], seconds: float) -> list[Part]:
        """Those that have come or will not."""
        common = self._common
        with common.lock:
            end = self._common.now() + seconds
            while True:
                self._give_up(parts)
                # What was queued while the store was paused.
                self._work()
                found = [part for part in parts if self._fetches[part].ready]
                left = end - self._common.now()
                if found or left <= 0 or not self._setup.threads:
                    return found
                common.changed.wait(left)

    def _give_up(self, parts: Sequence[Part]) -> None:
        """Fail what will not arrive, or not in time. The lock is held."""
        common, now = self._common, self._common.now()
        fetches = [self._fetches[part] for part in parts if not self._fetches[part].ready]
        late = [f for f in fetches if f.began is not None and now - f.began > common.patience(f.image.size)]
        if late and not common.breaker.paused:
            common.counts.late += 1
            common.fail(f"a transfer took longer than {now - (late[0].began or now):.1f} s")
        if common.breaker.paused or common.closed:
            self._fail(fetches)
        elif fetches and not self._worth(fetches):
            common.counts.not_worth += 1
            self._fail(fetches)
            for fetch in fetches:
                # Found again, it would be abandoned again.
                common.is_gone(fetch.part)

    def _worth(self, fetches: Sequence[Fetch]) -> bool:
        """Whether the rest arrives sooner than it could be computed."""
        pace = self._common.pace
        compute = pace.compute(max(fetch.tokens for fetch in fetches))
        return compute is None or pace.transfer(sum(fetch.image.size for fetch in fetches)) <= max(compute, 0.1)

    def _fail(self, fetches: Sequence[Fetch]) -> None:
        for fetch in fetches:
            fetch.failed = True

    def read(self, targets: Sequence[Target]) -> list[bool | None]:
        with self._common.lock:
            fetches = [self._fetches[target.key, target.part] for target in targets]
            contents = [None if fetch.failed else fetch.content for fetch in fetches]
            answers = [content is not None if f.ready else None for f, content in zip(fetches, contents, strict=True)]
        for fetch, target, content in zip(fetches, targets, contents, strict=True):
            if content is not None:
                data = content[fetch.image.header_size : fetch.image.size]
                if isinstance(target.into, bytearray):
                    target.into[:] = data
                else:
                    target.into(data)
        # All at the end: where a target raises, everything is still expected.
        with self._common.lock:
            for fetch, answer in zip(fetches, answers, strict=True):
                if answer is not None:
                    self._common.counts.hits += answer
                    self._common.counts.promoted_bytes += fetch.image.size * answer
                    self._drop(fetch.part)
            self._work()
        return answers

    def _drop(self, part: Part) -> None:
        """One load less wants it. The lock is held."""
        fetch = self._fetches[part]
        fetch.wanted -= 1
        if fetch.wanted:
            return
        del self._fetches[part]
        # Not that of a running one: its thread returns it.
        if fetch.content is not None:
            fetch.content = None
            self.taken -= fetch.image.size

    def stop(self, seconds: float) -> None:
        self._threads.stop(seconds)

    # In threads

    def _work(self) -> None:
        """Ensure that threads fetch what can be fetched now. The lock is held."""
        for _ in range(min(FETCHERS, len(self._queue)) - self._working):
            self._working += 1
            self._threads.do(self._run)

    def _take(self) -> Fetch | None:
        """The next one, with room for it. The lock is held."""
        while self._queue:
            fetch = self._queue[0]
            if not fetch.wanted or fetch.failed:
                self._queue.popleft()
            elif self._common.breaker.paused or self._common.closed or self.taken + fetch.image.size > self._budget:
                return None
            else:
                self.taken += fetch.image.size
                fetch.began = self._common.now()
                return self._queue.popleft()
        return None

    def _run(self) -> None:
        self._threads.repeat(self._one)

    def _one(self) -> bool:
        """Fetch the next one; False if there is none."""
        common = self._common
        with common.lock:
            fetch = self._take()
            if fetch is None:
                self._working -= 1
                return False
        content = problem = None
        try:
            content = self._fetch(fetch)
        except Trouble as trouble:
            problem = str(trouble)
        except Exception as error:  # noqa: BLE001
            # Nobody may wait forever for a thread that is gone.
            problem = unforeseen(error)
        with common.lock:
            if problem is not None:
                common.fail(problem)
            fetch.failed = fetch.failed or content is None
            if fetch.wanted and not fetch.failed:
                fetch.content = content
            else:
                self.taken -= fetch.image.size
            common.changed.notify_all()
        return True

    def _fetch(self, fetch: Fetch) -> memoryview | None:
        """The part's file; None if it is not there, or wrong."""
        common, sealer = self._common, self._setup.sealer
        began = self._common.now()
        size = fetch.image.size + SEAL
        name = sealer.name(*fetch.part)
        content = self._setup.store.get(name, size + 1)
        if content is None:
            with common.lock:
                common.is_gone(fetch.part)
            return None
        assert fetch.address is not None, "without an address it has failed"
        if (problem := sealer.problem(name, content, fetch.image, fetch.address)) is not None:
            common.is_wrong(fetch.part, problem)
            return None
        with common.lock:
            now = self._common.now()
            common.pace.transferred(size, began, now)
            common.counts.promoted_seconds += now - began
        return content[: fetch.image.size]
