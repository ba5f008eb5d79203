"""Runs a Python program and records its memory in a file.

    python -c "from onekv.bench.suite.watched import main; main()" FILE MODULE ARGUMENTS...

Each line of FILE has the time in seconds, and bytes: MLX's active memory, its cache (freed, but kept by MLX) and its
peak since the previous line, and the process's footprint, which only the process itself can query on macOS. OneKV is
imported first, and with it the BLAS that MLX then loads, so that every contender uses the same one.
"""

import json
import runpy
import sys
import threading
import time
from pathlib import Path

from ...footprint import footprint

ENTRY = "from onekv.bench.suite.watched import main; main()"
SAMPLE_S = 0.05


def main() -> None:
    file, module = sys.argv[1:3]
    sys.argv = [module, *sys.argv[3:]]
    threading.Thread(target=watch, args=[Path(file)], daemon=True).start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def watch(file: Path) -> None:
    import mlx.core as mx

    with file.open("a", buffering=1) as out:
        while True:
            active, peak = mx.get_active_memory(), mx.get_peak_memory()
            # A peak that has been reset is 0 until something is allocated.
            sample = [time.time(), active, mx.get_cache_memory(), max(active, peak), footprint()]
            mx.reset_peak_memory()
            out.write(json.dumps(sample) + "\n")
            time.sleep(SAMPLE_S)
