"""GET /api/tags, POST /api/show, GET /api/ps, GET /api/version: the models, and the version."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import mlx.core as mx
from fastapi import APIRouter, Request

from ... import __version__
from ...models.facts import ModelFacts, model_facts
from ..models.describe import About, about, about_all
from .convert import LATEST
from .schema import ShowBody

router = APIRouter()
# The Ollama whose API this is: programs ask for it and refuse those that are too old for them.
API_VERSION = "0.12.11"
# Of a model that is not unloaded by itself.
NEVER = "9999-12-31T23:59:59Z"


@router.api_route("/api/version", methods=["GET", "HEAD"])
async def version() -> dict[str, str]:
    return {"version": API_VERSION, "onekv": __version__}


@router.api_route("/api/tags", methods=["GET", "HEAD"])
async def tags(request: Request) -> dict[str, Any]:
    rows = []
    for found in about_all(request):
        facts = await _facts(found)
        common = {"modified_at": _time(facts), "size": facts.bytes, "state": found.state}
        rows += [{**_named(found, facts, name), **common} for name in found.names]
    return {"models": rows}


@router.get("/api/ps")
async def ps(request: Request) -> dict[str, Any]:
    """Those that are loaded, with the memory of their plans: weights, KV pool, workspace."""
    loaded = [found for found in about_all(request) if found.state == "loaded"]
    return {"models": [await _running(found) for found in loaded]}


async def _running(found: About) -> dict[str, Any]:
    size = found.plan.total
    expires = None if found.expires is None else datetime.now(UTC) + timedelta(seconds=max(0.0, found.expires))
    return {
        **_named(found, await _facts(found), found.name),
        "size": size,
        "size_vram": size if mx.default_device() == mx.gpu else 0,
        "context_length": found.longest,
        "expires_at": NEVER if expires is None else _stamp(expires),
    }


@router.post("/api/show")
async def show(body: ShowBody, request: Request) -> dict[str, Any]:
    found = about(request, (body.model or body.name or "").removesuffix(LATEST))
    facts = await _facts(found)
    return {
        "parameters": "\n".join(f"{name} {value:g}" for name, value in vars(found.defaults).items()),
        "template": found.template,
        "details": _details(found, facts),
        "model_info": _info(found, facts),
        "capabilities": _capabilities(found),
        "modified_at": _time(facts),
    }


async def _facts(found: About) -> ModelFacts:
    return await asyncio.to_thread(model_facts, found.path, found.adapter)


def _named(found: About, facts: ModelFacts, name: str) -> dict[str, Any]:
    return {"name": name, "model": name, "digest": facts.digest, "details": _details(found, facts)}


def _details(found: About, facts: ModelFacts) -> dict[str, Any]:
    family = str(found.config.get("model_type", ""))
    return {
        "parent_model": found.base or "",
        "format": facts.format,
        "family": family,
        "families": [family],
        "parameter_size": _shortened(facts.parameters),
        "quantization_level": facts.quantization,
    }


def _info(found: About, facts: ModelFacts) -> dict[str, Any]:
    """With the names of a GGUF file's metadata, for what a config.json has of it."""
    config = {**found.config, **(found.config.get("text_config") or {})}
    family = str(config.get("model_type", ""))
    known = {
        "embedding_length": config.get("hidden_size"),
        "block_count": config.get("num_hidden_layers"),
        "attention.head_count": config.get("num_attention_heads"),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "vocab_size": found.plan.layout.vocabulary,
        # What a request may have here, which is what programs plan with.
        "context_length": found.longest,
    }
    info = {f"{family}.{name}": value for name, value in known.items() if value is not None}
    return {"general.architecture": family, "general.parameter_count": facts.parameters, **info}


def _capabilities(found: About) -> list[str]:
    there = {
        "completion": True,
        "tools": found.chats,
        "insert": found.inserts,
        "thinking": found.thinks,
    }
    return [name for name, can in there.items() if can]


def _time(facts: ModelFacts) -> str:
    return _stamp(datetime.fromtimestamp(facts.modified, UTC))


def _stamp(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _shortened(count: int) -> str:
    """As people write it: 135M, 8.2B."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count / 1000:.3g}K"
