"""GET and DELETE /admin/cache: memory by owner; drop what is not in use."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from ...llm import LLM, PoolStats
from ..backend import Backend
from ..metrics import pool_owners
from ..models.registry import Models
from .access import ADMINISTRATOR

router = APIRouter()
REASONS = ("one_by_one", "uncompiled", "unspeculated", "unused_kernels")


@router.get("/admin/cache", dependencies=ADMINISTRATOR)
async def cache(request: Request) -> dict[str, Any]:
    """What memory holds now, in bytes by owner, and what the prefix cache did so far."""
    models: Models | None = request.app.state.models
    if models is None:
        return await _held(request.app.state.backend)
    loaded = models.backends()
    return {"models": {name: await _held(backend) for name, backend in loaded.items()}}


async def _held(backend: Backend) -> dict[str, Any]:
    stats = await backend.call(LLM.stats)
    return {
        "pools": [_pool(pool) for pool in stats.pools],
        "prefix": asdict(stats.prefix) if stats.prefix is not None else None,
        "tiers": [asdict(tier) for tier in stats.tiers],
        "memory": asdict(stats.memory),
        "hygiene": backend.metrics.hygiene(),
        "requests": {"waiting": stats.waiting, "running": stats.running},
        # What this model or device does without, and why; null where it does not.
        "reasons": {name: getattr(stats, name) for name in REASONS},
    }


def _pool(pool: PoolStats) -> dict[str, Any]:
    owners = {owner: blocks * pool.block_bytes for owner, blocks in pool_owners(pool).items()}
    return {**asdict(pool), "bytes": {**owners, "total": pool.blocks * pool.block_bytes}}


@router.delete("/admin/cache", dependencies=ADMINISTRATOR)
async def clear(request: Request) -> dict[str, int]:
    """Drop whatever is neither used by a running request nor pinned, for all keys; returns how much that freed."""
    models: Models | None = request.app.state.models
    backends = [request.app.state.backend] if models is None else list(models.backends().values())
    freed = [await backend.call(LLM.clear_cache) for backend in backends]
    return {"freed_blocks": sum(each.blocks for each in freed), "freed_bytes": sum(each.bytes for each in freed)}
