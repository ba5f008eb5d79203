"""Reading parts into memory of the caller's, several at once.

The caller waits: whatever happens, no thread writes to its memory after `read` has returned. A part that cannot be used
is reported as such; damaged ones are removed by the writer and are gone at once for `find`.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import xxhash

from .base import Buffer, Target
from .folder import Folder
from .image import Image
from .index import Row
from .shared import Shared
from .writer import Writer

READERS = 2
# memoryview or numpy array: anything with nbytes.
View = Any
# What is wrong with a file.
Problem = str | OSError
# Bytes read at once: they are checked while the processor's cache has them.
_CHUNK = 256 * 1024
# Buffers that one system call takes.
_VECTOR = min(1024, os.sysconf("SC_IOV_MAX"))
# The process has run out of something: that says nothing about the file.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Readers:
    def __init__(self, folder: Folder, hash: str, images: Mapping[int, Image], writer: Writer) -> None:
        self._folder, self._hash, self._images, self._writer = folder, hash, images, writer
        self._shared: Shared = writer.shared
        self._threads: ThreadPoolExecutor | None = None

    def read(self, rows: Sequence[Row], targets: Sequence[Target]) -> list[Problem | None]:
        """Read what `rows` say to `targets`; what was wrong with each, if something was."""
        futures = [self._pool.submit(self._load, row, target) for row, target in zip(rows, targets, strict=True)]
        _finish(futures)
        return [future.result() for future in futures]

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
        """Ask the system to have these files in its memory soon, where it can be asked."""
        if hasattr(os, "posix_fadvise"):
            self._pool.submit(self._advise, list(names))

    def stop(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    @property
    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(READERS, "onekv-disk-reader")
        return self._threads

    # The threads.

    def _advise(self, names: list[tuple[bytes, int]]) -> None:
        for key, part in names:
            try:
                handle = _open(self._folder.path(self._hash, key, part))
            except OSError:
                # Reading it will tell.
                continue
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)

    def _load(self, row: Row, target: Target) -> Problem | None:
        """Read and check a file; what is wrong with it, if something is."""
        image = self._images[row.name.part]
        if row.size != image.size:
            return "a row of the index has another size than the model's blocks"
        header = bytearray(image.header_size)
        digest = xxhash.xxh3_128()
        try:
            path = self._folder.path(self._hash, row.name.key, row.name.part)
            size = _read_file(path, image.size, [header, *target.into], digest)
        except OSError as error:
            return error
        if size != image.size:
            return "a file has a wrong size"
        if digest.digest() != row.checksum:
            return "a file does not match its checksum"
        if header != image.header(self._hash, row.address):
            return "a file does not match its row of the index"
        return None


def _finish(futures: Sequence["Future[Problem | None]"]) -> None:
    """Wait for all, also when interrupted: what they write to is not theirs."""
    try:
        wait(futures)
    finally:
        if not all(future.done() for future in futures):
            _finish(futures)


def _read_file(path: str, size: int, buffers: Sequence[Buffer], digest: "xxhash.xxh3_128") -> int:
    """The size of a file; if it is `size`, its content is in `buffers`, which together are as long, and in `digest`."""
    handle = _open(path)
    try:
        found = os.fstat(handle).st_size
        if found != size:
            return found
        views = [buffer if isinstance(buffer, np.ndarray) else memoryview(buffer) for buffer in buffers]
        # About `_CHUNK` bytes together: pieces of a block are alike, and there are hundreds of them.
        together = max(1, min(_VECTOR, _CHUNK * len(views) // size))
        return sum(_fill(handle, views[i : i + together], digest) for i in range(0, len(views), together))
    finally:
        os.close(handle)


def _fill(handle: int, views: Sequence[View], digest: "xxhash.xxh3_128") -> int:
    """Read on into `views`; how many bytes there were for them."""
    wanted = sum(view.nbytes for view in views)
    got = os.readv(handle, views)
    while 0 < got < wanted:
        # A file system that gives less than it is asked for.
        more = os.readv(handle, _after(views, got))
        if not more:
            break
        got += more
    for view in views:
        digest.update(view)
    return got


def _after(views: Sequence[View], count: int) -> list[memoryview]:
    """What is left of `views` after their first `count` bytes."""
    left = []
    for view in views:
        if count < view.nbytes:
            left.append(memoryview(view).cast("B")[count:])
        count = max(0, count - view.nbytes)
    return left


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
