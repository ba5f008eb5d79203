"""POST /admin/cache/probe: how much of a prompt is cached, and where it diverges."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from ..backend import Backend
from ..body import Str
from ..call import ChatCall
from ..errors import BadRequestError
from ..explain import explained
from ..models.choose import choose
from ..openai import schema
from ..prompt import render

router = APIRouter()


class ProbeBody(schema.TemplateBody):
    """A prompt, as text or token ids, or a chat as OpenAI's API takes it."""

    # Where there are several.
    model: Str | None = None
    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)] | None = None
    messages: Annotated[list[schema.Message], Field(min_length=1)] | None = None
    tools: list[schema.AnyTool] | None = None
    functions: list[schema.Function] | None = None
    tool_choice: schema.ToolChoice = None


@router.post("/admin/cache/probe")
async def probe(request: Request, body: ProbeBody) -> dict[str, Any]:
    """How many tokens of a prompt a request with this key would find cached now, and why not more."""
    backend = await choose(request, body.model)
    salt: str = request.state.salt
    call, tokens = await asyncio.to_thread(_tokens, backend, body, salt)
    found = await backend.probe(tokens, salt)
    return await asyncio.to_thread(explained, backend, call, tokens, found)


def _tokens(backend: Backend, body: ProbeBody, salt: str) -> tuple[ChatCall | None, list[int]]:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("set either prompt or messages", "prompt")
    if body.messages is not None:
        messages = [message.as_message() for message in body.messages]
        functions = [tool.function for tool in body.tools or [] if isinstance(tool, schema.Tool)]
        tools = [function.as_tool() for function in functions + (body.functions or [])]
        # Turns that were generated for this key are what they would be for a request.
        call = ChatCall(messages, tools, body.tool_choice or "auto", template=body.template(), salt=salt)
        return call, render(backend, call).tokens
    return None, backend.encode(body.prompt or [])
