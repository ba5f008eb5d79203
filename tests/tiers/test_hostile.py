"""An index that lies: the tier gives nothing wrong, ends if it must and says why, and keeps within its limit."""

import os
import random
import shutil
from functools import partial

import pytest
from damage import LIMIT, Watched, again, read_some, use
from damages import COLUMNS, VALUES, execute, set_values
from disk_parts import address, fetch_one, files, image, in_time, is_right, offer, open_tier, store

from onekv.tiers.maintain import IndexUnreadable, models, verify

SIZE = image().size
pytestmark = pytest.mark.usefixtures("no_thread_dies")


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


def test_an_index_that_keeps_what_was_removed(root):
    """Damage inside an SQLite file can make it list rows that it does not find: there is no end of evicting these."""
    tier = open_tier(root, LIMIT)
    nodes = store(tier, 10)
    for number, change in enumerate(("DELETE ON parts", "UPDATE OF state ON parts", "UPDATE ON total")):
        execute(root, f"CREATE TRIGGER keep{number} BEFORE {change} BEGIN SELECT RAISE(IGNORE); END")
    for number in range(100, 500):
        offer(tier, address(number), wait=False)
        if number % 20 == 0:
            in_time(tier.flush)
    in_time(tier.flush)
    assert "still there" in (tier.stats().failed or "")
    in_time(lambda: read_some(tier, [node.key for node in nodes]))
    in_time(tier.close)
    # The next start does without that index.
    tier = open_tier(root, LIMIT)
    assert tier.stats().failed is None
    nodes = store(tier, 2)
    assert is_right(nodes[1], 0, fetch_one(tier, nodes[1]))
    tier.close()
