"""Files and their rows changed together, in the order that a kill cannot break (see `index`).

A store is used by one thread, with a connection of its own: the writer's, or that of maintenance.
"""

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress

from .files import NEW, Files, write_file
from .folder import INDEX, INDEX_FILES, TEMPORARY, Folder
from .index import BATCH, CHECKPOINT_PAGES, PAGE, WRITES, DiskIndex, Name, NewRow

# What one transaction adds to the log at most, and what the log takes: it is written back after CHECKPOINT_PAGES.
TRANSACTION = 4 * BATCH * PAGE
LOG = CHECKPOINT_PAGES * PAGE + TRANSACTION
# The log's own index, the tag, the lock, and pages that rows may add to the database before the next look.
SMALL = 64 * 1024 + 4 * WRITES * PAGE
# A limit below this leaves no room for parts.
LEAST_LIMIT = 2 * 1024 * 1024


def open_index(folder: Folder, any_thread: bool = False) -> tuple[DiskIndex, str | None]:
    """The index of a folder, and why it was made anew, if it was: then all parts are gone.

    Raises sqlite3.OperationalError or OSError if the disk does not allow it.
    """
    problem = None
    if folder.has_index():
        try:
            return DiskIndex(folder.index, any_thread), None
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            problem = f"its index cannot be used ({error})"
    elif folder.has_models():
        problem = "its index is missing"
    if problem is not None:
        folder.remove_files()
    folder.remove_index()
    DiskIndex.create(folder.index, folder.files)
    return DiskIndex(folder.index, any_thread), problem


class Store:
    def __init__(self, folder: Folder, index: DiskIndex) -> None:
        self.folder, self.index = folder, index
        self._hashes = index.hashes()

    def put(
        self, new: Sequence[NewRow], data: Sequence[memoryview], day: str, made: Callable[[int], None]
    ) -> list[OSError | None]:
        """Write the files of at most `WRITES` parts; what went wrong with each: then there is no such part, as before.

        `made` is told which of them will not be looked at any more, as soon as that is so.
        """
        self.index.begin(new)
        errors: list[OSError | None] = []
        gone: list[Name] = []
        for number, name in enumerate(each.row.name for each in new):
            try:
                path = self.folder.path(self._hashes[name.model], name.key, name.part)
                _write(self.folder.files, path, data[number])
                errors.append(None)
            except OSError as error:
                errors.append(error)
                # If even that fails the row stays, and the next open tries again.
                with suppress(OSError):
                    self._unlink(name)
                    gone.append(name)
            made(number)
        self.index.finish([each.row for each, error in zip(new, errors, strict=True) if error is None], day)
        self.index.forget(gone)
        return errors

    def remove(self, names: Sequence[Name]) -> None:
        """Remove files, then their rows. OSError: those that are left are as they were."""
        for start in range(0, len(names), BATCH):
            some = names[start : start + BATCH]
            self.index.leave(some)
            gone: list[Name] = []
            try:
                for name in some:
                    self._unlink(name)
                    gone.append(name)
            except OSError:
                self.index.stay([name for name in some if name not in gone])
                self.index.forget(gone)
                raise
            # If this was interrupted, all are LEAVING: the next open removes them.
            self.index.forget(gone)

    def settle(self) -> int:
        """Finish what a kill interrupted; how many parts that were."""
        names = [name for name, _ in self.index.unsettled()]
        for name in names:
            self._unlink(name)
        self.index.forget(names)
        return len(names)

    def overhead(self) -> int:
        """The bytes that all but the parts take or may take before the next look."""
        sizes = self.folder.sizes()
        log = sizes[INDEX_FILES[1]]
        database = max(self.index.nbytes(), sizes[INDEX])
        return database + max(log + TRANSACTION, LOG) + SMALL

    def _unlink(self, name: Name) -> None:
        self.folder.unlink(self._hashes[name.model], name.key, name.part)


def _write(files: Files, path: str, data: memoryview) -> None:
    write_file(files, _create(files, path + TEMPORARY), data)
    files.rename(path + TEMPORARY, path)


def _create(files: Files, path: str) -> int:
    try:
        return files.open(path, NEW)
    except FileNotFoundError:
        shard = os.path.dirname(path)
        try:
            files.mkdir(shard)
        except FileNotFoundError:
            # One by one, so that a root that is gone stays gone.
            files.mkdir(os.path.dirname(shard))
            files.mkdir(shard)
        return files.open(path, NEW)
