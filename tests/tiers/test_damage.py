"""Damage on disk: found, counted, said once, and answered with "it is not there"; never an error or wrong bytes."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_parts import MB, address, fetch, fetch_one, file_of, files, image, is_right, offer, open_tier, store

from onekv.tiers.disk import DiskTier
from onekv.tiers.maintain import verify

SIZE, HEADER = image().size, image().header_size


@pytest.fixture
def tier(root: Path) -> Iterator[DiskTier]:
    tier = open_tier(root)
    yield tier
    tier.close()


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "onekv.tiers"]


@pytest.mark.parametrize("place", [0, 7, 8, 9, 60, HEADER - 1, HEADER, HEADER + 1, SIZE // 2, SIZE - 1])
def test_one_flipped_byte_anywhere_in_a_file(root, tier, caplog, place):
    nodes = store(tier, 3)
    for where in nodes[:2]:
        flip(file_of(root, where), place)
    assert [is_right(where, 0, fetch_one(tier, where)) for where in nodes] == [False, False, True]
    assert fetch_one(tier, nodes[0]) is None
    # Gone at once, and stored anew if it is offered.
    assert list(tier.find([where.key for where in nodes])) == [nodes[2].key]
    assert tier.stats().corrupt == 2
    assert len(warnings(caplog)) == 1 and "does not match its checksum" in warnings(caplog)[0]
    assert offer(tier, nodes[0])
    tier.flush()
    assert is_right(nodes[0], 0, fetch_one(tier, nodes[0]))
    assert len(files(root)) == 2 and tier.stats().blocks == 2


def test_a_flipped_byte_at_random_places_is_always_found(root, tier):
    nodes = store(tier, 40)
    for where in nodes:
        flip(file_of(root, where), random.randrange(SIZE))
    assert set(fetch(tier, *((where.key, 0) for where in nodes)).values()) == {None}
    assert tier.stats().corrupt == 40
    tier.flush()
    assert files(root) == [] and tier.stats().blocks == 0


@pytest.mark.parametrize("size", [0, 1, HEADER, SIZE - 1, SIZE + 1])
def test_a_file_of_another_size(root, tier, caplog, size):
    nodes = store(tier, 2)
    for where in nodes:
        os.truncate(file_of(root, where), size)
        assert fetch_one(tier, where) is None
    assert tier.stats().corrupt == 2
    assert len(warnings(caplog)) == 1 and "wrong size" in warnings(caplog)[0]


def test_two_files_swapped(root, tier):
    a, b, c = store(tier, 3)
    first, second = file_of(root, a), file_of(root, b)
    first.rename(root / "x")
    second.rename(first)
    (root / "x").rename(second)
    assert [fetch_one(tier, where) for where in (a, b)] == [None, None]
    assert is_right(c, 0, fetch_one(tier, c))
    assert tier.stats().corrupt == 2


def test_a_row_that_was_changed(root):
    tier = open_tier(root)
    (where,) = store(tier, 1)
    tier.close()
    import sqlite3

    db = sqlite3.connect(root / "index.db")
    db.execute("UPDATE parts SET start = start + 1")
    db.commit()
    db.close()
    tier = open_tier(root)
    assert fetch_one(tier, where) is None
    assert tier.stats().corrupt == 1
    tier.close()


def test_a_missing_file(root, tier, caplog):
    nodes = store(tier, 3)
    for where in nodes[:2]:
        file_of(root, where).unlink()
        assert fetch_one(tier, where) is None
    assert tier.stats().corrupt == 2
    assert len(warnings(caplog)) == 1 and "No such file" in warnings(caplog)[0]
    tier.flush()
    assert tier.stats().blocks == 1


def test_a_missing_file_of_a_victim_is_fine(root):
    tier = open_tier(root, 3 * MB)
    for where in store(tier, 5):
        file_of(root, where).unlink()
    store(tier, 60, first=100)
    assert tier.stats().corrupt == 0 and tier.stats().failed is None and tier.stats().discarded == 0
    tier.close()


def test_a_folder_or_link_in_place_of_a_file(root, tier):
    a, b = store(tier, 2)
    content = file_of(root, a).rename(root.parent / "elsewhere")
    file_of_a = root / content.name
    shard = next(iter(root.glob(f"*/{a.key.hex()[:2]}")))
    file_of_a = shard / f"{a.key.hex()}-0.safetensors"
    file_of_a.symlink_to(content)
    path = file_of(root, b)
    path.unlink()
    path.mkdir()
    assert fetch_one(tier, a) is None and fetch_one(tier, b) is None
    assert tier.stats().corrupt == 2
    tier.flush()
    assert content.exists() and path.is_dir() and tier.stats().failed is None


def damage_index(root: Path, kind: str) -> None:
    index = root / "index.db"
    if kind == "missing":
        index.unlink()
    elif kind == "empty":
        index.write_bytes(b"")
    elif kind == "garbage":
        index.write_bytes(random.Random(0).randbytes(50_000))
    elif kind == "pages":
        # Its first page is as it was: this is found later.
        index.write_bytes(index.read_bytes()[:4096] + random.Random(0).randbytes(index.stat().st_size - 4096))
    elif kind == "version":
        import sqlite3

        db = sqlite3.connect(index)
        db.execute("UPDATE meta SET value = '999'")
        db.commit()
        db.close()


@pytest.mark.parametrize("kind", ["missing", "empty", "garbage", "pages", "version"])
def test_an_index_that_cannot_be_used_empties_the_folder(root, caplog, kind):
    tier = open_tier(root)
    nodes = store(tier, 5)
    tier.close()
    (shard := next(iter(root.glob("*/*")))).joinpath("mine.txt").write_text("not yours")
    damage_index(root, kind)
    tier = open_tier(root)
    assert tier.find([where.key for where in nodes]) == {}
    assert tier.stats().corrupt == 1 and tier.stats().failed is None
    assert len(warnings(caplog)) == 1 and "was emptied" in warnings(caplog)[0]
    assert [path.name for path in files(root)] == ["mine.txt"]
    assert is_right(store(tier, 1)[0], 0, fetch_one(tier, nodes[0]))
    tier.close()
    assert verify(root).stray == [str(shard / "mine.txt")]


@pytest.mark.parametrize("replace", [True, False], ids=["replaced", "overwritten"])
def test_garbage_in_place_of_the_index_while_it_is_used(root, caplog, replace):
    tier = open_tier(root)
    nodes = store(tier, 50)
    if replace:
        (root / "new").write_bytes(random.Random(0).randbytes(100_000))
        (root / "new").replace(root / "index.db")
    else:
        # Both the log and the database: the log alone would hide it until the next checkpoint.
        for name in ("index.db", "index.db-wal"):
            (root / name).write_bytes(random.Random(0).randbytes((root / name).stat().st_size))
    for _ in range(3):
        for where in (*nodes, *(address(number) for number in range(100, 200))):
            data = fetch_one(tier, where) if tier.has(where.key, 0) else None
            assert data is None or is_right(where, 0, data)
            offer(tier, where, wait=False)
        tier.flush()
    stats = tier.stats()
    if stats.failed is not None:
        assert tier.find([where.key for where in nodes]) == {} and not offer(tier, nodes[0])
        assert fetch_one(tier, nodes[0]) is None
        assert len([line for line in warnings(caplog) if "is disabled" in line]) == 1
    tier.close()
    tier = open_tier(root)
    tier.close()
    assert verify(root).sound
    tier = open_tier(root)
    store(tier, 3)
    assert tier.stats().failed is None
    tier.close()


def test_the_folder_removed_while_it_is_used(root, caplog):
    tier = open_tier(root)
    nodes = store(tier, 5)
    assert is_right(nodes[0], 0, fetch_one(tier, nodes[0]))
    shutil.rmtree(root)
    assert fetch_one(tier, nodes[0]) is None
    for number in range(100, 110):
        offer(tier, address(number))
    tier.flush()
    stats = tier.stats()
    assert stats.failed is not None and "gone" in stats.failed
    assert tier.find([where.key for where in nodes]) == {} and not offer(tier, nodes[0])
    assert stats.discarded == 10 and stats.corrupt == 1
    assert len(warnings(caplog)) == 1 and "is disabled" in warnings(caplog)[0]
    tier.close()
    assert not root.exists()


def test_the_folder_replaced_while_it_is_used(root):
    tier = open_tier(root)
    nodes = store(tier, 5)
    shutil.rmtree(root)
    root.mkdir()
    (root / "mine.txt").write_text("not yours")
    fetch_one(tier, nodes[0])
    store_later = [offer(tier, address(number)) for number in range(100, 110)]
    tier.close()
    assert store_later and [path.name for path in root.iterdir()] == ["mine.txt"]


def test_the_folder_of_the_model_is_made_again(root, tier):
    store(tier, 5)
    shutil.rmtree(next(path for path in root.iterdir() if path.is_dir()))
    (where,) = store(tier, 1, first=100)
    assert is_right(where, 0, fetch_one(tier, where))
    assert fetch_one(tier, address(0)) is None and tier.stats().corrupt == 1 and tier.stats().failed is None
