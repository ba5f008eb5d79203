"""Tiers of several models with one folder: one limit, fair shares, and each as if it were alone."""

import random
import sqlite3
import threading
from pathlib import Path

import pytest
from disk_parts import MB, address, fetch_one, files, in_time, is_right, offer, open_tier, store
from test_disk_limit import used_bytes

from onekv.tiers.disk import DiskTier
from onekv.tiers.files import Files
from onekv.tiers.folder import INDEX, FolderInUse
from onekv.tiers.index import DiskIndex
from onekv.tiers.maintain import models, verify
from onekv.tiers.store import Store


def opened(root: Path, model: str, limit: int = 100 * MB, **more: object) -> DiskTier:
    return open_tier(root, limit, fingerprint=model, name=model, **more)


def test_each_finds_its_own_and_nothing_else(root: Path) -> None:
    a, b = opened(root, "a"), opened(root, "b")
    nodes = store(a, 6)
    assert b.find([node.key for node in nodes]) == {} and not b.has(nodes[0].key, 0)
    store(b, 3)
    b.clear()
    b.flush()
    assert b.find([node.key for node in nodes]) == {}
    assert all(is_right(node, 0, fetch_one(a, node)) for node in nodes)
    assert a.stats().blocks == b.stats().blocks == 6 and a.stats().bytes == b.stats().bytes
    a.close()
    # The other goes on, and writes, when the first to open the folder has left it.
    more = store(b, 4, first=20)
    assert all(is_right(node, 0, fetch_one(b, node)) for node in more)
    b.close()
    assert verify(root).sound and {use.name: use.parts for use in models(root)} == {"a": 6, "b": 4}


def test_a_model_has_one_tier(root: Path) -> None:
    a = opened(root, "a")
    b = opened(root, "b")
    with pytest.raises(FolderInUse, match="for the same model"):
        opened(root, "a")
    a.close()
    again = opened(root, "a")
    again.close()
    b.close()
    with pytest.raises(FolderInUse, match="pid"):
        # Maintenance takes the folder for itself.
        keeper = opened(root, "a")
        try:
            verify(root)
        finally:
            keeper.close()


def test_the_lowest_limit_holds_for_all(root: Path) -> None:
    a = opened(root, "a", 100 * MB)
    store(a, 60)
    b = opened(root, "b", 4 * MB)
    assert used_bytes(root) <= 4 * MB and a.stats().limit == b.stats().limit == 4 * MB
    store(a, 60, first=100)
    assert used_bytes(root) <= 4 * MB
    a.close()
    b.close()


def test_nobody_is_evicted_below_its_share_for_another(root: Path) -> None:
    limit = 12 * MB
    quiet, loud = opened(root, "quiet", limit), opened(root, "loud", limit)
    kept = store(quiet, 12)
    store(loud, 300, first=1000)
    assert len(quiet.find([node.key for node in kept])) == 12
    assert loud.stats().evicted > 100 and used_bytes(root) <= limit
    # What the loud one has beyond its share makes room.
    more = store(quiet, 12, first=100)
    assert len(quiet.find([node.key for node in kept + more])) == 24
    # Beyond its own share, the quiet one is evicted like others.
    store(quiet, 160, first=200)
    there = len(loud.find([address(number).key for number in range(1000, 1300)]))
    shared = [use.bytes for use in models(root)]
    # The rest of the two halves is what the index may take, which varies.
    assert there and min(shared) >= limit // 3
    quiet.close()
    loud.close()


def test_what_another_model_will_read_is_not_evicted(root: Path) -> None:
    limit = 3 * MB
    a, b = opened(root, "a", limit), opened(root, "b", limit)
    nodes = store(a, 14)
    expected = [(node.key, 0) for node in nodes]
    a.expect(expected)
    store(b, 30, first=100)
    assert all(a.has(*part) for part in expected) and used_bytes(root) <= limit
    a.unexpect(expected)
    a.close()
    b.close()


def test_files_of_a_model_that_came_later_are_not_taken_for_left_over(root: Path) -> None:
    a = opened(root, "a")
    nodes = store(a, 2)
    known = Store(a._folder, DiskIndex(root / INDEX))
    b = opened(root, "b")
    later = store(b, 3, first=50)
    assert known.remove_orphans() == (0, 0, [])
    known.index.close()
    assert all(is_right(node, 0, fetch_one(b, node)) for node in later)
    assert all(is_right(node, 0, fetch_one(a, node)) for node in nodes)
    a.close()
    b.close()


def test_trouble_with_the_index_is_everybodys(root: Path) -> None:
    a, b = opened(root, "a"), opened(root, "b")
    store(a, 4)
    with sqlite3.connect(root / INDEX) as db:
        db.execute("DROP TABLE written")
    for number in range(4):
        offer(b, address(number))
    in_time(b.flush)
    assert a.stats().failed == b.stats().failed is not None
    assert a.find([address(0).key]) == {} and not offer(a, address(9), wait=False)
    # One that joins now is out of use like the others; when all have left, the folder starts anew.
    c = opened(root, "c")
    assert c.stats().failed is not None and not offer(c, address(9), wait=False)
    for tier in (a, b, c):
        in_time(tier.close)
    a = opened(root, "a")
    (node,) = store(a, 1)
    assert a.stats().failed is None and is_right(node, 0, fetch_one(a, node))
    a.close()


class Counting(Files):
    """Counts the bytes in the folder after every write, while its tier has the turn and nobody else changes it."""

    def __init__(self, root: Path) -> None:
        self._root, self.most = root, 0

    def write(self, handle: int, data: memoryview) -> int:
        count = super().write(handle, data)
        self.most = max(self.most, used_bytes(self._root))
        return count


@pytest.mark.parametrize("seed", range(2))
def test_the_limit_holds_while_all_write_and_come_and_go(root: Path, seed: int) -> None:
    limit, counting = 5 * MB, Counting(root)
    wrong: list[object] = []
    failed: list[str | None] = []

    def work(model: str) -> None:
        choose = random.Random(f"{seed} {model}")
        for _ in range(4):
            tier = opened(root, model, limit, staging=MB, files=counting)
            for _ in range(40):
                node = address(choose.randrange(60))
                offer(tier, node)
                tier.touch([node.key])
                other = address(choose.randrange(60))
                data = fetch_one(tier, other) if tier.has(other.key, 0) else None
                if data is not None and not is_right(other, 0, data):
                    wrong.append(other)
            if choose.random() < 0.3:
                tier.clear()
            failed.append(tier.stats().failed)
            tier.close()

    workers = [threading.Thread(target=work, args=(model,)) for model in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong and failed == [None] * 12 and 0 < counting.most <= limit
    assert verify(root).sound and len(files(root)) == sum(use.parts for use in models(root))
