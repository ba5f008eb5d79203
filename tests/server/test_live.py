"""GET /admin/live: complete snapshots for everyone who watches, made once, and never any text."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import blocks, counts, until, watching
from several import start_several

from conftest import KEYS, Server
from onekv.bench.soak import save_tiny
from onekv.server.live.snapshot import runs

# No answer of the default model ends before it has as many tokens as it may.
ENDLESS = {"0": -100, "2": -100}
ADMINISTRATOR = {"Authorization": f"Bearer {KEYS[0]}"}


def ask(
    server: Server, content: str, max_tokens: int = 8, headers: dict[str, str] = ADMINISTRATOR, **more: Any
) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    body = {"model": "default", "messages": messages, "max_tokens": max_tokens, "logit_bias": ENDLESS, **more}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def shown(snapshot: dict[str, Any]) -> dict[str, Any]:
    (model,) = snapshot["models"]
    return model


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(1, 600)), max_size=20))
def test_runs_of_blocks_are_the_blocks(spans: list[tuple[int, int]]) -> None:
    states = b"".join(bytes([state]) * length for state, length in spans)
    pairs = np.frombuffer(runs(states), np.uint8).reshape(-1, 2)
    assert np.repeat(pairs[:, 0], pairs[:, 1]).tobytes() == states
    assert not len(pairs) or pairs[:, 1].min() > 0
    # However large the pool: no more than two bytes a block, and few where blocks are alike.
    assert len(pairs) <= max(1, len(states))
    assert len(runs(bytes(100_000))) < 1000


def test_a_snapshot_has_what_the_cache_says(server: Server) -> None:
    ask(server, "What is a block? " * 20)
    with watching(server.url, KEYS[0]) as snapshots:
        snapshot = until(snapshots, lambda each: shown(each)["pools"][0]["map"] and not shown(each)["requests"])
    cache = httpx.get(f"{server.url}/admin/cache", headers=ADMINISTRATOR).json()
    assert httpx.get(f"{server.url}/admin/integrity", headers=ADMINISTRATOR).json()["ok"]
    model, memory = shown(snapshot), snapshot["memory"]
    for pool, known in zip(model["pools"], cache["pools"], strict=True):
        assert counts(pool) == {state: known[state] for state in ("free", "idle", "pinned", "held")}
        assert len(blocks(pool)) == known["blocks"]
    assert memory["cached"] == sum(pool["bytes"]["cached"] for pool in cache["pools"]) > 0
    assert memory["weights"] == cache["memory"]["weights"]
    assert memory["footprint"] > 0 and memory["budget"] >= memory["weights"]
    assert model["prefix"]["misses"] == cache["prefix"]["misses"]
    assert model["tiers"][0]["limit"] == 10**9 and model["state"] == "loaded"


def test_the_first_snapshot_is_not_from_the_past(server: Server) -> None:
    """Unwatched, an idle engine's view is from a step of the last request, which held blocks."""
    with watching(server.url, KEYS[0]) as snapshots:
        next(snapshots)
    ask(server, "Count for a long time, please.", 200)
    with watching(server.url, KEYS[0]) as snapshots:
        first = next(snapshots)
    assert first["memory"]["held"] == 0 and not shown(first)["requests"]


def test_requests_are_shown_while_they_run(server: Server) -> None:
    with watching(server.url, KEYS[0]) as snapshots, ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, server, "Count for a long time, please.", 400)
        running = until(snapshots, lambda each: any(r["tokens_per_second"] for r in shown(each)["requests"]))
        (request,) = shown(running)["requests"]
        assert request["state"] == "running" and request["generated_tokens"] > 0 and request["age_s"] > 0
        assert request["stored_tokens"] == request["prompt_tokens"]
        assert counts(shown(running)["pools"][0])["held"] > 0
        until(snapshots, lambda each: not shown(each)["requests"])
        assert answer.result()["usage"]["completion_tokens"] == 400


def test_requests_that_have_ended_have_their_final_figures(server: Server) -> None:
    """Also those that were over before anyone could see them run; the last five stay."""
    usages = [ask(server, f"{number} is a number.", 1)["usage"] for number in range(4)]
    with watching(server.url, KEYS[0]) as snapshots, ThreadPoolExecutor() as pool:
        known = shown(next(snapshots))["ended"]
        assert len(known) <= 5 and [each["prompt_tokens"] for each in known[-4:]] == [
            u["prompt_tokens"] for u in usages
        ]
        answer = pool.submit(ask, server, "Count for a long time, please.", 200)
        seen = until(snapshots, lambda each: any(r["generated_tokens"] for r in shown(each)["requests"]))
        (running,) = shown(seen)["requests"]
        after = until(snapshots, lambda each: not shown(each)["requests"])
        last, usage = shown(after)["ended"][-1], answer.result()["usage"]
    assert (last["id"], last["state"], last["generated_tokens"], last["max_tokens"]) == (
        running["id"],
        "ended",
        200,
        200,
    )
    assert last["prompt_tokens"] == usage["prompt_tokens"] and last["tokens_per_second"] > 0
    assert last["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert last["age_s"] >= running["age_s"] and len({each["id"] for each in shown(after)["ended"]}) == 5


def test_requests_one_after_the_other_are_not_taken_for_one(server: Server) -> None:
    """Python often gives a new request the address of the one before."""
    lengths: dict[int, set[int]] = {}
    with watching(server.url, KEYS[0]) as snapshots, ThreadPoolExecutor() as pool:
        asked = pool.submit(lambda: [ask(server, "word " * 2 * number, 24) for number in range(1, 9)])
        while not asked.done():
            for each in [*shown(found := next(snapshots))["requests"], *shown(found)["ended"]]:
                lengths.setdefault(each["id"], set()).add(each["prompt_tokens"])
    assert len(lengths) >= 8 and {len(each) for each in lengths.values()} == {1}


def test_blocks_that_two_requests_share_say_so(server: Server) -> None:
    prefix = "A long beginning that both have in common. " * 30
    ask(server, prefix)
    with watching(server.url, KEYS[0]) as snapshots, ThreadPoolExecutor() as pool:
        both = [pool.submit(ask, server, prefix + end, 300) for end in ("First.", "Second.")]
        until(snapshots, lambda each: 4 in blocks(shown(each)["pools"][0]))
        assert all(answer.result() for answer in both)


def test_no_text_is_in_the_feed(server: Server) -> None:
    secret = "Xylophonic quokkas"
    with watching(server.url, KEYS[0]) as snapshots, ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, server, f"{secret} are my secret.", 60)
        seen = [until(snapshots, lambda each: shown(each)["requests"])]
        seen.append(until(snapshots, lambda each: not shown(each)["requests"]))
        said = answer.result()["choices"][0]["message"]["content"]
    assert secret not in json.dumps(seen) and said.strip()[:20] not in json.dumps(seen)


def test_all_watchers_get_the_same_snapshot(server: Server) -> None:
    """And one who leaves is not counted any more."""
    with watching(server.url, KEYS[0]) as first:
        with watching(server.url, KEYS[0]) as second:
            alone = until(first, lambda each: each["watchers"] >= 2)
            assert until(second, lambda each: each["time"] >= alone["time"]) == alone
        assert until(first, lambda each: each["watchers"] < alone["watchers"])


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("not-a-key-at-all", 401), (KEYS[1], 403)])
def test_it_is_for_the_administrator(server: Server, key: str | None, status: int) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    assert httpx.get(f"{server.url}/admin/live", headers=headers).status_code == status


def test_several_models_and_the_end_of_the_server(tmp_path: Path) -> None:
    """Each has an entry, loaded or not; a server that is told to stop does not wait for those who watch."""
    tables = {name: {"model": save_tiny(tmp_path / name, seed)} for seed, name in enumerate(("one", "two"))}
    server = start_several(tmp_path, tables)
    with watching(server.url) as snapshots:
        snapshot = until(snapshots, lambda each: each["models"][0]["pools"][0]["map"])
        states = {model["name"]: model["state"] for model in snapshot["models"]}
        assert states == {"one": "loaded", "two": "unloaded"}
        httpx.post(f"{server.url}/admin/models/two/load", timeout=60)
        both = until(snapshots, lambda each: each["models"][1]["state"] == "loaded")
        assert both["memory"]["budget"] == 1200 << 20
        server.process.terminate()
        assert all(snapshot["models"] for snapshot in snapshots)
    assert server.process.wait(60) == 0, server.log()
