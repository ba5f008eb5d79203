"""Disks that refuse: full, read-only, without permission. Mounted for the test, where that is allowed."""

import errno
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_parts import address, fetch, fetch_one, files, is_right, offer, open_tier, store

from onekv.errors import SettingError
from onekv.tiers.maintain import verify


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "onekv.tiers"]


def test_a_full_disk_discards_and_recovers(tmp_path, mount, caplog):
    disk = tmp_path / "disk"
    mount(disk, "size=8m")
    tier = open_tier(disk / "cache")
    for number in range(100):
        assert offer(tier, address(number))
    tier.flush()
    stats = tier.stats()
    assert stats.failed is None and 0 < stats.writes < 100 and stats.discarded == 100 - stats.writes
    assert len(warnings(caplog)) == 1 and os.strerror(errno.ENOSPC) in warnings(caplog)[0]
    there = tier.find([address(number).key for number in range(100)])
    assert len(there) == stats.writes == len(files(disk / "cache"))
    parts = [(key, 0) for key in there]
    assert all(data is not None for data in fetch(tier, *parts).values())
    subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)
    (where,) = store(tier, 1, first=200)
    assert is_right(where, 0, fetch_one(tier, where))
    tier.close()


def test_a_disk_that_is_full_to_the_last_byte(tmp_path, mount, caplog):
    disk = tmp_path / "disk"
    mount(disk, "size=8m")
    tier = open_tier(disk / "cache")
    nodes = store(tier, 10)
    with pytest.raises(OSError, match="No space"), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    for number in range(100, 110):
        offer(tier, address(number))
    tier.touch([where.key for where in nodes])
    tier.flush()
    for where in nodes:
        data = fetch_one(tier, where)
        assert data is None or is_right(where, 0, data)
    assert tier.stats().discarded == 10
    tier.close()
    (disk / "filler").unlink()
    tier = open_tier(disk / "cache")
    assert len(tier.find([where.key for where in nodes])) == 10 and tier.stats().corrupt == 0
    tier.close()
    assert verify(disk / "cache").sound


def test_a_read_only_disk_is_refused_at_the_start(tmp_path, mount):
    mount(tmp_path / "disk", "ro,size=8m")
    with pytest.raises(SettingError, match=r"Read-only.*--disk-cache"):
        open_tier(tmp_path / "disk" / "cache")
    with pytest.raises(SettingError, match=r"Read-only.*--disk-cache"):
        open_tier(tmp_path / "disk")


def test_blocks_on_a_read_only_disk_while_it_is_used(root, mount, caplog):
    tier = open_tier(root)
    nodes = store(tier, 5)
    mount(next(path for path in root.iterdir() if path.is_dir()), "ro,size=1m")
    for number in range(100, 105):
        assert offer(tier, address(number))
    tier.flush()
    assert tier.stats().discarded == 5 and tier.stats().failed is None
    assert len(warnings(caplog)) == 1 and os.strerror(errno.EROFS) in warnings(caplog)[0]
    assert fetch_one(tier, nodes[0]) is None and tier.stats().corrupt == 1
    assert tier.find([address(100).key]) == {}
    tier.close()


def run_child(root: Path, body: str) -> None:
    """Run code in another process, as a user for whom modes of files count."""
    code = f"""
        import os, resource, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from disk_parts import *
        root = Path({str(root)!r})
    """
    script = textwrap.dedent(code) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be written") == 1, done.stderr


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that another user can reach: those of pytest are for this user alone."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def test_a_folder_that_may_not_be_written_any_more(open_to_all):
    run_child(
        open_to_all / "cache",
        """
        if os.getuid() == 0:
            os.setuid(65534)
        tier = open_tier(root, 3 * MB)
        nodes = store(tier, 5)
        for folder in [path for path in root.rglob("*") if path.is_dir()]:
            folder.chmod(0o500)
        for number in range(100, 200):
            offer(tier, address(number))
        tier.flush()
        stats = tier.stats()
        assert stats.discarded == 100 - (stats.writes - 5) and stats.discarded > 20 and stats.failed is None, stats
        assert all(is_right(where, 0, fetch_one(tier, where)) for where in nodes)
        for folder in [path for path in root.rglob("*") if path.is_dir()]:
            folder.chmod(0o700)
        (where,) = store(tier, 1, first=300)
        assert is_right(where, 0, fetch_one(tier, where))
        tier.close()
        """,
    )


def test_a_write_that_fails_in_the_middle(tmp_path):
    run_child(
        tmp_path / "cache",
        """
        tier = open_tier(root, images={0: image(), 1: image(4 * MB)}, staging=20 * MB)
        store(tier, 3)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MB, 2 * MB))
        for number in range(100, 103):
            assert offer(tier, address(number), 1)
        tier.flush()
        stats = tier.stats()
        assert (stats.discarded, stats.writes, stats.failed) == (3, 3, None), stats
        assert len(files(root)) == 3 and stats.bytes < MB
        store(tier, 3, first=200)
        tier.close()
        """,
    )
