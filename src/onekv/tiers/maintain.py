"""Maintenance of a disk cache folder: inspect, verify, clear.

Inspecting works while a server uses the folder. Verifying and clearing need exclusive access.
"""

import errno
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ..errors import OneKVError, SettingError
from .files import FILES, READ, Files
from .folder import INDEX, Folder, is_ours, part_path
from .index import DiskIndex
from .rows import ModelUse, Name
from .store import Store, open_index

__all__ = ["IndexUnreadable", "ModelUse", "Report", "clear", "inspect", "models", "verify", "written"]

_CHUNK = 4 * 1024 * 1024
# A folder or a link in place of a file.
_NO_FILE = (errno.EISDIR, errno.ELOOP)


class IndexUnreadable(OneKVError):
    """The index is damaged: the next open, or `verify`, starts over."""


@dataclass
class Report:
    """What `verify` found. All but `stray` was removed."""

    checked: int = 0
    bytes: int = 0
    # Parts whose file does not match its row, or has none.
    corrupt: int = 0
    missing: int = 0
    # Files of ours that no row knows, among them those that a kill left.
    orphans: int = 0
    removed_bytes: int = 0
    # Files below the folders of models that are not ours.
    stray: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not (self.corrupt or self.missing or self.orphans)


def models(folder: Path) -> list[ModelUse]:
    """The models of a folder, the one used last first. A folder that is not there has none.

    Raises SettingError if the folder is not ours, IndexUnreadable.
    """
    if not folder.exists():
        return []
    _must_be_ours(folder)
    if not (folder / INDEX).exists():
        return []
    with _reading(folder) as index:
        index.check()
        return index.uses()


def written(folder: Path, day: str) -> int:
    """Bytes that were written to the folder on that day (UTC). Raises IndexUnreadable."""
    if not (folder / INDEX).exists():
        return 0
    with _reading(folder) as index:
        return index.written(day)


@contextmanager
def _reading(folder: Path) -> Iterator[DiskIndex]:
    try:
        index = DiskIndex(folder / INDEX, read_only=True)
        try:
            yield index
        finally:
            index.close()
    except sqlite3.Error as error:
        raise IndexUnreadable(
            f"the index of the disk cache {folder} cannot be read ({error}); `onekv cache verify` repairs it"
        ) from error


def verify(folder: Path, progress: Callable[[int, int], None] | None = None, files: Files = FILES) -> Report:
    """Read every file and compare it with its checksum; remove what is damaged or left over.

    `progress` is told how many parts of how many are done. Raises FolderInUse, SettingError.
    """
    report = Report()
    if not folder.exists():
        return report
    with _taken(folder, files) as (store, emptied):
        report.corrupt += emptied
        # Leftovers of a kill are no orphans while a row knows them.
        store.settle()
        hashes = store.index.hashes()
        parts = [part for model in hashes for part in store.index.of_model(model)]
        bad: list[Name] = []
        for done, (name, size) in enumerate(parts, 1):
            _check(store.index, folder, hashes[name.model], name, size, report, bad, files)
            if progress is not None:
                progress(done, len(parts))
        store.remove(bad)
        report.orphans, removed, report.stray = store.remove_orphans()
        report.removed_bytes += removed
        store.folder.remove_empty()
    return report


def inspect(folder: Path, seconds: float, files: Files = FILES) -> tuple[Report, int]:
    """As `verify`, for at most so long, but nothing is changed: what was found, and how many parts there are.

    For a folder that nobody uses: whoever does may remove what is being looked at. Raises SettingError,
    IndexUnreadable.
    """
    report, end = Report(), time.monotonic() + seconds
    if not models(folder):
        return report, 0
    with _reading(folder) as index:
        unsettled = {name for name, _ in index.unsettled()}
        hashes = index.hashes()
        parts = [part for model in hashes for part in index.of_model(model) if part[0] not in unsettled]
        for name, size in parts:
            if time.monotonic() > end:
                break
            _check(index, folder, hashes[name.model], name, size, report, [], files)
    report.removed_bytes = 0
    return report, len(parts)


def clear(folder: Path, model: str | None = None) -> tuple[int, int]:
    """Remove everything, or what belongs to a model (its name, or the beginning of its hash): parts and bytes.

    Raises FolderInUse, SettingError, or OneKVError if there is no such model.
    """
    if not folder.exists() and model is None:
        return 0, 0
    with _taken(folder, FILES) as (store, _):
        uses = store.index.uses()
        chosen = {use.id for use in uses if model is None or use.name == model or use.hash.startswith(model)}
        if model is not None and not chosen:
            raise OneKVError(f"the disk cache {folder} has no model {model!r}; see `onekv cache ls`")
        parts = [part for number in chosen for part in store.index.of_model(number)]
        store.remove([name for name, _ in parts])
        store.index.remove_models(chosen)
        for use in uses:
            if use.id in chosen:
                store.folder.remove_turns(use.hash)
        count, size = len(parts), sum(size for _, size in parts)
        if model is None:
            store.folder.remove_turns()
            files, more = store.folder.remove_files()
            count, size = count + files, size + more
        store.folder.remove_empty()
        store.index.shrink()
    return count, size


@contextmanager
def _taken(root: Path, files: Files) -> Iterator[tuple[Store, bool]]:
    """The folder, for this process alone, and whether its index had to be rebuilt."""
    _must_be_ours(root)
    folder = Folder(root, files)
    try:
        index, problem = open_index(folder)
        try:
            yield Store(folder, index), problem is not None
            index.checkpoint()
        finally:
            index.close()
    except (OSError, sqlite3.Error) as error:
        raise OneKVError(f"the disk cache {root} cannot be changed ({error})") from error
    finally:
        folder.release()


def _must_be_ours(root: Path) -> None:
    if not root.is_dir() or (any(root.iterdir()) and not is_ours(root)):
        raise SettingError(f"{root} is not a OneKV disk cache; set its folder with --disk-cache")


def _check(
    index: DiskIndex, root: Path, hash: str, name: Name, size: int, report: Report, bad: list[Name], files: Files
) -> None:
    row = index.row(name)
    path = part_path(root, hash, name.key, name.part)
    report.checked += 1
    try:
        actual, checksum = _checksum(files, path)
    except (FileNotFoundError, NotADirectoryError):
        report.missing += 1
        bad.append(name)
        return
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        report.corrupt += 1
        bad.append(name)
        return
    report.bytes += actual
    if row is None or (actual, checksum) != (size, row.checksum):
        report.corrupt += 1
        report.removed_bytes += actual
        bad.append(name)


def _checksum(files: Files, path: str) -> tuple[int, bytes]:
    digest = xxhash.xxh3_128()
    size = 0
    buffer = memoryview(bytearray(_CHUNK))
    handle = files.open(path, READ)
    try:
        while count := files.read(handle, [buffer]):
            digest.update(buffer[:count])
            size += count
    finally:
        files.close(handle)
    return size, digest.digest()
