"""POST /v1/chat/completions."""

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...errors import OneKVError
from ..answer import Answer, AnswerResponse, frame
from ..backend import Backend
from ..call import ChatCall
from ..chat import prepare
from ..deltas import Finish, TextDelta, ToolCallDelta, TypedDelta
from ..errors import BadRequestError, openai_body
from .common import DONE, TokenTexts, fingerprint, new_id, usage
from .schema import ChatBody

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    backend: Backend = request.app.state.backend
    backend.check_model(body.model)
    call = _call(body, backend, request.state.salt)
    return AnswerResponse(request, ChatAnswer(backend, body), partial(prepare, backend, call), body.stream)


def _call(body: ChatBody, backend: Backend, salt: str) -> ChatCall:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    tools = [tool.function.as_tool() for tool in body.tools or []]
    if not tools and body.tool_choice not in (None, "auto", "none"):
        raise BadRequestError("tool_choice asks for a call, but there are no tools", "tool_choice")
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return ChatCall(
        messages=[message.as_message() for message in body.messages],
        tools=tools,
        tool_choice=body.tool_choice or "auto",
        schema=body.response_format.schema_of_answer() if body.response_format is not None else None,
        thinking=body.thinking(),
        max_tokens=wanted,
        sampling=body.sampling(backend.llm.vocabulary),
        stops=body.stops,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        n=body.n or 1,
        salt=salt,
    )


class ChatAnswer(Answer):
    def __init__(self, backend: Backend, body: ChatBody) -> None:
        self._body = body
        self._texts = TokenTexts(backend)
        self._head = {
            "id": new_id("chatcmpl-"),
            "created": int(time.time()),
            "model": backend.name,
            "system_fingerprint": fingerprint(backend),
        }
        # By choice: how many calls were sent, and how it finished.
        self._calls = [0] * (body.n or 1)
        self._finished: dict[int, Finish] = {}

    def begin(self, prompt_tokens: int) -> Iterable[str]:
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self._calls))]

    def add(self, index: int, delta: TypedDelta) -> Iterator[str]:
        if isinstance(delta, TextDelta):
            name = "content" if delta.kind == "content" else "reasoning_content"
            yield self._chunk(index, {name: delta.text}, logprobs=self._logprobs([delta]))
        elif isinstance(delta, ToolCallDelta):
            yield self._chunk(index, {"tool_calls": [{"index": self._calls[index], **_tool_call(delta)}]})
            self._calls[index] += 1
        else:
            self._finished[index] = delta
            yield self._chunk(index, {}, delta.reason)

    def end(self) -> Iterator[str]:
        if self._body.wants_usage:
            yield self._frame([], _usage([self._finished[index] for index in sorted(self._finished)]))
        yield DONE

    def fail(self, error: OneKVError) -> Iterator[str]:
        yield frame(openai_body(error))
        yield DONE

    def whole(self, said: list[list[TypedDelta]]) -> dict[str, Any]:
        finishes = [delta for deltas in said for delta in deltas if isinstance(delta, Finish)]
        choices = [
            {
                "index": index,
                "message": _message(deltas),
                "logprobs": self._logprobs(deltas),
                "finish_reason": finish.reason,
            }
            for index, (deltas, finish) in enumerate(zip(said, finishes, strict=True))
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": _usage(finishes)}

    def _logprobs(self, deltas: Iterable[TypedDelta]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = [
            entry
            for delta in deltas
            if isinstance(delta, TextDelta) and delta.kind == "content"
            for entry in self._texts.chat(delta.tokens, delta.logprobs)
        ]
        return {"content": content, "refusal": None}

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any | None = None
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._frame([choice], None)

    def _frame(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> str:
        counted = {"usage": usage} if self._body.wants_usage else {}
        return frame({**self._head, "object": "chat.completion.chunk", "choices": choices, **counted})


def _usage(finishes: list[Finish]) -> dict[str, Any]:
    return usage(finishes[:1], finishes)


def _message(deltas: list[TypedDelta]) -> dict[str, Any]:
    content, reasoning = (
        "".join(delta.text for delta in deltas if isinstance(delta, TextDelta) and delta.kind == kind)
        for kind in ("content", "reasoning")
    )
    calls = [_tool_call(delta) for delta in deltas if isinstance(delta, ToolCallDelta)]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
