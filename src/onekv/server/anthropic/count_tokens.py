"""POST /v1/messages/count_tokens."""

import asyncio

from fastapi import APIRouter, Request

from ..prompt import render
from .convert import chosen, prompt_call
from .schema import CountBody

router = APIRouter()


@router.post("/v1/messages/count_tokens")
async def count(request: Request, body: CountBody) -> dict[str, int]:
    backend = await chosen(request, body)
    rendered = await asyncio.to_thread(render, backend, prompt_call(body, request.state.salt))
    return {"input_tokens": len(rendered.tokens)}
