"""GET /health, /health/live and /health/ready: whether the engine makes progress, for people and for probes.

/health, /health/ready    200 if requests are served; 503 while the model is loading, while the server shuts down, and
                          if the engine is stuck or has ended
/health/live              503 only if the engine is stuck or has ended, so that only a restart helps
"""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from ..backend import Backend
from ..models.describe import health
from ..models.registry import Models
from ..watch import Watch

router = APIRouter()
# Probes of load balancers often use HEAD.
METHODS = ["GET", "HEAD"]


@router.api_route("/health", methods=METHODS, include_in_schema=False)
@router.api_route("/health/ready", methods=METHODS, include_in_schema=False)
async def ready(request: Request) -> JSONResponse:
    body = _body(request)
    return JSONResponse(body, 200 if body["status"] == "ok" else 503)


@router.api_route("/health/live", methods=METHODS, include_in_schema=False)
async def live(request: Request) -> JSONResponse:
    body = _body(request)
    return JSONResponse(body, 503 if body["status"] in ("stuck", "ended") else 200)


def _body(request: Request) -> dict[str, Any]:
    models: Models | None = request.app.state.models
    if models is not None:
        return health(models, request.app.state.step_limit)
    backend: Backend = request.app.state.backend
    watch = Watch(backend.thread, request.app.state.step_limit)
    doing = watch.thread.doing
    # The engine is there a moment before the rest.
    status = "loading" if watch.state == "ok" and not backend.loaded else watch.state
    return {
        "status": status,
        "model": backend.name if backend.loaded else None,
        "uptime_s": round(time.monotonic() - backend.metrics.started, 3),
        "engine": {"doing": str(doing), "requests": doing.requests, "for_s": round(watch.thread.age(), 3)},
        "step_limit_s": watch.step_limit,
    }
