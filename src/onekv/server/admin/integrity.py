"""GET /admin/integrity: whether all counts are consistent."""

import gc
import threading
from typing import Any

from fastapi import APIRouter, Request

from ...llm import LLM
from ..backend import Backend
from ..models.registry import Models
from .access import ADMINISTRATOR

router = APIRouter()


@router.get("/admin/integrity", dependencies=ADMINISTRATOR)
async def integrity(request: Request) -> dict[str, Any]:
    """Count every block and every reference; an error if anything does not add up."""
    models: Models | None = request.app.state.models
    backends: list[Backend] = [request.app.state.backend] if models is None else list(models.backends().values())

    def check(llm: LLM) -> int:
        llm.check_integrity()
        gc.collect()
        return len(gc.get_objects())

    # Objects are those of the process.
    counted = [await backend.call(check) for backend in backends]
    return {"ok": True, "objects": max(counted, default=0), "threads": threading.active_count()}
