"""Other processes: one at a time has the folder, and one that is killed leaves it sound."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from disk_parts import MB, address, fetch, fetch_one, is_right, offer, open_tier

from onekv.tiers.folder import FolderInUse
from onekv.tiers.maintain import clear, models, verify

HERE = Path(__file__).parent

HOLDER = f"""
import sys, time
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from disk_parts import *
tier = open_tier(Path(sys.argv[1]))
store(tier, 3)
print("open", flush=True)
time.sleep(60)
"""


def test_the_second_process_is_refused_until_the_first_is_gone(tmp_path):
    root = tmp_path / "cache"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        for use in (open_tier, verify, clear):
            with pytest.raises(FolderInUse, match=rf"pid {holder.pid}\).*--disk-cache"):
                use(root)
        # Looking is allowed.
        (use,) = models(root)
        assert use.parts == 3
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    tier = open_tier(root)
    assert is_right(address(0), 0, fetch_one(tier, address(0)))
    tier.close()


def test_kills_at_random_moments_leave_it_sound():
    done = subprocess.run(
        [sys.executable, str(HERE / "kill.py"), "--rounds", "20"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"20 kills, (\d+) parts", done.stdout)
    assert found and int(found[1]) > 50, done.stdout


def test_a_process_that_gets_no_more_threads_loses_no_request_and_no_block(tmp_path, no_more_threads):
    root = tmp_path / "kv"
    tier = open_tier(root, staging=MB)
    with no_more_threads():
        stored = [where for where in map(address, range(100)) if offer(tier, where)]
        assert 10 < len(stored) < 100
        tier.touch([where.key for where in stored])
        tier.drop([stored[0].key])
        tier.flush()
        assert fetch_one(tier, stored[1]) is None
        tier.close()
    tier = open_tier(root)
    parts = [(where.key, 0) for where in stored]
    with no_more_threads():
        read = fetch(tier, *parts)
        assert read.pop(parts[0]) is None
        assert all(is_right(where, 0, read[where.key, 0]) for where in stored[1:])
    assert is_right(stored[1], 0, fetch_one(tier, stored[1]))
    assert offer(tier, address(1000))
    tier.close()
    assert verify(root).sound


def test_a_writer_that_got_no_thread_gets_one_later(tmp_path, no_more_threads):
    tier = open_tier(tmp_path / "kv")
    with no_more_threads():
        assert offer(tier, address(0))
    tier.touch([address(0).key])
    tier.flush()
    assert tier.stats().writes == 1
    tier.close()
