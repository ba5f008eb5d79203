"""POST /v1/messages."""

import json
import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...errors import OneKVError
from ..answer import Answer, AnswerResponse, frame
from ..backend import Backend
from ..chat import prepare
from ..deltas import Finish, TextDelta, ToolCallDelta, TypedDelta
from ..errors import anthropic_body
from .convert import check_model, full_call
from .schema import MessagesBody, NoChoice

router = APIRouter()
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post("/v1/messages")
async def create(request: Request, body: MessagesBody) -> Response:
    backend: Backend = request.app.state.backend
    check_model(backend, body)
    call = full_call(body, request.state.salt)
    return AnswerResponse(request, MessageAnswer(backend.name, body), partial(prepare, backend, call), body.stream)


class MessageAnswer(Answer):
    """One message, whose content is blocks of text, thinking and tool use; a block is closed before the next begins."""

    fields: ClassVar = {"response_format": "output_config.format"}

    def __init__(self, model: str, body: MessagesBody) -> None:
        self._model, self._stops = model, body.stop_sequences
        choice = body.tool_choice
        # Calls after the first are left out.
        self._one_call = choice is not None and not isinstance(choice, NoChoice) and choice.disable_parallel_tool_use
        self._called = False
        self._id = f"msg_{secrets.token_hex(12)}"
        # The block that is open, if there is one.
        self._index, self._kind = -1, ""

    def begin(self, prompt_tokens: int) -> Iterator[str]:
        start = {**_usage(None), "input_tokens": prompt_tokens}
        yield _frame("message_start", message={**self._message(), "usage": start})

    def add(self, index: int, delta: TypedDelta) -> Iterator[str]:
        if isinstance(delta, Finish):
            yield from self._close()
            yield _frame("message_delta", delta=self._stop(delta), usage=_usage(delta))
        elif self._shown(delta):
            if self._kind != _kind(delta) or isinstance(delta, ToolCallDelta):
                yield from self._close()
                self._index, self._kind = self._index + 1, _kind(delta)
                yield _frame("content_block_start", index=self._index, content_block=_empty(delta))
            yield _frame("content_block_delta", index=self._index, delta=_change(delta))

    def end(self) -> Iterator[str]:
        yield _frame("message_stop")

    def fail(self, error: OneKVError) -> Iterator[str]:
        yield frame(anthropic_body(error), "error")

    def whole(self, said: list[list[TypedDelta]]) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        message = self._message()
        for delta in said[0]:
            if isinstance(delta, Finish):
                message |= {"content": content, **self._stop(delta), "usage": _usage(delta)}
            elif not self._shown(delta):
                continue
            elif isinstance(delta, ToolCallDelta):
                content.append({**_empty(delta), "input": json.loads(delta.arguments)})
            else:
                if not content or content[-1]["type"] != _kind(delta):
                    content.append(_empty(delta))
                content[-1][_kind(delta)] += delta.text
        return message

    def _shown(self, delta: TextDelta | ToolCallDelta) -> bool:
        if isinstance(delta, TextDelta):
            return bool(delta.text)
        first, self._called = not self._called, True
        return first or not self._one_call

    def _close(self) -> Iterator[str]:
        if self._kind:
            yield _frame("content_block_stop", index=self._index)

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

    def _stop(self, finish: Finish) -> dict[str, Any]:
        if finish.reason == "stop" and finish.stopped_by in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stopped_by}
        return {"stop_reason": _REASONS[finish.reason], "stop_sequence": None}


def _usage(finish: Finish | None) -> dict[str, int]:
    """Nothing before the answer has finished."""
    prompt, cached, generated = (
        (finish.prompt_tokens, finish.cached_tokens, finish.generated) if finish is not None else (0, 0, 0)
    )
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def _frame(kind: str, **fields: Any) -> str:
    return frame({"type": kind, **fields}, kind)


def _kind(delta: TextDelta | ToolCallDelta) -> str:
    """The type of the block that `delta` belongs to."""
    if isinstance(delta, ToolCallDelta):
        return "tool_use"
    return "thinking" if delta.kind == "reasoning" else "text"


def _empty(delta: TextDelta | ToolCallDelta) -> dict[str, Any]:
    """A block of the kind of `delta`, without its content."""
    if isinstance(delta, ToolCallDelta):
        return {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
    if delta.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _change(delta: TextDelta | ToolCallDelta) -> dict[str, str]:
    """What the API calls a delta."""
    if isinstance(delta, ToolCallDelta):
        return {"type": "input_json_delta", "partial_json": delta.arguments}
    kind = _kind(delta)
    return {"type": f"{kind}_delta", kind: delta.text}
