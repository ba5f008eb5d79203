"""GET /health: whether the engine runs."""

import time

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from ..backend import Backend

router = APIRouter()


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
