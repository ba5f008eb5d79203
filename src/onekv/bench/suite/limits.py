"""The hardware limits for OneKV on this machine: memory bandwidth for decoding, the disk for restoring.

The weights and KV of other contenders have other sizes, so their rows have no such figure.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ...config import Settings
from ...memory.plan import make_plan
from ...models.loader import load_for
from ..disk import drop
from ..roofline import bandwidth, step_bytes
from .session import Figures

# Bytes of the file that is read, and how many at once, as many as a block of a small model has.
FILE, PIECE = 2**26, 2**20
REPEATS = 3


@dataclass(frozen=True)
class Limits:
    """Bytes per second of memory and disk, bytes of weights that a step reads, and of a token's KV by format."""

    memory: float
    disk: float
    weights: int
    tokens: dict[str, int]

    def of(self, contender: str, figures: Figures) -> Figures:
        """`roofline`: the share of the speed that memory allows; `disk`: seconds to read the KV at the raw speed."""
        name, _, variant = contender.partition(" ")
        if name != "OneKV":
            return {}
        token = self.tokens[variant or "plain"]
        found: Figures = {}
        if "rows" in figures:
            step = (self.weights + token * figures["rows"] * figures["row_tokens"]) / self.memory
            found["roofline"] = 100 * figures["speed"] * step / figures["rows"]
        if "restored" in figures:
            found["disk"] = token * figures["restored"] / self.disk
        return found


def measure(model: str, formats: list[str], folder: Path) -> Limits:
    """`folder` is on the disk that servers use."""
    loaded = load_for(model, Settings()).model
    plans = {name: make_plan(loaded, Settings(kv_memory="64MiB", kv_format=_flag(name)), None) for name in formats}
    tokens = {name: sum(group.token_bytes for group in plan.layout.groups) for name, plan in plans.items()}
    limits = Limits(bandwidth(), _disk(folder), step_bytes(loaded, 0, 0), tokens)
    # Servers get all of the device.
    del loaded, plans
    mx.clear_cache()
    return limits


def _flag(variant: str) -> str:
    return "auto" if variant == "plain" else variant


def _disk(folder: Path) -> float:
    """Bytes per second of a plain file, out of the page cache where the system can drop it."""
    file, into, best = folder / "raw", bytearray(PIECE), 0.0
    file.write_bytes(os.urandom(FILE))
    for _ in range(REPEATS):
        drop([file])
        begin = time.perf_counter()
        with file.open("rb", buffering=0) as source:
            while source.readinto(into):
                pass
        best = max(best, FILE / (time.perf_counter() - begin))
    file.unlink()
    return best
