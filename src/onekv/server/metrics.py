"""Metrics for /metrics: counters and histograms kept here, and gauges of the engine read on each scrape.

Requests are observed in the engine's thread, as their events arrive; the gauges show one snapshot of `LLM.stats`.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..engine import Delta, End, Event, Request
from ..engine.speculation.control import SpeculationStats
from ..errors import OneKVError
from ..llm import MemoryStats, PoolStats, Stats
from ..prefix.figures import PrefixStats
from ..tiers.base import TierStats
from .lookups import Lookups

# Seconds: from 1 ms, between two tokens on a fast device, to 5 minutes, a long answer.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

# Requests that have ended and are still shown to watchers.
ENDED_KEPT = 5

# Else every counter comes twice, as a time too: onekv_requests_created is not how many were created.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The metrics of one backend, with a registry of their own."""

    def __init__(self, rules: Iterable[str] = ()) -> None:
        """`rules` of hygiene that are counted from the start."""
        self.started = time.monotonic()
        self._registry = CollectorRegistry()
        self._snapshot = _Snapshot()
        # Recent lookups in the cache, to explain misses.
        self.lookups = Lookups()
        # The last requests that ended, for watchers: most are over before anyone has seen them run.
        self.ended: deque[Ended] = deque(maxlen=ENDED_KEPT)
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
            "Prompt tokens of requests that were started.",
            registry=registry,
        )
        self._cached = Counter("onekv_cached_tokens", "Prompt tokens that were cached.", registry=registry)
        self._generated = Counter("onekv_generated_tokens", "Generated tokens.", registry=registry)
        self._cleaned = Counter(
            "onekv_hygiene_applied",
            "Places in system messages changed by a hygiene rule.",
            ["rule"],
            registry=registry,
        )
        for rule in rules:
            self._cleaned.labels(rule)
        self._first = Histogram(
            "onekv_time_to_first_token_seconds",
            "Time from a request's arrival to its first token, including time in the queue.",
            buckets=BUCKETS,
            registry=registry,
        )
        self._between = Histogram(
            "onekv_time_between_tokens_seconds",
            "Time between the tokens of a request; tokens of one step count as one.",
            buckets=BUCKETS,
            registry=registry,
        )
        self._duration = Histogram(
            "onekv_request_duration_seconds",
            "Time from a request's arrival to its end, whatever the outcome.",
            buckets=BUCKETS,
            registry=registry,
        )

    def add(self, collector: Collector) -> None:
        """More metrics, of a part that has its own."""
        self._registry.register(collector)

    def observe(self, request: Request) -> "Observed":
        """What is to be called with every event of `request`, in order."""
        return Observed(self, request)

    def request_started(self, request: Request) -> None:
        self._prompt.inc(len(request.prompt))
        self._cached.inc(request.cached_tokens)
        self._first.observe(request.first - request.created)
        self.lookups.add(request)

    def tokens_came(self, tokens: int, seconds: float | None) -> None:
        """A request has more tokens, `seconds` after those before, if there were any."""
        if seconds is not None:
            self._between.observe(seconds)
        self._generated.inc(tokens)

    def request_ended(self, outcome: str, seconds: float) -> None:
        """A request ended `seconds` after it had arrived."""
        self._requests.labels(outcome).inc()
        self._duration.observe(seconds)

    def cleaned(self, counts: Mapping[str, int]) -> None:
        """Rules of hygiene were applied to a request so often."""
        for rule, count in counts.items():
            self._cleaned.labels(rule).inc(count)

    def hygiene(self) -> dict[str, int]:
        """How often each rule was applied so far."""
        samples = (sample for family in self._cleaned.collect() for sample in family.samples)
        return {sample.labels["rule"]: int(sample.value) for sample in samples}

    def refused(self, error: OneKVError) -> None:
        """A request was not even submitted."""
        self._requests.labels(type(error).__name__).inc()

    def collect(self, stats: Stats | None) -> list[Metric]:
        """All metrics; without `stats`, no gauges."""
        self._snapshot.stats = stats
        return list(self._registry.collect())

    def render(self, stats: Stats | None) -> bytes:
        """All metrics in Prometheus' text format; without `stats`, the gauges are those of the last time."""
        if stats is not None:
            self._snapshot.stats = stats
        return generate_latest(self._registry)


@dataclass(frozen=True)
class Ended:
    """The final figures of a request. `number` and `created` are those of the `RequestView`s it had."""

    number: int
    created: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    # While it generated; None if it had fewer than two moments at which tokens came.
    tokens_per_second: float | None
    seconds: float


class Observed:
    """One request, as seen from its events. The engine's thread updates it and the metrics; any thread may read it."""

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics, self._request = metrics, request
        self.prompt_tokens, self.created = len(request.prompt), request.created
        self.cached_tokens = self.generated = 0
        # Those of the generated tokens that came first, at once.
        self.began_with = 0
        # Tokens that were guessed to be next, and those of them that were.
        self.proposed = self.accepted = 0
        # When its first and its last token came, by `time.perf_counter`; None before there was one.
        self.first: float | None = None
        self.last = self.created
        # How it ended: as in `End`, or the kind of its error.
        self.outcome: str | None = None
        # At which token its prompt left a cached conversation, if it did, and why no more of it was cached.
        self.leaves: int | None = None
        self.missed: str | None = None

    def __call__(self, event: Event) -> None:
        now = time.perf_counter()
        if not isinstance(event, Delta):
            self.cached_tokens = self._request.cached_tokens
            self.leaves = event.branch.position if isinstance(event, End) and event.branch is not None else None
            self.proposed, self.accepted = self._request.proposed, self._request.accepted
            self.missed = self._request.missed
            self.outcome = event.finish_reason if isinstance(event, End) else type(event).__name__
            self._metrics.request_ended(self.outcome, now - self.created)
            self._metrics.ended.append(self._ended(now))
        elif event.tokens:
            if self.first is None:
                self.first, self.cached_tokens = self._request.first, self._request.cached_tokens
                self.began_with = len(event.tokens)
                self._metrics.request_started(self._request)
                self._metrics.tokens_came(len(event.tokens), None)
            else:
                self._metrics.tokens_came(len(event.tokens), now - self.last)
            self.generated += len(event.tokens)
            self.last = now

    def _ended(self, now: float) -> Ended:
        seconds = self.last - (self.first if self.first is not None else self.last)
        return Ended(
            number=id(self._request),
            created=self.created,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated,
            max_tokens=self._request.max_tokens,
            proposed_tokens=self.proposed,
            accepted_tokens=self.accepted,
            tokens_per_second=round((self.generated - self.began_with) / seconds, 1) if seconds > 0 else None,
            seconds=round(now - self.created, 2),
        )


class _Snapshot(Collector):
    """The engine at one moment, as metrics; nothing until there is a moment."""

    def __init__(self) -> None:
        self.stats: Stats | None = None

    def collect(self) -> Iterator[Metric]:
        if self.stats is None:
            return
        yield GaugeMetricFamily("onekv_requests_waiting", "Queued requests.", value=self.stats.waiting)
        yield GaugeMetricFamily(
            "onekv_requests_running",
            "Running requests, including those being prefilled.",
            value=self.stats.running,
        )
        yield from _pools(self.stats.pools)
        yield from _memory(self.stats.memory)
        if self.stats.prefix is not None:
            yield from _prefix(self.stats.prefix)
        if self.stats.speculation is not None:
            yield from _speculation(self.stats.speculation)
        yield from _tiers(self.stats.tiers)


def pool_owners(pool: PoolStats) -> dict[str, int]:
    """Blocks of a pool by who has them; together they are all of its blocks."""
    return {"held": pool.held, "cached": pool.idle, "pinned": pool.pinned, "free": pool.free}


def _pools(pools: tuple[PoolStats, ...]) -> Iterator[Metric]:
    family = GaugeMetricFamily(
        "onekv_kv_pool_bytes",
        "The KV pool by group of layers and owner: held by running requests, or not in use: cached, pinned, free.",
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
        ("onekv_mlx_peak_bytes", "Peak memory, as MLX counts it.", memory.peak),
        ("onekv_mlx_buffer_cache_bytes", "Freed buffers that MLX keeps for reuse.", memory.buffer_cache),
        ("onekv_process_bytes", "Physical memory of the process, as the system counts it.", memory.footprint),
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
        "onekv_prefix_evicted_blocks", "Cached blocks that were evicted.", value=prefix.evicted_blocks
    )
    misses = CounterMetricFamily(
        "onekv_prefix_misses", "Requests by the reason why no more of their prompt was cached.", labels=["reason"]
    )
    for reason, count in prefix.misses.items():
        misses.add_metric([reason], count)
    yield misses


def _speculation(speculation: SpeculationStats) -> Iterator[Metric]:
    figures = [
        ("proposed_tokens", "Proposed tokens.", speculation.proposed),
        ("accepted_tokens", "Proposed tokens that were accepted.", speculation.accepted),
        ("steps", "Decode steps that verified proposed tokens.", speculation.steps),
    ]
    for name, text, value in figures:
        yield CounterMetricFamily(f"onekv_speculation_{name}", text, value=value)


def _tiers(tiers: tuple[TierStats, ...]) -> Iterator[Metric]:
    """Per tier; nothing where there is none."""
    gauges = {
        "blocks": "Blocks in a tier colder than the pool.",
        "bytes": "Bytes in a tier.",
        "limit": "Maximum bytes in a tier.",
        "queued_bytes": "Bytes queued to be written to a tier.",
        "up": "Whether a tier is in use: 0 while it is paused, or has failed.",
        "latency": "Response time of a remote tier in seconds, running mean.",
        "bandwidth": "Bytes per second read from a remote tier, running mean.",
    }
    counters = {
        "hits": "Blocks read back into the pool.",
        "promoted_bytes": "Bytes read back into the pool.",
        "promoted_seconds": "Time spent reading them.",
        "writes": "Blocks written to a tier.",
        "written_bytes": "Bytes written to a tier.",
        "evicted": "Blocks evicted from a tier to stay within its limit.",
        "discarded": "Blocks lost before they were written: queue full, budget spent, or write rejected.",
        "corrupt": "Blocks in a tier that were corrupt or missing, and were recomputed.",
        "forged": "Corrupt blocks that were signed with another secret, or not at all.",
        "pauses": "How often a remote tier was paused.",
        "late": "Lookups and transfers that missed their deadline.",
        "not_worth": "Hits that were not used because computing is faster.",
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
