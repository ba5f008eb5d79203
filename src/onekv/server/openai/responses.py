"""/v1/responses: create, stream, get, delete."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...errors import OneKVError
from ..answer import Answer, AnswerResponse, frame
from ..backend import Backend
from ..call import ChatCall, ChatMessage
from ..chat import prepare
from ..deltas import Finish, TypedDelta
from ..errors import BadRequestError
from .common import TokenTexts, new_id
from .output import ResponseOutput, StreamEvent
from .responses_schema import ResponsesBody, messages_of
from .store import ResponseStore

router = APIRouter()


@router.post("/v1/responses")
async def create_response(body: ResponsesBody, request: Request) -> Response:
    backend: Backend = request.app.state.backend
    backend.check_model(body.model)
    store, salt = _store(request), request.state.salt
    earlier = store.get(salt, body.previous_response_id).messages if body.previous_response_id is not None else []
    messages = [*earlier, *messages_of(body.input)]
    call = _call(body, backend, messages, salt)

    def keep(response: dict[str, Any], said: ChatMessage) -> None:
        if body.store is not False:
            store.put(salt, response, [*messages, said])

    return AnswerResponse(request, ResponseAnswer(backend, body, keep), partial(prepare, backend, call), body.stream)


@router.get("/v1/responses/{name}")
async def get_response(name: str, request: Request) -> dict[str, Any]:
    return _store(request).get(request.state.salt, name).response


@router.delete("/v1/responses/{name}")
async def delete_response(name: str, request: Request) -> dict[str, Any]:
    _store(request).delete(request.state.salt, name)
    return {"id": name, "object": "response", "deleted": True}


def _store(request: Request) -> ResponseStore:
    state = request.app.state
    if not hasattr(state, "responses"):
        state.responses = ResponseStore()
    store: ResponseStore = state.responses
    return store


def _call(body: ResponsesBody, backend: Backend, messages: list[ChatMessage], salt: str) -> ChatCall:
    tools = [tool.as_tool() for tool in body.tools or []]
    if not tools and body.tool_choice not in (None, "auto", "none"):
        raise BadRequestError("tool_choice asks for a call, but there are no tools", "tool_choice")
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return ChatCall(
        messages=[*instructions, *messages],
        tools=tools,
        tool_choice=body.tool_choice or "auto",
        schema=body.schema_of_answer(),
        thinking=body.thinking(),
        max_tokens=body.max_output_tokens,
        sampling=body.sampling(backend.llm.vocabulary),
        stops=body.stops,
        top_logprobs=body.wanted_logprobs(),
        salt=salt,
    )


class ResponseAnswer(Answer):
    fields: ClassVar = {"messages": "input", "response_format": "text.format"}

    def __init__(
        self, backend: Backend, body: ResponsesBody, keep: Callable[[dict[str, Any], ChatMessage], None]
    ) -> None:
        """`keep` is called with the finished response and what was said."""
        self._keep = keep
        self._output = ResponseOutput(TokenTexts(backend))
        self._response = _empty(backend, body)
        # Frames written so far.
        self._number = 0

    def begin(self, prompt_tokens: int) -> Iterator[str]:
        for kind in ("created", "in_progress"):
            yield self._frame({"type": f"response.{kind}", "response": self._response})

    def add(self, index: int, delta: TypedDelta) -> Iterator[str]:
        for event in self._finish(delta) if isinstance(delta, Finish) else self._output.add(delta):
            yield self._frame(event)

    def end(self) -> Iterator[str]:
        yield self._frame({"type": f"response.{self._response['status']}", "response": self._response})

    def fail(self, error: OneKVError) -> Iterator[str]:
        self._response |= {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
        yield self._frame({"type": "response.failed", "response": self._response})

    def whole(self, said: list[list[TypedDelta]]) -> dict[str, Any]:
        for delta in said[0]:
            for _ in self._finish(delta) if isinstance(delta, Finish) else self._output.add(delta):
                pass
        return self._response

    def _finish(self, finish: Finish) -> Iterator[StreamEvent]:
        incomplete = finish.reason == "length"
        status = "incomplete" if incomplete else "completed"
        yield from self._output.close(status)
        self._response |= {
            "status": status,
            "output": self._output.items,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "usage": _usage(finish),
        }
        self._keep(self._response, self._output.message())

    def _frame(self, event: StreamEvent) -> str:
        self._number += 1
        return frame({**event, "sequence_number": self._number - 1}, event["type"])


def _usage(finish: Finish) -> dict[str, Any]:
    return {
        "input_tokens": finish.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finish.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finish.generated,
        "output_tokens_details": {"reasoning_tokens": finish.reasoning_tokens},
        "total_tokens": finish.prompt_tokens + finish.generated,
    }


def _empty(backend: Backend, body: ResponsesBody) -> dict[str, Any]:
    """The response before anything was said."""
    choice = body.tool_choice or "auto"
    form = body.text.format if body.text is not None else None
    described = form.model_dump(by_alias=True, exclude_unset=True) if form is not None else {"type": "text"}
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": backend.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": described},
        "tool_choice": choice if choice in ("auto", "none", "required") else {"type": "function", "name": choice},
        "tools": [tool.described() for tool in body.tools or []],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
