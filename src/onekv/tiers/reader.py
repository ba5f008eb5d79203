"""Reading parts: each as a whole, checked, and only then put where it belongs.

The caller's thread reads, and one of this module's beside it. Each has a buffer of one part, which all that it reads
goes through: the system copies into it, the checksum is taken of it, and what it holds is copied into the pool, all
without the interpreter's lock. Parts that the caller gives memory for are read into that. A third thread asks the
system to read ahead, which may take long: reading never waits for it.
The caller waits: whatever happens, no thread writes to its memory or calls its functions after `read` has returned. A
part that cannot be used is reported as such; damaged ones are removed by the writer and are gone at once for `find`.
"""

import errno
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import xxhash

from .base import Target
from .files import READ, read_file
from .folder import Folder
from .image import TOKEN_BYTES, Image
from .rows import Row
from .shared import Shared
from .writer import Writer

# Threads beside the caller's.
READERS = 1
# Files that tell whether all are in the system's memory.
_SAMPLE = 4
# What is wrong with a file.
Problem = str | OSError
# The process has run out of something: that says nothing about the file.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Readers:
    def __init__(self, folder: Folder, hash: str, images: Mapping[int, Image], writer: Writer) -> None:
        self._folder, self._hash, self._images, self._writer = folder, hash, images, writer
        self._shared: Shared = writer.shared
        # Beside the caller: for reading, and for reading ahead, which must never be in its way.
        self._reading: ThreadPoolExecutor | None = None
        self._ahead: ThreadPoolExecutor | None = None
        self._stopped = False
        self._own = threading.local()

    def read(self, rows: Sequence[Row], targets: Sequence[Target], deadline: float) -> list[Problem | bool]:
        """Read what `rows` say to `targets`: what was wrong with each, True if nothing was, False if time was over."""
        answers: list[Problem | bool] = [False] * len(rows)
        left = deque(zip(range(len(rows)), rows, targets, strict=True))
        others = max(0, min(READERS, len(rows) - 1)) if self._writer.place.threads else 0
        if others and self._reading is None:
            self._reading = ThreadPoolExecutor(READERS, "onekv-disk-reader")
        futures = [
            self._reading.submit(self._load_some, left, answers, deadline) for _ in range(others) if self._reading
        ]
        try:
            # At least one: that is how a slow disk gets anywhere.
            self._load_one(left, answers)
            self._load_some(left, answers, deadline)
        finally:
            # If this is interrupted, nothing more is begun.
            left.clear()
            _finish(futures)
        for future in futures:
            future.result()
        return answers

    def damaged(self, row: Row, problem: Problem) -> None:
        """A part that is there cannot be used."""
        root = self._folder.root
        with self._shared.lock:
            self._shared.counts.corrupt += 1
        if isinstance(problem, OSError) and not self._folder.there():
            self._shared.fail(problem)
            return
        kind = problem.errno if isinstance(problem, OSError) else problem
        text = f"a file cannot be read ({problem.strerror})" if isinstance(problem, OSError) else problem
        self._shared.once(("read", kind), f"The disk cache {root} is damaged: {text}. The block is computed again.")
        if kind not in _PASSING:
            self._writer.remove(row)

    def read_ahead(self, names: Sequence[tuple[bytes, int]]) -> None:
        """Ask the system to have these files in its memory soon."""
        if not self._writer.place.threads:
            return
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(1, "onekv-disk-ahead")
        self._ahead.submit(self._advise, list(names))

    def stop(self) -> None:
        self._stopped = True
        for threads in (self._reading, self._ahead):
            if threads is not None:
                threads.shutdown(cancel_futures=True)

    # The threads.

    def _advise(self, names: list[tuple[bytes, int]]) -> None:
        try:
            # If some here and there are in the system's memory, so are the others: asking would take time only.
            if all(self._ask_for(*name, only_if_absent=True) for name in names[:: len(names) // _SAMPLE + 1]):
                return
            for name in names:
                with self._shared.lock:
                    wanted = name in self._shared.expected
                if self._stopped:
                    return
                if wanted:
                    self._ask_for(*name)
        except Exception as error:  # noqa: BLE001
            # Nobody asks for the result: an error would be lost.
            self._shared.fail(error)

    def _ask_for(self, key: bytes, part: int, only_if_absent: bool = False) -> bool:
        """Have a file read ahead; whether its end was in the system's memory, if that is asked."""
        files = self._folder.files
        try:
            handle = files.open(self._folder.path(self._hash, key, part), READ)
        except OSError:
            # Reading it will tell.
            return False
        try:
            if only_if_absent and files.in_memory(handle, self._images[part].size - 1):
                return True
            files.read_ahead(handle)
        except OSError:
            # A file system that cannot; reading it will tell.
            pass
        finally:
            files.close(handle)
        return False

    def _load_some(self, left: deque[tuple[int, Row, Target]], answers: list[Problem | bool], deadline: float) -> None:
        """Read what is left, and begin none after the deadline."""
        while left and self._shared.clock.monotonic() <= deadline:
            self._load_one(left, answers)

    def _load_one(self, left: deque[tuple[int, Row, Target]], answers: list[Problem | bool]) -> None:
        try:
            number, row, target = left.popleft()
        except IndexError:
            # Another thread was faster.
            return
        answers[number] = self._load(row, target) or True

    def _load(self, row: Row, target: Target) -> Problem | None:
        """Read and check a file, and put it where it belongs; what is wrong with it, if something is."""
        image = self._images[row.name.part]
        if row.size != image.size or len(row.address.tokens) > self._writer.place.block_tokens * TOKEN_BYTES:
            return "a row of the index has another size than the model's blocks"
        if isinstance(target.into, bytearray):
            views = [memoryview(bytearray(image.header_size)), memoryview(target.into)]
        else:
            views = [self._buffer(image.size)]
        try:
            path = self._folder.path(self._hash, row.name.key, row.name.part)
            size = read_file(self._folder.files, path, image.size, views)
        except OSError as error:
            return error
        if size != image.size:
            return "a file has a wrong size"
        digest = xxhash.xxh3_128()
        for view in views:
            digest.update(view)
        if digest.digest() != row.checksum:
            return "a file does not match its checksum"
        if bytes(views[0][: image.header_size]) != image.header(self._hash, row.address):
            return "a file does not match its row of the index"
        if not isinstance(target.into, bytearray):
            target.into(views[0][image.header_size :])
        return None

    def _buffer(self, size: int) -> memoryview:
        """This thread's, which every part it reads goes through."""
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = np.empty(max(image.size for image in self._images.values()), np.uint8).data
        return buffer[:size]


def _finish(futures: Sequence[Future[None]]) -> None:
    """Wait for all, also when interrupted: what they write to is not theirs."""
    try:
        wait(futures)
    finally:
        if not all(future.done() for future in futures):
            _finish(futures)
