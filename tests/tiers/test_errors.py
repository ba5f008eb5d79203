"""Threads of the tier that meet errors nobody thought of: the tier ends, says why, and nobody waits."""

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence

import pytest
from damage import LIMIT, Watched, again
from damages import execute
from disk_parts import (
    MB,
    PATIENCE,
    address,
    fetch_one,
    file_of,
    files,
    image,
    in_time,
    is_right,
    offer,
    open_tier,
    store,
)

from onekv.tiers.base import Target
from onekv.tiers.files import Files, Where
from onekv.tiers.maintain import verify

SIZE = image().size
pytestmark = pytest.mark.usefixtures("no_thread_dies")


# Errors that cross threads


class Broken(Files):
    """Raises `error` at the calls that are named."""

    error: Exception | None = None
    calls: tuple[str, ...] = ()

    def _may(self, call: str) -> None:
        if self.error is not None and call in self.calls:
            raise self.error

    def size(self, where: Where | int) -> int:
        self._may("size")
        return super().size(where)

    def free(self, folder: Where) -> int:
        self._may("free")
        return super().free(folder)

    def unlink(self, path: Where) -> None:
        self._may("unlink")
        super().unlink(path)

    def items(self, folder: Where) -> list:
        self._may("items")
        return super().items(folder)

    def rename(self, old: Where, new: Where) -> None:
        self._may("rename")
        super().rename(old, new)

    def read_ahead(self, handle: int) -> None:
        self._may("read_ahead")

    def in_memory(self, handle: int, place: int) -> bool:
        self._may("read_ahead")
        return False


@pytest.mark.parametrize("calls", [("size",), ("free",), ("size", "unlink", "items"), ("rename", "unlink")])
def test_an_error_of_the_disk_anywhere_in_the_writer_costs_blocks_only(root, calls):
    disk = Broken()
    tier = open_tier(root, LIMIT, files=disk)
    store(tier, 25)
    disk.error, disk.calls = OSError(errno.EIO, os.strerror(errno.EIO)), calls
    for number in range(100, 110):
        offer(tier, address(number))
    tier.drop([address(24).key])
    in_time(tier.flush)
    in_time(tier.stats)
    assert tier.stats().failed is None and tier.stats().queued_bytes == 0
    disk.error = None
    (where,) = store(tier, 1, first=200)
    assert is_right(where, 0, fetch_one(tier, where))
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= LIMIT
    in_time(tier.close)
    assert verify(root).corrupt == 0


def test_files_that_could_be_neither_finished_nor_removed_count(root):
    """A disk that refuses to rename and to remove must not be filled with what is left of writing."""
    disk = Broken()
    tier = open_tier(root, LIMIT, files=disk)
    disk.error, disk.calls = OSError(errno.EIO, os.strerror(errno.EIO)), ("rename", "unlink")
    for number in range(100):
        offer(tier, address(number))
    in_time(tier.flush)
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= LIMIT
    assert tier.stats().failed is None and tier.stats().writes == 0
    disk.error = None
    in_time(tier.close)
    tier = open_tier(root, LIMIT)
    assert files(root) == []
    tier.close()


def test_an_error_that_nobody_thought_of_ends_the_tier_and_not_its_thread(root, caplog):
    disk = Broken()
    tier = open_tier(root, files=disk, staging=2 * SIZE)
    nodes = store(tier, 3)
    disk.error, disk.calls = RuntimeError("a fault of ours"), ("rename",)
    for number in range(100, 110):
        in_time(lambda number=number: offer(tier, address(number)))
    in_time(tier.flush)
    stats = tier.stats()
    assert stats.failed is not None and "a fault of ours" in stats.failed and stats.queued_bytes == 0
    assert tier.find([node.key for node in nodes]) == {} and not offer(tier, address(50))
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None, "the traceback is logged"
    in_time(tier.close)
    again(root, Watched(root))


def test_a_block_that_is_lost_is_counted_once(root):
    """Of two that are written together, one is refused, and then the index fails."""

    class Full(Files):
        looks = 0

        def free(self, folder: Where) -> int:
            self.looks += 1
            if self.looks == 2:
                execute(root, "DROP TABLE written")
            return 0

    tier = open_tier(root, files=Full(), threads=False, write_budget=100 * MB)
    assert offer(tier, address(0), wait=False) and offer(tier, address(1), wait=False)
    assert tier.work()
    assert tier.stats().failed is not None and tier.stats().discarded == 2
    tier.close()


def test_an_error_while_reading_ahead_is_not_lost(root):
    disk = Broken()
    tier = open_tier(root, files=disk)
    nodes = store(tier, 3)
    disk.error, disk.calls = RuntimeError("a fault of ours"), ("read_ahead",)
    tier.expect([(node.key, 0) for node in nodes])
    in_time(tier.close)
    assert tier.stats().failed is not None and "a fault of ours" in tier.stats().failed


# Waiting


class Slow(Files):
    """Reading ahead does not end before it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()

    def in_memory(self, handle: int, place: int) -> bool:
        self.begun.set()
        assert self.go.wait(5 * PATIENCE)
        return False


def test_reading_does_not_wait_for_what_is_read_ahead(root):
    disk = Slow()
    tier = open_tier(root, files=disk)
    nodes = store(tier, 8)
    parts = [(node.key, 0) for node in nodes]
    tier.expect(parts)
    assert disk.begun.wait(PATIENCE)
    targets = [Target(*part, bytearray(tier._images[0].data_size)) for part in parts]
    try:
        assert in_time(lambda: tier.read(targets)) == [True] * 8
    finally:
        disk.go.set()
    assert all(is_right(node, 0, bytes(target.into)) for node, target in zip(nodes, targets, strict=True))
    tier.close()


class Late(Files):
    """The thread beside the caller's comes to its first file when the caller has read one and time is over."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.slow = False

    def read(self, handle: int, views: Sequence[memoryview]) -> int:
        if self.slow:
            self.reads.append(threading.current_thread().name)
            time.sleep(0.05)
        return super().read(handle, views)


def test_nothing_is_begun_after_the_deadline_but_one_part(root):
    disk = Late()
    tier = open_tier(root, files=disk)
    nodes = store(tier, 8)
    parts = [(node.key, 0) for node in nodes]
    tier.expect(parts)
    disk.slow = True
    found = tier.read([Target(*part, bytearray(tier._images[0].data_size)) for part in parts], seconds=-1)
    assert found == [True] + [None] * 7 and len(disk.reads) == 1
    tier.unexpect(parts[1:])
    tier.close()


def test_a_pipe_in_place_of_a_file_is_not_waited_for(root):
    tier = open_tier(root)
    a, b = store(tier, 2)
    path = file_of(root, a)
    path.unlink()
    os.mkfifo(path)
    assert in_time(lambda: fetch_one(tier, a)) is None
    assert is_right(b, 0, fetch_one(tier, b))
    in_time(tier.flush)
    os.mkfifo(f"{path}.tmp")
    assert offer(tier, a)
    in_time(tier.close)


def test_verify_goes_on_after_a_folder_or_a_link_in_place_of_a_file(root):
    tier = open_tier(root)
    nodes = store(tier, 3)
    tier.close()
    first, second = file_of(root, nodes[0]), file_of(root, nodes[1])
    first.unlink()
    first.mkdir()
    second.unlink()
    second.symlink_to("/dev/zero")
    report = verify(root)
    assert (report.checked, report.corrupt) == (3, 2) and verify(root).sound
    assert first.is_dir() and not second.is_symlink()


def test_an_opening_that_is_interrupted_frees_the_folder(root):
    store(tier := open_tier(root), 3)
    tier.close()

    class Interrupted(Files):
        def items(self, folder: Where) -> list:
            raise KeyboardInterrupt

    (root / "index.db").write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        open_tier(root, files=Interrupted())
    tier = open_tier(root)
    assert tier.stats().failed is None
    tier.close()
