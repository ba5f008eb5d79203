"""POST /v1/messages and /v1/messages/count_tokens."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine import End
from ..backend import Backend
from ..call import ChatCall
from ..chat import Choice, Part, ToolCall, count_tokens, open_chat
from ..errors import BadRequestError, anthropic_body, for_client
from ..streaming import sse, stream, until_gone
from .convert import full_call, prompt_call
from .schema import CountBody, MessagesBody, NoChoice

router = APIRouter()


@router.post("/v1/messages", response_model=None)
async def create(request: Request, body: MessagesBody) -> Response | dict[str, Any]:
    backend: Backend = request.app.state.backend
    _check_model(backend, body)
    answer = Answer(backend.name, full_call(body, request.state.salt), _one_call(body))
    if not body.stream:
        return await until_gone(request, answer.whole(backend))
    async with AsyncExitStack() as stack:
        choice = await answer.begin(backend, stack)
        return stream(answer.events(choice), stack.pop_all())


@router.post("/v1/messages/count_tokens")
async def count(request: Request, body: CountBody) -> dict[str, int]:
    backend: Backend = request.app.state.backend
    _check_model(backend, body)
    call = prompt_call(body, request.state.salt)
    return {"input_tokens": await asyncio.to_thread(count_tokens, backend, call)}


def _check_model(backend: Backend, body: CountBody) -> None:
    """Agents ask for the models they know; whatever Claude they ask for, the one model there is answers."""
    if not body.model.startswith("claude"):
        backend.check_model(body.model)


def _one_call(body: CountBody) -> bool:
    choice = body.tool_choice
    return choice is not None and not isinstance(choice, NoChoice) and choice.disable_parallel_tool_use


class Answer:
    """One message, in one piece or as events."""

    def __init__(self, model: str, call: ChatCall, one_call: bool) -> None:
        """With `one_call`, tool calls after the first are left out."""
        self._model, self._call, self._one_call = model, call, one_call
        self._id = f"msg_{secrets.token_hex(12)}"

    async def begin(self, backend: Backend, stack: AsyncExitStack) -> Choice:
        try:
            (choice,) = await open_chat(backend, self._call, stack)
        except BadRequestError as error:
            if error.field == "response_format":
                error.field = "output_config.format"
            raise
        return choice

    async def whole(self, backend: Backend) -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            choice = await self.begin(backend, stack)
            content: list[dict[str, Any]] = []
            async for part in self._parts(choice):
                if isinstance(part, ToolCall):
                    content.append({**_empty(part), "input": json.loads(part.arguments)})
                    continue
                if not content or content[-1]["type"] != _kind(part):
                    content.append(_empty(part))
                content[-1][_kind(part)] += part.text
        return {**self._message(), "content": content, **self._stop(choice), "usage": _usage(choice.end)}

    async def events(self, choice: Choice) -> AsyncIterator[str]:
        start = {**_usage(None), "input_tokens": choice.prompt_tokens}
        yield _event("message_start", message={**self._message(), "usage": start})
        index, kind = -1, None
        try:
            async for part in self._parts(choice):
                if kind != _kind(part) or isinstance(part, ToolCall):
                    if kind is not None:
                        yield _event("content_block_stop", index=index)
                    index, kind = index + 1, _kind(part)
                    yield _event("content_block_start", index=index, content_block=_empty(part))
                yield _event("content_block_delta", index=index, delta=_delta(part))
        except Exception as error:  # noqa: BLE001  it is told, or logged and told
            yield sse(anthropic_body(for_client(error)), "error")
            return
        if kind is not None:
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=self._stop(choice), usage=_usage(choice.end))
        yield _event("message_stop")

    async def _parts(self, choice: Choice) -> AsyncIterator[Part]:
        called = False
        async for part in choice:
            if isinstance(part, ToolCall):
                if called and self._one_call:
                    continue
                called = True
            elif not part.text:
                continue
            yield part

    def _message(self) -> dict[str, Any]:
        """What is known at the start; how much of the prompt is cached is known when the engine has begun."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(None),
        }

    def _stop(self, choice: Choice) -> dict[str, Any]:
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        stopped_by = choice.end.stopped_by
        if choice.finish_reason == "stop" and stopped_by in self._call.stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        return {"stop_reason": reasons[choice.finish_reason], "stop_sequence": None}


def _usage(end: End | None) -> dict[str, int]:
    prompt, cached, generated = (end.prompt_tokens, end.cached_tokens, end.generated) if end is not None else (0, 0, 0)
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def _event(kind: str, **fields: Any) -> str:
    return sse({"type": kind, **fields}, kind)


def _kind(part: Part) -> str:
    """The type of the block that `part` belongs to."""
    if isinstance(part, ToolCall):
        return "tool_use"
    return "thinking" if part.kind == "reasoning" else "text"


def _empty(part: Part) -> dict[str, Any]:
    """A block of the kind of `part`, without its content."""
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(part: Part) -> dict[str, str]:
    if isinstance(part, ToolCall):
        return {"type": "input_json_delta", "partial_json": part.arguments}
    kind = _kind(part)
    return {"type": f"{kind}_delta", kind: part.text}
