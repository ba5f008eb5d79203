"""POST /v1/messages/count_tokens."""

import asyncio

from fastapi import APIRouter, Request

from ..backend import Backend
from ..prompt import render
from .convert import check_model, prompt_call
from .schema import CountBody

router = APIRouter()


@router.post("/v1/messages/count_tokens")
async def count(request: Request, body: CountBody) -> dict[str, int]:
    backend: Backend = request.app.state.backend
    check_model(backend, body)
    rendered = await asyncio.to_thread(render, backend, prompt_call(body, request.state.salt))
    return {"input_tokens": len(rendered.tokens)}
