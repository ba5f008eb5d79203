"""Streams of an `LLM`: the requests of one call, read by the thread that drives the engine.

Events of requests wait in their stream's queue to be read. Reading an empty queue advances the engine, and with
it every other stream of the same `Driver`. When a stream has been closed, or has raised, none of its requests is left.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from tqdm import tqdm

from .completion import Answer, Completion
from .engine import Delta, End, Engine, Event, Job, Jobs, Request, TextOutput
from .errors import OneKVError

AnyReader = TypeVar("AnyReader", bound="_Reader")


class StoreBar:
    """Shows how far storing the cache on disk is, if that takes longer than a second."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, desc="to disk", unit="B", unit_scale=True, delay=1.0, disable=None)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()


class Driver:
    """An engine and its jobs, advanced by reading; with `check`, all blocks are counted when nothing runs."""

    def __init__(self, engine: Engine, check: bool) -> None:
        self.engine, self._check = engine, check
        self._jobs = Jobs()
        self._closed = False

    def begin(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._jobs.begin(self.engine, job)

    def step(self) -> None:
        self._jobs.step(self.engine)
        self.count()

    def cancel(self, jobs: list[Job]) -> None:
        if not self._closed:
            self._jobs.cancel(self.engine, jobs)

    def count(self) -> None:
        if self._check and not self._closed and self.engine.idle:
            self.engine.check_integrity()

    def close(self) -> None:
        """All streams end."""
        self._closed = True
        try:
            self.engine.close()
        finally:
            self._jobs.close()


class _Reader:
    """Reads the requests of one call, in the order in which they emit."""

    def __init__(self, driver: Driver, requests: Sequence[tuple[Request, TextOutput]]) -> None:
        self._driver = driver
        self._events: deque[tuple[int, Event]] = deque()
        self._answers = [Answer(request) for request, _ in requests]
        self._jobs = [Job(*each, partial(self._put, index)) for index, each in enumerate(requests)]
        # Those whose end was not read.
        self._open = set(range(len(requests)))
        driver.begin(self._jobs)

    def _put(self, index: int, event: Event) -> None:
        self._events.append((index, event))

    def _next(self) -> tuple[int, str]:
        """The next text and whose it is. Raises StopIteration at the end of all."""
        try:
            while (item := self._take()) is None and self._open:
                self._driver.step()
        except BaseException:
            # Whatever interrupts it, its requests hold nothing afterwards.
            self._driver.cancel(self._jobs)
            raise
        if item is None:
            raise StopIteration
        return item

    def _take(self) -> tuple[int, str] | None:
        """What lies ready."""
        while self._events:
            index, event = self._events.popleft()
            self._note(index, event)
            if isinstance(event, OneKVError):
                raise event
            if isinstance(event, Delta) and (event.text or self._jobs[index].output.silent):
                return index, event.text
        return None

    def _note(self, index: int, event: Event) -> None:
        if isinstance(event, Delta):
            self._answers[index].add(event)
            return
        self._open.remove(index)
        if isinstance(event, End):
            self._answers[index].end = event

    def close(self) -> None:
        """Stop generating and release everything; what was generated stays in the completion."""
        self._driver.cancel(self._jobs)
        while self._events:
            self._note(*self._events.popleft())
        self._driver.count()

    def __enter__(self: AnyReader) -> AnyReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream(_Reader, Iterator[str]):
    """Deltas of text as they are generated. `completion` has what was read so far; `close` ends it early.

    Without a tokenizer, deltas are empty, and there is one for every step that generated a token.
    """

    def __next__(self) -> str:
        return self._next()[1]

    @property
    def completion(self) -> Completion:
        return self._answers[0].completion


class BatchStream(_Reader, Iterator[tuple[int, str]]):
    """A stream for several prompts: (index of the prompt, delta), as they are generated. An error of one ends all."""

    def __next__(self) -> tuple[int, str]:
        return self._next()

    @property
    def completions(self) -> list[Completion]:
        return [answer.completion for answer in self._answers]
