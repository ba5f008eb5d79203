"""Finds the backend that answers a request.

With several models, a request holds its model until the response has been sent, whatever the outcome; `Held` then
releases it. While a streaming request waits for its model, its client is told how long that may take.
"""

import asyncio
import time
from contextlib import ExitStack
from typing import Any

from fastapi import Request
from starlette.types import Receive, Scope, Send

from ...inbox import ClientGoneError
from .. import journal
from ..answer import KEEP_ALIVE_S
from ..around import Around
from ..backend import Backend
from ..explain import ASK
from .early import EarlyStream
from .model import Model, Place
from .refusals import standing, too_long
from .registry import Models


class Held(Around):
    """Around the routes: lets go of what a request holds."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        early, state = EarlyStream(scope["path"], send), scope.setdefault("state", {})
        with ExitStack() as held:
            state.update(held=held, early=early)
            try:
                await self.app(scope, receive, early.send)
            finally:
                # Before the model may be unloaded: the server's own objects for a request are in cycles, and what the
                # last one had used would be in memory until those are searched for.
                state.pop("backend", None)


async def choose(request: Request, name: str | None, lenient: bool = False, stream: bool | None = False) -> Backend:
    """The backend of the model that a request calls `name`, loaded; None is the first there is, and so is a name that
    nobody knows where that is `lenient`. `stream`: it is answered with server-sent events, which may begin meanwhile.

    Raises NotFoundError, MemoryBudgetError if it can never be loaded, OverloadedError if that takes too long, and what
    made loading it fail.
    """
    models: Models | None = request.app.state.models
    if models is None:
        backend: Backend = request.app.state.backend
        if name is not None and not lenient:
            backend.check_model(name)
        return backend
    model = models.first if lenient and not models.knows(name) else models.find(name)
    # What explains a miss is in the headers.
    early: EarlyStream | None = request.state.early if stream and ASK not in request.headers else None
    request.state.backend = chosen = await hold(request, models, model, early)
    return chosen


async def hold(request: Request, models: Models, model: Model, early: EarlyStream | None = None) -> Backend:
    """The backend of `model`, loaded, and not unloaded before the request is answered."""
    place = models.ask(model, journal.request_id())
    request.state.held.callback(models.leave, place)
    if not place.came.done():
        await _wait(request, models, place, early)
    return place.came.result()


async def _wait(request: Request, models: Models, place: Place, early: EarlyStream | None) -> None:
    came: asyncio.Future[Any] = asyncio.wrap_future(place.came)
    gone: asyncio.Future[Any] = asyncio.ensure_future(_gone(request))
    end = place.since + models.max_wait
    try:
        while not (came.done() or gone.done()) and (left := end - time.monotonic()) > 0:
            pause = left if early is None else min(left, KEEP_ALIVE_S)
            await asyncio.wait({came, gone}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if early is not None and not (came.done() or gone.done()):
                told = f"{standing(place, models.queue())}; {models.loads.told(place.model)}"
                await early.say(told, place.model.name)
    finally:
        gone.cancel()
        if (entry := journal.current.get()) is not None:
            entry.waited = time.monotonic() - place.since
    if place.came.done():
        # Raised by who asks for the result; here it is only looked at.
        came.exception()
    elif gone.done():
        raise ClientGoneError
    else:
        raise too_long(place, models.queue(), models.max_wait)


async def _gone(request: Request) -> None:
    """Until the client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
