"""Small models of different weights, and servers that have several of them."""

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx

from conftest import Server, start_server

# What one of them needs beside the margin is about 400 MiB, most of it workspace: one fits, two fit.
ONE, TWO = "800MiB", "1200MiB"
WORDS = "Here is a list to remember: " + ", ".join(f"word {number}" for number in range(60)) + "."


def start_several(
    folder: Path, tables: dict[str, dict[str, Any]], *flags: str, memory: str = TWO, **options: Any
) -> Server:
    """A server with a table for each model, whose KV has 32 MiB unless the table says otherwise."""
    lines = [f'memory = "{memory}"', 'kv_memory = "32MiB"', "block_size = 16"]
    for name, table in tables.items():
        lines += [f'[models."{name}"]', *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    file = folder / "several.toml"
    file.write_text("\n".join(lines))
    return start_server("--config", str(file), *flags, keys=[], **options)


def complete(server: Server, model: str, prompt: str = WORDS, max_tokens: int = 8) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def rows(server: Server) -> dict[str, dict[str, Any]]:
    """What /admin/models says of each."""
    answer = httpx.get(f"{server.url}/admin/models", timeout=60)
    return {row["name"]: row for row in answer.json()["models"]}


def states(server: Server) -> dict[str, str]:
    return {name: row["state"] for name, row in rows(server).items()}
