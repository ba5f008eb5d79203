"""A folder in use, and what its tiers share: a folder belongs to one process, with a tier for each model.

The first tier to open a folder locks it for the process and repairs its index if necessary (`ready`); tiers of other
models join it, and the last to leave closes it. A model has one tier: a second one finds the folder in use.

`turn` is held by whoever changes files or rows. Writers take turns, task by task, so that each sees the folder as if
it were alone; the counts (`blocks`, `files`, `sizes`) change with it. `lock` guards the clock and the failure; it is
held only briefly, and no other lock is taken meanwhile.

The limit covers the whole folder, and is fair: of the models used within a day, none is evicted in favor of another
while it uses less than an equal share. Usage beyond the shares is evicted in LRU order, whichever model it belongs to.
"""

import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock, RLock

from .files import Files
from .folder import Folder, FolderInUse
from .index import LATEST, DiskIndex
from .rows import Name, Use

# Seconds for which a model has its share after its last use.
RECENT = 24 * 3600.0

# Those that this process has open, and the lock of that table.
_OPEN: dict[Path, "OpenFolder"] = {}
_TABLE = Lock()


class OpenFolder:
    """Made by `join`. By the hash of its model, what each tier will read, asked of it; from `join` to `leave`."""

    def __init__(self, root: Path, files: Files) -> None:
        self.folder = Folder(root, files)
        self.turn = RLock()
        self.lock = Lock()
        self.tiers: dict[str, Callable[[], Iterable[Name]]] = {}
        # The lowest that a tier was opened with.
        self.limit = LATEST
        self.ready = False
        # With `turn` held: files of groups' blocks; bytes of all parts, and of each model's; when each was used last.
        self.blocks = 0
        self.files = 0
        self.sizes: Counter[int] = Counter()
        self.used_at: dict[int, float] = {}
        self._clock = 0
        # Why the folder is no longer usable, and whether its index is to blame.
        self.failed: str | None = None
        self.index_damaged = False

    def use(self, at: float) -> Use:
        """A use that is later than all before it."""
        with self.lock:
            self._clock += 1
            return Use(self._clock, at)

    def count(self, index: DiskIndex) -> None:
        """What the index says is there, before anything is changed."""
        totals = index.totals()
        self.blocks, self.files, self._clock = totals.blocks, totals.bytes, totals.clock
        self.count_models(index)

    def count_models(self, index: DiskIndex) -> None:
        self.sizes.clear()
        for model, size, used in index.shares():
            self.sizes[model] = size
            self.used_at[model] = max(used, self.used_at.get(model, 0.0))

    def fail(self, reason: Exception) -> bool:
        """Nothing in the folder can be used from here on; False if that is known."""
        there = self.folder.there()
        with self.lock:
            if self.failed is not None:
                return False
            if not there:
                self.failed = "the folder is gone"
            elif isinstance(reason, sqlite3.Error):
                self.failed = f"its index failed ({reason})"
            else:
                self.failed = f"an unexpected error ({type(reason).__name__}: {reason})"
            # Errors of the operating system are raised as OperationalError: the next start checks the index. Others say
            # that the content is wrong, or caused an unexpected error: the next start does not use it.
            self.index_damaged = not isinstance(reason, (OSError, sqlite3.OperationalError))
            return True

    def expected(self) -> set[Name]:
        """Parts that one of the tiers will read."""
        with _TABLE:
            tiers = list(self.tiers.values())
        return {name for expected in tiers for name in expected()}

    def protected(self, room: int, now: float) -> list[int]:
        """Models that take no more than their share of `room` bytes. With `turn` held."""
        recent = [model for model, used in self.used_at.items() if used > now - RECENT and self.sizes[model]]
        return [model for model in recent if self.sizes[model] <= room // len(recent)] if len(recent) > 1 else []

    def alone(self, hash: str) -> bool:
        """Whether no other model's tier has it open."""
        with _TABLE:
            return set(self.tiers) <= {hash}

    def leave(self, hash: str) -> None:
        """The tier of that model is closed; the folder is free when it was the last. Allowed twice."""
        with _TABLE:
            self.tiers.pop(hash, None)
            if not self.tiers:
                if _OPEN.get(self.folder.root) is self:
                    del _OPEN[self.folder.root]
                self.folder.release()


def join(root: Path, hash: str, expected: Callable[[], Iterable[Name]], limit: int, files: Files) -> OpenFolder:
    """The folder, for the tier of the model `hash`. Raises SettingError, or FolderInUse."""
    with _TABLE:
        opened = _OPEN.get(root)
        if opened is None:
            opened = _OPEN[root] = OpenFolder(root, files)
        elif hash in opened.tiers:
            raise FolderInUse(
                f"the disk cache {root} is already in use by this process (pid {os.getpid()}) for the same model; "
                "close that one, or choose another folder with --disk-cache"
            )
        opened.tiers[hash] = expected
        opened.limit = min(opened.limit, limit)
    return opened
