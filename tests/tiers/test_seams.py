"""A tier without threads, over files and a clock that are not the system's: what a simulation drives."""

import errno
import os
import random
import shutil
import threading
from collections.abc import Sequence

import pytest
from disk_parts import MB, address, fetch, fetch_one, files, image, is_right, offer, open_tier, store

from onekv.errors import SettingError
from onekv.tiers.files import Clock, Files, Where
from onekv.tiers.folder import FolderInUse
from onekv.tiers.maintain import verify

SIZE = image().size


class Kill(BaseException):
    """The end of the process."""


class Killing(Files):
    """Every call is the last one, once `left` of them were made; a write is torn."""

    left = 10**9
    dead = False

    def _count(self) -> None:
        if self.left <= 0:
            self.dead = True
        self.left -= 1
        if self.dead:
            raise Kill

    def open(self, path: Where, flags: int) -> int:
        self._count()
        return super().open(path, flags)

    def read(self, handle: int, views: Sequence[memoryview]) -> int:
        self._count()
        return super().read(handle, views)

    def write(self, handle: int, data: memoryview) -> int:
        if self.left == 0:
            super().write(handle, data[: len(data) // 2])
        self._count()
        return super().write(handle, data)

    def rename(self, old: Where, new: Where) -> None:
        self._count()
        super().rename(old, new)

    def unlink(self, path: Where) -> None:
        self._count()
        super().unlink(path)

    def mkdir(self, path: Where) -> None:
        self._count()
        super().mkdir(path)

    def size(self, where: Where | int) -> int:
        self._count()
        return super().size(where)

    def free(self, folder: Where) -> int:
        self._count()
        return super().free(folder)


class Steps(Clock):
    """A second at every look."""

    seconds = 1_800_000_000.0

    def now(self) -> float:
        self.seconds += 1
        return self.seconds

    monotonic = now


def test_without_threads_nothing_happens_until_work_is_called(root):
    before = threading.active_count()
    tier = open_tier(root, threads=False)
    nodes = [address(number) for number in range(3)]
    for where in nodes:
        assert offer(tier, where, wait=False)
    assert files(root) == [] and tier.find([nodes[0].key]) == {} and tier.has(nodes[0].key, 0)
    assert tier.work() and not tier.work()
    assert len(files(root)) == 3 and set(tier.find([where.key for where in nodes])) == {where.key for where in nodes}
    assert all(is_right(where, 0, fetch_one(tier, where)) for where in nodes)
    tier.touch([nodes[0].key])
    tier.clear()
    assert tier.find([nodes[0].key]) == {} and len(files(root)) == 3
    tier.flush()
    assert files(root) == [] and threading.active_count() == before
    tier.close()
    tier.close()
    assert verify(root).sound


def test_an_offer_that_waits_does_the_work_itself(root):
    tier = open_tier(root, threads=False, staging=2 * SIZE)
    for number in range(7):
        assert offer(tier, address(number), wait=True)
    assert not offer(tier, address(8), wait=False) or tier.stats().queued_bytes <= 2 * SIZE
    tier.close()
    assert len(files(root)) >= 7 and verify(root).sound


def test_a_run_without_threads_is_the_same_every_time(tmp_path):
    """The order of use, the times in the index and what is evicted follow from what was asked alone."""
    found = []
    for name in ("a", "b"):
        choose = random.Random(5)
        tier = open_tier(tmp_path / name, 3 * MB, threads=False, clock=Steps())
        for _ in range(200):
            offer(tier, address(choose.randrange(60)), wait=True)
            tier.touch([address(choose.randrange(60)).key])
            tier.work(choose.randrange(3))
        tier.close()
        index = (tmp_path / name / "index.db").read_bytes()
        found.append(([path.name for path in files(tmp_path / name)], index))
    assert found[0] == found[1] and found[0][0]


def test_a_kill_at_every_call_leaves_a_sound_folder(tmp_path):
    """At every call of an opening, some writes, evictions and reads, one after the other."""
    call = done = 0
    while not done:
        root = tmp_path / "cache"
        shutil.rmtree(root, ignore_errors=True)
        store(old := open_tier(root, 3 * MB, threads=False), 16)
        old.kill()
        disk = Killing()
        disk.left = call
        tier = None
        try:
            tier = open_tier(root, 3 * MB, threads=False, files=disk)
            for number in range(100, 104):
                assert offer(tier, address(number))
                tier.work()
            tier.touch([address(101).key])
            tier.drop([address(100).key])
            assert is_right(address(101), 0, fetch_one(tier, address(101)))
            tier.flush()
            done = call
        except Kill:
            pass
        disk.left = 10**9
        if tier is not None:
            tier.kill()
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        assert size <= 3 * MB, f"{size} bytes after a kill at call {call}"
        tier = open_tier(root, 3 * MB, threads=False)
        there = tier.find([address(number).key for number in range(110)])
        read = fetch(tier, *((key, 0) for key in there))
        assert all(data is not None for data in read.values()) and len(files(root)) == len(there) >= 12
        tier.close()
        assert verify(root).sound
        call += 1
    assert done > 40


def test_kill_frees_the_lock_and_keeps_what_was_committed(root):
    tier = open_tier(root, threads=False)
    nodes = store(tier, 3)
    with pytest.raises(FolderInUse):
        open_tier(root)
    offer(tier, address(50))
    log = (root / "index.db-wal").stat().st_size
    tier.kill()
    assert (root / "index.db-wal").stat().st_size == log > 0
    assert all((root / name).stat().st_mode & 0o777 == 0o600 for name in ("index.db", "index.db-wal"))
    tier = open_tier(root)
    assert len(tier.find([*(where.key for where in nodes), address(50).key])) == 3
    tier.close()


class Refusing(Files):
    error: int | None = None
    room: int | None = None

    def write(self, handle: int, data: memoryview) -> int:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        # Short, as a file system may.
        return super().write(handle, data[:10_000])

    def free(self, folder: Where) -> int:
        return super().free(folder) if self.room is None else self.room


def test_short_writes_refusals_and_a_full_disk(root):
    disk = Refusing()
    tier = open_tier(root, threads=False, files=disk)
    (whole,) = store(tier, 1)
    disk.error = errno.EIO
    assert offer(tier, address(1)) and tier.work()
    disk.error, disk.room = None, 0
    assert offer(tier, address(2)) and tier.work()
    disk.room = None
    stats = tier.stats()
    assert (stats.writes, stats.discarded, stats.failed) == (1, 2, None) and len(files(root)) == 1
    assert is_right(whole, 0, fetch_one(tier, whole))
    tier.close()
    disk.error = errno.EIO
    with pytest.raises(SettingError):
        open_tier(root / "other", files=disk)
