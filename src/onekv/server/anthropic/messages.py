"""POST /v1/messages."""

import base64
import hashlib
import json
import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...errors import OneKVError
from ..answer import Answer, AnswerResponse, frame
from ..chat import prepare
from ..deltas import Finish, TextDelta, ToolCallDelta, ToolCallPart, TypedDelta
from ..errors import anthropic_body
from .convert import chosen, full_call
from .schema import MessagesBody

router = APIRouter()
Said = TextDelta | ToolCallPart | ToolCallDelta
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post("/v1/messages")
async def create(request: Request, body: MessagesBody) -> Response:
    backend = await chosen(request, body, body.stream)
    call = full_call(body, request.state.salt, backend.defaults)
    return AnswerResponse(request, MessageAnswer(backend.name, body), partial(prepare, backend, call), body.stream)


class MessageAnswer(Answer):
    """One message, whose content is blocks of text, thinking and tool use; a block is closed before the next begins.

    The message starts when it is known how much of the prompt was cached, or when the client would wait too long: then
    the cached tokens are null, and the end of the message has the true numbers, as always. Thinking that was not asked
    for is not shown. A tool call in which the answer was cut off is left out: its input is no object. In a stream,
    where its beginning was sent before that was known, it ends as far as it came, as Anthropic's own do.
    """

    fields: ClassVar = {"response_format": "output_config.format"}

    def __init__(self, model: str, body: MessagesBody) -> None:
        self._model, self._stops, self._thinks = model, body.stop_sequences, body.wants_thinking
        self._id = f"msg_{secrets.token_hex(12)}"
        self._prompt = 0
        self._cached: int | None = None
        self._started = False
        # The block that is open, if there is one, and what it has of thinking.
        self._index, self._kind, self._thought = -1, "", ""

    def begin(self, prompt_tokens: int) -> Iterator[str]:
        self._prompt = prompt_tokens
        yield from ()

    def found(self, cached_tokens: int) -> Iterator[str]:
        self._cached = cached_tokens
        yield from self._start()

    def add(self, index: int, delta: TypedDelta) -> Iterator[str]:
        if isinstance(delta, Finish):
            yield from self._close()
            yield _frame("message_delta", delta=self._stop(delta), usage=_usage(delta))
        elif self._shown(delta):
            if self._kind != _kind(delta) or isinstance(delta, ToolCallDelta) or _begins(delta):
                yield from self._close()
                self._index, self._kind = self._index + 1, _kind(delta)
                yield _frame("content_block_start", index=self._index, content_block=_empty(delta))
            if self._kind == "thinking" and isinstance(delta, TextDelta):
                self._thought += delta.text
            yield _frame("content_block_delta", index=self._index, delta=_change(delta))

    def waiting(self) -> str:
        return "".join([*self._start(), _frame("ping")])

    def end(self) -> Iterator[str]:
        yield _frame("message_stop")

    def fail(self, error: OneKVError) -> Iterator[str]:
        yield frame(anthropic_body(error), "error")

    def whole(self, said: list[list[TypedDelta]]) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        message = self._message()
        for delta in said[0]:
            if isinstance(delta, Finish):
                for block in content:
                    if block["type"] == "thinking":
                        block["signature"] = _signature(block["thinking"])
                message |= {"content": content, **self._stop(delta), "usage": _usage(delta)}
            elif not self._shown(delta):
                continue
            elif isinstance(delta, ToolCallDelta):
                content.append({**_empty(delta), "input": json.loads(delta.arguments)})
            elif isinstance(delta, TextDelta):
                if not content or content[-1]["type"] != _kind(delta):
                    content.append(_empty(delta))
                content[-1][_kind(delta)] += delta.text
        return message

    def _shown(self, delta: Said) -> bool:
        if isinstance(delta, TextDelta):
            return bool(delta.text) and (self._thinks or delta.kind == "content")
        return isinstance(delta, ToolCallPart) or (delta.complete and not delta.in_parts)

    def _start(self) -> Iterator[str]:
        if not self._started:
            self._started = True
            yield _frame("message_start", message=self._message())

    def _close(self) -> Iterator[str]:
        if self._kind == "thinking":
            signed = {"type": "signature_delta", "signature": _signature(self._thought)}
            self._thought = ""
            yield _frame("content_block_delta", index=self._index, delta=signed)
        if self._kind:
            yield _frame("content_block_stop", index=self._index)

    def _message(self) -> dict[str, Any]:
        """What is known at the start."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _counted(self._prompt, self._cached, 0),
        }

    def _stop(self, finish: Finish) -> dict[str, Any]:
        if finish.reason == "stop" and finish.stopped_by in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stopped_by}
        return {"stop_reason": _REASONS[finish.reason], "stop_sequence": None}


def _usage(finish: Finish) -> dict[str, int | None]:
    return _counted(finish.prompt_tokens, finish.cached_tokens, finish.generated)


def _counted(prompt: int, cached: int | None, generated: int) -> dict[str, int | None]:
    return {
        "input_tokens": prompt - (cached or 0),
        "cache_creation_input_tokens": None if cached is None else 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def _signature(thought: str) -> str:
    """Clients keep it with the thinking and send it back; the same thinking has the same, and nothing reads it here."""
    return base64.b64encode(hashlib.sha256(f"onekv thinking {thought}".encode()).digest()).decode()


def _frame(kind: str, **fields: Any) -> str:
    return frame({"type": kind, **fields}, kind)


def _begins(delta: Said) -> bool:
    """Whether `delta` is the first part of a call."""
    return isinstance(delta, ToolCallPart) and delta.first


def _kind(delta: Said) -> str:
    """The type of the block that `delta` belongs to."""
    if not isinstance(delta, TextDelta):
        return "tool_use"
    return "thinking" if delta.kind == "reasoning" else "text"


def _empty(delta: Said) -> dict[str, Any]:
    """A block of the kind of `delta`, without its content."""
    if not isinstance(delta, TextDelta):
        return {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
    if delta.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _change(delta: Said) -> dict[str, str]:
    """What the API calls a delta."""
    if not isinstance(delta, TextDelta):
        text = delta.text if isinstance(delta, ToolCallPart) else delta.arguments
        return {"type": "input_json_delta", "partial_json": text}
    kind = _kind(delta)
    return {"type": f"{kind}_delta", kind: delta.text}
