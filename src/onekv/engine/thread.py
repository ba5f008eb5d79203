"""The one thread that owns MLX, and how others talk to it.

Orders go in by a queue: start a job, cancel one, call a function between two steps. What a job produces goes out by its
`emit`, which the engine's thread calls and which must not block: `Piece`s of text, then exactly one `End` or one
exception. Nothing of the engine is ever touched by another thread.

    job     submitted -> waiting -> prefilling -> running -> ended: End | error
                 \\_ refused at once: too long, or too many wait    \\_ cancelled: End("cancelled")

A request that fails ends with its error and no other does: the engine sees to that for what it computes, this module
for the rest. If a job's text cannot be made, that job fails; if its `emit` raises, it is cancelled. If the engine
cannot go on, the thread ends, and every job with it: nobody waits for a thread that is gone.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ..errors import OneKVError, OverloadedError, RequestFailedError
from .engine import Engine
from .output import Piece, TextOutput
from .request import FinishReason, Request, Timings

log = logging.getLogger("onekv.engine")
Result = TypeVar("Result")


@dataclass(frozen=True)
class End:
    """How a job ended. `generated` counts all tokens, the stop token too."""

    finish_reason: FinishReason
    stopped_by: str | None
    prompt_tokens: int
    cached_tokens: int
    generated: int
    timings: Timings


Event = Piece | End | OneKVError


class Job:
    """A request, how it becomes text, and where its events go."""

    def __init__(self, request: Request, output: TextOutput, emit: Callable[[Event], None]) -> None:
        self.request, self.output, self.emit = request, output, emit

    def end(self) -> End | OneKVError:
        request = self.request
        if request.error is not None:
            return request.error
        assert request.finish_reason is not None
        return End(
            request.finish_reason,
            self.output.stopped_by,
            len(request.prompt),
            request.cached_tokens,
            len(request.tokens),
            request.timings,
        )


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
        # Whether every count is checked whenever the engine has become idle; the thread ends if one is wrong.
        self.check_integrity = False
        self._orders: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._jobs: dict[Request, Job] = {}
        self._lock = threading.Lock()
        # Jobs submitted and not ended, by whichever thread.
        self._open = 0
        self._room = 0
        self._stopping = False
        # When running jobs are cancelled, once it is stopping.
        self._deadline = math.inf
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="onekv-engine", daemon=True)

    # From any thread

    def start(self) -> None:
        """Returns when the engine is built; raises what building it raised."""
        self._thread.start()
        self._ready.result()

    def submit(self, jobs: list[Job]) -> None:
        """Start all of `jobs` or none. Raises OverloadedError at once; other refusals come as the job's event."""
        with self._lock:
            self._check_open()
            if self._open + len(jobs) > self._room:
                raise OverloadedError(
                    f"{self._open} requests are running or waiting and {self._room} may; try again later "
                    "(--max-waiting changes that)",
                    retry_after=2,
                )
            self._open += len(jobs)
            for job in jobs:
                self._orders.put(partial(self._begin, job=job))

    def cancel(self, jobs: list[Job]) -> None:
        """End those of `jobs` that have not ended; each then emits its End."""

        def order(engine: Engine) -> None:
            engine.cancel([job.request for job in jobs if job.request in self._jobs])
            self._report([job.request for job in jobs])

        self._orders.put(order)

    def call(self, function: Callable[[Engine], Result]) -> "Future[Result]":
        """Run `function` in the engine's thread, between two steps."""
        future: Future[Result] = Future()

        def order(engine: Engine) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(engine))
                except Exception as error:  # noqa: BLE001  it is raised where the result is asked for
                    future.set_exception(error)

        with self._lock:
            self._check_open()
            self._orders.put(order)
        return future

    def _check_open(self) -> None:
        """With the lock held, so that an order that is let in is also carried out."""
        if self._stopping:
            raise OverloadedError("the server is shutting down", retry_after=5)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def open_jobs(self) -> int:
        """Jobs that were submitted and have not ended."""
        return self._open

    @property
    def quiet(self) -> bool:
        """Whether nothing is asked for that has not been carried out."""
        return self._orders.empty()

    def stop(self, grace: float = 10.0) -> None:
        """Refuse new jobs, let those there are run for `grace` seconds, cancel the rest, close the engine."""
        with self._lock:
            if self._stopping:
                return
            self._deadline = self._now() + grace
            self._stopping = True
        self._orders.put(None)
        self._thread.join()

    # In the engine's thread

    def _run(self) -> None:
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
            log.critical("the engine cannot go on; all requests end", exc_info=True)
        self.close(engine)

    def open(self) -> Engine:
        """Build the engine; the thread that does so owns it."""
        engine = self._build()
        self._room = engine.plan.max_batch + self._max_waiting
        return engine

    def turn(self, engine: Engine, wait: bool = True) -> bool:
        """Carry out what was asked for, end what waited too long, make one step; False when it is time to end.

        With nothing to do, `wait` until something is asked for.
        """
        if self._take_orders(engine, wait):
            return False
        self._expire(engine)
        was_idle = engine.idle
        for request in engine.step().changed:
            self._pump(engine, request)
        if self.check_integrity and engine.idle and not was_idle:
            engine.check_integrity()
        return True

    def close(self, engine: Engine) -> None:
        """End all jobs, whatever state the engine is in, and let go of it."""
        with self._lock:
            self._stopping = True
        try:
            engine.close()
        except Exception:
            log.exception("the engine could not be closed")
        self._report(list(self._jobs))
        # Those that came too late, and all if the engine could not end them.
        while not self._orders.empty():
            order = self._orders.get()
            try:
                if order is not None:
                    order(engine)
            except Exception:
                log.exception("an order to an engine that is closed failed")
        for job in list(self._jobs.values()):
            if not job.request.finished:
                job.request.finish_reason = "error"
                job.request.error = OverloadedError("the server is shutting down", retry_after=5)
        self._report(list(self._jobs))

    def _take_orders(self, engine: Engine, wait: bool) -> bool:
        """Do what was asked for; with nothing else to do, wait for it. True when it is time to end."""
        while True:
            if self._stopping and (engine.idle or self._now() >= self._deadline):
                return True
            try:
                order = self._orders.get(block=wait and engine.idle and not self._stopping)
            except queue.Empty:
                return False
            if order is not None:
                order(engine)

    def _begin(self, engine: Engine, job: Job) -> None:
        self._jobs[job.request] = job
        try:
            engine.submit(job.request)
        except OneKVError as error:
            self._refuse(job, error)
        except Exception as error:
            log.exception("a request could not be submitted; it ends with an error")
            self._refuse(job, RequestFailedError.internal(error))

    def _refuse(self, job: Job, error: OneKVError) -> None:
        job.request.error, job.request.finish_reason = error, "error"
        self._report([job.request])

    def _expire(self, engine: Engine) -> None:
        now = self._now()
        old = [request for request in engine.scheduler.waiting if now - request.created > self._max_wait]
        for request in old:
            waited = f"the request waited {self._max_wait:.0f} s for its turn (--max-wait)"
            engine.end(request, "error", OverloadedError(waited, retry_after=10))
        self._report(old)

    def _pump(self, engine: Engine, request: Request) -> None:
        """Emit what a request has new."""
        job = self._jobs[request]
        try:
            piece = job.output.take(request)
        except Exception as error:
            log.exception("the text of a request could not be made; it ends with an error")
            engine.end(request, "error", RequestFailedError.internal(error))
            # It may have ended by itself with the same token.
            request.finish_reason, request.error = "error", request.error or RequestFailedError.internal(error)
        else:
            if (piece.text or piece.tokens) and not self._emit(job, piece):
                engine.end(request, "cancelled")
            if job.output.stopped_by is not None:
                engine.end(request, "stop")
                request.finish_reason = "stop"
        self._report([request])

    def _report(self, requests: Iterable[Request]) -> None:
        """Emit the end of those that have ended, once."""
        for request in requests:
            if request.finished and request in self._jobs:
                job = self._jobs.pop(request)
                with self._lock:
                    self._open -= 1
                self._emit(job, job.end())

    def _emit(self, job: Job, event: Event) -> bool:
        """Whether the job's consumer has taken an event."""
        try:
            job.emit(event)
        except Exception:
            log.exception("an event could not be delivered; its request is cancelled")
            return False
        return True
