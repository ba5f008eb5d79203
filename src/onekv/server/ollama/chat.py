"""POST /api/chat."""

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..answer import AnswerResponse
from ..backend import Backend
from ..chat import prepare
from ..deltas import ToolCallDelta, TypedDelta
from .convert import call_of, chosen, messages_of
from .output import OllamaAnswer, text_of
from .schema import ChatBody

router = APIRouter()


@router.post("/api/chat")
async def chat(body: ChatBody, request: Request) -> Response:
    backend = await chosen(request, body.model)
    answer = ChatAnswer(backend, body)
    if not body.messages:
        return answer.loaded(body.streams)
    call = call_of(backend, body, request.state.salt, messages_of(body.messages), body.tools)
    return AnswerResponse(request, answer, partial(prepare, backend, call), body.streams)


class ChatAnswer(OllamaAnswer):
    def __init__(self, backend: Backend, body: ChatBody) -> None:
        super().__init__(backend, body)
        # Calls so far.
        self._called = 0

    def _said(self, deltas: Iterable[TypedDelta]) -> dict[str, Any]:
        deltas = list(deltas)
        message: dict[str, Any] = {"role": "assistant", "content": text_of(deltas, "content")}
        if thinking := text_of(deltas, "reasoning"):
            message["thinking"] = thinking
        calls = [call for delta in deltas if isinstance(delta, ToolCallDelta) for call in self._calls(delta)]
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _calls(self, delta: ToolCallDelta) -> list[dict[str, Any]]:
        """The call, unless it was cut off: here arguments are an object, and half of one should not be used."""
        try:
            arguments = json.loads(delta.arguments)
        except ValueError:
            return []
        self._called += 1
        function = {"index": self._called - 1, "name": delta.name, "arguments": arguments}
        return [{"id": delta.id, "function": function}]
