"""Parts that are written together, and parts that are read at once: each is treated as if it were alone."""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from disk_parts import MB, address, fetch_one, file_of, files, image, is_right, offer, open_tier, store

from onekv.tiers import reader as reader_module
from onekv.tiers import store as store_module
from onekv.tiers.base import Target
from onekv.tiers.disk import DiskTier
from onekv.tiers.files import Files
from onekv.tiers.index import WRITES, DiskIndex
from onekv.tiers.maintain import verify
from onekv.tiers.rows import Status

SIZE = image().size


@pytest.fixture
def files_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[str], None]]]:
    """What to do before a file is made and after it; both are told its path."""
    around: list[Callable[[str], None]] = [lambda path: None, lambda path: None]
    write = store_module._write

    def wrapped(files: Files, path: str, data: memoryview) -> None:
        around[0](path)
        write(files, path, data)
        around[1](path)

    monkeypatch.setattr(store_module, "_write", wrapped)
    yield around


def offer_together(
    tier: DiskTier, around: list[Callable[[str], None]], count: int, then: Callable[[], None] = lambda: None
) -> None:
    """Offer parts while the writer is busy with another, so that it finds all of them in its queue."""
    busy, go = threading.Event(), threading.Event()
    before = around[0]

    def hold(path: str) -> None:
        busy.set()
        assert go.wait(10)

    around[0] = hold
    assert offer(tier, address(10_000))
    assert busy.wait(10)
    around[0] = before
    for number in range(count):
        assert offer(tier, address(number))
    then()
    go.set()
    tier.flush()


def statuses(root: Path) -> dict[str, int]:
    """What is committed: the status of every part, by its file's name."""
    index = DiskIndex(root / "index.db", read_only=True)
    rows = index._db.execute("SELECT key, state FROM parts").fetchall()
    index.close()
    return {f"{key.hex()}-0.safetensors": status for key, status in rows}


def test_rows_are_writing_before_the_first_file_and_ready_after_the_last(root, files_made):
    tier = open_tier(root)
    names = {f"{address(number).key.hex()}-0.safetensors" for number in range(WRITES)}
    seen = []

    def look(path: str) -> None:
        if Path(path).name in names:
            found = statuses(root)
            seen.append({found.get(name) for name in names})

    files_made[:] = [look, look]
    offer_together(tier, files_made, WRITES)
    assert seen == [{Status.WRITING}] * 2 * WRITES
    assert {statuses(root)[name] for name in names} == {Status.READY}
    assert tier.stats().writes == WRITES + 1
    tier.close()


def test_one_file_that_cannot_be_written_costs_one_part(root, files_made, caplog):
    tier = open_tier(root)

    def refuse(path: str) -> None:
        if address(3).key.hex() in path:
            raise OSError(errno.EIO, "broken")

    files_made[1] = refuse
    offer_together(tier, files_made, WRITES)
    stats = tier.stats()
    assert (stats.writes, stats.discarded, stats.queued_bytes, stats.failed) == (WRITES, 1, 0, None)
    assert stats.blocks == WRITES == len(files(root)) and stats.bytes < WRITES * SIZE + MB
    for number in range(WRITES):
        assert is_right(address(number), 0, fetch_one(tier, address(number))) == (number != 3)
    assert "broken" in caplog.text
    files_made[1] = lambda path: None
    assert offer(tier, address(3))
    tier.flush()
    assert is_right(address(3), 0, fetch_one(tier, address(3)))
    tier.close()
    assert verify(root).sound


def test_parts_that_do_not_fit_together_are_written_one_by_one(root, files_made):
    """The limit has room for two of them."""
    sizes = {0: image(512 * 1024)}
    tier = open_tier(root, 3 * MB + 128 * 1024, staging=20 * MB, images=sizes)
    offer_together(tier, files_made, WRITES)
    stats = tier.stats()
    assert stats.discarded == 0 and stats.writes == WRITES + 1 and stats.evicted >= WRITES - 2
    assert stats.bytes <= stats.limit
    assert is_right(address(WRITES - 1), 0, fetch_one(tier, address(WRITES - 1)))
    tier.close()
    assert verify(root).sound


def test_parts_written_together_do_not_evict_what_was_used_after_them(root, files_made):
    """The limit has room for five."""
    tier = open_tier(root, 4 * MB + 512 * 1024, staging=20 * MB, images={0: image(512 * 1024)})
    used = [where.key for where in store(tier, 3, first=100)] + [address(10_000).key]
    offer_together(tier, files_made, 4, then=lambda: tier.touch(used))
    assert set(used) <= set(tier.find([*used, *(address(number).key for number in range(4))]))
    assert tier.stats().writes == 8 and tier.stats().evicted == 3
    tier.close()


def test_a_buffer_is_free_as_soon_as_its_file_is_made(root, files_made):
    """Not when all files of the batch are: then half of the queue would be of no use."""
    tier = open_tier(root, staging=(WRITES + 1) * SIZE)
    queued = []
    files_made[0] = lambda path: queued.append(tier.stats().queued_bytes)
    offer_together(tier, files_made, WRITES)
    assert queued == [count * SIZE for count in range(WRITES, 0, -1)]
    assert tier.stats().queued_bytes == 0
    tier.close()


def test_what_there_is_no_time_for_stays_expected(root, monkeypatch):
    tier = open_tier(root)
    nodes = store(tier, 20)
    parts = [(node.key, 0) for node in nodes]
    tier.expect(parts)
    targets = [Target(*part, bytearray(tier._images[0].data_size)) for part in parts]
    # Each thread reads one: that is how a slow disk gets anywhere.
    first = tier.read(targets, seconds=-1)
    assert 1 <= first.count(True) <= reader_module.READERS + 1 and first.count(None) == 20 - first.count(True)
    assert set(tier._shared.expected) == {part for part, read in zip(parts, first, strict=True) if read is None}
    again = [target for target, read in zip(targets, first, strict=True) if read is None]
    assert tier.read(again) == [True] * len(again)
    assert all(is_right(node, 0, bytes(target.into)) for node, target in zip(nodes, targets, strict=True))
    assert tier.stats().hits == 20 and not tier._shared.expected
    tier.close()


def test_files_are_read_ahead_unless_they_are_in_memory(root):
    class Watched(Files):
        there = True
        asked = 0

        def in_memory(self, handle: int, place: int) -> bool:
            return self.there

        def read_ahead(self, handle: int) -> None:
            self.asked += 1
            super().read_ahead(handle)

    disk = Watched()
    tier = open_tier(root, files=disk)
    nodes = store(tier, 12)

    def expect() -> int:
        disk.asked = 0
        tier.expect([(node.key, 0) for node in nodes])
        assert tier._readers._ahead is not None
        tier._readers._ahead.submit(lambda: None).result()
        tier.unexpect([(node.key, 0) for node in nodes])
        return disk.asked

    assert expect() == 0
    disk.there = False
    assert expect() >= 12
    tier.close()


def test_a_function_is_never_given_bytes_that_are_wrong(root):
    tier = open_tier(root)
    nodes = store(tier, 6)
    for node in nodes[::2]:
        path = file_of(root, node)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    given = []
    tier.expect([(node.key, 0) for node in nodes])
    read = tier.read([Target(node.key, 0, lambda data, n=node: given.append((n, bytes(data)))) for node in nodes])
    assert read == [False, True] * 3
    assert sorted(node.key for node, _ in given) == sorted(node.key for node in nodes[1::2])
    assert all(is_right(node, 0, data) for node, data in given)
    tier.close()


def test_nobody_writes_to_memory_that_was_lent_once_read_is_interrupted(root, monkeypatch):
    """Interrupted twice: while it reads, and while it waits for the other thread."""
    wait = reader_module.wait
    interrupted, begun = [], threading.Event()

    class Slow(Files):
        slow = False

        def read(self, handle: int, views: Sequence[memoryview]) -> int:
            if not self.slow:
                return super().read(handle, views)
            if threading.current_thread() is threading.main_thread():
                assert begun.wait(10)
                raise KeyboardInterrupt
            begun.set()
            time.sleep(0.2)
            return super().read(handle, views)

    disk = Slow()
    tier = open_tier(root, files=disk)
    nodes = store(tier, 20)

    def interrupt(futures: object) -> object:
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return wait(futures)

    monkeypatch.setattr(reader_module, "wait", interrupt)
    parts = [(node.key, 0) for node in nodes]
    tier.expect(parts)
    buffers = [bytearray(tier._images[0].data_size) for _ in nodes]
    disk.slow = True
    with pytest.raises(KeyboardInterrupt):
        tier.read([Target(*part, buffer) for part, buffer in zip(parts, buffers, strict=True)])
    left = [bytes(buffer) for buffer in buffers]
    assert interrupted and sum(any(data) for data in left) == 1, "more than what was begun was read"
    time.sleep(0.5)
    assert [bytes(buffer) for buffer in buffers] == left
    tier.close()
