"""What `onekv serve` says at the start: where clients find it, what fits, and a line that works as it is."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from starlette.testclient import TestClient
from test_server import onekv

from onekv.bench.soak import save_tiny
from onekv.server.app import create_app
from onekv.server.backend import Backend
from onekv.server.greeting import greeting
from onekv.server.settings import ServerSettings


def example(said: str) -> tuple[str, dict[str, str], Any]:
    """The address, headers and body of the curl line."""
    (line,) = [line for line in said.splitlines() if line.startswith("  curl ")]
    _, url, *rest = shlex.split(line)
    flags = list(zip(rest[::2], rest[1::2], strict=True))
    headers = dict(value.split(": ", 1) for flag, value in flags if flag == "-H")
    (body,) = [json.loads(value) for flag, value in flags if flag == "-d"]
    return url, headers, body


def test_it_says_where_clients_find_the_server(server: Any) -> None:
    said = server.log()
    base = dict(re.findall(r"^  (OpenAI|Anthropic) +(\S+)$", said, re.MULTILINE))
    assert base == {"OpenAI": f"{server.url}/v1", "Anthropic": server.url}
    assert f"in a browser:\n  {server.url}/\n" in said
    models = openai.OpenAI(base_url=base["OpenAI"], api_key=server.keys[0]).models.list()
    assert [model.id for model in models] == [server.backend_name]
    url, headers, body = example(said)
    headers = {name: value.replace("KEY", server.keys[0]) for name, value in headers.items()}
    answer = httpx.post(url, headers=headers, json=body, timeout=120)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]


def test_it_has_the_line_that_starts_an_agent(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEKV_API_KEYS", server.keys[0])
    (line,) = [line.strip() for line in server.log().splitlines() if line.startswith("  onekv launch ")]
    _, *words = shlex.split(line)
    # The server that is there is taken: none is to be started.
    done = onekv(*words, "--print")
    assert f"# {server.url} has {server.backend_name}\n" in done.stdout, done


def test_conversations_are_listed_up_to_the_models_context(server: Any) -> None:
    lengths = re.findall(r"^([\d,]+) tokens +\d+$", server.log(), re.MULTILINE)
    assert lengths == ["1,024", "4,096", "8,192"]


def test_a_model_without_a_chat_template_gets_a_line_that_works(tmp_path: Path) -> None:
    folder = Path(save_tiny(tmp_path))
    for file in folder.glob("*"):
        if file.name == "chat_template.jinja":
            file.unlink()
        elif file.name == "tokenizer_config.json":
            settings = json.loads(file.read_text())
            settings.pop("chat_template", None)
            file.write_text(json.dumps(settings))
    backend = Backend(str(folder), kv_memory="34MiB", progress=False)
    backend.start()
    assert not backend.tokenizer.has_chat_template
    url, headers, body = example(greeting(backend, "::1", 8000, keys=False))
    assert url == "http://[::1]:8000/v1/completions"
    with TestClient(create_app(backend, ServerSettings()), base_url="http://localhost") as client:
        assert client.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = Path(save_tiny(tmp_path))
    for file in folder.glob("*"):
        if file.name not in ("config.json", "model.safetensors", "tokenizer_config.json"):
            file.unlink()
    answer = onekv("serve", str(folder), "--port", "0", "--hot-only", "on")
    assert (answer.returncode, answer.stderr.count("\n")) == (1, 1)
    assert "has no tokenizer: tokenizer.json" in answer.stderr
