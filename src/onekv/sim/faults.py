"""What can go wrong, and when: each fault is armed by an operation and strikes at the n-th call of its site.

site              strikes                                   who may suffer
model             the model raises                          the requests of that step
nan               the model's logits are not numbers        that request
copy              copying a block raises                    the request that is admitted
constraint        a constraint raises                       its request
text              a detokenizer raises                      its request
emit              a consumer raises                         its request
states            reading recurrent states raises           the requests that the engine is working on
tier              the tier raises, which it must not        the requests that the engine is working on
upkeep            the same, when it is notified of uses,    the requests that the engine is working on
                  asked to clear, or not to expect parts
allowed           a constraint raises when it is queried    its request
proposer          a proposer raises                         none: it is no longer used
the rest          the disk, the store: see `SimFiles` and   none: a tier never fails a request
                  `SimStore` (store.py)
"""

import errno
import os
import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..tiers.files import Clock, Files, Where

ENGINE_SITES = ("model", "nan", "copy", "constraint", "text", "emit", "states", "tier")
# Armed by separate operations, so that scripts recorded before they existed stay valid.
ASKED_SITES = ("allowed", "proposer")
# Methods of a tier, and the site that they belong to. Not `drop`: if it fails, the engine ends, for its content may be
# wrong.
TIER_CALLS = {
    **dict.fromkeys(("find", "tails", "offer", "expect", "ready", "read", "wants"), "tier"),
    **dict.fromkeys(("unexpect", "touch", "clear"), "upkeep"),
}
DISK_SITES = (
    "disk full",
    "disk error",
    "no free space",
    "short write",
    "torn write",
    "flip when written",
    "flip when read",
    "vanished",
    "slow read",
    "killed",
)
REMOTE_SITES = ("store unreachable", "store slow", "store full", "store flips", "store forgets")


class Kill(BaseException):
    """The process ends here."""


class Injected(Exception):
    """A fault that the simulation has caused."""


class SimClock(Clock):
    """Time that passes only when it is advanced."""

    def __init__(self) -> None:
        self.seconds = 1.7e9

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds


class Faults:
    def __init__(self) -> None:
        # Calls of a site until it strikes.
        self._armed: dict[str, int] = {}
        # While the simulation itself looks at something.
        self.paused = False
        self.struck: Counter[str] = Counter()

    def arm(self, site: str, calls: int) -> None:
        self._armed[site] = calls

    @property
    def armed(self) -> bool:
        """Whether something can go wrong, or has."""
        return bool(self._armed) or bool(self.struck)

    def disarm(self) -> None:
        self._armed.clear()

    def strikes(self, site: str) -> bool:
        """To be asked at every call of a site."""
        if self.paused or site not in self._armed:
            return False
        self._armed[site] -= 1
        if self._armed[site] > 0:
            return False
        del self._armed[site]
        self.struck[site] += 1
        return True


class SimFiles(Files):
    """The real file system, between calls of which faults strike."""

    def __init__(self, faults: Faults, clock: SimClock) -> None:
        self._faults, self._clock = faults, clock

    def _call(self) -> None:
        if self._faults.strikes("killed"):
            raise Kill
        if self._faults.strikes("disk error"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open(self, path: Where, flags: int) -> int:
        self._call()
        if self._faults.strikes("vanished"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return super().open(path, flags)

    def read(self, handle: int, views: Sequence[memoryview]) -> int:
        self._call()
        if self._faults.strikes("slow read"):
            self._clock.seconds += 0.3
        count = super().read(handle, views)
        if count and self._faults.strikes("flip when read"):
            _flip(np.frombuffer(max(views, key=len), np.uint8))
        return count

    def write(self, handle: int, data: memoryview) -> int:
        self._call()
        if self._faults.strikes("disk full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._faults.strikes("torn write"):
            super().write(handle, data[: len(data) // 2])
            raise Kill
        if len(data) > 1 and self._faults.strikes("short write"):
            return super().write(handle, data[: len(data) // 2])
        if self._faults.strikes("flip when written"):
            damaged = np.frombuffer(data, np.uint8).copy()
            _flip(damaged)
            return super().write(handle, damaged.data)
        return super().write(handle, data)

    def rename(self, old: Where, new: Where) -> None:
        self._call()
        super().rename(old, new)
        # Between a file and its row in the index.
        self._call()

    def unlink(self, path: Where) -> None:
        self._call()
        super().unlink(path)

    def size(self, where: Where | int) -> int:
        self._call()
        return super().size(where)

    def free(self, folder: Where) -> int:
        self._call()
        return 0 if self._faults.strikes("no free space") else super().free(folder)


def _flip(data: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
    """One bit, at a place that depends on the content alone: in half of the cases near the end, where the KV is."""
    if len(data):
        place = int(data.sum()) * 7919
        data[-1 - place // 2 % min(32, len(data)) if place % 2 else place % len(data)] ^= 16


def damage_file(folder: Path, choice: int, how: int) -> bool:
    """Flip a bit of one of the files of parts, cut it, empty it, remove it or put another one in its place."""
    files = sorted(folder.glob("*/*/*.safetensors"))
    if not files:
        return False
    file, other = files[choice % len(files)], files[(choice // 7) % len(files)]
    content = bytearray(file.read_bytes())
    if how % 5 == 0 and content:
        content[-1 - choice % min(64, len(content)) if how % 2 else choice % len(content)] ^= 1 << choice % 8
    elif how % 5 == 1:
        del content[choice % (len(content) + 1) :]
    elif how % 5 == 2:
        content.clear()
    elif how % 5 == 3:
        file.unlink()
        return True
    else:
        content[:] = other.read_bytes()
    file.write_bytes(content)
    return True


# Values that a tampered row of the index may hold.
HOSTILE = (None, -1, 0, 2**62, -(2**62), 1.5, "text", b"", b"\xff" * 16, "\x00")
COLUMNS = (
    "model",
    "key",
    "part",
    "parent",
    "start",
    "tokens",
    "partial",
    "size",
    "checksum",
    "state",
    "used",
    "used_at",
)


def damage_index(path: Path, choice: int, value: int) -> bool:
    """Write something hostile into one row of the index, past what its tables check."""
    if not path.exists():
        return False
    column = COLUMNS[choice % len(COLUMNS)]
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute(
            f"UPDATE parts SET {column} = ? WHERE (model, key, part) IN"
            " (SELECT model, key, part FROM parts ORDER BY key, part LIMIT 1 OFFSET ?)",
            (HOSTILE[value % len(HOSTILE)], choice // len(COLUMNS) % 17),
        )
    except (sqlite3.Error, UnicodeDecodeError):
        # The database refuses it, or is so full of noise that not even its error message can be read.
        return False
    finally:
        db.close()
    return True


def noise_in_index(path: Path, choice: int) -> bool:
    """Overwrite some bytes of the database file."""
    if not path.exists():
        return False
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(choice % max(1, size))
        file.write(np.random.default_rng(choice).bytes(1 + choice % 64)[: max(1, size - choice % max(1, size))])
    return True
