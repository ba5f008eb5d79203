"""What a publisher did, as metrics."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class EventStats:
    """Counts since the start, except for `blocks`, which is the current number, as far as published."""

    batches: int
    stored: int
    removed: int
    cleared: int
    # Events that were undone by later ones before they were sent, and were not.
    undone: int
    # Answers to subscribers that asked for what they missed: with what was kept, and with all there is.
    replays: int
    snapshots: int
    blocks: int


class EventFigures(Collector):
    def __init__(self, stats: Callable[[], EventStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        told = CounterMetricFamily("onekv_kv_events", "Events sent to routers.", labels=["kind"])
        for kind in ("stored", "removed", "cleared"):
            told.add_metric([kind], getattr(stats, kind))
        answers = CounterMetricFamily(
            "onekv_kv_event_replays", "Requests for missed events, by response.", labels=["answer"]
        )
        answers.add_metric(["kept"], stats.replays)
        answers.add_metric(["all"], stats.snapshots)
        yield told
        yield CounterMetricFamily("onekv_kv_event_batches", "Messages in which events were sent.", value=stats.batches)
        yield CounterMetricFamily(
            "onekv_kv_events_undone", "Events undone by later ones before they were sent.", value=stats.undone
        )
        yield answers
        yield GaugeMetricFamily("onekv_kv_event_blocks", "Blocks stored, according to the events.", value=stats.blocks)
