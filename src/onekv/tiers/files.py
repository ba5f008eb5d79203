"""The disk tier's calls to the operating system: files and the time. Nothing else in the tier makes any, except SQLite.

Both classes can be replaced, so that a simulation can drive the real tier (`DiskTier(files=..., clock=...)`): subclass
`Files`, do something before or after calling the original method, or raise what the system could raise. Methods are
called without holding any of the tier's locks, and by several threads at once if there are threads.

    no space, a broken disk   raise OSError with that errno, or give 0 from `free`
    a short write             write less than was requested and return how much that was
    a bit flip                change what `read` has put into its views, or what `write` is given
    a vanished file           raise FileNotFoundError, or remove it
    a kill                    raise an exception that is not an `Exception` (class Kill(BaseException)): the tier does
                              nothing more on its way out, neither to files nor to the index. A torn write is a part
                              of `write`, then a kill. See `DiskTier.kill`.
"""

import os
import stat
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

Where = str | Path

# NONBLOCK is for a named pipe in place of a file: opening it would block forever.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
# A new file, or an old one emptied.
NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK


class Item(NamedTuple):
    """Something in a folder. A link is neither a file nor a folder."""

    name: str
    is_file: bool
    is_folder: bool


class Files:
    """The operating system's own. Everything raises OSError, as it does."""

    def open(self, path: Where, flags: int) -> int:
        """A handle, for `close`."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, handle: int) -> None:
        os.close(handle)

    def read(self, handle: int, views: Sequence[memoryview]) -> int:
        """Read from the current position; returns the number of bytes, 0 at the end."""
        return os.readv(handle, views)

    def write(self, handle: int, data: memoryview) -> int:
        """Write at least one byte of them; returns how many."""
        return os.write(handle, data)

    def rename(self, old: Where, new: Where) -> None:
        os.replace(old, new)

    def unlink(self, path: Where) -> None:
        os.unlink(path)

    def mkdir(self, path: Where) -> None:
        os.mkdir(path, 0o700)

    def rmdir(self, path: Where) -> None:
        os.rmdir(path)

    def chmod(self, path: Where, mode: int) -> None:
        os.chmod(path, mode)

    def size(self, where: Where | int) -> int:
        """Of a path, where a link is not followed, or of what `open` gave."""
        return (os.fstat(where) if isinstance(where, int) else os.lstat(where)).st_size

    def is_folder(self, path: Where) -> bool:
        return stat.S_ISDIR(os.lstat(path).st_mode)

    def same(self, path: Where, handle: int) -> bool:
        """Whether that path is still the file that was opened."""
        return os.path.samestat(os.stat(path), os.fstat(handle))

    def items(self, folder: Where) -> list[Item]:
        """What is in a folder, in the order of the names."""
        with os.scandir(folder) as found:
            return sorted(
                Item(item.name, item.is_file(follow_symlinks=False), item.is_dir(follow_symlinks=False))
                for item in found
            )

    def free(self, folder: Where) -> int:
        """Bytes available to us on the disk."""
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    def in_memory(self, handle: int, place: int) -> bool:
        """Whether a byte of a file can be read without the disk, if the system can tell."""
        if sys.platform != "linux":
            return False
        try:
            return os.preadv(handle, [bytearray(1)], place, os.RWF_NOWAIT) == 1
        except OSError:
            return False

    def read_ahead(self, handle: int) -> None:
        """Ask the system to prefetch a file, where that is supported."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)


class Clock:
    """The operating system's own."""

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """A steady clock in seconds, for deadlines."""
        return time.perf_counter()

    def today(self) -> str:
        """The day (UTC) that writes are counted for."""
        return datetime.fromtimestamp(self.now(), UTC).date().isoformat()


FILES = Files()
CLOCK = Clock()


def file_size(path: Where, files: Files = FILES) -> int:
    """0 if it is not there."""
    try:
        return files.size(path)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def read_file(files: Files, path: Where, size: int, views: list[memoryview]) -> int:
    """The size of a file; if it is `size`, its content is in `views`, which together are as long."""
    handle = files.open(path, READ)
    try:
        found = files.size(handle)
        if found != size:
            return found
        got = files.read(handle, views)
        while 0 < got < size:
            # A file system that returns less than was requested.
            more = files.read(handle, _after(views, got))
            if not more:
                break
            got += more
        return got
    finally:
        files.close(handle)


def write_file(files: Files, handle: int, data: memoryview) -> None:
    """Write all of it and close the file."""
    try:
        rest = data
        while rest:
            rest = rest[files.write(handle, rest) :]
    finally:
        files.close(handle)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` after their first `count` bytes."""
    left = []
    for view in views:
        if count < view.nbytes:
            left.append(view[count:])
        count = max(0, count - view.nbytes)
    return left
