"""Files and their rows changed together, in the order that a kill cannot break (see `index`).

A store is used by one thread, with a connection of its own: the writer's, or that of maintenance.
"""

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress

from . import schema
from .files import NEW, Files, file_size, write_file
from .folder import INDEX, INDEX_FILES, TEMPORARY, Folder, Found
from .index import BATCH, CHECKPOINT_PAGES, WRITES, DiskIndex
from .rows import IndexDamaged, Name, NewRow, Status
from .schema import PAGE

# What one transaction adds to the log at most, and what the log takes: it is written back after CHECKPOINT_PAGES.
TRANSACTION = 4 * BATCH * PAGE
LOG = CHECKPOINT_PAGES * PAGE + TRANSACTION
# The log's own index, the tag, the lock, and pages that rows may add to the database before the next look.
SMALL = 64 * 1024 + 4 * WRITES * PAGE
# A limit below this leaves no room for parts.
LEAST_LIMIT = 2 * 1024 * 1024


# SQLite's errors when the index is intact but temporarily unavailable.
_PASSING = ("locked", "disk is full")


def open_index(folder: Folder, any_thread: bool = False, damage: str | None = None) -> tuple[DiskIndex, str | None]:
    """The index of a folder, and why it was rebuilt, if it was: then all parts are gone.

    `damage`: what is known to be wrong with it. Raises sqlite3.Error or OSError if the disk does not allow it.
    """
    problem = f"its index cannot be used ({damage})" if damage is not None else None
    if problem is None and folder.has_index():
        try:
            return _checked(folder, any_thread), None
        except sqlite3.Error as error:
            if str(error).endswith(_PASSING):
                raise
            problem = f"its index cannot be used ({error})"
    elif problem is None and folder.has_models():
        problem = "its index is missing"

    def empty() -> None:
        # Now that there can be another.
        if problem is not None:
            folder.remove_files()
        folder.remove_index()

    schema.create(folder.index, folder.files, empty)
    return DiskIndex(folder.index, any_thread), problem


def _checked(folder: Folder, any_thread: bool) -> DiskIndex:
    index = DiskIndex(folder.index, any_thread)
    try:
        index.check()
    except BaseException:
        index.close()
        raise
    return index


class Store:
    def __init__(self, folder: Folder, index: DiskIndex) -> None:
        self.folder, self.index = folder, index
        self._hashes = index.hashes()

    def put(
        self, new: Sequence[NewRow], data: Sequence[memoryview], day: str, made: Callable[[int], None]
    ) -> tuple[list[OSError | None], bool]:
        """Write the files of at most `WRITES` parts; what went wrong with each: then there is no such part, as before.

        And whether something of those is left in the folder, because it could not be removed. `made` is told which of
        them will not be looked at any more, as soon as that is so.
        """
        self.index.begin(new)
        errors: list[OSError | None] = []
        gone: list[Name] = []
        for number, name in enumerate(each.row.name for each in new):
            try:
                _write(self.folder.files, self.folder.path(self._hash(name), name.key, name.part), data[number])
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
        return errors, len(gone) < sum(error is not None for error in errors)

    def remove(self, names: Sequence[Name]) -> int:
        """Remove files, then their rows; how many bytes that were. OSError: those that are left are as they were."""
        removed = 0
        for start in range(0, len(names), BATCH):
            some = names[start : start + BATCH]
            self.index.leave(some)
            gone: list[Name] = []
            try:
                for name in some:
                    removed += self._unlink(name)
                    gone.append(name)
            except OSError:
                self.index.stay([name for name in some if name not in gone])
                self.index.forget(gone)
                raise
            # If this was interrupted, all are LEAVING: the next open removes them.
            self.index.forget(gone)
        return removed

    def remove_orphans(self) -> tuple[int, int, list[str]]:
        """Remove the files that no row knows; how many files and bytes that were, and the paths that are not ours."""
        # Another tier may have added its model.
        self._hashes = self.index.hashes()
        numbers = {hash: number for number, hash in self._hashes.items()}
        files = size = 0
        stray: list[str] = []
        for found in list(self.folder.scan()):
            if not isinstance(found, Found):
                stray.append(found)
            elif self._unknown(numbers.get(found.model), found):
                length = file_size(found.path, self.folder.files)
                self.folder.files.unlink(found.path)
                files, size = files + 1, size + length
        return files, size, stray

    def _unknown(self, model: int | None, found: Found) -> bool:
        status = self.index.status(Name(model, found.key, found.part)) if model is not None else None
        return status is None or (found.temporary and status == Status.READY)

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

    def _unlink(self, name: Name) -> int:
        return self.folder.unlink(self._hash(name), name.key, name.part)

    def _hash(self, name: Name) -> str:
        if name.model not in self._hashes:
            # Another tier may have added its model.
            self._hashes = self.index.hashes()
        try:
            return self._hashes[name.model]
        except KeyError:
            raise IndexDamaged(f"a row is of model {name.model}, which is not there") from None


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
