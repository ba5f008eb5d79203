"""A model is loaded into the memory of the one before, and the process is never larger than it may be."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from swaps import COMMON, spec

from onekv.bench.soak import save_tiny
from onekv.footprint import footprint
from onekv.models.freed import Freed, freed
from onekv.server.models.registry import Models

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="what is freed is kept by glibc")
# Freed, kept, and then in the way of something larger.
KEPT = """
import onekv
import mlx.core as mx
from onekv.footprint import footprint
from onekv.footprint import footprint
from onekv.models.freed import freed
MB = 1 << 20
mx.eval(mx.zeros(1)); before = footprint()
arrays = [mx.zeros(64 * MB, mx.uint8) for _ in range(8)]
mx.eval(arrays)
# What is small and stays lies between, so that nothing larger than a piece fits into what is freed.
small = [mx.zeros(1 << 18, mx.uint8) for _ in range(8)]
mx.eval(small)
del arrays
limit = footprint() + 100 * MB
freed.keep(limit, footprint)
freed.take(64 * MB)
assert freed.kept and footprint() - before > 500 * MB, "it fits in any case"
again = mx.zeros(64 * MB, mx.uint8); mx.eval(again)
assert footprint() <= limit
freed.take(700 * MB)
assert not freed.kept and footprint() - before < 100 * MB, "it does not fit beside what is kept"
large = mx.zeros(700 * MB, mx.uint8); mx.eval(large)
assert footprint() - before < 800 * MB
"""


@LINUX
def test_what_is_kept_goes_back_before_the_process_becomes_too_large() -> None:
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_nothing_is_given_back_while_there_is_room() -> None:
    kept, process = Freed(), 1000
    kept.take(2**40)
    assert not kept.kept
    kept.keep(1500, lambda: process)
    kept.take(500)
    assert kept.kept
    kept.take(501)
    assert not kept.kept
    # What has gone back cannot go back again.
    kept.take(2**40)
    kept.release()


@LINUX
def test_models_in_turn_stay_below_the_budget(smollm2_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("swaps.py")), str(smollm2_path), "--turns"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    turns = json.loads(done.stdout)
    assert turns["trials"] == [1, 1]
    assert turns["peak"] <= turns["memory"]
    # The larger one needs more than the smaller one had; the smaller one finds all that it needs.
    packed = range(2, len(turns["mapped"]), 2)
    assert all(turns["mapped"][number] < turns["weights"][number] / 2 for number in packed)
    assert turns["loaded"] - turns["left"] >= turns["weights"][-1]


def test_nothing_is_kept_for_one_that_nobody_waits_for(tmp_path: Path) -> None:
    """As when the request for the next model goes away before that is loaded."""
    models = Models([spec("a", save_tiny(tmp_path / "a"))], "1GiB", COMMON)
    models.start()
    try:
        freed.keep(2**62, footprint)
        # Whatever happens next.
        models.unpin(models.first)
        deadline = time.monotonic() + 60
        while freed.kept and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not freed.kept
    finally:
        freed.release()
        models.stop(0)
