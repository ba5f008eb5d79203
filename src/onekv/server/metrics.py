"""What /metrics tells: counters and histograms kept here, and gauges of the engine taken when they are asked for.

Requests are observed in the engine's thread, as their events come; the gauges show one snapshot of `LLM.stats`.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..engine import Delta, End, Event, Request
from ..errors import OneKVError
from ..llm import MemoryStats, PoolStats, Stats
from ..prefix.figures import PrefixStats
from ..tiers.base import TierStats

# Seconds: from 1 ms, between two tokens on a fast device, to 5 minutes, a long answer.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

# Else every counter comes twice, as a time too: onekv_requests_created is not how many were created.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The metrics of one backend, with a registry of their own."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._registry = CollectorRegistry()
        self._snapshot = _Snapshot()
        self._registry.register(self._snapshot)
        registry = self._registry
        self._requests = Counter(
            "onekv_requests",
            "Requests that ended, by outcome: stop, length, cancelled, or the kind of error.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("stop", "length", "cancelled"):
            self._requests.labels(outcome)
        self._prompt = Counter(
            "onekv_prompt_tokens",
            "Tokens of the prompts of requests that were started to be answered.",
            registry=registry,
        )
        self._cached = Counter("onekv_cached_tokens", "Those of the prompt tokens that were cached.", registry=registry)
        self._generated = Counter("onekv_generated_tokens", "Tokens that were generated.", registry=registry)
        self._first = Histogram(
            "onekv_time_to_first_token_seconds",
            "From a request's arrival to its first token, waiting included.",
            buckets=BUCKETS,
            registry=registry,
        )
        self._between = Histogram(
            "onekv_time_between_tokens_seconds",
            "From one token of a request to its next.",
            buckets=BUCKETS,
            registry=registry,
        )
        self._duration = Histogram(
            "onekv_request_duration_seconds",
            "From a request's arrival to its end, whatever the outcome.",
            buckets=BUCKETS,
            registry=registry,
        )

    def observe(self, request: Request) -> Callable[[Event], None]:
        """What is to be called with every event of `request`, in order."""
        last: float | None = None

        def on_event(event: Event) -> None:
            nonlocal last
            now = time.perf_counter()
            if not isinstance(event, Delta):
                self._ended(request, event, now)
            elif event.tokens:
                if last is None:
                    self._started(request)
                else:
                    self._between.observe(now - last)
                self._generated.inc(len(event.tokens))
                last = now

        return on_event

    def _started(self, request: Request) -> None:
        self._prompt.inc(len(request.prompt))
        self._cached.inc(request.cached_tokens)
        self._first.observe(request.first - request.created)

    def _ended(self, request: Request, event: End | OneKVError, now: float) -> None:
        outcome = event.finish_reason if isinstance(event, End) else type(event).__name__
        self._requests.labels(outcome).inc()
        self._duration.observe(now - request.created)

    def refused(self, error: OneKVError) -> None:
        """A request was not even submitted."""
        self._requests.labels(type(error).__name__).inc()

    def render(self, stats: Stats | None) -> bytes:
        """All metrics in Prometheus' text format; without `stats`, the gauges are those of the last time."""
        if stats is not None:
            self._snapshot.stats = stats
        return generate_latest(self._registry)


class _Snapshot(Collector):
    """The engine at one moment, as metrics; nothing until there is a moment."""

    def __init__(self) -> None:
        self.stats: Stats | None = None

    def collect(self) -> Iterator[Metric]:
        if self.stats is None:
            return
        yield GaugeMetricFamily("onekv_requests_waiting", "Requests that wait to be started.", value=self.stats.waiting)
        yield GaugeMetricFamily(
            "onekv_requests_running",
            "Requests in the batch, the one that is prefilled included.",
            value=self.stats.running,
        )
        yield from _pools(self.stats.pools)
        yield from _memory(self.stats.memory)
        if self.stats.prefix is not None:
            yield from _prefix(self.stats.prefix)
        yield from _tiers(self.stats.tiers)


def pool_owners(pool: PoolStats) -> dict[str, int]:
    """Blocks of a pool by who has them; together they are all of its blocks."""
    return {"held": pool.held, "cached": pool.idle, "pinned": pool.pinned, "free": pool.free}


def _pools(pools: tuple[PoolStats, ...]) -> Iterator[Metric]:
    family = GaugeMetricFamily(
        "onekv_kv_pool_bytes",
        "The KV pool by group of layers and by owner: held by running requests, or not in use: cached, pinned, free.",
        labels=["group", "owner"],
    )
    for pool in pools:
        for owner, blocks in pool_owners(pool).items():
            family.add_metric([pool.group, owner], blocks * pool.block_bytes)
    yield family


def _memory(memory: MemoryStats) -> Iterator[Metric]:
    figures = [
        ("onekv_weights_bytes", "The model's weights.", memory.weights),
        ("onekv_states_bytes", "Recurrent states of running requests.", memory.states),
        ("onekv_mlx_active_bytes", "Memory in use, as MLX counts it.", memory.active),
        ("onekv_mlx_peak_bytes", "The most memory that was in use, as MLX counts it.", memory.peak),
        ("onekv_mlx_buffer_cache_bytes", "Freed buffers that MLX keeps to use again.", memory.buffer_cache),
    ]
    for name, text, value in figures:
        yield GaugeMetricFamily(name, text, value=value)


def _prefix(prefix: PrefixStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "onekv_snapshots_bytes", "Recurrent states kept with cached prompts.", value=prefix.snapshot_bytes
    )
    yield CounterMetricFamily(
        "onekv_prefix_hits", "Requests that found some of their prompt cached.", value=prefix.hits
    )
    yield CounterMetricFamily(
        "onekv_prefix_tokens_reused", "Prompt tokens that requests found cached.", value=prefix.tokens_reused
    )
    yield CounterMetricFamily(
        "onekv_prefix_evicted_blocks", "Cached blocks that made room for others.", value=prefix.evicted_blocks
    )
    misses = CounterMetricFamily(
        "onekv_prefix_misses", "Requests by the reason why no more of their prompt was cached.", labels=["reason"]
    )
    for reason, count in prefix.misses.items():
        misses.add_metric([reason], count)
    yield misses


def _tiers(tiers: tuple[TierStats, ...]) -> Iterator[Metric]:
    """Per tier; nothing where there is none."""
    gauges = {
        "blocks": "Blocks in a tier colder than the pool.",
        "bytes": "Bytes a tier takes.",
        "limit": "Bytes a tier may take.",
        "queued_bytes": "Bytes that wait to be written to a tier.",
    }
    counters = {
        "hits": "Blocks that came back from a tier into the pool.",
        "promoted_bytes": "Bytes that came back from a tier into the pool.",
        "promoted_seconds": "Time in which they did.",
        "writes": "Blocks written to a tier.",
        "written_bytes": "Bytes written to a tier.",
        "evicted": "Blocks a tier dropped to hold its limit.",
        "discarded": "Blocks that were to go to a tier and were dropped: queue full, budget spent or disk refused.",
        "corrupt": "Blocks in a tier that were damaged or missing, and were computed again.",
    }
    for name, text in gauges.items() if tiers else ():
        family = GaugeMetricFamily(f"onekv_tier_{name}", text, labels=["tier"])
        for tier in tiers:
            family.add_metric([tier.name], getattr(tier, name))
        yield family
    for name, text in counters.items() if tiers else ():
        counter = CounterMetricFamily(f"onekv_tier_{name}", text, labels=["tier"])
        for tier in tiers:
            counter.add_metric([tier.name], getattr(tier, name))
        yield counter
