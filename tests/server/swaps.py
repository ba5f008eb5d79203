"""Models that are loaded and unloaded without a server around them.

python tests/server/swaps.py MODEL [--rounds 3]

Loads and unloads one model in turn, and prints the bytes and threads of the process each time as JSON.
"""

import argparse
import gc
import json
import os
import sys
from typing import Any

import onekv  # noqa: F401  (before MLX, which links its matrix products when it is loaded)

# isort: split
import mlx.core as mx

from onekv.config import Settings
from onekv.footprint import footprint
from onekv.server.hygiene import Hygiene
from onekv.server.model_settings import ModelSettings
from onekv.server.models.model import Model
from onekv.server.models.registry import Models
from onekv.server.models.spec import ModelSpec

COMMON: dict[str, Any] = {"max_waiting": 8, "max_wait": 60, "hygiene": Hygiene(), "progress": False}
PROMPT = "the cat sat on the mat and"
# What may be left of models that were unloaded: odds and ends of MLX, no weights and no pool.
LEFT = 2**20


def spec(name: str, path: str, keep: str = "lru", **settings: Any) -> ModelSpec:
    engine = Settings(**{"kv_memory": "32MiB", "block_size": 16, **settings})
    return ModelSpec(name, path, engine, ModelSettings(), keep)


def generate(models: Models, model: Model) -> None:
    """A request of its own, as the server makes one."""
    place = models.ask(model)
    try:
        backend = place.came.result(60)
        backend.thread.call(lambda _: backend.llm.generate(PROMPT, 4)).result(60)
    finally:
        models.leave(place)


def active() -> int:
    """Bytes of MLX's arrays, without those that nobody refers to."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    models = Models([spec("x", args.model, kv_memory="128MiB")], "2GiB", COMMON)
    models.start()
    footprints, threads = [], []
    try:
        for _ in range(args.rounds):
            generate(models, models.first)
            loaded = footprint()
            models.unload(models.first)
            footprints.append((loaded, footprint()))
            threads.append(len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0)
    finally:
        models.stop(0)
    print(json.dumps({"weights": models.first.planned.plan.weights, "footprints": footprints, "threads": threads}))


if __name__ == "__main__":
    main()
