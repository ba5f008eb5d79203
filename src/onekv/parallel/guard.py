"""Ends the process, with the reason, when the ranks cannot continue together.

If a rank dies or diverges, the others block in a collective that nothing can interrupt. So the process exits at once,
with status 70, without closing anything; the disk cache is consistent at all times. It exits when

    another rank is gone or reports a failure
    another rank has been silent for `limit` seconds; each sends a heartbeat every second
    a joint operation (`busy`) takes longer than `limit` seconds
    the process that started it is gone: mlx.launch, if killed, would leave its ranks running. Here the rank sends
    itself SIGTERM, which ends all ranks cleanly

Loading a model, and writing the cache at shutdown, are not limited.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from ..interrupts import uninterrupted
from .wire import Gone, Wire

log = logging.getLogger("onekv.parallel")

FAILED_STATUS = 70
# The default of --step-limit, in seconds.
STEP_LIMIT = 300.0
# Heartbeat interval; shorter if `limit` is short.
BEAT_SECONDS = 1.0
# How long to wait for another rank's explanation when a collective breaks.
REASON_SECONDS = 2.0


class Guard:
    def __init__(self, rank: int, size: int, wires: dict[int, Wire], limit: float = STEP_LIMIT) -> None:
        """`wires` maps other ranks to the connections to them; `limit` is in seconds."""
        self.limit = limit
        self._name, self._wires = f"rank {rank} of {size}", wires
        self._ending, self._over = threading.Lock(), threading.Event()
        # The joint operation in progress: when it began, and what it is.
        self._busy: tuple[float, str] | None = None
        self._parent = os.getppid()

    def start(self) -> None:
        for target in (self._beat, self._watch):
            threading.Thread(target=target, name=f"onekv-ranks{target.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Orderly shutdown: connections may close from now on."""
        self._over.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """A joint operation of all ranks: takes at most `limit` seconds, and Ctrl-C is deferred until it is over."""
        with uninterrupted():
            self._busy = (time.monotonic(), what)
            try:
                yield
            finally:
                self._busy = None

    def broke(self, what: str, error: BaseException) -> NoReturn:
        """A joint operation raised `error`, perhaps only because another rank failed, which may be about to say so."""
        self._over.wait(REASON_SECONDS)
        log.critical("%s: %s failed", self._name, what, exc_info=error)
        self.fail(f"{what} failed: {error}")

    def fail(self, reason: str) -> NoReturn:
        """Tell the other ranks, and exit."""
        if not self._ending.acquire(blocking=False):
            # Another thread is doing it.
            threading.Event().wait()
        log.critical("%s exits: %s", self._name, reason)
        for wire in self._wires.values():
            # In threads: a peer that does not read must not keep this process alive.
            threading.Thread(target=_tell, args=(wire, reason), daemon=True).start()
        time.sleep(0.1)
        _exit(FAILED_STATUS)

    def leave(self) -> NoReturn:
        """Exit quietly: rank 0 failed to start, and reports that itself."""
        _exit(0)

    # Threads

    def _beat(self) -> None:
        while not self._over.wait(min(BEAT_SECONDS, self.limit / 4)):
            for wire in self._wires.values():
                try:
                    wire.send({"do": "beat"})
                except Gone:
                    # The receiving thread reports it.
                    return

    def _watch(self) -> None:
        while not self._over.wait(min(BEAT_SECONDS, self.limit / 4)):
            now, busy = time.monotonic(), self._busy
            if busy is not None and now - busy[0] > self.limit:
                self.fail(f"{busy[1]} takes more than {self.limit:g} s (--step-limit)")
            for rank, wire in self._wires.items():
                if now - wire.heard > self.limit:
                    self.fail(f"rank {rank} has been silent for more than {self.limit:g} s (--step-limit)")
            if os.getppid() != self._parent:
                self._parent = os.getppid()
                log.warning("%s: the process that started this rank is gone; shutting down", self._name)
                os.kill(os.getpid(), signal.SIGTERM)


def _exit(status: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _tell(wire: Wire, reason: str) -> None:
    with suppress(Gone):
        wire.send({"do": "failed", "reason": reason})
