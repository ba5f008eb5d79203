"""Health by progress: whether the engine makes progress, based on what its thread is doing, and since when.

    loading -> ok -> shutting down -> ended     ended by itself, too, where the engine could not continue
               | ^
              stuck                             a step, or an order between two, takes longer than `--step-limit`

Probes read `Watch.state`. The watchdog, a daemon thread, logs the stacks of all Python threads, once for each stuck
step. With `--exit-when-stuck` it then ends the process, for a supervisor to restart it, and likewise if the engine
could not continue. The disk cache is consistent at every moment, so nothing is closed before.

If something holds Python's lock forever, this cannot run either; then no probe is answered, which has the same effect.
"""

import logging
import os
import sys
import threading
import traceback
from typing import Literal

from ..engine import EngineThread

log = logging.getLogger("onekv.server")

State = Literal["loading", "ok", "stuck", "shutting down", "ended"]

# The exit status of a process that ended itself because it was stuck, or its engine had failed.
STUCK_STATUS = 70
# How often the watchdog looks at most.
LOOK_S = 1.0


class Watch:
    def __init__(self, thread: EngineThread, step_limit: float) -> None:
        """`step_limit` is in seconds."""
        self.thread, self.step_limit = thread, step_limit

    @property
    def state(self) -> State:
        thread = self.thread
        what = thread.doing.what
        if what in ("loading", "ended"):
            return what
        if thread.stuck(self.step_limit):
            return "stuck"
        return "shutting down" if thread.stopping else "ok"

    def start(self, exit_when_stuck: bool) -> None:
        """Start the watchdog, which continues until the process ends."""
        threading.Thread(target=self._watch, args=(exit_when_stuck,), name="onekv-watchdog", daemon=True).start()

    def _watch(self, exit_when_stuck: bool) -> None:
        pause = threading.Event()
        # When the step began that was last reported.
        reported: float | None = None
        while self.state != "ended":
            pause.wait(min(LOOK_S, self.step_limit / 4))
            since = self.thread.doing.since
            if self.state == "stuck" and since != reported:
                reported = since
                log.critical("%s; all stacks:\n%s", self.thread.complaint(self.step_limit), stacks())
                if exit_when_stuck:
                    _exit()
            elif reported is not None and since != reported:
                reported = None
                log.warning("the stuck step has finished; the engine continues")
        if exit_when_stuck and self.thread.failed:
            _exit()


def _exit() -> None:
    log.critical("exiting with status %d (--exit-when-stuck)", STUCK_STATUS)
    logging.shutdown()
    os._exit(STUCK_STATUS)


def stacks() -> str:
    """Where each thread of this process is, as Python sees it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}, most recent call last:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
