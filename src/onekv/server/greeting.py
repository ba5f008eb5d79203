"""What `onekv serve` prints when the model is loaded: the plan, the URLs for clients, and a command to try."""

import json
import shlex
from typing import Any

from ..models.adapted import adapter_bytes
from ..report import plan_table
from ..tables import table
from ..units import format_size
from .backend import Backend
from .models.model import Model
from .models.registry import Models
from .settings import ServerSettings


def greeting(answering: Backend | Models, host: str, port: int, keys: bool) -> str:
    """For a server on `host` and `port` whose clients need a key, or not. Of several models, the first one's plan."""
    if isinstance(answering, Models):
        name, chats = answering.first.name, answering.first.planned.chats
        held = _of_several(answering)
    else:
        name, chats = answering.name, bool(answering.tokenizer.has_chat_template)
        held = _of_one(answering)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    lines = [
        *held,
        f"\n{name} is served on {url}. Base URLs for clients:",
        f"  OpenAI     {url}/v1",
        f"  Anthropic  {url}",
        f"Memory, cache reuse and a chat, in a browser:\n  {url}/",
        *(_agents(host, port) if chats else []),
        f"Try:\n  {_example(name, chats, url, keys)}",
    ]
    return "\n".join(lines)


def _of_one(backend: Backend) -> list[str]:
    """Its plan, and what is on disk."""
    llm = backend.llm
    adapter = adapter_bytes(llm.model)
    tiers = backend.thread.look().stats.tiers
    caches = [f"\n{tier.name} cache: {tier.summary}" for tier in tiers]
    ranks = [f"\nsharded over {llm.ranks} ranks; figures are per rank"] if llm.ranks > 1 else []
    return [plan_table(llm.plan, llm.context if llm.settings.max_kv_size is None else None, adapter), *caches, *ranks]


def _of_several(models: Models) -> list[str]:
    """The first one's plan, and what each needs. It may have been unloaded meanwhile."""
    first = models.first.planned
    rows = [[", ".join(each.names), each.state, each.keep, _memory(models, each)] for each in models.models]
    listed = table(rows, ["model", "state", "keep", "memory"])
    counted = f"{format_size(models.counted)} of {format_size(models.memory)} (--memory) in use"
    return [
        plan_table(first.plan, first.context, first.adapter),
        f"\n{listed}\n{counted}; others are loaded on demand",
    ]


def _memory(models: Models, model: Model) -> str:
    """What a model needs; for an adapter whose base is served, what it needs in addition."""
    if model.spec.base is None or not models.knows(model.spec.base):
        return format_size(model.planned.need)
    return f"{format_size(model.planned.own)} beside {model.spec.base}"


def _agents(host: str, port: int) -> list[str]:
    """How a coding agent is started on this server, where `onekv launch` finds it."""
    if host not in ("127.0.0.1", "localhost", "0.0.0.0"):
        return []
    given = [] if port == ServerSettings.port else ["--port", str(port)]
    command = shlex.join(["onekv", "launch", "claude", *given])
    return [f"Coding agents (claude, codex, opencode, aider):\n  {command}"]


def _example(name: str, chats: bool, url: str, keys: bool) -> str:
    """A command that the model can answer: without a chat template it takes plain text alone."""
    body: dict[str, Any] = {"model": name, "max_tokens": 32}
    if chats:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Say hello."}]
    else:
        path, body["prompt"] = "/v1/completions", "Once upon a time"
    key = ["-H", "Authorization: Bearer KEY"] if keys else []
    return shlex.join(["curl", url + path, *key, "-H", "Content-Type: application/json", "-d", json.dumps(body)])
