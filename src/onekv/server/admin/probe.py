"""POST /admin/cache/probe: how much of a prompt is cached."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from ...prefix.figures import NEVER_SEEN, OTHER_SALT
from ..backend import Backend
from ..body import Body
from ..call import ChatCall
from ..errors import BadRequestError
from ..openai import schema
from ..prompt import render

router = APIRouter()


class ProbeBody(Body):
    """A prompt, as text or token ids, or a chat as OpenAI's API takes it."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)] | None = None
    messages: Annotated[list[schema.Message], Field(min_length=1)] | None = None
    tools: list[schema.Tool] | None = None


@router.post("/admin/cache/probe")
async def probe(request: Request, body: ProbeBody) -> dict[str, Any]:
    """How many tokens of a prompt a request with this key would find cached now, and why not more."""
    backend: Backend = request.app.state.backend
    salt: str = request.state.salt
    tokens = await asyncio.to_thread(_tokens, backend, body)

    found = await backend.call(lambda llm: llm.probe(tokens, salt))
    # What others asked is not for this key to know.
    return asdict(found) | {"reason": NEVER_SEEN if found.reason == OTHER_SALT else found.reason}


def _tokens(backend: Backend, body: ProbeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("give either prompt or messages", "prompt")
    if body.messages is not None:
        messages = [message.as_message() for message in body.messages]
        tools = [tool.function.as_tool() for tool in body.tools or []]
        return render(backend, ChatCall(messages, tools)).tokens
    return backend.encode(body.prompt or [])
