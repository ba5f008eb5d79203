"""The folder of the disk tier: its names, who may use it, and what in it is ours.

    <root>/CACHEDIR.TAG                                says that this is a cache, and ours
    <root>/lock                                        held by the one process that uses the folder; has its pid
    <root>/index.db, -wal, -shm                        the index of all models
    <root>/<model>/<2 digits>/<key>-<part>.safetensors  the parts; with .tmp while they are written

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
from .image import FORMAT

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
_MODEL = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(r"([0-9a-f]{2,})-(states|[0-9]+)\.safetensors(\.tmp)?")


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


def is_ours(root: Path) -> bool:
    """Whether a disk cache of OneKV is there."""
    try:
        lines = (root / TAG).read_text("utf-8", "replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return lines[:2] == _OURS


class Folder:
    """A folder that this process has for itself, from here to `release`."""

    def __init__(self, root: Path) -> None:
        """Make it if it is not there, and lock it. Raises SettingError, or FolderInUse."""
        self.root = root
        try:
            _make(root)
            self._lock = _lock(root)
        except OSError as error:
            raise SettingError(
                f"the folder {root} cannot be used as a disk cache ({error.strerror}); choose another with --disk-cache"
            ) from error

    def release(self) -> None:
        """Let others have it. Allowed twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def index(self) -> Path:
        return self.root / INDEX

    def there(self) -> bool:
        """Whether the folder is still the one that was locked."""
        try:
            return os.path.samestat(os.stat(self.root / LOCK), os.fstat(self._lock))
        except OSError:
            return False

    def path(self, model: str, key: bytes, part: int) -> str:
        name = key.hex()
        return f"{self.root}/{model}/{name[:2]}/{name}-{'states' if part == STATES else part}.safetensors"

    def unlink(self, model: str, key: bytes, part: int) -> None:
        """Remove a part's file and what is left of writing it, if they are there."""
        path = self.path(model, key, part)
        for name in (path, path + TEMPORARY):
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(name)

    def sizes(self) -> dict[str, int]:
        """The bytes of every file that is not a part."""
        return {name: file_size(self.root / name) for name in (TAG, LOCK, *INDEX_FILES)}

    def free(self) -> int:
        """Bytes that the disk has left for us."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    def has_models(self) -> bool:
        return any(_MODEL.fullmatch(name) for name in os.listdir(self.root))

    def scan(self) -> Iterator[Found | str]:
        """Every file below the folders of models: as `Found`, or its path if it is not ours."""
        for model in sorted(filter(_MODEL.fullmatch, os.listdir(self.root))):
            for folder, _, names in os.walk(self.root / model):
                shard = os.path.relpath(folder, self.root / model)
                for name in names:
                    yield _found(f"{folder}/{name}", model, shard, name)

    def remove_index(self) -> None:
        for name in INDEX_FILES:
            (self.root / name).unlink(missing_ok=True)

    def remove_files(self) -> tuple[int, int]:
        """Remove all parts of all models; how many files and bytes that were."""
        files = size = 0
        for found in list(self.scan()):
            if isinstance(found, Found):
                files, size = files + 1, size + file_size(found.path)
                os.unlink(found.path)
        self.remove_empty()
        return files, size

    def remove_empty(self) -> None:
        """Remove the folders of models that have nothing in them."""
        for model in filter(_MODEL.fullmatch, os.listdir(self.root)):
            for shard in filter(_SHARD.fullmatch, os.listdir(self.root / model)):
                _remove_folder(self.root / model / shard)
            _remove_folder(self.root / model)


def file_size(path: Path | str) -> int:
    """0 if it is not there."""
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _found(path: str, model: str, shard: str, name: str) -> Found | str:
    match = _FILE.fullmatch(name)
    if match is None or not name.startswith(shard) or len(match[1]) % 2 or os.path.islink(path):
        return path
    part = STATES if match[2] == "states" else int(match[2])
    return Found(path, model, bytes.fromhex(match[1]), part, match[3] is not None)


def _make(root: Path) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_ours(root):
        if others := sorted({*os.listdir(root)} - {TAG + TEMPORARY}):
            raise SettingError(
                f"the folder {root} is not empty ({others[0]!r} is in it) and not a disk cache of OneKV; "
                "give an empty or a new folder with --disk-cache"
            )
        # By rename: a kill in between must not leave a folder that is refused for ever.
        temporary = root / (TAG + TEMPORARY)
        temporary.write_text(TAG_TEXT)
        temporary.replace(root / TAG)
    # A file system without modes, or a folder of another user, is as private as it can be.
    with suppress(PermissionError):
        root.chmod(0o700)


def _lock(root: Path) -> int:
    handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(handle, 32).decode("ascii", "replace").strip()
        os.close(handle)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise FolderInUse(
            f"the disk cache {root} is used by another process (pid {holder or 'unknown'}); "
            "stop that process, or give this one a folder of its own with --disk-cache"
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def _remove_folder(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        # Something foreign is in it, or it is a link: not ours to remove.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENOENT):
            raise
