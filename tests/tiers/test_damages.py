"""Damage at random, and that the drivers which do it would notice."""

import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from damage import LIMIT, Watched, read_some
from damages import CLOSED, execute
from disk_parts import MB, address, offer, open_tier, store

from onekv.tiers.base import STATES


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


@pytest.mark.parametrize("kind", CLOSED)
def test_every_damage_can_follow_another(root, kind):
    """SQLite quotes the damaged schema in its message, which is no text then."""
    store(tier := open_tier(root), 3)
    tier.close()
    index = root / "index.db"
    index.write_bytes(index.read_bytes().replace(b"CHECK (id", b"\xf3HECK (id"))
    with pytest.raises(UnicodeDecodeError):
        execute(root, "SELECT * FROM models")
    CLOSED[kind](root, random.Random(kind))


@pytest.mark.parametrize("old, new", [(b"CHECK (id", b"\xf3HECK (id"), (b"meta (name", b"meta (nome")])
def test_a_second_model_goes_without_a_damaged_index(root, old, new):
    """Whatever SQLite makes of the damage, both models run, and the next start begins anew."""
    first, index = open_tier(root), root / "index.db"
    store(first, 3)
    content = index.read_bytes()
    assert old in content
    index.write_bytes(content.replace(old, new))
    second = open_tier(root, fingerprint="another")
    assert "its index failed" in second.stats().failed
    assert not offer(first, address(7)) and not offer(second, address(7))
    first.close()
    second.close()
    tier = open_tier(root)
    store(tier, 3)
    assert tier.stats().failed is None and len(tier.find([address(0).key])) == 1
    tier.close()


@pytest.mark.parametrize("another", [False, True], ids=["alone", "beside another model"])
def test_a_lower_limit_that_meets_a_damaged_row(root, another):
    """It evicts the oldest: that it is damaged was not seen before."""
    tier = open_tier(root)
    store(tier, 60)
    tier.close()
    beside = open_tier(root, fingerprint="another") if another else None
    with closing(sqlite3.connect(root / "index.db", isolation_level=None)) as db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute("UPDATE parts SET key = 5, used = -1 WHERE start = 0")
    low = open_tier(root, limit=4 * MB)
    if beside is None:
        assert low.stats().failed is None and low.stats().corrupt == 1
        assert store(low, 1) and low.find([address(0).key])
    else:
        assert "its index failed" in low.stats().failed and not offer(beside, address(9))
        beside.close()
    low.close()
    tier = open_tier(root)
    assert tier.stats().failed is None
    tier.close()
