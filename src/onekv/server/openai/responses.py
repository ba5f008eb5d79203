"""/v1/responses: create, stream, get, delete."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ..backend import Backend
from ..call import ChatCall
from ..chat import Choice, open_chat
from ..errors import BadRequestError, for_client
from ..streaming import sse, stream, until_gone
from .common import TokenTexts, new_id
from .responses_schema import ResponsesBody, messages_of
from .store import ResponseStore
from .turn import Event, Turn

router = APIRouter()
# What the chat layer calls fields, and what this API calls them.
_FIELDS = {"messages": "input", "response_format": "text.format"}


@router.post("/v1/responses")
async def create_response(body: ResponsesBody, request: Request) -> Response:
    backend: Backend = request.app.state.backend
    backend.check_model(body.model)
    store, salt = _store(request), request.state.salt
    earlier = store.get(salt, body.previous_response_id).messages if body.previous_response_id is not None else []
    messages = [*earlier, *messages_of(body.input)]
    call = _call(body, backend, messages, salt)
    async with AsyncExitStack() as stack:
        answer = ResponseAnswer(backend, body, await _open(backend, call, stack))
        if body.store is not False:
            answer.on_end = lambda response, said: store.put(salt, response, [*messages, said])
        if body.stream:
            return stream(answer.lines(), stack.pop_all())
        return JSONResponse(await until_gone(request, answer.whole()))


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


def _call(body: ResponsesBody, backend: Backend, messages: list[dict[str, Any]], salt: str) -> ChatCall:
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
        sampling=body.sampling(backend.llm.plan.layout.vocabulary),
        stops=body.stops,
        top_logprobs=body.wanted_logprobs(),
        salt=salt,
    )


async def _open(backend: Backend, call: ChatCall, stack: AsyncExitStack) -> Choice:
    try:
        return (await open_chat(backend, call, stack))[0]
    except BadRequestError as error:
        error.field = _FIELDS.get(error.field or "", error.field)
        raise


class ResponseAnswer:
    """A response while it is made, in one piece or as events."""

    def __init__(self, backend: Backend, body: ResponsesBody, choice: Choice) -> None:
        self._choice = choice
        self._turn = Turn(TokenTexts(backend))
        self._response = _empty(backend, body)
        # Called with the finished response and what was said as a message.
        self.on_end: Any = None

    async def whole(self) -> dict[str, Any]:
        async for _ in self._events():
            pass
        return self._response

    async def lines(self) -> AsyncIterator[str]:
        number = 0
        try:
            async for event in self._events():
                yield sse({**event, "sequence_number": number}, event["type"])
                number += 1
        except Exception as error:  # noqa: BLE001  it is told, or logged and told
            self._response |= {"status": "failed", "error": {"code": "server_error", "message": str(for_client(error))}}
            failed = {"type": "response.failed", "response": self._response, "sequence_number": number}
            yield sse(failed, "response.failed")

    async def _events(self) -> AsyncIterator[Event]:
        yield {"type": "response.created", "response": self._response}
        yield {"type": "response.in_progress", "response": self._response}
        async for part in self._choice:
            for event in self._turn.add(part):
                yield event
        incomplete = self._choice.finish_reason == "length"
        status = "incomplete" if incomplete else "completed"
        for event in self._turn.close(status):
            yield event
        self._response |= {
            "status": status,
            "output": self._turn.output,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "usage": self._usage(),
        }
        if self.on_end is not None:
            self.on_end(self._response, self._turn.message())
        yield {"type": f"response.{status}", "response": self._response}

    def _usage(self) -> dict[str, Any]:
        end = self._choice.end
        return {
            "input_tokens": end.prompt_tokens,
            "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": end.generated,
            "output_tokens_details": {"reasoning_tokens": self._choice.reasoning_tokens},
            "total_tokens": end.prompt_tokens + end.generated,
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
