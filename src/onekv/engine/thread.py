"""The one thread that owns MLX, and how others talk to it.

Orders arrive through a queue: start a job, cancel one, call a function between two steps. A job's output leaves through
its `emit`, which the engine's thread calls (`jobs.py`). No other thread ever touches the engine: observers get an
immutable snapshot (`look`), which is refreshed after a step, a few times a second. What the thread is doing, and since
when, can be read at any time (`doing`), even in the middle of a step that hangs.

    job     submitted -> waiting -> prefilling -> running -> ended: End | error
                 \\_ rejected at once: too long, or queue full      \\_ cancelled: End("cancelled")

If the engine cannot continue, the thread ends, and every job with it: nothing waits for a thread that has ended. Nor
does `stop` wait for one that is stuck, which ends with the process.
"""

import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..errors import OverloadedError, RequestFailedError, StuckError
from .doing import Doing, What
from .engine import Engine
from .jobs import Job, Jobs
from .stream import borrowed_stream
from .view import View, look

log = logging.getLogger("onekv.engine")
Result = TypeVar("Result")


# How old a snapshot of the engine may become while there are watchers or something runs, and for how long after a
# look its caller counts as a watcher.
VIEW_SECONDS, WATCH_SECONDS = 0.25, 5.0
# Between two attempts to copy blocks to a colder tier if there is nothing else to do.
SHARE_SECONDS = 0.01
# How long a thread that Python has joined may take to end.
GONE_SECONDS = 10.0
# How often to check whether a thread that is being stopped is stuck.
LOOK_SECONDS = 0.05
# What those are told who ask an engine that could not continue, or had asked it.
FAILURE = "the engine could not continue and has ended; the log has the reason"


class EngineThread:
    def __init__(
        self,
        build: Callable[[], Engine],
        max_waiting: int = 256,
        max_wait: float = 600.0,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`build` makes the engine, in its own thread. At most `max_waiting` requests wait, each `max_wait` seconds.

        `now` tells the time in seconds.
        """
        self._build = build
        self._max_waiting, self._max_wait = max_waiting, max_wait
        self._now = now
        # Whether every count is checked whenever the engine becomes idle; the thread ends if one is wrong.
        self.check_integrity = False
        self._orders: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._jobs = Jobs()
        self._lock = threading.Lock()
        self._submitted = 0
        self._room = 0
        self._stopping = False
        # When running jobs are cancelled, once it is stopping.
        self._deadline = math.inf
        self._view: View | None = None
        # Until when there are watchers, and watchers of the state of every block.
        self._watched, self._blocks_watched = -math.inf, -math.inf
        # Whether the engine could not continue.
        self.failed = False
        self._doing = Doing("loading", now())
        # For `doing` alone; the engine's own thread passes it on.
        self._engine: Engine | None = None
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="onekv-engine", daemon=True)

    # From any thread

    def start(self) -> None:
        """Returns when the engine is built; if building it raised, raises that once the thread has ended."""
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            if self._ready.done():
                self._thread.join()
                _wait_until_gone(self._thread)
            raise

    def submit(self, jobs: list[Job]) -> None:
        """Start all of `jobs` or none. Raises OverloadedError at once; other rejections arrive as the job's event."""
        with self._lock:
            self.check_open()
            if self.open_jobs + len(jobs) > self._room:
                raise OverloadedError(
                    f"{self.open_jobs} requests are running or waiting, the limit is {self._room}; try again later "
                    "(--max-waiting changes it)",
                    retry_after=2,
                )
            self._submitted += len(jobs)
            for job in jobs:
                self._orders.put(partial(self._jobs.begin, job=job))

    def cancel(self, jobs: list[Job]) -> None:
        """End those of `jobs` that have not ended; each then emits its End."""
        self._orders.put(partial(self._jobs.cancel, jobs=jobs))

    def call(self, function: Callable[[Engine], Result]) -> "Future[Result]":
        """Run `function` in the engine's thread, between two steps."""
        future: Future[Result] = Future()

        def order(engine: Engine) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(engine))
                except Exception as error:  # noqa: BLE001  it is raised where the result is requested
                    future.set_exception(error)

        with self._lock:
            self.check_open()
            self._orders.put(order)
        return future

    def look(self, blocks: bool = False) -> View:
        """The engine as it was after a recent step; soon with the state of every block, if wanted.

        Never blocks: during a long step it is the snapshot from before it.
        """
        assert self._view is not None, "the engine was not started"
        now, before = self._now(), self._watched
        self._watched = now + WATCH_SECONDS
        if blocks:
            self._blocks_watched = self._watched
        if now >= before and not self._stopping:
            # It may be idle, and wakes up only for an order.
            self._orders.put(lambda engine: None)
        return self._view

    def check_open(self) -> None:
        """Raises OverloadedError if it is stopping, RequestFailedError if it could not continue.

        With the lock held, an accepted order is also carried out.
        """
        if self.failed:
            raise RequestFailedError(FAILURE)
        if self._stopping:
            raise OverloadedError("the server is shutting down", retry_after=5)

    @property
    def doing(self) -> Doing:
        """What it is doing now; read from any thread, whatever that is."""
        doing, engine = self._doing, self._engine
        if doing.what == "step" and engine is not None:
            return Doing(doing.what, doing.since, *engine.at_work)
        if doing.what == "closing" and engine is not None:
            return Doing(doing.what, doing.since, stored=engine.stored)
        return doing

    def age(self) -> float:
        """For how many seconds it has been doing that; compiling does not count."""
        return self._doing.age(self._now())

    def stuck(self, limit: float) -> bool:
        """Whether a step or an order takes longer than `limit` seconds."""
        return self._doing.stuck(self._now(), limit)

    def complaint(self, limit: float) -> str:
        """Of a thread that is stuck: with what, and for how long."""
        return f"the engine is stuck: {self.doing} for {self.age():.1f} s, more than {limit:g} s (--step-limit)"

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def open_jobs(self) -> int:
        """Jobs that were submitted and have not ended."""
        return self._submitted - self._jobs.ended

    @property
    def quiet(self) -> bool:
        """Whether all orders have been carried out."""
        return self._orders.empty()

    def stop(self, grace: float = 10.0, step_limit: float = math.inf) -> None:
        """Reject new jobs, let existing ones run for `grace` seconds, cancel the rest, close the engine.

        Raises StuckError if the grace is over and the step in flight has taken more than `step_limit` seconds: then
        nothing was closed, and the process should exit.
        """
        with self._lock:
            if self._stopping:
                return
            self._deadline = self._now() + grace
            self._stopping = True
        self._orders.put(None)
        self._thread.join(LOOK_SECONDS)
        while self._thread.is_alive():
            if self._now() >= self._deadline and self.stuck(step_limit):
                raise StuckError(f"{self.complaint(step_limit)}; what was cached only in memory is lost")
            self._thread.join(LOOK_SECONDS)
        _wait_until_gone(self._thread)

    # In the engine's thread

    def _run(self) -> None:
        with borrowed_stream():
            self._compute()

    def _compute(self) -> None:
        try:
            engine = self.open()
        except BaseException as error:  # noqa: BLE001  raised by start, in the thread that waits for it
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            while self.turn(engine):
                pass
        except BaseException:
            log.critical("the engine cannot continue; all requests end", exc_info=True)
            self.failed = True
        self.close(engine)

    def open(self) -> Engine:
        """Build the engine; the thread that does so owns it."""
        engine = self._engine = self._build()
        self._room = engine.plan.max_batch + self._max_waiting
        self._publish(engine)
        self._begin("idle")
        return engine

    def turn(self, engine: Engine, wait: bool = True) -> bool:
        """Carry out orders, end what waited too long, run one step; False when it is time to end.

        With nothing to do, `wait` for an order.
        """
        if self._take_orders(engine, wait):
            return False
        self._begin("step")
        self._expire(engine)
        was_idle = engine.idle
        self._jobs.step(engine)
        if self._view_is_old():
            self._publish(engine)
        if self.check_integrity and engine.idle and not was_idle:
            engine.check_integrity()
        return True

    def close(self, engine: Engine) -> None:
        """End all jobs, whatever state the engine is in, and drop it."""
        with self._lock:
            self._stopping = True
        self._begin("closing")
        try:
            engine.close()
        except Exception:
            log.exception("the engine could not be closed")
        self._engine = None
        # Including those that arrived too late.
        while not self._orders.empty():
            order = self._orders.get()
            try:
                if order is not None:
                    order(engine)
            except Exception:
                log.exception("a command to a closed engine failed")
        self._jobs.close(FAILURE if self.failed else None)
        self._begin("ended")

    def _begin(self, what: What) -> None:
        self._doing = Doing(what, self._now())

    def _take_orders(self, engine: Engine, wait: bool) -> bool:
        """Carry out orders; with nothing else to do, wait for one. True when it is time to end."""
        while True:
            if self._stopping and (engine.idle or self._now() >= self._deadline):
                return True
            idle = engine.idle and not self._stopping
            watched = self._now() < self._watched
            # Steps make copies for colder tiers, even if there is nothing else to do.
            sharing = engine.prefix.unshared
            if idle:
                self._begin("idle")
            try:
                order = self._orders.get(wait and idle, SHARE_SECONDS if sharing else VIEW_SECONDS if watched else None)
            except queue.Empty:
                if not (wait and idle) or sharing:
                    return False
                order = None
            if order is not None:
                self._begin("order")
                order(engine)
            if idle and self._now() < self._watched:
                self._publish(engine)

    def _view_is_old(self) -> bool:
        return self._view is None or self._now() >= self._view.time + VIEW_SECONDS

    def _publish(self, engine: Engine) -> None:
        self._view = look(engine, blocks=self._now() < self._blocks_watched)

    def _expire(self, engine: Engine) -> None:
        now = self._now()
        old = [request for request in engine.scheduler.waiting if now - request.created > self._max_wait]
        for request in old:
            waited = f"the request waited {self._max_wait:.0f} s for its turn (--max-wait)"
            self._jobs.fail(engine, request, OverloadedError(waited, retry_after=10))


def _wait_until_gone(thread: threading.Thread) -> None:
    """MLX frees what a thread compiled when the system ends it, and needs the interpreter for that: if that is being
    taken down by then, the process aborts. Before Python 3.13 `join` returns earlier.
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    deadline = time.monotonic() + GONE_SECONDS
    while sys.version_info < (3, 13) and task.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
