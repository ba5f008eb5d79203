"""The server's disk cache: on by default, over restarts, and to be seen."""

import stat
from pathlib import Path
from typing import Any

import httpx2 as httpx

from conftest import Server, start_server, stop_server

QUESTION = "Here is a list of words to remember: " + ", ".join(f"word {number}" for number in range(60)) + ". Say yes."


def ask(server: Server) -> dict[str, Any]:
    body = {"model": "default", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_conversation_survives_a_restart_of_the_server(smollm2_path: Path, tmp_path: Path) -> None:
    flags = [str(smollm2_path), "--kv-memory", "128MiB"]
    variables = {"ONEKV_HOT_ONLY": "", "ONEKV_CACHE_DIR": str(tmp_path)}
    server = start_server(*flags, keys=[], **variables)
    first = ask(server)
    stop_server(server)
    assert server.process.returncode == 0
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700

    server = start_server(*flags, keys=[], **variables)
    again = ask(server)
    tier = httpx.get(f"{server.url}/admin/cache").json()["tiers"][0]
    metrics = httpx.get(f"{server.url}/metrics").text
    errors = stop_server(server)
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= again["usage"]["prompt_tokens"] // 64 * 64 - 64
    assert tier["hits"] == cached // 64 and tier["promoted_bytes"] > 0 and tier["failed"] is None
    assert f'onekv_tier_hits_total{{tier="disk"}} {float(tier["hits"])}' in metrics
    assert server.process.returncode == 0 and "Traceback" not in errors


def test_two_servers_on_the_default_folder(smollm2_path: Path, tmp_path: Path) -> None:
    """The second goes without a disk cache and says so; a folder given by name is refused."""
    flags = [str(smollm2_path), "--kv-memory", "64MiB"]
    variables = {"ONEKV_HOT_ONLY": "", "ONEKV_CACHE_DIR": str(tmp_path)}
    first = start_server(*flags, keys=[], **variables)
    second = start_server(*flags, keys=[], **variables)
    assert httpx.get(f"{first.url}/admin/cache").json()["tiers"] != []
    assert httpx.get(f"{second.url}/admin/cache").json()["tiers"] == []
    stop_server(second)
    try:
        start_server(*flags, "--disk-cache", str(tmp_path / "kv"), keys=[])
    except AssertionError as refused:
        assert f"pid {first.process.pid}" in str(refused) and "--disk-cache" in str(refused)
    else:
        raise AssertionError("a folder in use was taken")
    stop_server(first)
