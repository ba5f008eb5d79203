"""Answers that come piece by piece, and clients that go away.

`stream` sends server-sent events. While nothing comes (a long prefill) it sends a comment every few seconds, so that
neither the client nor a proxy gives up. `until_gone` is for answers in one piece: it cancels the work when the client
has closed the connection. In both cases the exit of `Backend.generate` then cancels the requests.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

KEEP_ALIVE_S = 5.0
Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was ready."""


def sse(data: Mapping[str, Any] | str, event: str | None = None) -> str:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {event}\n" if event else "") + f"data: {text}\n\n"


def stream(events: AsyncIterator[str], stack: AsyncExitStack) -> StreamingResponse:
    """Send `events`; `stack`, with the generation they come from, is closed when the last was sent or nobody reads."""
    return _EventStream(_with_keep_alive(events), stack)


class _EventStream(StreamingResponse):
    def __init__(self, events: AsyncIterator[str], stack: AsyncExitStack) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Here and not around the events: they may never be asked for.
        async with self._stack:
            await super().__call__(scope, receive, send)


async def _with_keep_alive(events: AsyncIterator[str]) -> AsyncIterator[str]:
    following = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait({following}, timeout=KEEP_ALIVE_S)
            if not done:
                yield ": keep-alive\n\n"
                continue
            try:
                event = following.result()
            except StopAsyncIteration:
                return
            following = asyncio.ensure_future(anext(events))
            yield event
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def until_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, unless the client goes away first: then it is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
