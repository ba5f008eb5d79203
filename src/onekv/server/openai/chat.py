"""POST /v1/chat/completions."""

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...errors import OneKVError
from ..answer import Answer, AnswerResponse, frame
from ..backend import Backend, Progress
from ..call import ChatCall
from ..chat import prepare
from ..deltas import Finish, TextDelta, ToolCallDelta, ToolCallPart, TypedDelta
from ..errors import BadRequestError, openai_body
from ..models.choose import choose
from ..tools import OtherTool, check_choice, leave_out
from .common import DONE, Storing, TokenTexts, fingerprint, new_id, prompt_progress, usage
from .schema import ChatBody

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    backend = await choose(request, body.model, stream=body.stream)
    call = _call(body, backend, request.state.salt)
    return AnswerResponse(request, ChatAnswer(backend, body), partial(prepare, backend, call), body.stream)


def _call(body: ChatBody, backend: Backend, salt: str) -> ChatCall:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    left_out = [tool for tool in body.tools or [] if isinstance(tool, OtherTool)]
    leave_out(left_out)
    choice = body.tool_choice or body.function_call
    check_choice(choice, [function.name for function in body.callable_functions], left_out)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return ChatCall(
        messages=[message.as_message() for message in body.messages],
        tools=[function.as_tool() for function in body.callable_functions],
        tool_choice=choice or "auto",
        schema=body.response_format.schema_of_answer() if body.response_format is not None else None,
        template=body.template(),
        stream=bool(body.stream),
        one_call=body.legacy or body.parallel_tool_calls is False,
        max_tokens=wanted,
        sampling=body.sampling(backend),
        stops=body.stops,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        n=body.n or 1,
        salt=salt,
        prediction=(body.prediction.content or "") if body.prediction is not None else "",
    )


class ChatAnswer(Answer):
    def __init__(self, backend: Backend, body: ChatBody) -> None:
        self._body = body
        self.wants_progress, self._storing = bool(body.return_progress), Storing()
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
        self._storing.begin(prompt_tokens)
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self._calls))]

    def found(self, cached_tokens: int) -> Iterable[str]:
        done = self._storing.done(cached_tokens)
        return [self._chunk(0, {}, progress=done)] if self.wants_progress else []

    def add(self, index: int, delta: TypedDelta) -> Iterator[str]:
        if isinstance(delta, TextDelta):
            name = "content" if delta.kind == "content" else "reasoning_content"
            yield self._chunk(index, {name: delta.text}, logprobs=self._logprobs([delta]))
        elif isinstance(delta, ToolCallDelta):
            if not delta.in_parts:
                yield self._call_chunk(index, _tool_call(delta))
            self._calls[index] += 1
        elif isinstance(delta, ToolCallPart):
            whole = ToolCallDelta(delta.name, delta.text, id=delta.id)
            yield self._call_chunk(index, _tool_call(whole) if delta.first else {"function": {"arguments": delta.text}})
        else:
            self._finished[index] = delta
            yield self._chunk(index, {}, self._reason(delta))

    def waiting(self) -> str:
        return self._chunk(0, {})

    def progress(self, progress: Progress) -> str:
        return self._chunk(0, {}, progress=prompt_progress(progress))

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
                "message": self._message(deltas),
                "logprobs": self._logprobs(deltas),
                "finish_reason": self._reason(finish),
            }
            for index, (deltas, finish) in enumerate(zip(said, finishes, strict=True))
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": _usage(finishes)}

    def _reason(self, finish: Finish) -> str:
        return "function_call" if self._body.legacy and finish.reason == "tool_calls" else finish.reason

    def _message(self, deltas: list[TypedDelta]) -> dict[str, Any]:
        content, reasoning = (
            "".join(delta.text for delta in deltas if isinstance(delta, TextDelta) and delta.kind == kind)
            for kind in ("content", "reasoning")
        )
        calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls and self._body.legacy:
            message |= {"content": content or None, "function_call": _function_call(calls[0])}
        elif calls:
            message |= {"content": content or None, "tool_calls": [_tool_call(call) for call in calls]}
        return message

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

    def _call_chunk(self, index: int, call: dict[str, Any]) -> str:
        if self._body.legacy:
            return self._chunk(index, {"function_call": call["function"]})
        return self._chunk(index, {"tool_calls": [{"index": self._calls[index], **call}]})

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: Any | None = None,
        progress: dict[str, Any] | None = None,
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._frame([choice], None, {} if progress is None else {"prompt_progress": progress})

    def _frame(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, more: dict[str, Any] | None = None
    ) -> str:
        counted = {"usage": usage} if self._body.wants_usage else {}
        return frame({**self._head, "object": "chat.completion.chunk", "choices": choices, **counted, **(more or {})})


def _usage(finishes: list[Finish]) -> dict[str, Any]:
    return usage(finishes[:1], finishes)


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": _function_call(call)}


def _function_call(call: ToolCallDelta) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}
