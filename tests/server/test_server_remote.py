"""Two servers over one store: a conversation begun on one continues on the other; and what an operator sees."""

import time
from pathlib import Path
from typing import Any

import httpx2 as httpx

from conftest import Server, start_server, stop_server

QUESTION = "Here is a list of words to remember: " + ", ".join(f"word {number}" for number in range(60)) + ". Say yes."


def ask(server: Server, *messages: str) -> tuple[str, int]:
    roles = ("user", "assistant")
    body = {
        "model": "default",
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)],
        "max_tokens": 8,
        "temperature": 0,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def remote(server: Server) -> dict[str, Any]:
    (tier,) = [tier for tier in httpx.get(f"{server.url}/admin/cache").json()["tiers"] if tier["name"] == "remote"]
    return tier


def test_a_conversation_goes_on_at_another_server(smollm2_path: Path, tmp_path: Path) -> None:
    flags = [str(smollm2_path), "--kv-memory", "128MiB", "--remote-write", "all"]
    flags += ["--remote-tier", f"file://{tmp_path}/shared?timeout=60s"]
    variables = {"ONEKV_TIER_SECRET": "known to both of them"}
    first, second = (start_server(*flags, keys=[], **variables) for _ in range(2))
    answer, cached = ask(first, QUESTION)
    assert cached == 0
    # Written while nothing else is to do.
    end = time.monotonic() + 60
    while remote(first)["writes"] < 3:
        assert time.monotonic() < end, remote(first)
        time.sleep(0.05)
    longer = [QUESTION, answer, "And now say no."]
    found, cached = ask(second, *longer)
    assert cached >= 192 and remote(second)["hits"] == cached // 64
    metrics = httpx.get(f"{second.url}/metrics").text
    assert f'onekv_tier_hits_total{{tier="remote"}} {float(cached // 64)}' in metrics
    assert 'onekv_tier_up{tier="remote"} 1.0' in metrics
    errors = stop_server(second) + stop_server(first)
    assert "Traceback" not in errors and "known to both" not in errors
    alone = start_server(str(smollm2_path), "--kv-memory", "128MiB", keys=[])
    assert ask(alone, *longer)[0] == found
    stop_server(alone)
