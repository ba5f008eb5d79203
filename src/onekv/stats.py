"""Who holds which blocks and bytes: plain figures, taken from an engine."""

from dataclasses import dataclass

import mlx.core as mx

from .engine import Engine
from .prefix.figures import PrefixStats
from .tiers.base import TierStats


@dataclass(frozen=True)
class PoolStats:
    """Blocks of one group: held by running sequences, idle (cached, not in use), pinned and not in use, or free.

    `reserved` of the idle and free ones are promised to running sequences, `available` are not.
    """

    group: str
    layers: int
    block_bytes: int
    blocks: int
    held: int
    peak_held: int
    idle: int
    peak_idle: int
    pinned: int
    free: int
    reserved: int
    available: int


@dataclass(frozen=True)
class MemoryStats:
    """Bytes: by owner, and as MLX counts them for the whole process."""

    weights: int
    pool: int
    states: int
    active: int
    peak: int
    buffer_cache: int


@dataclass(frozen=True)
class Stats:
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


def read_stats(engine: Engine) -> Stats:
    pools = tuple(
        PoolStats(
            group=str(pool.group.rule),
            layers=len(pool.group.layers),
            block_bytes=pool.block_bytes,
            blocks=pool.blocks,
            held=pool.held,
            peak_held=pool.peak_held,
            idle=pool.idle,
            peak_idle=pool.peak_idle,
            pinned=int((pool.pinned & (pool.references == 0)).sum()),
            free=pool.free,
            reserved=pool.reserved,
            available=pool.available,
        )
        for pool in engine.memory.pools
    )
    memory = MemoryStats(
        weights=engine.plan.weights,
        pool=sum(pool.nbytes for pool in engine.memory.pools),
        states=engine.memory.state_bytes,
        active=mx.get_active_memory(),
        peak=mx.get_peak_memory(),
        buffer_cache=mx.get_cache_memory(),
    )
    waiting = len(engine.scheduler.waiting)
    running = len(list(engine.scheduler)) - waiting
    prefix = engine.prefix.stats() if engine.prefix.enabled else None
    tiers = tuple(tier.stats() for tier in engine.prefix.tiers)
    return Stats(pools, memory, prefix, tiers, waiting, running, engine.runner.one_by_one)
