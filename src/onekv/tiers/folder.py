"""The folder of the disk tier: its names, who may use it, and what in it is ours.

    <root>/CACHEDIR.TAG                                says that this is a cache, and ours
    <root>/lock                                        held by the one process that uses the folder; has its pid
    <root>/index.db, -wal, -shm                        the index of all models
    <root>/<model>.turns                               turns that a server remembers (turns.py)
    <root>/<model>/<2 digits>/<key>-<part>.safetensors  the parts; with .tmp while they are written
    <root>/rank-1-of-2                                 disk caches of ranks (`onekv.parallel`), each a root of its own

Only the owner may look into it (0700, files 0600). A folder that has other things in it and no tag is not taken, and
whatever does not look like the above is never removed. The lock is the kernel's (`flock`): a kill frees it.
"""

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import OneKVError, SettingError
from .base import STATES
from .files import FILES, NEW, READ, Files, Item, Where, file_size, write_file
from .image import FORMAT

__all__ = [
    "INDEX",
    "INDEX_FILES",
    "TEMPORARY",
    "Folder",
    "FolderInUse",
    "Found",
    "file_size",
    "holder",
    "is_ours",
    "model_hash",
    "part_path",
    "rank_folder",
]

TAG = "CACHEDIR.TAG"
LOCK = "lock"
INDEX = "index.db"
INDEX_FILES = (INDEX, f"{INDEX}-wal", f"{INDEX}-shm")
TEMPORARY = ".tmp"
TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file is a cache directory tag created by OneKV: this folder is its disk cache.\n"
    "# For information about cache directory tags see https://bford.info/cachedir/\n"
)
_OURS = TAG_TEXT.splitlines()[:2]
# The errors of a lock that another process holds.
_LOCKED = (errno.EWOULDBLOCK, errno.EACCES)
_MODEL = re.compile(r"[0-9a-f]{32}")
_TURNS = re.compile(r"([0-9a-f]{32})\.turns(\.tmp)?")
_RANK = re.compile(r"rank-[0-9]+-of-[0-9]+")
_SHARD = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(r"([0-9a-f]{2,})-(states|[0-9]+)\.safetensors(\.tmp)?")


def rank_folder(rank: int, size: int) -> str:
    """In a folder that several ranks were given: the one of this rank."""
    return f"rank-{rank}-of-{size}"


class FolderInUse(OneKVError):
    """Another process has the folder of the disk cache."""


@dataclass(frozen=True)
class Found:
    """A file that looks like one of ours."""

    path: str
    model: str
    key: bytes
    part: int
    temporary: bool


def model_hash(fingerprint: str) -> str:
    """The name of a model's folder: 32 hex digits. Another format of files is another folder."""
    return hashlib.blake2b(f"{FORMAT}\0{fingerprint}".encode(), digest_size=16).hexdigest()


def is_ours(root: Path, files: Files = FILES) -> bool:
    """Whether a disk cache of OneKV is there."""
    try:
        handle = files.open(root / TAG, READ)
        try:
            text = memoryview(bytearray(len(TAG_TEXT)))
            size = files.read(handle, [text])
        finally:
            files.close(handle)
    except OSError as error:
        # Not there, or something else of that name.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
            return False
        raise
    return bytes(text[:size]).decode("utf-8", "replace").splitlines()[:2] == _OURS


class Folder:
    """A folder that this process has for itself, from here to `release`."""

    def __init__(self, root: Path, files: Files = FILES) -> None:
        """Make it if it is not there, and lock it. Raises SettingError, or FolderInUse."""
        self.root, self.files = root, files
        try:
            _make(root, files)
            self._lock = _lock(root, files)
        except OSError as error:
            raise SettingError(
                f"the folder {root} cannot be used as a disk cache ({error.strerror}); choose another with --disk-cache"
            ) from error

    def release(self) -> None:
        """Let others have it. Allowed twice."""
        if self._lock >= 0:
            handle, self._lock = self._lock, -1
            # Not one of the calls that a simulation may refuse: a process that ends closes it, too.
            os.close(handle)

    @property
    def index(self) -> Path:
        return self.root / INDEX

    def has_index(self) -> bool:
        try:
            self.files.size(self.index)
        except FileNotFoundError:
            return False
        return True

    def there(self) -> bool:
        """Whether the folder is still the one that was locked."""
        try:
            return self.files.same(self.root / LOCK, self._lock)
        except OSError:
            return False

    def path(self, model: str, key: bytes, part: int) -> str:
        return part_path(self.root, model, key, part)

    def turns(self, model: str) -> Path:
        return self.root / f"{model}.turns"

    def unlink(self, model: str, key: bytes, part: int) -> int:
        """Remove a part's file and its temporary file, if they exist; returns how many bytes that freed."""
        path = self.path(model, key, part)
        return self._unlink(path) + self._unlink(path + TEMPORARY)

    def _unlink(self, path: str) -> int:
        try:
            size = self.files.size(path)
            self.files.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return 0
        except (IsADirectoryError, PermissionError):
            # A folder in its place is not ours to remove.
            if self.files.is_folder(path):
                return 0
            raise
        return size

    def used(self) -> tuple[int, int]:
        """What is really there: how many files of groups' blocks, and the bytes of all files that are ours."""
        blocks = size = 0
        for found in self.scan():
            if isinstance(found, Found):
                blocks += found.part != STATES and not found.temporary
                size += file_size(found.path, self.files)
        return blocks, size

    def sizes(self) -> dict[str, int]:
        """The bytes of every file that is not a part."""
        names = (TAG, LOCK, *INDEX_FILES, *self._turns())
        return {name: file_size(self.root / name, self.files) for name in names}

    def free(self) -> int:
        """Bytes available to us on the disk."""
        return self.files.free(self.root)

    def has_models(self) -> bool:
        return bool(self._models())

    def scan(self) -> Iterator[Found | str]:
        """Every file below the folders of models: as `Found`, or its path if it is not ours."""
        for model in self._models():
            left = [""]
            while left:
                shard = left.pop()
                folder = f"{self.root}/{model}/{shard}".rstrip("/")
                for item in self._items(folder):
                    if item.is_folder:
                        left.append(f"{shard}/{item.name}".lstrip("/"))
                    else:
                        yield _found(f"{folder}/{item.name}", model, shard, item)

    def remove_index(self) -> None:
        for name in INDEX_FILES:
            with suppress(FileNotFoundError):
                self.files.unlink(self.root / name)

    def remove_turns(self, model: str | None = None) -> None:
        """What a server remembers of a model's turns, or of all models'."""
        for name in self._turns():
            if model is None or name.startswith(model):
                self.files.unlink(self.root / name)

    def _turns(self) -> list[str]:
        return [item.name for item in self.files.items(self.root) if item.is_file and _TURNS.fullmatch(item.name)]

    def remove_files(self) -> tuple[int, int]:
        """Remove all parts of all models; returns the number of files and bytes."""
        files = size = 0
        for found in list(self.scan()):
            if isinstance(found, Found):
                files, size = files + 1, size + file_size(found.path, self.files)
                self.files.unlink(found.path)
        self.remove_empty()
        return files, size

    def remove_empty(self) -> None:
        """Remove the folders of models that have nothing in them."""
        for model in self._models():
            for item in self._items(f"{self.root}/{model}"):
                if item.is_folder and _SHARD.fullmatch(item.name):
                    _remove_folder(self.files, f"{self.root}/{model}/{item.name}")
            _remove_folder(self.files, f"{self.root}/{model}")

    def _models(self) -> list[str]:
        """The folders of models. Links are not followed: their targets are not ours."""
        return [item.name for item in self.files.items(self.root) if item.is_folder and _MODEL.fullmatch(item.name)]

    def _items(self, folder: str) -> list[Item]:
        """What is in a folder; nothing if it has been removed meanwhile."""
        try:
            return self.files.items(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []


def part_path(root: Path, model: str, key: bytes, part: int) -> str:
    """Where a part is, in the folder `root`, of the model with that hash."""
    name = key.hex()
    return f"{root}/{model}/{name[:2]}/{name}-{'states' if part == STATES else part}.safetensors"


def holder(root: Path) -> str | None:
    """The pid of the process that uses a folder, or `unknown`; None if there is none. Does not lock the folder."""
    try:
        handle = os.open(root / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _LOCKED:
            raise
        return _holder(handle)
    finally:
        # Also the end of the lock, if it was got.
        os.close(handle)
    return None


def _holder(handle: int) -> str:
    return os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"


def _found(path: str, model: str, shard: str, item: Item) -> Found | str:
    match = _FILE.fullmatch(item.name)
    if match is None or not item.is_file or shard != match[1][:2] or len(match[1]) % 2:
        return path
    part = STATES if match[2] == "states" else int(match[2])
    return Found(path, model, bytes.fromhex(match[1]), part, match[3] is not None)


def _make(root: Path, files: Files) -> None:
    _make_folders(root, files)
    if not is_ours(root, files):
        names = [item.name for item in files.items(root)]
        if others := [name for name in names if name != TAG + TEMPORARY and not _RANK.fullmatch(name)]:
            raise SettingError(
                f"the folder {root} is not empty ({others[0]!r} is in it) and not a OneKV disk cache; "
                "choose an empty or new folder with --disk-cache"
            )
        # By rename: a kill in between must not leave a folder that is refused forever.
        temporary = root / (TAG + TEMPORARY)
        write_file(files, files.open(temporary, NEW), memoryview(TAG_TEXT.encode()))
        files.rename(temporary, root / TAG)
    # A file system without modes, or a folder of another user, is as private as it can be.
    with suppress(PermissionError):
        files.chmod(root, 0o700)


def _make_folders(folder: Path, files: Files) -> None:
    try:
        files.mkdir(folder)
    except FileNotFoundError:
        _make_folders(folder.parent, files)
        files.mkdir(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _lock(root: Path, files: Files) -> int:
    # filelock is not used: without flock it creates a file that a kill leaves behind; and `there` needs the handle.
    handle = files.open(root / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        files.write(handle, memoryview(f"{os.getpid()}\n".encode()))
    except BaseException as error:
        pid = _holder(handle)
        os.close(handle)
        if not isinstance(error, OSError) or error.errno not in _LOCKED:
            raise
        raise FolderInUse(
            f"the disk cache {root} is in use by another process (pid {pid}); "
            "stop that process, or choose another folder with --disk-cache"
        ) from error
    return handle


def _remove_folder(files: Files, folder: Where) -> None:
    try:
        files.rmdir(folder)
    except OSError as error:
        # Something foreign is in it: not ours to remove.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENOENT):
            raise
