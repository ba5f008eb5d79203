"""An index that lies, and threads that meet errors nobody thought of: the tier ends, says why, and nobody waits."""

import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from damage import LIMIT, Watched, again, read_some, use
from damages import COLUMNS, VALUES, execute, set_values
from disk_parts import MB, address, fetch_one, file_of, files, image, is_right, offer, open_tier, store

from onekv.tiers.base import STATES, Target
from onekv.tiers.files import Files, Where
from onekv.tiers.maintain import IndexUnreadable, models, verify

PATIENCE = 60
SIZE = image().size


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def in_time(what: Callable[[], object]) -> object:
    """Do it in a thread; a test that waits for ever says so."""
    done: list[object] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            done.append(what())
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits for ever"
    if errors:
        raise errors[0]
    return done[0]


@pytest.fixture(autouse=True)
def no_thread_dies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An error that ends a thread is an error of the test."""
    died: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda event: died.append(event.exc_value))
    yield
    assert died == []


@pytest.mark.parametrize("table", ["parts", "models", "written", "total"])
def test_values_that_nobody_wrote_while_it_is_used(root, table):
    """Every column and every kind of value: what is read is right, nothing hangs, the limit holds, it works again."""
    for number, column in enumerate(COLUMNS[table]):
        choose = random.Random(number)
        # Two kinds of values at each column here; all of them at random in `damage.py`.
        for value in choose.sample(VALUES, 2):
            shutil.rmtree(root, ignore_errors=True)
            disk = Watched(root)
            tier = open_tier(root, LIMIT, files=disk)
            in_time(partial(use, tier, choose, True))
            set_values(root, table, column, value)
            in_time(partial(use, tier, choose, True))
            in_time(tier.close)
            assert disk.most <= LIMIT, (column, value)
            again(root, disk)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("used", "NULL"), ("used", "'text'"), ("used", "9223372036854775807"), ("size", "NULL"), ("size", "-1")),
        *(("size", "x'ff00'"), ("size", "4611686018427387904"), ("model", "77"), ("part", "'text'"), ("part", "NULL")),
        *(("key", "'text'"), ("state", "NULL"), ("checksum", "NULL"), ("start", "NULL")),
        ("tokens", "zeroblob(100000)"),
    ],
)
@pytest.mark.parametrize("in_use", [False, True], ids=["closed", "in use"])
def test_one_row_with_a_value_that_nobody_wrote(root, column, value, in_use):
    tier = open_tier(root, LIMIT)
    nodes = store(tier, 10)
    if not in_use:
        tier.close()
    set_values(root, "parts", column, value, f"key = x'{nodes[3].key.hex()}'")
    if not in_use:
        tier = open_tier(root, LIMIT)
    in_time(lambda: read_some(tier, [node.key for node in nodes]))
    tier.touch([node.key for node in nodes])
    for number in range(100, 140):
        offer(tier, address(number), wait=False)
    in_time(tier.flush)
    in_time(lambda: read_some(tier, [node.key for node in nodes]))
    tier.drop([node.key for node in nodes])
    in_time(tier.flush)
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= LIMIT
    in_time(tier.close)
    again(root, Watched(root))


def test_sizes_that_say_less_than_there_is_do_not_fill_the_disk(root):
    """Before it is opened, and while it is used."""
    for in_use in (False, True):
        tier = open_tier(root, LIMIT)
        store(tier, 20, first=1000 * in_use)
        if not in_use:
            tier.close()
        set_values(root, "parts", "size", "1")
        if not in_use:
            tier = open_tier(root, LIMIT)
            assert tier.stats().corrupt == 1
        for number in range(100, 200):
            offer(tier, address(number))
        in_time(tier.flush)
        assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= LIMIT
        in_time(tier.close)


def test_sizes_that_say_more_than_there_is_do_not_let_it_grow(root):
    """What an evicted part frees is what its file took."""
    disk = Watched(root)
    tier = open_tier(root, LIMIT, files=disk)
    store(tier, 20)
    set_values(root, "parts", "size", str(100 * SIZE))
    for number in range(100, 200):
        offer(tier, address(number))
    in_time(tier.flush)
    assert disk.most <= LIMIT
    in_time(tier.close)


def test_sizes_that_are_not_true_are_not_shown(root):
    """The default limit is made of them."""
    tier = open_tier(root)
    store(tier, 3)
    tier.close()
    assert sum(use.bytes for use in models(root)) == 3 * SIZE
    set_values(root, "parts", "size", str(10**12))
    with pytest.raises(IndexUnreadable, match="verify"):
        models(root)


def test_a_path_in_place_of_the_hash_of_a_model(root):
    """It must not lead to files of others."""
    tier = open_tier(root, LIMIT)
    store(tier, 5)
    tier.close()
    shutil.copytree(next(path for path in root.iterdir() if path.is_dir()), root.parent / ("f" * 32))
    there = files(root.parent / "..") + sorted((root.parent / ("f" * 32)).rglob("*"))
    set_values(root, "models", "hash", f"'../{'f' * 32}'")
    tier = open_tier(root, LIMIT)
    store(tier, 40, first=100)
    tier.clear()
    tier.flush()
    tier.close()
    assert files(root.parent / "..") + sorted((root.parent / ("f" * 32)).rglob("*")) == there


def test_rows_that_are_lost_do_not_take_room_for_ever(root):
    tier = open_tier(root, LIMIT)
    store(tier, 40)
    execute(root, "DELETE FROM parts")
    last = store(tier, 30, first=100)[-1]
    assert is_right(last, 0, fetch_one(tier, last)) and tier.stats().discarded == 0 and tier.stats().failed is None
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= LIMIT
    tier.close()


@pytest.mark.parametrize("log", ["lost", "cut"])
def test_an_index_that_has_lost_its_last_changes_leaves_no_files_behind(root, log):
    """A power cut or damage takes them; the files are there, and count."""
    tier = open_tier(root, LIMIT, threads=False)
    store(tier, 20)
    tier.kill()
    if log == "lost":
        (root / "index.db-wal").unlink()
    else:
        os.truncate(root / "index.db-wal", (root / "index.db-wal").stat().st_size // 2)
    disk = Watched(root)
    tier = open_tier(root, LIMIT, threads=False, files=disk)
    keys = [address(number).key for number in range(20)]
    assert len(files(root)) == len(tier.find(keys)) == tier.stats().blocks < 20
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) == tier.stats().bytes
    store(tier, 40, first=100)
    assert disk.most <= LIMIT
    tier.close()
    assert verify(root).sound


@pytest.mark.parametrize("change", ["DROP TABLE parts", "ALTER TABLE parts RENAME COLUMN used TO older"])
def test_tables_that_are_not_ours_are_made_anew(root, change):
    tier = open_tier(root)
    store(tier, 3)
    tier.close()
    execute(root, change)
    tier = open_tier(root)
    assert tier.stats().corrupt == 1 and files(root) == []
    (where,) = store(tier, 1)
    assert is_right(where, 0, fetch_one(tier, where))
    tier.close()


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


def test_random_damage(tmp_path):
    """Thirty rounds of `damage.py`; its seed is printed."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    command = [sys.executable, str(Path(__file__).with_name("damage.py")), "--rounds", "30", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"


def test_the_driver_notices_wrong_bytes_and_too_many(root):
    """A test that cannot fail is no test."""
    disk = Watched(root)
    tier = open_tier(root, LIMIT, files=disk)
    where = address(1)
    assert tier.offer(where, 0, lambda view: None, wait=True)
    assert tier.offer(where, STATES, lambda view: None, wait=True)
    tier.flush()
    with pytest.raises(AssertionError, match="wrong bytes"):
        read_some(tier, [where.key])
    (root / "more").write_bytes(bytes(4 * MB))
    disk.look()
    assert disk.most > LIMIT
    tier.close()
