"""Requests together with their text: the only path from the engine to readers.

A job emits `Delta`s, then exactly one `End` or one error. Whoever drives the engine owns its `Jobs` and calls both in
the same thread: the server's engine thread, or an `LLM` in the thread that reads its streams.

A request that fails ends with its error, and no other does: the engine ensures that for what it computes, this module
for the rest. If a job's text cannot be decoded, that job fails; if its `emit` raises, it is cancelled.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import OneKVError, OverloadedError, RequestFailedError
from ..prefix.branch import Branch
from .engine import Engine
from .output import Delta, TextOutput
from .request import FinishReason, Request, Timings

log = logging.getLogger("onekv.engine")


@dataclass(frozen=True)
class End:
    """How a job ended. `generated` counts all tokens, the stop token too."""

    finish_reason: FinishReason
    stopped_by: str | None
    prompt_tokens: int
    cached_tokens: int
    generated: int
    timings: Timings
    # Where the prompt diverged from the cache.
    branch: Branch | None = None
    # Proposed tokens, and how many of them were accepted.
    proposed: int = 0
    accepted: int = 0


Event = Delta | End | OneKVError


class Job:
    """A request, how it becomes text, and where its events go; `emit` must not block."""

    def __init__(self, request: Request, output: TextOutput, emit: Callable[[Event], None]) -> None:
        self.request, self.output, self.emit = request, output, emit

    def end(self) -> End | OneKVError:
        request = self.request
        if request.error is not None:
            return request.error
        assert request.finish_reason is not None
        generated = len(request.tokens) - self.output.dropped
        return End(
            request.finish_reason,
            self.output.stopped_by,
            len(request.prompt),
            request.cached_tokens,
            generated,
            request.timings,
            request.branch,
            request.proposed,
            min(request.accepted, generated),
        )


class Jobs:
    """The jobs of one engine that have not ended."""

    def __init__(self) -> None:
        self._jobs: dict[Request, Job] = {}
        # How many have, so far.
        self.ended = 0

    def begin(self, engine: Engine, job: Job) -> None:
        """Submit a job; if the engine rejects it, it ends at once."""
        self._jobs[job.request] = job
        try:
            engine.submit(job.request)
        except OneKVError as error:
            self._refuse(job.request, error)
        except Exception as error:
            log.exception("a request could not be submitted; it ends with an error")
            self._refuse(job.request, RequestFailedError.internal(error))

    def step(self, engine: Engine) -> None:
        """Run one step of the engine, and emit what is new."""
        for request in engine.step().changed:
            self._pump(engine, request)

    def cancel(self, engine: Engine, jobs: Iterable[Job]) -> None:
        """End those of `jobs` that have not ended; each then emits its End."""
        requests = [job.request for job in jobs if job.request in self._jobs]
        if requests:
            engine.cancel(requests)
            self._report(requests)

    def fail(self, engine: Engine, request: Request, error: OneKVError) -> None:
        engine.end(request, "error", error)
        self._report([request])

    def close(self, failure: str | None = None) -> None:
        """The engine was closed: no job is left, whether or not the engine could end it.

        `failure` is why it had to be: an error of those that had not ended.
        """
        for request in list(self._jobs):
            if failure is not None and request.finish_reason in (None, "cancelled"):
                self._refuse(request, RequestFailedError(failure))
            elif request.finished:
                self._report([request])
            else:
                self._refuse(request, OverloadedError("the server is shutting down", retry_after=5))

    def _refuse(self, request: Request, error: OneKVError) -> None:
        request.error, request.finish_reason = error, "error"
        self._report([request])

    def _pump(self, engine: Engine, request: Request) -> None:
        """Emit a request's new output."""
        job = self._jobs[request]
        try:
            delta = job.output.take(request)
        except Exception as error:
            log.exception("the text of a request could not be decoded; it ends with an error")
            engine.end(request, "error", RequestFailedError.internal(error))
            # It may have ended by itself with the same token.
            request.finish_reason, request.error = "error", request.error or RequestFailedError.internal(error)
        else:
            if (delta.text or delta.tokens) and not self._emit(job, delta):
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
                # First: the receiver may start the next one at once.
                self.ended += 1
                self._emit(job, job.end())

    def _emit(self, job: Job, event: Event) -> bool:
        """Whether the job's reader accepted the event."""
        try:
            job.emit(event)
        except Exception:
            log.exception("an event could not be delivered; its request is cancelled")
            return False
        return True
