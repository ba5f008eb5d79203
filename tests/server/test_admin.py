"""Health and the cache, as the one who runs the server sees them."""

import json
from typing import Any

import httpx2 as httpx
import pytest
from starlette.testclient import TestClient

from onekv.server.app import create_app
from onekv.server.backend import Backend
from onekv.server.settings import ServerSettings


def call(server: Any, method: str, path: str, body: Any = None, key: int = 0) -> httpx.Response:
    headers = {"x-api-key": server.keys[key], "content-type": "application/json"}
    content = None if body is None else json.dumps(body)
    return httpx.request(method, server.url + path, content=content, headers=headers, timeout=60)


def generate(server: Any, text: str, key: int = 0) -> dict[str, Any]:
    body = {"model": "default", "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    answer = call(server, "POST", "/v1/messages", body, key)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def probe(server: Any, body: Any, key: int = 0) -> dict[str, Any]:
    answer = call(server, "POST", "/admin/cache/probe", body, key)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_health_needs_no_key(server: Any) -> None:
    answer = httpx.get(f"{server.url}/health")
    assert answer.status_code == 200
    body = answer.json()
    assert (body["status"], body["model"]) == ("ok", server.backend_name)
    assert body["uptime_s"] > 0


def test_health_of_an_engine_that_ended() -> None:
    backend = Backend(kv_memory="64MiB", progress=False)
    backend.start()
    backend.stop(0)
    # Not entered: its end would stop the backend.
    client = TestClient(create_app(backend, ServerSettings()), base_url="http://localhost")
    assert client.get("/health").status_code == 503
    late = client.post("/v1/completions", json={"model": "default", "prompt": "Hello"})
    assert late.status_code == 429 and "Retry-After" in late.headers
    metrics = client.get("/metrics")
    assert metrics.status_code == 200
    assert "onekv_requests_total" in metrics.text


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/metrics"), ("GET", "/admin/cache"), ("DELETE", "/admin/cache"), ("POST", "/admin/cache/probe")],
)
def test_the_rest_needs_a_key(server: Any, method: str, path: str) -> None:
    assert httpx.request(method, server.url + path).status_code == 401


def test_cache_adds_up(server: Any) -> None:
    generate(server, "Say something that stays in the cache.")
    stats = call(server, "GET", "/admin/cache").json()
    (pool,) = stats["pools"]
    size = pool["bytes"]
    assert size["held"] + size["cached"] + size["pinned"] + size["free"] == size["total"] == stats["memory"]["pool"]
    assert size["held"] == 0 < size["cached"]
    assert stats["requests"] == {"waiting": 0, "running": 0}
    assert stats["prefix"]["nodes"] > 0
    # Nothing here keeps sequences from being decoded together, and there is no kernel that could not be used.
    assert stats["reasons"].keys() == {"one_by_one", "uncompiled", "unspeculated", "unused_kernels"}
    assert stats["reasons"]["one_by_one"] is None and stats["reasons"]["unused_kernels"] is None


def test_clear_frees_what_is_not_in_use(server: Any) -> None:
    text = "This will be known, and then it will be forgotten."
    chat = {"messages": [{"role": "user", "content": text}]}
    generate(server, text)
    assert probe(server, chat)["cached"] > 0
    before = call(server, "GET", "/admin/cache").json()["pools"][0]["bytes"]
    freed = call(server, "DELETE", "/admin/cache").json()
    after = call(server, "GET", "/admin/cache").json()["pools"][0]["bytes"]
    assert freed["freed_blocks"] > 0
    assert freed["freed_bytes"] == before["cached"] == after["free"] - before["free"]
    assert after["cached"] == 0
    assert probe(server, chat)["cached"] == 0
    assert call(server, "DELETE", "/admin/cache").json() == {"freed_blocks": 0, "freed_bytes": 0}


def test_probe_tells_what_a_request_then_finds(server: Any) -> None:
    text = "Name three kinds of boats that sail on lakes, and where they were first built."
    chat = {"messages": [{"role": "user", "content": text}]}
    call(server, "DELETE", "/admin/cache")
    unknown = probe(server, chat)
    assert (unknown["cached"], unknown["reason"]) == (0, "never seen")
    generate(server, text)
    known = probe(server, chat)
    assert (known["cached"], known["reason"]) == (unknown["tokens"] - 1, None)
    usage = generate(server, text)
    assert usage["cache_read_input_tokens"] == known["cached"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == known["tokens"]


def test_another_key_finds_nothing(server: Any) -> None:
    text = "A long secret that only the first key may find again. " * 6
    chat = {"messages": [{"role": "user", "content": text}]}
    generate(server, text)
    assert probe(server, chat)["cached"] > 64
    other = probe(server, chat, key=1)
    assert (other["cached"], other["reason"]) == (0, "never seen")
    assert generate(server, text, key=1)["cache_read_input_tokens"] == 0


def test_probe_of_plain_prompts(server: Any) -> None:
    ids = probe(server, {"prompt": [1, 2, 3, 4]})
    assert ids["tokens"] == 4
    assert probe(server, {"prompt": "Some words"})["tokens"] > 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
    ],
)
def test_probe_names_what_is_wrong(server: Any, body: dict[str, Any], field: str) -> None:
    answer = call(server, "POST", "/admin/cache/probe", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field)
