"""GET /admin/models: which models are loaded, and why others are not; progress of loads; queued requests.

POST /admin/models/NAME/load, /unload, /pin and /unpin change that. All of them respond like GET.
"""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from ..errors import NotFoundError
from ..models.choose import hold
from ..models.describe import overview, overview_of_one
from ..models.registry import Models
from .access import ADMINISTRATOR

router = APIRouter(dependencies=ADMINISTRATOR)


@router.get("/admin/models")
async def models(request: Request) -> dict[str, Any]:
    found: Models | None = request.app.state.models
    return overview(found) if found is not None else overview_of_one(request.app.state.backend)


@router.post("/admin/models/{name:path}/load")
async def load(name: str, request: Request) -> dict[str, Any]:
    """Responds when it is loaded, as for a request that needs it."""
    await hold(request, _models(request), _models(request).find(name))
    return overview(_models(request))


@router.post("/admin/models/{name:path}/unload")
async def unload(name: str, request: Request) -> dict[str, Any]:
    """Responds when it is unloaded: its requests in flight finish first. Works even if it is pinned."""
    await asyncio.to_thread(_models(request).unload, _models(request).find(name))
    return overview(_models(request))


@router.post("/admin/models/{name:path}/pin")
async def pin(name: str, request: Request) -> dict[str, Any]:
    """Never unload it for another one. Does not load it; rejected if it cannot fit together with the pinned ones."""
    _models(request).pin(_models(request).find(name))
    return overview(_models(request))


@router.post("/admin/models/{name:path}/unpin")
async def unpin(name: str, request: Request) -> dict[str, Any]:
    """Back to the `keep` that it was configured with; to lru where that is pinned."""
    _models(request).unpin(_models(request).find(name))
    return overview(_models(request))


def _models(request: Request) -> Models:
    models: Models | None = request.app.state.models
    if models is None:
        raise NotFoundError("this server has a single model that stays loaded; start it with several, or with --memory")
    return models
