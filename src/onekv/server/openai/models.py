"""GET /v1/models: the one model there is."""

import time
from typing import Any

from fastapi import APIRouter, Request

from ..backend import Backend

router = APIRouter()
_STARTED = int(time.time())


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_described(request.app.state.backend)]}


@router.get("/v1/models/{model:path}")
async def get_model(model: str, request: Request) -> dict[str, Any]:
    backend: Backend = request.app.state.backend
    backend.check_model(model)
    return _described(backend)


def _described(backend: Backend) -> dict[str, Any]:
    return {
        "id": backend.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "onekv",
        "context_length": backend.longest,
    }
