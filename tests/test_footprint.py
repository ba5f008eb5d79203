"""The process's physical memory: what each system says, read right; and what this one says of this process."""

import struct
import subprocess
import sys

from architectures import build
from onekv import LLM
from onekv.footprint import of_rusage, of_statm


def test_what_linux_says() -> None:
    assert of_statm("3000 1200 50 4 0 700 0\n", 4096) == 1200 * 4096


def test_what_macos_says() -> None:
    """A UUID; user and system time, two kinds of wake-ups, page-ins, wired, resident, footprint, start, exit."""
    times, sizes, lifetime = [11, 12, 13, 14, 15], [16, 17, 7 * 2**30], [19, 20]
    assert of_rusage(b"u" * 16 + struct.pack("<10Q", *times, *sizes, *lifetime)) == 7 * 2**30


def test_it_grows_with_what_is_held() -> None:
    """In a process of its own: one that has freed as much before need not ask the system for it."""
    script = """
import mlx.core as mx
from onekv.footprint import footprint

before = footprint()
held = mx.ones((64, 2**20), mx.uint8)
mx.eval(held)
print(footprint() - before, held.nbytes)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    grown, size = map(int, done.stdout.split())
    assert grown > 60 * 2**20 and size == 2**26


def test_an_llm_shows_it_beside_what_mlx_counts() -> None:
    with LLM(build("llama"), kv_memory="8MB", progress=False) as llm:
        stats = llm.stats()
    assert stats.memory.footprint > 2**25
    assert ", process " in repr(stats)
