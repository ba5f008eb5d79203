"""Looking into a cache, checking it and emptying it."""

import time
from pathlib import Path

import pytest
from disk_parts import MB, address, file_of, files, image, open_tier, store

from onekv.errors import OneKVError, SettingError
from onekv.tiers.base import STATES
from onekv.tiers.folder import Folder, model_hash
from onekv.tiers.index import DiskIndex
from onekv.tiers.maintain import IndexUnreadable, clear, models, verify
from onekv.tiers.rows import Name, NewRow, Row, Use

SIZE = image().size


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache of two models."""
    root = tmp_path / "cache"
    tier = open_tier(root)
    store(tier, 4)
    tier.offer(address(0), STATES, lambda view: None)
    tier.close()
    tier = open_tier(root, fingerprint="b", name="model b")
    store(tier, 3, first=50)
    tier.close()
    return root


def test_models_are_listed_with_what_they_take(root):
    b, a = models(root)
    assert (a.name, a.hash, a.blocks, a.parts) == ("a model", model_hash("model"), 4, 5)
    assert (b.name, b.hash, b.blocks, b.parts, b.bytes) == ("model b", model_hash("b"), 3, 3, 3 * SIZE)
    assert a.bytes + b.bytes == sum(path.stat().st_size for path in files(root))
    assert time.time() - 60 < a.created <= a.used < b.used < time.time()
    assert models(root / "nowhere") == []


def test_using_a_model_is_seen(root):
    tier = open_tier(root)
    before = {use.name: use.used for use in models(root)}
    tier.touch([address(1).key])
    tier.flush()
    after = {use.name: use.used for use in models(root)}
    assert after["a model"] > before["a model"] and after["model b"] == before["model b"]
    assert models(root)[0].name == "a model"
    tier.close()


def test_a_sound_cache_verifies(root):
    steps = []
    report = verify(root, lambda done, total: steps.append((done, total)))
    assert report.sound and report.checked == 8 and not report.stray and not report.removed_bytes
    assert report.bytes == sum(path.stat().st_size for path in files(root))
    assert steps == [(i, 8) for i in range(1, 9)]


def test_verify_removes_what_is_wrong_and_nothing_else(root):
    flipped, truncated, missing = (file_of(root, address(number)) for number in (1, 2, 3))
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
    truncated.write_bytes(b"")
    missing.unlink()
    orphan = flipped.with_name(flipped.name.replace("-0.", "-1."))
    leftover = Path(f"{file_of(root, address(0))}.tmp")
    unknown = root / ("0" * 32) / "ab" / f"ab{'0' * 30}-states.safetensors"
    foreign = [flipped.with_name("mine.txt"), root / "notes", flipped.parent / "deep" / f"{'0' * 32}-0.safetensors"]
    for path in (orphan, leftover, unknown, *foreign):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    report = verify(root)
    assert (report.checked, report.corrupt, report.missing, report.orphans) == (8, 2, 1, 3)
    assert report.removed_bytes == SIZE + 15
    assert sorted(report.stray) == sorted(str(path) for path in foreign if path.parent != root)
    assert all(path.exists() for path in foreign)
    assert not any(path.exists() for path in (flipped, truncated, orphan, leftover, unknown.parent.parent))
    assert verify(root).sound
    tier = open_tier(root)
    assert list(tier.find([address(number).key for number in range(4)])) == [address(0).key]
    tier.close()


@pytest.mark.parametrize("state", ["writing", "renamed", "leaving", "removed"])
@pytest.mark.parametrize("cleaner", ["open", "verify"])
def test_what_a_kill_interrupts_is_cleaned_up(root, state, cleaner):
    folder = Folder(root)
    index = DiskIndex(folder.index)
    hash = model_hash("model")
    model = next(number for number, found in index.hashes().items() if found == hash)
    where = address(9)
    name = Name(model, where.key, 0)
    index.begin([NewRow(Row(name, where, SIZE, b"c" * 16), False, Use(99, time.time()))])
    path = Path(folder.path(hash, where.key, 0))
    path.parent.mkdir(exist_ok=True)
    if state != "removed":
        (path.with_name(path.name + ".tmp") if state == "writing" else path).write_bytes(b"123")
    if state in ("leaving", "removed"):
        index.leave([name])
    index.close()
    folder.release()
    if cleaner == "open":
        tier = open_tier(root)
        assert tier.find([where.key]) == {} and tier.stats().blocks == 7
        assert len(files(root)) == 8
        tier.close()
    report = verify(root)
    assert report.sound and report.checked == 8
    assert len(files(root)) == 8
    assert sum(use.parts for use in models(root)) == 8


def test_clear_removes_one_model_by_name_or_hash(root):
    assert clear(root, "model b") == (3, 3 * SIZE)
    assert [use.name for use in models(root)] == ["a model"]
    assert len(files(root)) == 5 and not (root / model_hash("b")).exists()
    with pytest.raises(OneKVError, match="no model 'nothing'"):
        clear(root, "nothing")
    assert clear(root, model_hash("model")[:8])[0] == 5
    assert models(root) == [] and files(root) == []


def test_clear_removes_everything_but_what_is_not_ours(root):
    foreign = files(root)[0].with_name("mine.txt")
    foreign.write_text("not yours")
    parts, size = clear(root)
    assert parts == 8 and size > 7 * SIZE
    assert files(root) == [foreign]
    assert sum(path.stat().st_size for path in root.iterdir() if path.is_file()) < MB // 4
    assert clear(root) == (0, 0)
    assert clear(root / "nowhere") == (0, 0)


def test_a_folder_of_someone_else_is_left_alone(tmp_path):
    (tmp_path / "photo.jpg").write_text("a photo")
    for use in (models, verify, clear):
        with pytest.raises(SettingError, match="is not a OneKV disk cache"):
            use(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def test_a_damaged_index_is_said_and_repaired(root):
    (root / "index.db").write_bytes(b"garbage" * 1000)
    with pytest.raises(IndexUnreadable, match="cannot be read"):
        models(root)
    assert verify(root).corrupt == 1
    assert verify(root).sound and models(root) == [] and files(root) == []
