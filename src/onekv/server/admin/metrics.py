"""GET /metrics, for Prometheus."""

import asyncio

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from ...errors import OneKVError
from ...llm import LLM, Stats
from ..backend import Backend
from ..models.figures import render
from ..models.registry import Models
from .access import ADMINISTRATOR

# How long a scrape waits for the engine to finish its step.
SCRAPE_S = 2.0

router = APIRouter()


@router.get("/metrics", dependencies=ADMINISTRATOR)
async def metrics(request: Request) -> Response:
    """In Prometheus' text format. During a long step the gauges are those from before it."""
    models: Models | None = request.app.state.models
    if models is not None:
        loaded = models.backends()
        taken = await asyncio.gather(*map(_stats, loaded.values()))
        return Response(render(models, dict(zip(loaded, taken, strict=True))), media_type=CONTENT_TYPE_LATEST)
    backend: Backend = request.app.state.backend
    return Response(backend.metrics.render(await _stats(backend)), media_type=CONTENT_TYPE_LATEST)


async def _stats(backend: Backend) -> Stats:
    try:
        return await asyncio.wait_for(backend.call(LLM.stats), SCRAPE_S)
    except (TimeoutError, OneKVError):
        # Busy, or shutting down.
        return backend.thread.look().stats
