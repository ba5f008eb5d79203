"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ..backend import Backend
from ..call import ChatCall
from ..chat import Choice, Part, Text, ToolCall, open_chat
from ..errors import BadRequestError, for_client, openai_body
from ..streaming import sse, stream, until_gone
from .common import TokenTexts, fingerprint, merged, new_id, usage
from .schema import ChatBody

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    backend: Backend = request.app.state.backend
    backend.check_model(body.model)
    call = _call(body, backend, request.state.salt)
    async with AsyncExitStack() as stack:
        answer = ChatAnswer(backend, body, await open_chat(backend, call, stack))
        if body.stream:
            return stream(answer.events(), stack.pop_all())
        return JSONResponse(await until_gone(request, answer.whole()))


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
        sampling=body.sampling(backend.llm.plan.layout.vocabulary),
        stops=body.stops,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        n=body.n or 1,
        salt=salt,
    )


class ChatAnswer:
    """The choices of one request, in one piece or as chunks."""

    def __init__(self, backend: Backend, body: ChatBody, choices: list[Choice]) -> None:
        self._choices, self._body = choices, body
        self._texts = TokenTexts(backend)
        self._head = {
            "id": new_id("chatcmpl-"),
            "created": int(time.time()),
            "model": backend.name,
            "system_fingerprint": fingerprint(backend),
        }

    def _usage(self) -> dict[str, Any]:
        ends = [choice.end for choice in self._choices]
        return usage(ends[:1], ends, sum(choice.reasoning_tokens for choice in self._choices))

    async def whole(self) -> dict[str, Any]:
        parts: list[list[Part]] = [[] for _ in self._choices]
        async for index, part in merged(self._choices):
            if part is not None:
                parts[index].append(part)
        choices = [
            {
                "index": index,
                "message": _message(parts[index]),
                "logprobs": self._logprobs(parts[index]),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    def _logprobs(self, parts: list[Part]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = [
            entry
            for part in parts
            if isinstance(part, Text) and part.kind == "content"
            for entry in self._texts.chat(part.tokens, part.logprobs)
        ]
        return {"content": content, "refusal": None}

    async def events(self) -> AsyncIterator[str]:
        try:
            for index in range(len(self._choices)):
                yield self._chunk(index, {"role": "assistant", "content": ""})
            calls = [0] * len(self._choices)
            async for index, part in merged(self._choices):
                if part is None:
                    yield self._chunk(index, {}, self._choices[index].finish_reason)
                elif isinstance(part, ToolCall):
                    yield self._chunk(index, {"tool_calls": [{"index": calls[index], **_tool_call(part)}]})
                    calls[index] += 1
                else:
                    name = "content" if part.kind == "content" else "reasoning_content"
                    yield self._chunk(index, {name: part.text}, logprobs=self._logprobs([part]))
            if self._body.wants_usage:
                yield self._event([], self._usage())
        except Exception as error:  # noqa: BLE001  it is told, or logged and told
            yield sse(openai_body(for_client(error)))
        yield sse("[DONE]")

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any | None = None
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._event([choice], None)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> str:
        counted = {"usage": usage} if self._body.wants_usage else {}
        return sse({**self._head, "object": "chat.completion.chunk", "choices": choices, **counted})


def _message(parts: list[Part]) -> dict[str, Any]:
    content, reasoning = (
        "".join(part.text for part in parts if isinstance(part, Text) and part.kind == kind)
        for kind in ("content", "reasoning")
    )
    calls = [_tool_call(part) for part in parts if isinstance(part, ToolCall)]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
