"""Who holds which blocks and bytes: what each part says of itself, gathered from an engine."""

from dataclasses import dataclass

import mlx.core as mx

from .engine import Engine
from .memory.figures import PoolStats
from .prefix.figures import PrefixStats
from .tiers.base import TierStats
from .units import format_size


@dataclass(frozen=True)
class MemoryStats:
    """Bytes: by owner, and as MLX counts them for the whole process."""

    weights: int
    pool: int
    states: int
    active: int
    peak: int
    buffer_cache: int


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        """A few lines; the fields have all of it."""
        memory = self.memory
        lines = [
            f"Stats({self.running} running, {self.waiting} waiting",
            f"  memory: weights {format_size(memory.weights)}, KV pool {format_size(memory.pool)}, "
            f"active {format_size(memory.active)}, peak {format_size(memory.peak)}",
        ]
        lines += [
            f"  {pool.group}: {pool.blocks} blocks of {format_size(pool.block_bytes)}: {pool.held} held, "
            f"{pool.idle} cached, {pool.pinned} pinned, {pool.free} free"
            for pool in self.pools
        ]
        if self.prefix is not None:
            lines.append(f"  prefix cache: {self.prefix.hits} hits, {self.prefix.tokens_reused:,} tokens reused")
        lines += [
            f"  {tier.name}: {tier.blocks} blocks, {format_size(tier.bytes)} of {format_size(tier.limit)}"
            for tier in self.tiers
        ]
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
    )
    waiting = len(engine.scheduler.waiting)
    running = len(list(engine.scheduler)) - waiting
    prefix = engine.prefix.stats() if engine.prefix.enabled else None
    tiers = tuple(tier.stats() for tier in engine.prefix.tiers)
    return Stats(kv.pools, memory, prefix, tiers, waiting, running, engine.runner.one_by_one)
