"""/metrics of several models: those of each model, with its name as a label, and the state of each."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ...llm import Stats
from .model import MOVES
from .registry import Models

# Of the process, and of the one folder that all have on disk, whatever is loaded.
_COMMON = {
    "onekv_tier_blocks",
    "onekv_tier_bytes",
    "onekv_tier_limit",
    "onekv_mlx_active_bytes",
    "onekv_mlx_peak_bytes",
    "onekv_mlx_buffer_cache_bytes",
    "onekv_process_bytes",
}


def render(models: Models, stats: dict[str, Stats]) -> bytes:
    """In Prometheus' text format; `stats` of those that are loaded, by name."""
    registry = CollectorRegistry()
    registry.register(_All(models, stats))
    return generate_latest(registry)


class _All(Collector):
    def __init__(self, models: Models, stats: dict[str, Stats]) -> None:
        self._models, self._stats = models, stats

    def collect(self) -> Iterator[Metric]:
        yield from self._own()
        families: dict[str, Metric] = {}
        for model in self._models.models:
            for family in model.metrics.collect(self._stats.get(model.name)):
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                if family.name not in _COMMON:
                    known.samples += [_labelled(sample, model.name) for sample in family.samples]
                elif not known.samples:
                    known.samples += family.samples
        yield from families.values()

    def _own(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("onekv_memory_limit_bytes", "Bytes for all models (--memory).", self._models.memory)
        yield GaugeMetricFamily(
            "onekv_memory_counted_bytes", "Those that loaded models take by their plans.", self._models.counted
        )
        states = GaugeMetricFamily("onekv_model_state", "1 for the state a model is in.", labels=["model", "state"])
        planned = GaugeMetricFamily("onekv_model_bytes", "What a model takes when it is loaded.", labels=["model"])
        waiting = GaugeMetricFamily("onekv_model_waiting", "Requests that wait for a model.", labels=["model"])
        for model in self._models.models:
            planned.add_metric([model.name], model.planned.need)
            waiting.add_metric([model.name], self._models.waiting(model))
            for state in MOVES:
                states.add_metric([model.name, state], model.state == state)
        yield from (states, planned, waiting)


def _labelled(sample: Sample, model: str) -> Sample:
    return sample._replace(labels={"model": model, **sample.labels})
