"""The server as a whole: exactness under load, keys and tenants, limits, settings, start and end."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from conftest import start_server, stop_server
from onekv.errors import SettingError
from onekv.server.settings import ServerSettings
from onekv.server.shape import nesting

SYSTEM = "You are a careful assistant who answers in one short sentence and never invents facts. " * 6


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Sixteen greedy requests: short and long, chats and plain text, shared prefixes, with and without limits."""
    made: list[tuple[str, dict[str, Any]]] = []
    for index in range(16):
        question = f"What is {index} plus {index + 1}? " * (1 + index % 5)
        common = {"model": "default", "temperature": 0, "max_tokens": 4 + index % 9}
        if index % 4 == 0:
            made.append(("/v1/completions", {**common, "prompt": question}))
            continue
        messages = [{"role": "user", "content": question}]
        if index % 2:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        if index == 6:
            common["frequency_penalty"] = 1.0
        if index == 10:
            common["response_format"] = {"type": "json_object"}
        made.append(("/v1/chat/completions", {**common, "messages": messages}))
    return made


async def send(url: str, key: str, path: str, body: dict[str, Any]) -> Any:
    async with httpx.AsyncClient(timeout=300) as client:
        answer = await client.post(url + path, json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice.get("text") or choice["message"]["content"], choice["finish_reason"]


def test_sixteen_at_once_get_what_each_gets_alone(server: Any) -> None:
    async def together(key: str) -> list[Any]:
        return await asyncio.gather(*(send(server.url, key, path, body) for path, body in bodies()))

    async def alone(key: str) -> list[Any]:
        return [await send(server.url, key, path, body) for path, body in bodies()]

    # The keys do not share what is cached, so neither side finds what the other computed.
    first = asyncio.run(together(server.keys[0]))
    second = asyncio.run(alone(server.keys[1]))
    assert first == second
    assert len({text for text, _ in first}) > 8


def call(server: Any, method: str, path: str, key: str | None = None, **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.request(method, server.url + path, headers={**headers, **options.pop("headers", {})}, **options)


def test_keys_are_needed_and_do_not_share_what_is_cached(server: Any) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "tenant " * 200}], "max_tokens": 1}
    assert call(server, "POST", "/v1/chat/completions", json=body).status_code == 401
    assert call(server, "POST", "/v1/chat/completions", "not a key", json=body).status_code == 401
    cached = []
    for key in (server.keys[0], server.keys[1], server.keys[1]):
        answer = call(server, "POST", "/v1/chat/completions", key, json=body, timeout=60).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    # The template's own first words are in every request of a key.
    assert max(cached[:2]) < 64
    assert cached[2] > 100


def test_only_the_first_key_sees_what_is_about_all(server: Any) -> None:
    for method, path in (("GET", "/metrics"), ("GET", "/admin/cache"), ("DELETE", "/admin/cache")):
        assert call(server, method, path, server.keys[1]).status_code == 403
    found = call(server, "GET", "/admin/integrity", server.keys[0], timeout=60).json()
    assert found["ok"] and found["objects"] > 1000


def test_bodies_have_a_size_and_a_depth(server: Any) -> None:
    key = server.keys[0]
    as_json = {"Content-Type": "application/json"}
    deep = call(server, "POST", "/v1/chat/completions", key, content=b'{"a":' + b"[" * 100_000)
    assert deep.status_code == 400
    assert "64 levels" in deep.json()["error"]["message"]
    large = call(server, "POST", "/v1/chat/completions", key, content=b" " * (33 * 2**20), timeout=60)
    assert large.status_code == 413
    assert "--max-body" in large.json()["error"]["message"]
    bad = call(server, "POST", "/v1/chat/completions", key, content=b'{"a": }', headers=as_json)
    assert bad.status_code == 400
    assert bad.json()["error"]["message"] == "the body is not valid JSON"


def test_an_error_names_the_field_in_the_formats_own_way(server: Any) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": 7}], "max_tokens": 4}
    answer = call(server, "POST", "/v1/chat/completions", server.keys[0], json=body)
    assert answer.json()["error"]["param"] == "messages.0.content"
    answer = call(server, "POST", "/v1/messages", server.keys[0], json=body)
    assert answer.json()["error"]["message"].startswith("messages.0.content")
    assert call(server, "GET", "/nowhere", server.keys[0]).json()["error"]["type"] == "not_found_error"
    assert call(server, "GET", "/v1/messages", server.keys[0]).status_code == 405


def test_pages_of_other_origins_may_not_call(server: Any) -> None:
    # Without a key, too: a page is not told whether it has a good one.
    for key in (server.keys[0], None):
        answer = call(server, "GET", "/v1/models", key, headers={"Origin": "https://example.com"})
        assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    own = call(server, "GET", "/v1/models", server.keys[0], headers={"Origin": server.url})
    assert own.status_code == 200


@pytest.mark.parametrize(
    ("text", "depth"),
    [(b"", 0), (b"[]", 1), (b'{"a": [1, {"b": []}]}', 4), (b'"[[[["', 0), (rb'["\"[[", []]', 2), (b'["unended [[[', 1)],
)
def test_nesting_is_counted_outside_of_strings(text: bytes, depth: int) -> None:
    assert nesting(text) == depth


def test_a_public_address_needs_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ONEKV_API_KEYS", raising=False)
    assert ServerSettings().keys() == []
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.com"):
        with pytest.raises(SettingError, match="--insecure"):
            ServerSettings(host=host).keys()
    assert ServerSettings(host="0.0.0.0", insecure=True).keys() == []
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst-long-key\n\nsecond-long-key\n")
    assert ServerSettings(host="0.0.0.0", api_keys=str(file)).keys() == ["first-long-key", "second-long-key"]
    monkeypatch.setenv("ONEKV_API_KEYS", "third-long-key, first-long-key")
    assert ServerSettings.resolve({}).keys() == ["third-long-key", "first-long-key"]
    with pytest.raises(SettingError, match="no such file"):
        ServerSettings(api_keys="nowhere.txt").keys()
    monkeypatch.setenv("ONEKV_API_KEYS", "short")
    with pytest.raises(SettingError, match="8 characters"):
        ServerSettings.resolve({}).keys()


def onekv(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onekv", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_budget_that_cannot_work_ends_with_its_message() -> None:
    """And not by aborting in MLX's hands."""
    for budget, said in (("1KB", "needs at least"), ("100TB", "the plan needs")):
        answer = onekv("serve", "--port", "0", "--hot-only", "on", "--kv-memory", budget)
        assert answer.returncode == 1, answer.stderr
        assert answer.stderr.splitlines()[-1].startswith("onekv: ") and said in answer.stderr
        assert "--kv-memory" in answer.stderr and "Traceback" not in answer.stderr


def test_settings_come_from_flags_variables_and_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = {"port": 1234, "grace": 3, "host": "127.0.0.2", "insecure": True}
    monkeypatch.setenv("ONEKV_GRACE", "5")
    settings = ServerSettings.resolve({"host": "127.0.0.3", "port": None}, file)
    assert (settings.host, settings.grace, settings.port, settings.insecure) == ("127.0.0.3", 5, 1234, True)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("prot = 1\n")
    answer = onekv("serve", "--config", str(wrong))
    assert answer.returncode == 1
    assert "'prot'" in answer.stderr
    assert "Traceback" not in answer.stderr
    broken = tmp_path / "broken.toml"
    broken.write_text("port = \n")
    answer = onekv("serve", "--config", str(broken))
    assert (answer.returncode, answer.stderr.count("\n")) == (1, 1)


def test_what_cannot_start_says_so_in_one_line(tmp_path: Path) -> None:
    damaged, empty, binary = tmp_path / "damaged", tmp_path / "empty", tmp_path / "binary.toml"
    damaged.mkdir()
    (damaged / "config.json").write_text('{"model_type": "llama"')
    empty.mkdir()
    binary.write_bytes(b"\xff\xfe\x00")
    for flags, named in {
        ("--kv-memory", "1MB"): "--kv-memory",
        (str(damaged),): "damaged",
        (str(empty),): "empty",
        ("--host", "192.0.2.1", "--insecure", "on"): "--host",
        ("--config", str(binary)): "--config",
    }.items():
        answer = onekv("serve", "--port", "0", "--hot-only", "on", *flags)
        assert answer.returncode == 1, (flags, answer)
        assert answer.stderr.startswith("onekv: ") and answer.stderr.count("\n") == 1, (flags, answer.stderr)
        assert named in answer.stderr


def test_a_port_that_is_taken_is_named_before_anything_is_loaded(server: Any) -> None:
    port = server.url.rpartition(":")[2]
    answer = onekv("serve", "--port", port)
    assert answer.returncode == 1
    assert f"port {port}" in answer.stderr
    assert "--port" in answer.stderr


def test_shutdown_lets_a_running_answer_end_and_logs_no_prompt(tmp_path: Path) -> None:
    config = tmp_path / "onekv.toml"
    config.write_text('kv_memory = "64MiB"\nmax_batch = 2\ngrace = 30\n')
    server = start_server("--config", str(config), keys=[])
    body = {"model": "default", "prompt": "a secret word:", "max_tokens": 6, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] in ("length", "stop")
    errors = stop_server(server)
    assert server.process.returncode == 0, errors
    assert "secret" not in errors
    (line,) = [line for line in errors.splitlines() if " onekv.request: " in line]
    assert " INFO onekv.request: POST /v1/completions 200 model=" in line


def test_shutdown_tells_an_answer_that_it_is_cut_off() -> None:
    server = start_server("--kv-memory", "128MiB", "--grace", "0", keys=[])
    body = {"model": "default", "prompt": "Once upon a time", "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line.startswith("data: ")]
    assert "shutting down" in json.loads(rest[-2][6:])["error"]["message"]
    errors = stop_server(server)
    assert server.process.returncode == 0, errors
    assert "Traceback" not in errors, errors
