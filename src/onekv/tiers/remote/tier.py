"""The remote tier: the contract of `base.py` over a shared store. The package's docstring explains the threads."""

import math
from collections.abc import Callable, Sequence

from ..base import Address, Entry, Target, TierStats
from ..image import TOKEN_BYTES
from ..staging import Staging
from .common import LOOK_UNKNOWN, REMEMBERED, Common, Part, Recent, Setup, Threads, unforeseen
from .fetches import Fetches
from .lookups import Lookups
from .seal import SEAL
from .stores import Trouble
from .writes import Rate, Writes

# A value that is there to measure the store with.
PROBE = 256 * 1024
# Seconds after which a store that seems too slow to be used is measured again.
MEASURE_SECONDS = 60.0
# Seconds that closing waits for what was offered, and for threads that wait for the store.
CLOSE_SECONDS, STOP_SECONDS = 10.0, 2.0
# Uses after which a node is written, by policy.
USES = {"all": 1, "twice": 2, "off": math.inf}


class RemoteTier:
    def __init__(self, setup: Setup, staging: int, arrivals: int, rate: float) -> None:
        """`staging` and `arrivals` are bytes on their way out and in, `rate` is bytes written per second."""
        self._setup = setup
        self._common = Common(setup)
        self._lookups = Lookups(self._common)
        self._fetches = Fetches(self._common, arrivals)
        self._writes = Writes(self._common, Staging(staging), Rate(rate))
        self._uses: Recent[bytes, int] = Recent(REMEMBERED)
        self._whole = setup.block_tokens * TOKEN_BYTES
        self._keeper = Threads(self._common, 1, "onekv-remote-keeper")
        self._keeper.do(self._keep if setup.threads else self._probe)

    # Looking up

    def find(self, keys: Sequence[bytes], seconds: float = 0.0) -> dict[bytes, Entry] | None:
        return self._lookups.find(keys, seconds)

    def has(self, key: bytes, part: int) -> bool:
        with self._common.lock:
            return self._writes.has((key, part))

    def tails(self, parent: bytes, seconds: float = 0.0) -> list[Entry] | None:
        # Whole blocks alone are there: finding ends of conversations would take a list that servers change together.
        return []

    def recent(self, count: int) -> list[Address]:
        return []

    # In

    def expect(self, parts: Sequence[Part]) -> None:
        self._fetches.expect(parts, self._lookups.address)

    def unexpect(self, parts: Sequence[Part]) -> None:
        self._fetches.unexpect(parts)

    def ready(self, parts: Sequence[Part], seconds: float = 0.0) -> Sequence[Part]:
        return self._fetches.ready(parts, seconds)

    def read(self, targets: Sequence[Target], seconds: float = math.inf) -> list[bool | None]:
        answers = self._fetches.read(targets)
        came = [(target.key, target.part) for target, answer in zip(targets, answers, strict=True) if answer]
        with self._common.lock:
            self._writes.there(came)
        return answers

    def computed(self, tokens: int, seconds: float) -> None:
        with self._common.lock:
            self._common.pace.computed(tokens, seconds)

    # Out

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._uses.put(key, self._uses.get(key, 0) + 1)

    def wants(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        with self._common.lock:
            if not self._common.writable:
                return []
            parts = list(self._setup.images)
            return [key for key in keys if self._used(key) and not all(self._writes.has((key, p)) for p in parts)]

    def _used(self, key: bytes) -> bool:
        return self._uses.get(key, 0) >= USES[self._setup.write]

    def offer(self, address: Address, part: int, fill: Callable[[memoryview], None], wait: bool = False) -> bool:
        if len(address.tokens) < self._whole:
            # The partial block at the end of a conversation, which could not be found.
            return False
        name = (address.key, part)
        with self._common.lock:
            if self._writes.has(name):
                return True
            if not (self._common.writable and self._used(address.key)):
                return False
        image = self._setup.images[part]
        buffer = self._take(image.size + SEAL, wait)
        if buffer is None:
            return False
        try:
            fill(buffer[image.header_size : image.size])
            buffer[: image.header_size] = image.header(self._setup.sealer.model, address)
        except BaseException:
            self._writes.staging.give(buffer)
            raise
        self._writes.put(name, buffer)
        return True

    def _take(self, size: int, wait: bool) -> memoryview | None:
        staging = self._writes.staging
        if self._setup.threads:
            return staging.take(size, wait)
        while (buffer := staging.take(size)) is None and wait and self.work():
            continue
        return buffer

    def drop(self, keys: Sequence[bytes], wrong: bool = False) -> None:
        """Removed from the store only if they may be wrong: other servers use it, too."""
        parts = [(key, part) for key in keys for part in self._setup.images]
        with self._common.lock:
            self._lookups.forget(keys)
            self._writes.forget(parts)
            for key in keys:
                self._uses.pop(key, None)
            if wrong and self._setup.write != "off" and not self._common.closed:
                self._common.wrong += [self._setup.sealer.name(*part) for part in parts]
                self._writes.work()

    def clear(self) -> None:
        """Drops what this server knows about the store. The store itself is left alone, because others use it."""
        with self._common.lock:
            self._lookups.forget()
            self._writes.forget()
        self._uses.clear()

    def flush(self) -> None:
        self._work_off()
        self._writes.flush()

    def _work_off(self) -> None:
        while not self._setup.threads and self._writes.pending and self.work():
            continue

    def stats(self) -> TierStats:
        with self._common.lock:
            common = self._common
            counts, pace = common.counts, common.pace
            return TierStats(
                name="remote",
                blocks=0,
                bytes=0,
                limit=0,
                hits=counts.hits,
                promoted_bytes=counts.promoted_bytes,
                promoted_seconds=counts.promoted_seconds,
                writes=counts.writes,
                written_bytes=counts.written_bytes,
                evicted=0,
                discarded=counts.discarded,
                corrupt=counts.corrupt,
                queued_bytes=self._writes.staging.taken,
                failed=common.failed,
                pauses=common.breaker.pauses,
                late=counts.late,
                not_worth=counts.not_worth,
                forged=counts.forged,
                latency=pace.latency or 0.0,
                bandwidth=1 / pace.byte if pace.byte else 0.0,
            )

    def work(self, tasks: int = 1) -> bool:
        """Without threads: do the next tasks here; False if there was nothing to do."""
        assert not self._setup.threads, "there are threads"
        common, done = self._common, 0
        while done < tasks and common.tasks:
            common.tasks.popleft()()
            done += 1
        if not done and common.breaker.paused and common.now() >= common.breaker.until:
            self._probe()
            done = 1
        return done > 0

    def close(self) -> None:
        self._work_off()
        self._writes.stop(CLOSE_SECONDS)
        with self._common.lock:
            self._common.closed = True
            self._common.changed.notify_all()
        self._writes.staging.close()
        for threads in (self._lookups, self._fetches, self._keeper):
            threads.stop(STOP_SECONDS)
        self._setup.store.close()

    # The keeper

    def _keep(self) -> None:
        """Measure the store at startup; then wait until it is paused or too slow, and probe it."""
        common = self._common
        self._probe()
        while True:
            with common.lock:
                refused = common.counts.not_worth
                self._sleep(lambda: common.breaker.paused, MEASURE_SECONDS)
                if common.breaker.paused:
                    self._sleep(lambda: False, common.breaker.until - self._common.now())
                if common.closed:
                    return
                if not common.breaker.paused and common.counts.not_worth == refused:
                    continue
            self._probe()

    def _sleep(self, event: Callable[[], bool], seconds: float) -> None:
        """Until the event, the end of the tier, or for `seconds`. The lock is held."""
        self._common.wait(lambda: self._common.closed or event(), seconds)

    def _probe(self) -> None:
        """Request something small and something larger; use the store again if that was fast enough."""
        common, store, name = self._common, self._setup.store, self._setup.sealer.probe
        try:
            began = self._common.now()
            there = store.heads([name], 1)[0] is not None
            answered = self._common.now()
            value = store.get(name, PROBE) if there else None
            ended = self._common.now()
            if value is not None and len(value) == PROBE:
                with common.lock:
                    common.pace.answered(answered - began)
                    common.pace.transferred(PROBE, answered, ended)
            elif self._setup.write != "off":
                self._put_probe(name)
        except Trouble as trouble:
            with common.lock:
                common.fail(str(trouble))
            return
        except Exception as error:  # noqa: BLE001
            # Without a keeper the tier would stay paused forever.
            with common.lock:
                common.fail(unforeseen(error))
            return
        with common.lock:
            limit = self._setup.timeout or LOOK_UNKNOWN
            if answered - began > limit:
                common.fail(f"it took {answered - began:.1f} s to answer")
                return
        common.resume()

    def _put_probe(self, name: str) -> None:
        store, value = self._setup.store, memoryview(bytes(PROBE))
        try:
            if not store.put(name, value):
                # One that is too short: what would be measured with it is not the store.
                store.delete(name)
                store.put(name, value)
        except Trouble as trouble:
            if not trouble.refused:
                raise
            with self._common.lock:
                self._common.refused(str(trouble))
