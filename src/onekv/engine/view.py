"""What there is, for eyes outside of the engine's thread: plain figures, and an immutable picture of all of it.

`Stats` is what each part says of itself, gathered. A `View` adds the requests and, if somebody wants them, the nodes of
the prefix tree. Both are made between two steps, in the thread that owns the engine, and can then be read by any.
"""

from dataclasses import dataclass

import mlx.core as mx

from ..memory.figures import PoolStats
from ..prefix.figures import PrefixStats
from ..prefix.index import held
from ..tiers.base import TierStats
from ..units import format_size
from .engine import Engine
from .request import Request, RequestState


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
    # Why decode steps are not compiled, if they are not.
    uncompiled: str | None

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
    return Stats(kv.pools, memory, prefix, tiers, waiting, running, engine.runner.one_by_one, engine.runner.uncompiled)


@dataclass(frozen=True)
class RequestView:
    """A request that has not ended: `number` is one of its own for as long as it is there; `age` is in seconds."""

    number: int
    state: RequestState
    prompt_tokens: int
    cached_tokens: int
    # Of its prompt and answer, in the pool.
    stored_tokens: int
    generated_tokens: int
    max_tokens: int
    age: float


@dataclass(frozen=True)
class NodeView:
    """A block of the prefix tree: tokens [start, end) after the node `parent`, or after nothing (None).

    `held` says which groups still have it, `use` is larger the later it was used.
    """

    key: bytes
    parent: bytes | None
    start: int
    end: int
    held: tuple[bool, ...]
    snapshot: bool
    pins: int
    # Running sequences that go on from here.
    leases: int
    use: int


@dataclass(frozen=True)
class View:
    # By the engine's clock.
    time: float
    stats: Stats
    requests: tuple[RequestView, ...]
    # None unless they were asked for.
    nodes: tuple[NodeView, ...] | None = None


def look(engine: Engine, nodes: bool = False) -> View:
    now = engine.now()
    requests = tuple(_request(request, now) for request in engine.scheduler)
    return View(now, read_stats(engine), requests, _nodes(engine) if nodes else None)


def _request(request: Request, now: float) -> RequestView:
    return RequestView(
        number=id(request),
        state=request.state,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached_tokens,
        stored_tokens=request.sequence.length if request.lease is not None else 0,
        generated_tokens=len(request.tokens),
        max_tokens=request.max_tokens,
        age=now - request.created,
    )


def _nodes(engine: Engine) -> tuple[NodeView, ...]:
    groups, snapshots = range(len(engine.memory.pools)), engine.prefix.snapshots
    return tuple(
        NodeView(
            key=node.key,
            parent=node.parent.key if node.parent is not None and node.parent.parent is not None else None,
            start=node.start,
            end=node.end,
            held=tuple(held(node, group) for group in groups),
            snapshot=snapshots.get(node.key) is not None,
            pins=node.pins,
            leases=node.leases,
            use=node.last_used,
        )
        for node in engine.prefix.index.nodes.values()
    )
