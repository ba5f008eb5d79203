"""The benefit of the disk cache: a conversation continued after a restart, and its speed compared with plain files.

Three processes, one after the other, each of which loads the model again and uses the same temporary folder:

    first    computes a prompt of N tokens and a short answer, and closes
    second   restart: continues the conversation, with its full blocks read from disk, compared with a cold prefill of
             all of it. The time is that to the first token; the tokens of both must be the same
             read: loads the conversation into the pool, timed from the request until all is loaded, compared with
             reading the same files, one after the other, into one reused buffer (which stays in the processor's cache)
             and into memory that holds them all, as the pool must. Page cache warm for all (the files were read just
             before) and cold for all (flushed and dropped with posix_fadvise, if available)
             write: stores the conversation's blocks in a new folder until the last is written, compared with writing
             files of the same sizes. Neither waits for the disk (no fsync); pending writes are flushed before
    third    peak: memory used by promoting in addition to the pool. `counted` is MLX's peak plus Python's
             (tracemalloc), which is exact; `resident` is the kernel's figure for the process (Linux)

Sides are interleaved, figures are medians, and the first round warms up, except for `first_after_restart`.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..config import Settings
from ..engine import Engine, Request
from ..errors import OneKVError, SettingError
from ..memory.plan import make_plan
from ..prefix.offload import Offload
from ..tables import table
from ..tiers.opening import open_tier, stored_as
from ..units import format_size
from .decode import about, bench_model

ADDED, ANSWER = 16, 8
# Tokens that the pool has room for in addition to the conversation.
SPARE = 1024
Kind = TypeVar("Kind")
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Case:
    model: str
    dtype: str | None
    folder: str
    tokens: int
    rounds: int


@dataclass(frozen=True)
class Restart:
    """Seconds to the first token; `first_after_restart` is that of the new process's first request."""

    prompt_tokens: int
    cached_tokens: int
    first_after_restart: float
    seconds: float
    seconds_cold: float
    tokens_identical: bool


@dataclass(frozen=True)
class Speed:
    """Bytes per second. For reads, also `by_its_own_count`, as the tier's statistics say it, and `raw_kept`: plain
    files, read into memory that holds them all.
    """

    what: str
    bytes: int
    speed: float
    raw: float
    by_its_own_count: float | None = None
    raw_kept: float | None = None


@dataclass(frozen=True)
class Peak:
    """Bytes above the level before."""

    block: int
    counted: int
    resident: int | None


def run(arguments: argparse.Namespace) -> int:
    folder = arguments.folder
    if folder is not None and not Path(folder).is_dir():
        raise SettingError(f"--folder is {folder!r}, which is not a folder")
    with tempfile.TemporaryDirectory(prefix="onekv-bench-", dir=folder) as root:
        case = Case(arguments.model, arguments.dtype, root, arguments.tokens, arguments.rounds)
        _say("the first process computes the conversation")
        tokens = _in_new_process(fill, case)
        _say("the second continues it, reads and writes")
        restart, speeds = _in_new_process(measure, case, tokens)
        _say("the third looks at memory")
        peak = _in_new_process(measure_peak, case, tokens)
    print(_format(restart, speeds, peak))
    if arguments.json:
        how = {"tokens": case.tokens, "rounds": case.rounds}
        results = {"restart": asdict(restart), "speeds": [asdict(speed) for speed in speeds], "peak": asdict(peak)}
        Path(arguments.json).write_text(json.dumps({**about(case.model), **how, **results}, indent=2) + "\n")
    return 0 if restart.tokens_identical else 1


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def _in_new_process(work: Callable[..., Kind], *arguments: object) -> Kind:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return processes.submit(work, *arguments).result()


# The processes


def fill(case: Case) -> list[int]:
    """The first process: all tokens of the conversation, whose blocks are on disk then."""
    model = bench_model(case.model, case.dtype)
    engine = _engine(case, model, _cache(case))
    request = _generate(engine, _random(engine, case.tokens, seed=0), ANSWER)
    engine.close()
    return request.all_tokens


def measure(case: Case, tokens: list[int]) -> tuple[Restart, list[Speed]]:
    """The second process."""
    model = bench_model(case.model, case.dtype)
    cold = _engine(case, model, None)
    _generate(cold, tokens[:ADDED], 2)
    engine = _engine(case, model, _cache(case))
    try:
        restart = _restart(case, engine, cold, tokens)
        cold.close()
        return restart, [*_reads(case, engine, tokens), _writes(case, engine, tokens)]
    finally:
        engine.close()


def measure_peak(case: Case, tokens: list[int]) -> Peak:
    """The third process. The threads that read start within what is measured."""
    model = bench_model(case.model, case.dtype)
    engine = _engine(case, model, _cache(case))
    _reset_resident()
    before = _resident("VmRSS")
    _promote(engine, tokens)
    after = _resident("VmHWM")
    engine.close()

    engine = _engine(case, model, _cache(case))
    block = sum(pool.block_bytes for pool in engine.memory.pools)
    tracemalloc.start()
    mx.reset_peak_memory()
    arrays, objects = mx.get_active_memory(), tracemalloc.get_traced_memory()[0]
    _promote(engine, tokens)
    # MLX's peak is 0 after a reset until something is allocated.
    counted = max(mx.get_peak_memory() - arrays, 0) + tracemalloc.get_traced_memory()[1] - objects
    tracemalloc.stop()
    engine.close()
    return Peak(block, counted, after - before if before and after else None)


# What is measured


def _restart(case: Case, engine: Engine, cold: Engine, tokens: list[int]) -> Restart:
    full = (len(tokens) - 1) // engine.memory.block_size * engine.memory.block_size
    times: tuple[list[float], list[float]] = [], []
    identical = True
    for turn in range(case.rounds + 1):
        prompt = tokens + _random(engine, ADDED, seed=turn + 1)
        warm = _generate(engine, prompt, ANSWER)
        engine.prefix.forget()
        if warm.cached_tokens < full:
            raise OneKVError(f"only {warm.cached_tokens} of {full} tokens came from disk")
        computed = _generate(cold, prompt, ANSWER)
        identical = identical and warm.tokens == computed.tokens
        for seconds, request in zip(times, (warm, computed), strict=True):
            seconds.append(request.first - request.created)
    medians = [statistics.median(seconds[1:]) for seconds in times]
    return Restart(len(prompt), warm.cached_tokens, times[0][0], medians[0], medians[1], identical)


def _reads(case: Case, engine: Engine, tokens: list[int]) -> list[Speed]:
    files = sorted(_cache(case).glob("*/*/*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    size = sum(file.stat().st_size for file in files)
    one, all_of_them = (np.ones(most, np.uint8) for most in (max(file.stat().st_size for file in files), size))
    states: dict[str, Callable[[list[Path]], object]] = {"warm": partial(_read, into=one)}
    if hasattr(os, "posix_fadvise"):
        states["cold"] = drop
    figures: dict[str, list[tuple[float, ...]]] = {state: [] for state in states}
    for turn in range(case.rounds + 1):
        for state, prepare in states.items():
            prepare(files)
            speeds = _promote(engine, tokens)
            for kept in (one, all_of_them):
                prepare(files)
                speeds = (*speeds, size / _read(files, kept))
            if turn:
                figures[state].append(speeds)
    results = []
    for state in states:
        speed, own, raw, raw_kept = (statistics.median(column) for column in zip(*figures[state], strict=True))
        results.append(Speed(f"read, page cache {state}", size, speed, raw, own, raw_kept))
    return results


def _promote(engine: Engine, tokens: list[int]) -> tuple[float, ...]:
    """Bring the conversation into the pool and forget it there; bytes per second by the clock and by the tier."""
    prefix, (tier,) = engine.prefix, engine.prefix.tiers
    before = tier.stats()
    begin = time.perf_counter()
    lease = prefix.open(tokens, len(tokens))
    while lease.loading is not None:
        prefix.load([lease], 1)
    seconds = time.perf_counter() - begin
    after = tier.stats()
    lease.release()
    prefix.forget()
    size = after.promoted_bytes - before.promoted_bytes
    if not size or after.corrupt:
        raise OneKVError("the conversation did not come from disk")
    return size / seconds, size / (after.promoted_seconds - before.promoted_seconds)


def _writes(case: Case, engine: Engine, tokens: list[int]) -> Speed:
    _generate(engine, tokens, 1)
    sizes = [file.stat().st_size for file in _cache(case).glob("*/*/*.safetensors")]
    folder = Path(case.folder) / "written"
    stored: list[float] = []
    raw: list[float] = []
    for turn in range(case.rounds + 1):
        os.sync()
        ours, size = _store(case, engine, folder)
        shutil.rmtree(folder)
        os.sync()
        theirs = _write(folder, sizes)
        shutil.rmtree(folder)
        if turn:
            stored.append(size / ours)
            raw.append(sum(sizes) / theirs)
    return Speed("write", size, statistics.median(stored), statistics.median(raw))


def _store(case: Case, engine: Engine, folder: Path) -> tuple[float, int]:
    """Offer all that is in the pool to a new tier; seconds until it is written, and bytes."""
    prefix = engine.prefix
    stored = stored_as(engine.runner.model, engine.plan)
    tier = open_tier(_settings(engine.plan.budget, folder), engine.plan, stored, case.model)
    assert tier is not None
    try:
        offload = Offload([tier], engine.memory, prefix.index, prefix.snapshots)
        begin = time.perf_counter()
        for node in prefix.index.nodes.values():
            offload.node(node, wait=True)
        tier.flush()
        return time.perf_counter() - begin, tier.stats().written_bytes
    finally:
        tier.close()


# Plain files


def _read(files: list[Path], into: Bytes) -> float:
    """Seconds to read all files, one after the other: into memory that holds all, or again and again into less."""
    begin, room, place = time.perf_counter(), into.data, 0
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        size = os.fstat(handle).st_size
        if place + size > len(room):
            place = 0
        while count := os.readv(handle, [room[place : place + size]]):
            place, size = place + count, size - count
        os.close(handle)
    return time.perf_counter() - begin


def drop(files: list[Path]) -> None:
    """Take files out of the page cache, where the system can."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _write(folder: Path, sizes: list[int]) -> float:
    """Seconds to write files of these sizes."""
    folder.mkdir()
    data = memoryview(os.urandom(max(sizes)))
    begin = time.perf_counter()
    for number, size in enumerate(sizes):
        handle = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        rest = data[:size]
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.close(handle)
    return time.perf_counter() - begin


# Engines


def _cache(case: Case) -> Path:
    return Path(case.folder) / "cache"


def _settings(kv_memory: int, folder: Path | None) -> Settings:
    if folder is None:
        return Settings(kv_memory=kv_memory, max_batch=1, prefix_cache=False)
    return Settings(kv_memory=kv_memory, max_batch=1, disk_cache=str(folder), disk_limit=2 * kv_memory + 2**26)


def _engine(case: Case, model: Module, folder: Path | None) -> Engine:
    layout = make_plan(model, Settings(kv_memory="1GiB", max_batch=1), None).layout
    token_bytes = sum(group.token_bytes for group in layout.groups)
    settings = _settings((case.tokens + SPARE) * token_bytes + 32 * layout.sequence_bytes, folder)
    plan = make_plan(model, settings, None)
    tier = open_tier(settings, plan, stored_as(model, plan), case.model)
    return Engine(model, plan, set(), settings, [tier] if tier is not None else [])


def _random(engine: Engine, count: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, engine.plan.layout.vocabulary, count).tolist()
    return tokens


def _generate(engine: Engine, prompt: list[int], count: int) -> Request:
    request = Request(prompt, count)
    engine.submit(request)
    while not engine.idle:
        engine.step()
    return request


# The process's own memory, as Linux reports it


def _reset_resident() -> None:
    """From now on the peak is counted afresh."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def _resident(name: str) -> int | None:
    if sys.platform != "linux":
        return None
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _format(restart: Restart, speeds: list[Speed], peak: Peak) -> str:
    same = "the same tokens" if restart.tokens_identical else "OTHER TOKENS"
    what = f"first token after a restart, {restart.cached_tokens:,} of {restart.prompt_tokens:,} tokens cached"
    ours, first, cold = restart.seconds, restart.first_after_restart, restart.seconds_cold
    rows = [
        [what, f"{ours:.2f} s", f"{cold:.2f} s", f"{cold / ours:.1f}x, {same}", "10x"],
        ["the process's first request", f"{first:.2f} s", "", f"{cold / first:.1f}x", ""],
    ]
    for speed in speeds:
        least = "50 %" if speed.what == "write" else "70 %"
        rows.append([speed.what, _rate(speed.speed), _rate(speed.raw), f"{speed.speed / speed.raw:.0%}", least])
        if (own := speed.by_its_own_count) is not None:
            rows.append(["by the tier's own count", _rate(own), "", f"{own / speed.raw:.0%}", ""])
        if (kept := speed.raw_kept) is not None:
            what = "beside files read into memory for all"
            rows.append([what, _rate(speed.speed), _rate(kept), f"{speed.speed / kept:.0%}", ""])
    for name, size, most in (("peak beyond the pool", peak.counted, "< 4"), ("as resident memory", peak.resident, "")):
        if size is not None:
            rows.append([name, format_size(size), "", f"{size / peak.block:.2f} blocks", most])
    return table(rows, ["", "disk cache", "beside it", "ratio", "wanted"])


def _rate(speed: float) -> str:
    return f"{speed / 1e6:,.0f} MB/s"
