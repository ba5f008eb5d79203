"""GET /metrics, for Prometheus."""

import asyncio
from contextlib import suppress

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from ...errors import OverloadedError
from ...llm import LLM, Stats
from ..backend import Backend
from .access import ADMINISTRATOR

# How long a scrape waits for the engine to finish its step.
SCRAPE_S = 2.0

router = APIRouter()


@router.get("/metrics", dependencies=ADMINISTRATOR)
async def metrics(request: Request) -> Response:
    """In Prometheus' text format. The gauges are of the last scrape if the engine is in the midst of a long step."""
    backend: Backend = request.app.state.backend
    stats: Stats | None = None
    # Busy, or shutting down: the counters are still worth having.
    with suppress(asyncio.TimeoutError, OverloadedError):
        stats = await asyncio.wait_for(backend.call(LLM.stats), SCRAPE_S)
    return Response(backend.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)
