"""/v1/responses: create, stream, get, delete, cancel."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..answer import AnswerResponse
from ..backend import Backend
from ..call import ChatCall, ChatMessage
from ..chat import prepare
from ..errors import BadRequestError
from ..models.choose import choose
from ..models.early import EarlyStream
from ..tools import OtherTool, check_choice, leave_out
from .background import Background
from .input_items import described
from .response_answer import ResponseAnswer
from .responses_schema import ResponsesBody, messages_of
from .store import Stored, stored_responses


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    # Nobody can ask for them any more.
    for background in stored_responses(app).running():
        await background.cancel()


router = APIRouter(lifespan=_lifespan)


@router.post("/v1/responses")
async def create_response(body: ResponsesBody, request: Request) -> Response:
    if body.background and body.store is False:
        raise BadRequestError("a background response must be stored; omit store, or set it to true", "background")
    early: EarlyStream = request.state.early
    # The events of one that can be followed later are kept from the first on: none of them comes before that.
    early.events = not body.background
    backend = await choose(request, body.model, stream=body.stream)
    store, salt = stored_responses(request.app), request.state.salt
    before = body.previous_response_id
    earlier = store.get(salt, before).conversation() if before is not None else []
    messages = [*earlier, *messages_of(body.input)]
    prepared = partial(prepare, backend, _call(body, backend, messages, salt))

    def keep(said: ChatMessage) -> None:
        stored.messages = [*messages, said]
        if body.store is not False:
            store.put(salt, stored)

    answer = ResponseAnswer(backend, body, keep, early.response)
    stored = Stored(answer.response, messages, described(body.input))
    if not body.background:
        return AnswerResponse(request, answer, prepared, body.stream)
    # What the request holds is let go of when its answer has ended, not when it has been sent.
    held = request.state.held.pop_all()
    ended = partial(store.put, salt, stored)
    stored.background = Background(answer, backend, prepared, held, bool(body.stream), ended)
    store.put(salt, stored)
    try:
        await stored.background.begun()
    except BaseException:
        store.forget(salt, stored.response["id"])
        raise
    return _followed(stored.background) if body.stream else JSONResponse(stored.response)


@router.get("/v1/responses/{name}")
async def get_response(
    name: str, request: Request, stream: bool = False, starting_after: Annotated[int, Query(ge=-1)] = -1
) -> Response:
    stored = stored_responses(request.app).get(request.state.salt, name)
    if not stream:
        return JSONResponse(stored.response)
    if stored.background is None or not stored.background.stream:
        message = f"the response {name!r} was not created with background and stream, so its events were not kept"
        raise BadRequestError(message, "stream")
    return _followed(stored.background, starting_after + 1)


@router.delete("/v1/responses/{name}")
async def delete_response(name: str, request: Request) -> dict[str, Any]:
    store, salt = stored_responses(request.app), request.state.salt
    if (background := store.get(salt, name).background) is not None:
        await background.cancel()
    store.forget(salt, name)
    return {"id": name, "object": "response", "deleted": True}


@router.post("/v1/responses/{name}/cancel")
async def cancel_response(name: str, request: Request) -> dict[str, Any]:
    """Of one that has ended already the client gets what it has become."""
    stored = stored_responses(request.app).get(request.state.salt, name)
    if stored.background is None:
        raise BadRequestError(f"the response {name!r} is not a background response; only those can be cancelled")
    await stored.background.cancel()
    return stored.response


def _followed(background: Background, begin: int = 0) -> Response:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(background.follow(begin), headers=headers, media_type="text/event-stream")


def _call(body: ResponsesBody, backend: Backend, messages: list[ChatMessage], salt: str) -> ChatCall:
    left_out = [tool for tool in body.tools or [] if isinstance(tool, OtherTool)]
    leave_out(left_out)
    check_choice(body.tool_choice, [tool.name for tool in body.functions], left_out)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return ChatCall(
        messages=[*instructions, *messages],
        tools=[tool.as_tool() for tool in body.functions],
        tool_choice=body.tool_choice or "auto",
        schema=body.schema_of_answer(),
        template=body.template(),
        stream=bool(body.stream),
        one_call=body.parallel_tool_calls is False,
        max_tokens=body.max_output_tokens,
        sampling=body.sampling(backend),
        stops=body.stops,
        top_logprobs=body.wanted_logprobs(),
        salt=salt,
    )
