"""Metrics: what one process counts, and how the figures of a real server move."""

import time
from dataclasses import replace
from typing import Any

import anthropic
import httpx2 as httpx
from prometheus_client.parser import text_string_to_metric_families

from onekv.engine import Delta, End, Request
from onekv.engine.speculation.control import SpeculationStats
from onekv.errors import OverloadedError
from onekv.llm import MemoryStats, PoolStats, Stats
from onekv.server.metrics import Metrics

Figures = dict[str, float]


def parse(text: str) -> Figures:
    """All samples, by name and labels; buckets are left out."""
    figures: Figures = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            if not sample.name.endswith("_bucket"):
                figures[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return figures


CANCELLED = "onekv_requests_total{outcome=cancelled}"


def scrape(server: Any) -> Figures:
    answer = httpx.get(f"{server.url}/metrics", headers={"x-api-key": server.keys[0]}, timeout=30)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return parse(answer.text)


def figures_of(metrics: Metrics, stats: Stats | None = None) -> Figures:
    return parse(metrics.render(stats).decode())


def ended(request: Request, reason: str = "stop") -> End:
    return End(reason, None, len(request.prompt), 0, len(request.tokens), request.timings)  # type: ignore[arg-type]


def test_events_are_counted_once() -> None:
    metrics, other = Metrics(), Metrics()
    request = Request([1, 2, 3], 4)
    request.cached_tokens = 2
    observe = metrics.observe(request)
    request.first = request.created + 0.5
    for token in (7, 8, 9):
        observe(Delta("x", [token]))
    observe(Delta("held back"))
    observe(ended(request))
    figures = figures_of(metrics)
    assert figures["onekv_prompt_tokens_total"] == 3
    assert figures["onekv_cached_tokens_total"] == 2
    assert figures["onekv_generated_tokens_total"] == 3
    assert figures["onekv_time_to_first_token_seconds_sum"] == 0.5
    assert figures["onekv_time_between_tokens_seconds_count"] == 2
    assert figures["onekv_request_duration_seconds_count"] == 1
    assert figures["onekv_requests_total{outcome=stop}"] == 1
    assert figures_of(other)["onekv_requests_total{outcome=stop}"] == 0


def test_outcomes() -> None:
    metrics = Metrics()
    metrics.observe(Request([1], 1))(ended(Request([1], 1), "cancelled"))
    metrics.observe(Request([1], 1))(OverloadedError("full", retry_after=1))
    metrics.refused(OverloadedError("full", retry_after=1))
    figures = figures_of(metrics)
    assert figures["onekv_requests_total{outcome=cancelled}"] == 1
    assert figures["onekv_requests_total{outcome=OverloadedError}"] == 2
    assert figures["onekv_prompt_tokens_total"] == 0
    assert figures["onekv_time_to_first_token_seconds_count"] == 0


def test_without_a_new_snapshot_the_last_one_is_shown() -> None:
    metrics = Metrics()
    assert "onekv_requests_running" not in figures_of(metrics)
    assert "onekv_speculation_steps_total" not in figures_of(metrics)
    pool = PoolStats("full attention", 30, 100, 9, 2, 5, 3, 3, 1, 3, 0, 6)
    stats = Stats(
        (pool,), MemoryStats(1, 900, 0, 3, 4, 5, 6), None, (), waiting=7, running=2, one_by_one=None, uncompiled=None
    )
    shown = figures_of(metrics, stats)
    assert shown["onekv_requests_waiting"] == 7
    assert shown["onekv_process_bytes"] == 6
    assert shown["onekv_kv_pool_bytes{group=full attention,owner=held}"] == 200
    assert sum(value for name, value in shown.items() if name.startswith("onekv_kv_pool_bytes")) == 900
    assert figures_of(metrics) == shown
    assert figures_of(metrics, replace(stats, waiting=0))["onekv_requests_waiting"] == 0
    guessed = figures_of(metrics, replace(stats, speculation=SpeculationStats(proposed=9, accepted=5, steps=2)))
    assert {
        name: guessed[f"onekv_speculation_{name}_total"] for name in ("proposed_tokens", "accepted_tokens", "steps")
    } == {
        "proposed_tokens": 9,
        "accepted_tokens": 5,
        "steps": 2,
    }


def test_a_request_moves_the_figures(server: Any) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key=server.keys[0], max_retries=0)
    said: list[anthropic.types.MessageParam] = [{"role": "user", "content": "Tell me what moves when a clock ticks."}]
    before = scrape(server)
    first = client.messages.create(model="default", max_tokens=5, messages=said, extra_body={"temperature": 0})
    second = client.messages.create(model="default", max_tokens=5, messages=said, extra_body={"temperature": 0})
    after = scrape(server)

    def moved(name: str) -> float:
        return after[name] - before.get(name, 0)

    usages = [first.usage, second.usage]
    cached = sum(usage.cache_read_input_tokens or 0 for usage in usages)
    assert moved("onekv_requests_total{outcome=length}") == 2
    assert moved("onekv_generated_tokens_total") == 10
    assert moved("onekv_prompt_tokens_total") == sum(usage.input_tokens for usage in usages) + cached
    assert moved("onekv_cached_tokens_total") == moved("onekv_prefix_tokens_reused_total") == cached > 0
    assert moved("onekv_time_to_first_token_seconds_count") == 2
    # Tokens that were guessed come several at once.
    assert moved("onekv_time_between_tokens_seconds_count") <= 8
    assert moved("onekv_request_duration_seconds_count") == 2
    assert moved("onekv_request_duration_seconds_sum") > moved("onekv_time_to_first_token_seconds_sum") > 0
    assert moved("onekv_prefix_hits_total") >= 1
    assert after["onekv_requests_running"] == after["onekv_requests_waiting"] == 0
    assert after["onekv_mlx_active_bytes"] > after["onekv_weights_bytes"] > 0
    assert after["onekv_mlx_peak_bytes"] >= after["onekv_mlx_active_bytes"]
    # The interpreter alone takes more; and the weights are in it.
    assert after["onekv_process_bytes"] > max(2**25, after["onekv_weights_bytes"])


def until_cancelled(server: Any, before: float) -> None:
    """Waits until more requests than `before` have been."""
    deadline = time.monotonic() + 60
    while scrape(server)[CANCELLED] <= before:
        assert time.monotonic() < deadline, "the request was not cancelled"
        time.sleep(0.1)


def test_a_client_that_goes_away_during_its_prompt_is_counted(server: Any) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key=server.keys[0], max_retries=0)
    before = scrape(server)[CANCELLED]
    words: Any = [{"role": "user", "content": " ".join(f"word{number}" for number in range(400))}]
    stream = client.messages.create(model="default", max_tokens=1000, messages=words, stream=True)
    stream.close()
    until_cancelled(server, before)
