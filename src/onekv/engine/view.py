"""The engine's state for other threads: plain figures, and an immutable snapshot of everything.

`Stats` collects what each part reports about itself. A `View` adds the requests and, if wanted, the state of every
block. Both are created between two steps, in the thread that owns the engine, and can then be read by any thread. What
the blocks contain is read by `contents.py`.
"""

from dataclasses import dataclass

import mlx.core as mx

from ..footprint import footprint
from ..memory.figures import LOADING, PoolStats
from ..prefix.figures import PrefixStats
from ..tiers.base import TierStats
from ..units import format_size
from .engine import Engine
from .request import Request, RequestState
from .speculation.control import SpeculationStats


@dataclass(frozen=True)
class MemoryStats:
    """Bytes: by owner, as MLX counts them for the whole process, and as the system counts the process."""

    weights: int
    pool: int
    states: int
    active: int
    peak: int
    buffer_cache: int
    # Physical memory (footprint.py).
    footprint: int


@dataclass(frozen=True, repr=False)
class Stats:
    """The state of the engine and its caches, as plain figures."""

    pools: tuple[PoolStats, ...]
    memory: MemoryStats
    # None when the prefix cache is off.
    prefix: PrefixStats | None
    # Colder places than the pool: the disk cache, if there is one.
    tiers: tuple[TierStats, ...]
    waiting: int
    running: int
    # Why sequences are decoded one by one instead of as a batch, if they are.
    one_by_one: str | None
    # Why decode steps are not compiled, if they are not.
    uncompiled: str | None
    # None when there is none; then why.
    speculation: SpeculationStats | None = None
    unspeculated: str | None = None
    # Why attention kernels that support this device are not used, if there are any.
    unused_kernels: str | None = None
    # How far next tokens are from those with plain KV, in nats, as measured at load; None of plain KV itself.
    divergence: float | None = None

    def __repr__(self) -> str:
        """A few lines; the fields have all of it."""
        memory = self.memory
        lines = [
            f"Stats({self.running} running, {self.waiting} waiting",
            f"  memory: weights {format_size(memory.weights)}, KV pool {format_size(memory.pool)}, "
            f"active {format_size(memory.active)}, peak {format_size(memory.peak)}, "
            f"process {format_size(memory.footprint)}",
        ]
        lines += [
            f"  {pool.group}: {pool.blocks} blocks of {format_size(pool.block_bytes)}: {pool.held} held, "
            f"{pool.idle} cached, {pool.pinned} pinned, {pool.free} free"
            for pool in self.pools
        ]
        if self.prefix is not None:
            lines.append(f"  prefix cache: {self.prefix.hits} hits, {self.prefix.tokens_reused:,} tokens reused")
        if self.speculation is not None:
            proposed, accepted = self.speculation.proposed, self.speculation.accepted
            lines.append(f"  speculation: {accepted:,} of {proposed:,} proposed tokens accepted")
        if self.unspeculated is not None:
            lines.append(f"  no speculation: {self.unspeculated}")
        if self.one_by_one is not None:
            lines.append(f"  sequences are decoded one at a time: {self.one_by_one}")
        elif self.uncompiled is not None:
            lines.append(f"  decode steps are not compiled: {self.uncompiled}")
        if self.unused_kernels is not None:
            lines.append(f"  attention by MLX's operations: {self.unused_kernels}")
        if self.divergence is not None:
            lines.append(f"  KV format: diverges from plain by {self.divergence:.2g} nats per token")
        lines += [f"  {tier.name}: {tier.summary}" for tier in self.tiers]
        return "\n".join(lines) + ")"


def read_stats(engine: Engine) -> Stats:
    kv = engine.memory.stats()
    memory = MemoryStats(
        weights=engine.plan.weights,
        pool=kv.pool_bytes,
        states=kv.state_bytes,
        active=mx.get_active_memory(),
        peak=mx.get_peak_memory(),
        buffer_cache=mx.get_cache_memory(),
        footprint=footprint(),
    )
    waiting = len(engine.scheduler.waiting)
    return Stats(
        pools=kv.pools,
        memory=memory,
        prefix=engine.prefix.stats() if engine.prefix.enabled else None,
        tiers=tuple(tier.stats() for tier in engine.prefix.tiers),
        waiting=waiting,
        running=len(list(engine.scheduler)) - waiting,
        one_by_one=engine.runner.one_by_one,
        uncompiled=engine.runner.uncompiled,
        speculation=engine.speculation.stats() if engine.speculation is not None else None,
        unspeculated=engine.unspeculated or (engine.speculation.failed if engine.speculation is not None else None),
        unused_kernels="; ".join(engine.memory.unused_kernels) or None,
        divergence=engine.divergence,
    )


@dataclass(frozen=True)
class RequestView:
    """A request that has not ended: `number` is unique among those in progress; `age` is in seconds."""

    number: int
    state: RequestState
    prompt_tokens: int
    cached_tokens: int
    # Of its prompt and answer, in the pool.
    stored_tokens: int
    generated_tokens: int
    max_tokens: int
    # Proposed tokens, and how many of them were accepted.
    proposed_tokens: int
    accepted_tokens: int
    age: float


@dataclass(frozen=True)
class View:
    # By the engine's clock.
    time: float
    stats: Stats
    requests: tuple[RequestView, ...]
    # Of each pool a byte per block (`memory.figures`); None unless they were requested.
    blocks: tuple[bytes, ...] | None = None


def look(engine: Engine, blocks: bool = False) -> View:
    now = engine.now()
    requests = tuple(_request(request, now) for request in engine.scheduler)
    return View(now, read_stats(engine), requests, _states(engine) if blocks else None)


def _states(engine: Engine) -> tuple[bytes, ...]:
    states = [pool.states() for pool in engine.memory.pools]
    for group, block in engine.prefix.being_read():
        states[group][block] = LOADING
    return tuple(each.tobytes() for each in states)


def _request(request: Request, now: float) -> RequestView:
    return RequestView(
        number=id(request),
        state=request.state,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached_tokens,
        stored_tokens=request.sequence.length if request.lease is not None else 0,
        generated_tokens=len(request.tokens),
        max_tokens=request.max_tokens,
        proposed_tokens=request.proposed,
        accepted_tokens=request.accepted,
        age=now - request.created,
    )
