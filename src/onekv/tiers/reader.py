"""Reading parts: each is read whole and verified, and only then copied to its place.

The caller's thread reads, and one of this module's beside it. Each has a one-part buffer for everything it reads: the
system copies into it, it is checksummed, and copied into the pool, all without the interpreter's lock. Parts that the
caller provides memory for are read into that. A third thread asks the system to prefetch, which may take long: reading
never waits for it.
The caller waits: whatever happens, no thread writes to its memory or calls its functions after `read` has returned. A
part that cannot be used is reported as such; damaged ones are removed by the writer and disappear from `find` at once.
"""

import errno
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import xxhash

from .base import Target
from .files import READ, read_file
from .image import TOKEN_BYTES, Image
from .rows import Row
from .shared import Setup, Shared
from .writer import Writer

# Threads in addition to the caller's.
READERS = 1
# Files that tell whether all are in the system's memory.
_SAMPLE = 4
# The process has run out of something: that says nothing about the file.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file: our own message, or the system's."""

    text: str
    error: OSError | None = None

    @property
    def kind(self) -> object:
        """What is logged once."""
        return self.text if self.error is None else self.error.errno

    @property
    def passing(self) -> bool:
        return self.error is not None and self.error.errno in _PASSING


@dataclass(eq=False)
class Load:
    """A part to be read, by the thread that takes it: what its row says, to its target."""

    row: Row
    target: Target
    image: Image
    # Whether there was time for it, and what was wrong with it, if something was.
    ended: bool = False
    problem: Problem | None = None

    @property
    def answer(self) -> bool | None:
        """As `Tier.read` gives it."""
        return self.problem is None if self.ended else None

    def run(self, setup: Setup, buffer: Callable[[], memoryview]) -> None:
        """Read and check the file, and put it where it belongs; `buffer` is the thread's own."""
        into = self.target.into
        if isinstance(into, bytearray):
            views = [memoryview(bytearray(self.image.header_size)), memoryview(into)]
            self.problem = self._read(setup, views)
        else:
            whole = buffer()[: self.image.size]
            self.problem = self._read(setup, [whole])
            if self.problem is None:
                into(whole[self.image.header_size :])
        self.ended = True

    def _read(self, setup: Setup, views: list[memoryview]) -> Problem | None:
        row, image = self.row, self.image
        if row.size != image.size or len(row.address.tokens) > setup.block_tokens * TOKEN_BYTES:
            return Problem("an index row has a different size than the model's blocks")
        try:
            path = setup.folder.path(setup.hash, row.name.key, row.name.part)
            size = read_file(setup.folder.files, path, image.size, views)
        except OSError as error:
            return Problem(f"a file cannot be read ({error.strerror})", error)
        if size != image.size:
            return Problem("a file has a wrong size")
        digest = xxhash.xxh3_128()
        for view in views:
            digest.update(view)
        if digest.digest() != row.checksum:
            return Problem("a file does not match its checksum")
        if bytes(views[0][: image.header_size]) != image.header(setup.hash, row.address):
            return Problem("a file does not match its index row")
        return None


@dataclass(frozen=True)
class ReadAhead:
    """Files that the system is asked to prefetch."""

    setup: Setup
    shared: Shared
    images: Mapping[int, Image]
    names: Sequence[tuple[bytes, int]]

    def run(self, stopped: threading.Event) -> None:
        try:
            # If some here and there are in the system's memory, so are the others: asking would take time only.
            sample = self.names[:: len(self.names) // _SAMPLE + 1]
            if all(self._ask_for(*name, only_if_absent=True) for name in sample):
                return
            for name in self.names:
                with self.shared.lock:
                    wanted = name in self.shared.expected
                if stopped.is_set():
                    return
                if wanted:
                    self._ask_for(*name)
        except Exception as error:  # noqa: BLE001
            # Nobody asks for the result: an error would be lost.
            self.shared.fail(error)

    def _ask_for(self, key: bytes, part: int, only_if_absent: bool = False) -> bool:
        """Have a file read ahead; whether its end was in the system's memory, if that is asked."""
        folder = self.setup.folder
        try:
            handle = folder.files.open(folder.path(self.setup.hash, key, part), READ)
        except OSError:
            # Reading it will tell.
            return False
        try:
            if only_if_absent and folder.files.in_memory(handle, self.images[part].size - 1):
                return True
            folder.files.read_ahead(handle)
        except OSError:
            # A file system that cannot; reading it will tell.
            pass
        finally:
            folder.files.close(handle)
        return False


class Readers:
    def __init__(self, images: Mapping[int, Image], writer: Writer) -> None:
        self._images, self._writer = images, writer
        self._setup, self._shared = writer.setup, writer.shared
        # Beside the caller: for reading, and for reading ahead, which must never be in its way.
        self._reading: ThreadPoolExecutor | None = None
        self._ahead: ThreadPoolExecutor | None = None
        self._stopped = threading.Event()
        self._own = threading.local()

    def read(self, tasks: Sequence[Load], deadline: float) -> None:
        """Run these, and start at most one after the deadline."""
        left = deque(tasks)
        futures: list[Future[None]] = []
        try:
            for _ in range(min(READERS, len(tasks) - 1) if self._setup.threads else 0):
                self._reading = self._reading or ThreadPoolExecutor(READERS, "onekv-disk-reader")
                futures += _submitted(self._reading, self._load_some, left, deadline)
            # At least one: that is how a slow disk gets anywhere.
            self._load_one(left)
            self._load_some(left, deadline)
        finally:
            # If this is interrupted, nothing more is begun.
            left.clear()
            _finish(futures)
        for future in futures:
            future.result()

    def damaged(self, row: Row, problem: Problem) -> None:
        """A part that is there cannot be used."""
        root = self._setup.folder.root
        with self._shared.lock:
            self._shared.counts.corrupt += 1
        if problem.error is not None and not self._setup.folder.there():
            self._shared.fail(problem.error)
            return
        message = f"The disk cache {root} is damaged: {problem.text}. The block is recomputed."
        self._shared.once(("read", problem.kind), message)
        if not problem.passing:
            self._writer.remove(row)

    def read_ahead(self, names: Sequence[tuple[bytes, int]]) -> None:
        """Ask the system to prefetch these files."""
        if not self._setup.threads:
            return
        self._ahead = self._ahead or ThreadPoolExecutor(1, "onekv-disk-ahead")
        _submitted(self._ahead, ReadAhead(self._setup, self._shared, self._images, list(names)).run, self._stopped)

    def stop(self) -> None:
        self._stopped.set()
        for threads in (self._reading, self._ahead):
            if threads is not None:
                threads.shutdown(cancel_futures=True)

    # The threads.

    def _load_some(self, left: deque[Load], deadline: float) -> None:
        """Read what is left, and start none after the deadline."""
        while left and self._shared.clock.monotonic() <= deadline:
            self._load_one(left)

    def _load_one(self, left: deque[Load]) -> None:
        try:
            task = left.popleft()
        except IndexError:
            # Another thread was faster.
            return
        task.run(self._setup, self._buffer)

    def _buffer(self) -> memoryview:
        """This thread's, which every part it reads goes through."""
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = np.empty(max(image.size for image in self._images.values()), np.uint8).data
        return buffer


def _submitted(threads: ThreadPoolExecutor, task: Callable[..., None], *arguments: object) -> list[Future[None]]:
    """The future of a task for another thread; none if the system starts no more threads: it may still run, late."""
    try:
        return [threads.submit(task, *arguments)]
    except RuntimeError:
        return []


def _finish(futures: Sequence[Future[None]]) -> None:
    """Wait for all, even when interrupted: what they write to is not theirs."""
    try:
        wait(futures)
    finally:
        if not all(future.done() for future in futures):
            _finish(futures)
