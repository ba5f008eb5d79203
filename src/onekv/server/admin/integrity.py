"""GET /admin/integrity: whether everything adds up."""

import gc
from typing import Any

from fastapi import APIRouter, Request

from ...llm import LLM
from ..backend import Backend
from .access import ADMINISTRATOR

router = APIRouter()


@router.get("/admin/integrity", dependencies=ADMINISTRATOR)
async def integrity(request: Request) -> dict[str, Any]:
    """Count every block and every reference; an error if anything does not add up."""
    backend: Backend = request.app.state.backend

    def check(llm: LLM) -> int:
        llm.check_integrity()
        gc.collect()
        return len(gc.get_objects())

    return {"ok": True, "objects": await backend.call(check)}
