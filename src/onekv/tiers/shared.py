"""What the engine's thread, the writer and the readers of a disk tier share: what it was opened with, and what changes.
What the tiers of several models share, the folder and its limit, is in `opened`.

One lock guards all of `Shared` but the buffers, and nothing is read from or written to the disk while it is held. The
writer waits for `work`; offers wait for a buffer (`staging`).
"""

import logging
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock

from .files import Clock, Files
from .folder import Folder
from .opened import OpenFolder, join
from .rows import Name, Row, Use
from .staging import Staging

log = logging.getLogger("onekv.tiers")


@dataclass(frozen=True)
class Setup:
    """What a disk tier was opened with: where it stores which model's parts, and how much it may."""

    opened: OpenFolder
    # The model's number in the index, and the name of its folder.
    model: int
    hash: str
    block_tokens: int
    # Bytes per day (UTC), if there is a bound.
    budget: int | None
    # Whether there are threads; else the caller runs one task at a time (`step`).
    threads: bool = True

    @property
    def folder(self) -> Folder:
        return self.opened.folder


@dataclass
class NewPart:
    """A part that waits to be stored; `buffer` is what its file will be, until that is made."""

    row: Row
    buffer: memoryview | None
    use: Use
    # Whether the folder has it.
    stored: bool = False

    @property
    def part(self) -> tuple[bytes, int]:
        return self.row.name.key, self.row.name.part


@dataclass
class Counts:
    """Since the tier was opened."""

    hits: int = 0
    promoted_bytes: int = 0
    promoted_seconds: float = 0.0
    writes: int = 0
    written_bytes: int = 0
    evicted: int = 0
    discarded: int = 0
    corrupt: int = 0


class Shared:
    def __init__(self, root: Path, hash: str, limit: int, staging: int, files: Files, clock: Clock) -> None:
        """Joins those who use the folder; `opened.leave` undoes it. Raises SettingError, or FolderInUse."""
        self.clock = clock
        # The model's number in the index, once that is open.
        self.model = 0
        self.lock = Lock()
        self.work = Condition(self.lock)
        self.counts = Counts()
        self.staging = Staging(staging)
        # What has not been stored yet.
        self.pending: dict[tuple[bytes, int], NewPart] = {}
        # Uses that have not been written yet, by node.
        self.touched: dict[bytes, Use] = {}
        # How many times everything is still to be removed: until then there is nothing.
        self.clearing = 0
        # Parts that will be read: they are not evicted.
        self.expected: Counter[tuple[bytes, int]] = Counter()
        # Parts that were found damaged and are not removed yet.
        self.damaged: set[tuple[bytes, int]] = set()
        self._logged: set[object] = set()
        self.opened = join(root, hash, self._expected_names, limit, files)
        self._folder = self.opened.folder

    @property
    def failed(self) -> str | None:
        """Why the tier has stopped working."""
        return self.opened.failed

    def _expected_names(self) -> list[Name]:
        with self.lock:
            return [Name(self.model, key, part) for key, part in self.expected]

    def once(self, kind: object, message: str) -> None:
        """Log the first of a kind."""
        with self.lock:
            if kind in self._logged:
                return
            self._logged.add(kind)
        log.warning("%s Further cases are counted, not logged.", message)

    def give_back(self, part: NewPart) -> None:
        """The part's buffer is free, if it was not before. The lock is held."""
        if part.buffer is not None:
            self.staging.give(part.buffer)
            part.buffer = None

    def refused(self, error: OSError) -> None:
        """The disk refuses, perhaps for a while."""
        if not self._folder.there():
            self.fail(error)
            return
        self.once(
            ("write", error.errno),
            f"The disk cache {self._folder.root} cannot be written ({error.strerror}): "
            "blocks that do not fit in RAM are lost.",
        )

    def discard(self) -> None:
        with self.lock:
            self.counts.discarded += 1

    def fail(self, reason: Exception) -> None:
        """The tier is disabled from here on: it has nothing and accepts nothing."""
        new = self.opened.fail(reason)
        with self.lock:
            self.work.notify_all()
        self.staging.close()
        if not new:
            return
        expected = isinstance(reason, (OSError, sqlite3.Error))
        log.error(
            "The disk cache %s is disabled until the next start: %s.",
            self._folder.root,
            self.failed,
            exc_info=None if expected else reason,
        )
