"""GET /metrics, for Prometheus."""

import asyncio

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from ...errors import OverloadedError
from ...llm import LLM
from ..backend import Backend
from .access import ADMINISTRATOR

# How long a scrape waits for the engine to finish its step.
SCRAPE_S = 2.0

router = APIRouter()


@router.get("/metrics", dependencies=ADMINISTRATOR)
async def metrics(request: Request) -> Response:
    """In Prometheus' text format. In the midst of a long step the gauges are those from before it."""
    backend: Backend = request.app.state.backend
    try:
        stats = await asyncio.wait_for(backend.call(LLM.stats), SCRAPE_S)
    except (TimeoutError, OverloadedError):
        # Busy, or shutting down.
        stats = backend.thread.look().stats
    return Response(backend.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)
