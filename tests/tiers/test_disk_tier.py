"""The disk tier: what is offered is there, once, as it was, also after a restart, and no more than is allowed."""

import os
import stat
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from disk_parts import (
    BLOCK,
    MB,
    address,
    content,
    fetch,
    fetch_one,
    file_of,
    files,
    image,
    images,
    is_right,
    offer,
    open_tier,
    store,
)

from onekv.errors import SettingError
from onekv.tiers.base import STATES, Target
from onekv.tiers.folder import Folder
from onekv.tiers.index import DiskIndex
from onekv.tiers.rows import Name, NewRow, Row, Use
from onekv.tiers.schema import create

SIZE = image().size


def test_parts_survive_a_restart_byte_for_byte(root):
    tier = open_tier(root)
    nodes = store(tier, 20)
    for where in nodes[:5]:
        assert offer(tier, where, STATES)
    tier.close()

    tier = open_tier(root)
    found = tier.find([where.key for where in nodes] + [b"unknown"])
    assert [found[where.key].address for where in nodes] == nodes
    assert [found[where.key].parts for where in nodes] == [frozenset({0, STATES})] * 5 + [frozenset({0})] * 15
    parts = [(where.key, part) for where in nodes for part in found[where.key].parts]
    for (key, part), data in fetch(tier, *parts).items():
        assert data == content(key, part, len(data))[: len(data)]
        assert len(data) == images()[part].data_size
    stats = tier.stats()
    assert (stats.hits, stats.blocks, stats.corrupt) == (25, 20, 0)
    assert stats.promoted_bytes == 20 * SIZE + 5 * images()[STATES].size
    assert stats.promoted_seconds > 0
    tier.close()


def test_a_part_is_never_written_twice(root):
    tier = open_tier(root)
    (where,) = store(tier, 1)
    before = file_of(root, where).stat()
    assert offer(tier, where)
    tier.close()
    tier = open_tier(root)
    assert tier.has(where.key, 0) and not tier.has(where.key, STATES)
    assert tier.offer(where, 0, lambda view: pytest.fail("was filled again"))
    tier.close()
    after = file_of(root, where).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert tier.stats().writes == 0


def test_a_part_on_its_way_is_there_but_not_found(root):
    tier = open_tier(root)
    where = address(1)
    for _ in range(20):
        offer(tier, where)
        assert tier.has(where.key, 0)
    tier.flush()
    assert tier.stats().writes == 1
    tier.close()


def test_partial_blocks_are_found_by_their_parent(root):
    tier = open_tier(root)
    ends = [address(number, tokens) for number, tokens in ((1, 3), (2, BLOCK - 1))]
    for where in (*ends, address(3), address(4, 3, parent=b"q" * 16)):
        offer(tier, where)
    tier.flush()
    assert {entry.address for entry in tier.tails(b"p" * 16)} == set(ends)
    tier.close()


def test_models_do_not_see_each_other(root):
    tier = open_tier(root)
    (where,) = store(tier, 1)
    tier.close()
    tier = open_tier(root, fingerprint="another")
    assert tier.find([where.key]) == {} and fetch_one(tier, where) is None
    assert tier.stats().corrupt == 0
    tier.close()


def test_opening_and_asking_starts_no_thread(root):
    before = threading.active_count()
    tier = open_tier(root)
    tier.find([b"k"])
    tier.tails(b"k")
    tier.has(b"k", 0)
    tier.flush()
    assert threading.active_count() == before
    store(tier, 1)
    fetch_one(tier, address(0))
    assert before + 2 <= threading.active_count() <= before + 3
    tier.close()
    assert threading.active_count() == before


def test_opening_100_000_blocks_opens_no_file_but_the_index(root):
    folder = Folder(root)
    create(folder.index)
    index = DiskIndex(folder.index)
    model = index.model("f" * 32, "other", "other", 0.0)
    rows = [Row(Name(model, where.key, 0), where, 3 * MB, b"c" * 16) for where in map(address, range(100_000))]
    index.begin([NewRow(row, False, Use(number, 0.0)) for number, row in enumerate(rows)])
    index.finish(rows, "today")
    index.close()
    folder.release()
    touched = []
    opened = [False]

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if opened[0] and event in ("open", "os.listdir", "os.scandir"):
            touched.append(str(arguments[0]))

    sys.addaudithook(watch)
    opened[0] = True
    tier = open_tier(root, limit=10**12)
    opened[0] = False
    assert tier.stats().blocks == 100_000
    # The folder itself is listed for what is beside the models' folders, and none of those is.
    assert {Path(path).name for path in touched} <= {"CACHEDIR.TAG", "lock", root.name}
    assert len(touched) < 10
    tier.close()


def test_cleared_parts_are_gone_at_once_and_can_be_stored_again(root):
    tier = open_tier(root)
    other = open_tier(root.parent / "other")
    nodes = store(tier, 50)
    offer(tier, address(50))
    tier.clear()
    assert tier.find([where.key for where in nodes]) == {}
    assert not tier.has(nodes[0].key, 0) and not tier.has(address(50).key, 0)
    assert offer(tier, nodes[0])
    assert fetch_one(tier, nodes[1]) is None
    tier.flush()
    assert list(tier.find([where.key for where in nodes])) == [nodes[0].key]
    assert [path.name for path in files(root)] == [f"{nodes[0].key.hex()}-0.safetensors"]
    stats = tier.stats()
    assert (stats.corrupt, stats.evicted, stats.blocks) == (0, 0, 1)
    tier.close()
    other.close()


def test_content_is_read_into_memory_or_given_to_a_function(root):
    tier = open_tier(root)
    nodes = store(tier, 12)
    buffers = [bytearray(tier._images[0].data_size) for _ in nodes]
    into = [b if i % 2 else partial(b.__setitem__, slice(None)) for i, b in enumerate(buffers)]
    tier.expect([(where.key, 0) for where in nodes])
    assert tier.read([Target(n.key, 0, i) for n, i in zip(nodes, into, strict=True)]) == [True] * 12
    assert all(is_right(where, 0, bytes(b)) for where, b in zip(nodes, buffers, strict=True))
    stats = tier.stats()
    assert stats.hits == 12 and stats.promoted_bytes == 12 * tier._images[0].size and stats.promoted_seconds > 0
    tier.close()


def test_what_is_expected_is_not_evicted(root):
    tier = open_tier(root, 3 * MB)
    nodes = store(tier, 10)
    parts = [(where.key, 0) for where in nodes]
    tier.expect(parts)
    tier.expect(parts[:1])
    store(tier, 100, first=100)
    assert tier.stats().evicted > 50
    tier.unexpect(parts[:1])
    assert sorted(tier.find([where.key for where in nodes])) == sorted(where.key for where in nodes)
    tier.unexpect(parts)
    store(tier, 100, first=300)
    assert tier.find([where.key for where in nodes]) == {} and not tier._shared.expected
    tier.close()


def test_dropped_nodes_are_gone_at_once(root):
    tier = open_tier(root)
    nodes = store(tier, 3)
    offer(tier, nodes[0], part=STATES)
    tier.drop([nodes[0].key, nodes[1].key, address(50).key])
    assert list(tier.find([where.key for where in nodes])) == [nodes[2].key]
    assert fetch_one(tier, nodes[0]) is None
    tier.flush()
    assert [path.name for path in files(root)] == [f"{nodes[2].key.hex()}-0.safetensors"]
    assert offer(tier, nodes[0])
    tier.flush()
    assert is_right(nodes[0], 0, fetch_one(tier, nodes[0]))
    assert tier.stats().corrupt == 0
    tier.close()


def test_closing_twice_and_after_an_interrupt(root):
    tier = open_tier(root, staging=100 * SIZE)
    for number in range(50):
        offer(tier, address(number))
    tier.expect([(address(0).key, 0)] * 10)
    join = threading.Thread.join
    interrupted = []

    def interrupt(thread: threading.Thread, timeout: float | None = None) -> None:
        if not interrupted and thread.name.startswith("onekv-disk-writer"):
            interrupted.append(thread)
            raise KeyboardInterrupt
        join(thread, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tier.close()
    assert not offer(tier, address(99)) and tier.find([address(0).key]) == {}
    tier.close()
    tier.close()
    assert interrupted and sorted(path.name for path in root.iterdir() if path.is_file()) == [
        "CACHEDIR.TAG",
        "index.db",
        "lock",
    ]
    tier = open_tier(root)
    assert len(tier.find([address(number).key for number in range(50)])) == 50
    tier.close()


def test_a_closed_tier_answers_that_nothing_is_there(root):
    tier = open_tier(root)
    (where,) = store(tier, 1)
    tier.close()
    assert tier.find([where.key]) == {} and not tier.has(where.key, 0) and not offer(tier, address(5))
    tier.touch([where.key])
    tier.clear()
    tier.flush()
    assert fetch_one(tier, where) is None


def test_only_the_owner_can_look(root):
    previous = os.umask(0)
    try:
        tier = open_tier(root)
        store(tier, 1)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()}
        folders = {stat.S_IMODE(path.stat().st_mode) for path in (root, *root.rglob("*")) if path.is_dir()}
        tier.close()
    finally:
        os.umask(previous)
    del modes["CACHEDIR.TAG"]
    assert set(modes.values()) == {0o600} and folders == {0o700}


@pytest.mark.parametrize("content", ["photo.jpg", "CACHEDIR.TAG", "index.db"])
def test_a_folder_of_someone_else_is_refused(root, content):
    root.mkdir(mode=0o755)
    (root / content).write_text("Signature: 8a477f597d28d172789f06886806bc55\n# by another program\n")
    with pytest.raises(SettingError, match="--disk-cache"):
        open_tier(root)
    assert [path.name for path in root.iterdir()] == [content]
    assert stat.S_IMODE(root.stat().st_mode) == 0o755


def test_an_empty_folder_is_taken(root):
    root.mkdir(mode=0o755)
    (root / "CACHEDIR.TAG.tmp").write_text("left by a kill")
    open_tier(root).close()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_limit_without_room_is_refused(root):
    with pytest.raises(SettingError, match="--disk-limit"):
        open_tier(root, limit=MB)
