"""Memory stays flat: the pool is written in place, and a cache hit copies nothing."""

import gc
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..config import Settings
from ..engine import Engine
from ..memory.plan.workspace import weight_bytes
from ..units import format_size
from .base import Case, Check, Notes, switch
from .engines import chat_model, generate, make_engine, random_prompt

PROMPT, DECODED, HIT = 1000, 500, 8
# Decode steps after which addresses are compared. Several, because a copy may reuse an earlier buffer.
LOOKS = 16
# Much larger than the working set of a step.
KV_MEMORY = "128MB"
SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}


@dataclass(frozen=True)
class Line:
    """Measurements in bytes, and the sizes they are judged by.

    `varies` is the range of active memory over decode steps, `decode_peak` their peak above weights and pool,
    `hit_peak` the peak of a cache hit above the level before it, `hit_left` what remains of that.
    """

    varies: int
    decode_peak: int
    hit_peak: int
    hit_left: int
    # Whether the pool's arrays kept their addresses, where those can be read.
    in_place: bool
    cached: int
    # Sizes of one layer's keys in the pool, of the conversation's KV, and of a block.
    array: int
    conversation: int
    block: int

    @property
    def problems(self) -> list[str]:
        found = []
        if not self.in_place:
            found.append("the pool's arrays moved to new buffers: a slice of one outlived its step, so writes copy")
        if self.decode_peak > self.array // 2:
            found.append(
                f"decode steps peak {format_size(self.decode_peak)} above weights and pool: writes copy the pool"
            )
        if self.varies > self.array // 4:
            found.append(f"active memory varies by {format_size(self.varies)} over {DECODED} tokens")
        if not self.cached:
            found.append("a repeated prompt was not found in the prefix cache")
        if self.hit_peak > self.conversation // 4:
            found.append(f"a cache hit peaks {format_size(self.hit_peak)} above the pool: it copies the cached blocks")
        if self.hit_left > self.block:
            found.append(f"a cache hit leaves {format_size(self.hit_left)} allocated")
        return found


def run(case: Case, notes: Notes) -> None:
    kernels = ("auto", "off") if case.settings.kernels != "off" else ("off",)
    lines = {}
    for each in kernels:
        case.doing(f"{DECODED} tokens, --kernels {each}")
        lines[each] = measure(each)
    for each, line in lines.items():
        how = f"kernels {each}"
        notes.figure(f"active memory varies, {how}", line.varies, "B", line.array // 4)
        notes.figure(f"decode peak above weights and pool, {how}", line.decode_peak, "B", line.array // 2)
        notes.figure(f"peak of a cache hit, {how}", line.hit_peak, "B", line.conversation // 4)
        notes.figure(f"left by a cache hit, {how}", line.hit_left, "B", line.block)
        for problem in line.problems:
            notes.fail(f"{how}: {problem}", _avoiding(each, lines))
    if not any(line.problems for line in lines.values()):
        cached = min(line.cached for line in lines.values())
        notes.ok(f"{DECODED} tokens decoded in place; {cached} of {PROMPT} tokens reused without a copy")


def _avoiding(kernels: str, lines: dict[str, Line]) -> str:
    other = "off" if kernels == "auto" else "auto"
    if other in lines and not lines[other].problems:
        return switch("kernels", other)
    return "room for a second copy of one layer: lower " + switch("kv_memory", "SIZE")


def measure(kernels: str) -> Line:
    settings = Settings(kernels=kernels, kv_memory=KV_MEMORY, max_batch=2, speculate="off")
    gc.collect()
    others, model = mx.get_active_memory(), chat_model(**SHAPE)
    engine = make_engine(model, settings)
    pool, places = engine.memory.pools[0], [_addresses(engine)]
    # Nothing else may stay allocated.
    planned = others + weight_bytes(model) + pool.nbytes
    levels: list[int] = []

    def step() -> None:
        if not levels:
            mx.reset_peak_memory()
        levels.append(mx.get_active_memory())
        if len(levels) <= LOOKS:
            places.append(_addresses(engine))

    prompt = random_prompt(PROMPT)
    generate(engine, prompt, DECODED, step)
    decode_peak = mx.get_peak_memory() - planned
    level = mx.get_active_memory()
    mx.reset_peak_memory()
    hit = generate(engine, prompt, HIT)
    peak, left = mx.get_peak_memory() - level, mx.get_active_memory() - level
    places.append(_addresses(engine))
    engine.check_integrity()
    return Line(
        varies=max(levels) - min(levels),
        decode_peak=decode_peak,
        hit_peak=peak,
        hit_left=left,
        in_place=all(each == places[0] for each in places),
        cached=hit.cached_tokens,
        array=pool.layers[0].k.nbytes,
        conversation=pool.group.token_bytes * (PROMPT + DECODED),
        block=pool.block_bytes,
    )


def _addresses(engine: Engine) -> list[int]:
    """Addresses of the pool's buffers; empty on CUDA, where reading an array on the host may move it."""
    if engine.memory.device == "cuda":
        return []
    arrays = engine.memory.arrays()
    mx.eval(arrays)
    return [np.asarray(array.view(mx.uint8)).ctypes.data for array in arrays]


CHECK = Check(
    "memory", "the pool is written in place, a cache hit copies nothing", run, passed="flat", failed="NOT FLAT"
)
