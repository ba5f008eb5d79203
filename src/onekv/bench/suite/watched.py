"""A Python program whose MLX allocations are written to a file while it runs.

    python -c "from onekv.bench.suite.watched import main; main()" FILE MODULE ARGUMENTS...

Each line of FILE has the time in seconds, and bytes: active, cached (freed, but kept by MLX) and the peak since the
line before. OneKV is imported first, and with it the BLAS that MLX then loads: the same one for every contender.
"""

import json
import runpy
import sys
import threading
import time
from pathlib import Path

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
            sample = [time.time(), mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory()]
            mx.reset_peak_memory()
            out.write(json.dumps(sample) + "\n")
            time.sleep(SAMPLE_S)
