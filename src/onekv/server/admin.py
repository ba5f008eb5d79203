"""For those who run the server: /health, /metrics, /admin/cache."""

import asyncio
import gc
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.responses import JSONResponse, Response

from ..errors import OverloadedError
from ..llm import LLM, PoolStats, Stats
from ..prefix.figures import NEVER_SEEN, OTHER_SALT
from .backend import Backend
from .body import Body
from .chat import ChatCall
from .errors import BadRequestError, ForbiddenError
from .metrics import pool_owners
from .openai.schema import Message, Tool
from .prompt import render

# How long a scrape waits for the engine to finish its step.
SCRAPE_S = 2.0

router = APIRouter()


def administrator(request: Request) -> None:
    """What is about all keys is for the first one alone."""
    if not request.state.administrator:
        raise ForbiddenError("this is for the first of the server's API keys")


ADMINISTRATOR = [Depends(administrator)]


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    backend: Backend = request.app.state.backend
    alive = backend.thread.alive
    body = {
        "status": "ok" if alive else "the engine does not run",
        "model": backend.name,
        "uptime_s": round(time.monotonic() - backend.metrics.started, 3),
    }
    return JSONResponse(body, 200 if alive else 503)


@router.get("/metrics", dependencies=ADMINISTRATOR)
async def metrics(request: Request) -> Response:
    """In Prometheus' text format. The gauges are of the last scrape if the engine is in the midst of a long step."""
    backend: Backend = request.app.state.backend
    stats: Stats | None = None
    # Busy, or shutting down: the counters are still worth having.
    with suppress(asyncio.TimeoutError, OverloadedError):
        stats = await asyncio.wait_for(backend.call(LLM.stats), SCRAPE_S)
    return Response(backend.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)


@router.get("/admin/cache", dependencies=ADMINISTRATOR)
async def cache(request: Request) -> dict[str, Any]:
    """What memory holds now, in bytes by owner, and what the prefix cache did so far."""
    backend: Backend = request.app.state.backend
    stats = await backend.call(LLM.stats)
    return {
        "pools": [_pool(pool) for pool in stats.pools],
        "prefix": asdict(stats.prefix) if stats.prefix is not None else None,
        "tiers": [asdict(tier) for tier in stats.tiers],
        "memory": asdict(stats.memory),
        "requests": {"waiting": stats.waiting, "running": stats.running},
    }


def _pool(pool: PoolStats) -> dict[str, Any]:
    owners = {owner: blocks * pool.block_bytes for owner, blocks in pool_owners(pool).items()}
    return {**asdict(pool), "bytes": {**owners, "total": pool.blocks * pool.block_bytes}}


@router.delete("/admin/cache", dependencies=ADMINISTRATOR)
async def clear(request: Request) -> dict[str, int]:
    """Forget what no running request uses and nobody has pinned, of all keys; answers how much that freed."""
    backend: Backend = request.app.state.backend
    return await backend.call(_clear)


def _clear(llm: LLM) -> dict[str, int]:
    pools = llm.engine.memory.pools
    free = [pool.free for pool in pools]
    llm.clear_cache()
    freed = [pool.free - before for pool, before in zip(pools, free, strict=True)]
    size = sum(blocks * pool.block_bytes for pool, blocks in zip(pools, freed, strict=True))
    return {"freed_blocks": sum(freed), "freed_bytes": size}


@router.get("/admin/integrity", dependencies=ADMINISTRATOR)
async def integrity(request: Request) -> dict[str, Any]:
    """Count every block and every reference; an error if anything does not add up."""
    backend: Backend = request.app.state.backend

    def check(llm: LLM) -> int:
        llm.check_integrity()
        gc.collect()
        return len(gc.get_objects())

    return {"ok": True, "objects": await backend.call(check)}


class ProbeBody(Body):
    """A prompt, as text or token ids, or a chat as OpenAI's API takes it."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None


@router.post("/admin/cache/probe")
async def probe(request: Request, body: ProbeBody) -> dict[str, Any]:
    """How many tokens of a prompt a request with this key would find cached now, and why not more."""
    backend: Backend = request.app.state.backend
    salt: str = request.state.salt
    tokens = await asyncio.to_thread(_tokens, backend, body)

    def look(llm: LLM) -> tuple[int, int, str | None]:
        return llm.engine.prefix.probe(tokens, salt)

    cached, hot, reason = await backend.call(look)
    if reason == OTHER_SALT:
        # What others asked is not for this key to know.
        reason = NEVER_SEEN
    return {"tokens": len(tokens), "cached": cached, "cached_in_memory": hot, "reason": reason}


def _tokens(backend: Backend, body: ProbeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("give either prompt or messages", "prompt")
    if body.messages is not None:
        messages = [message.as_message() for message in body.messages]
        tools = [tool.function.as_tool() for tool in body.tools or []]
        return render(backend, ChatCall(messages, tools)).tokens
    return backend.encode(body.prompt or [])
