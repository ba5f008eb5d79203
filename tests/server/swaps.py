"""Models that are loaded and unloaded without a server around them.

python tests/server/swaps.py MODEL [--rounds 3] [--turns]

Loads and unloads one model in turn, and prints the bytes and threads of the process each time as JSON. With `--turns`
there are two of it, packed and not, with room for one, and what is printed is the most bytes that the process had, and
those that were mapped anew for each model that was loaded in the place of the other.
"""

import argparse
import gc
import json
import os
import resource
import sys
import threading
from typing import Any

import onekv  # noqa: F401  (before MLX, which links its matrix products when it is loaded)

# isort: split
import mlx.core as mx

from onekv.config import Settings
from onekv.footprint import footprint
from onekv.memory.plan import MARGIN
from onekv.server.hygiene import Hygiene
from onekv.server.model_settings import ModelSettings
from onekv.server.models.model import Model
from onekv.server.models.planning import plan_model
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


def turns(path: str, rounds: int) -> dict[str, Any]:
    # Loaded in another way, they are two models to a server, each with weights of its own.
    specs = [spec("plain", path, kv_memory="256MiB", dtype="float32", kernels="off"), spec("packed", path)]
    memory = MARGIN + max(plan_model(each, 2**36).need for each in specs)
    models = Models(specs, memory, COMMON)
    models.start()
    peak, ended, mapped, weights = 0, threading.Event(), [], []

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, footprint())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        for number in range(1, 2 * rounds + 1):
            model = models.models[number % 2]
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            place = models.ask(model)
            place.came.result(60)
            mapped.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
            weights.append(model.planned.plan.weights)
            models.leave(place)
            generate(models, model)
            del place
        loaded = footprint()
        models.unload(model)
        left = footprint()
    finally:
        ended.set()
        watching.join()
        models.stop(0)
    trials = [model.known.trials for model in models.models]
    figures = {"memory": memory, "peak": peak, "mapped": mapped, "weights": weights, "trials": trials}
    return {**figures, "loaded": loaded, "left": left}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", action="store_true")
    args = parser.parse_args()
    if args.turns:
        print(json.dumps(turns(args.model, args.rounds)))
        return
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
