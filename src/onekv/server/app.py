"""The application: routes behind the guard, and every failure in the format of the API it happened in."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from .. import __version__
from ..errors import OneKVError
from ..inbox import ClientGoneError
from . import admin, anthropic, ollama, openai, root, tokens
from .admin.access import LOADED
from .admin.trees import Trees
from .backend import Backend
from .errors import BadRequestError, NotFoundError
from .guard import Guard, error_response, salts_of
from .journal import Journal
from .live.feed import Feed
from .live.snapshot import Snapshots
from .models.choose import Held
from .models.registry import Models
from .settings import ServerSettings


def create_app(backend: Backend | Models, settings: ServerSettings, routers: Sequence[APIRouter] = ()) -> FastAPI:
    """The server for a backend, or for several models, with `routers` of others; it stops them when it ends.

    Until the backend has loaded its model, everything but its health returns 503.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        # Where `serve` runs it, it has been stopped already, with time for what was running.
        await run_in_threadpool(backend.stop, 0)

    origins = settings.origins
    shown = ["x-request-id", "request-id"]
    cors = Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=shown
    )
    app = FastAPI(
        title="OneKV",
        version=__version__,
        lifespan=lifespan,
        middleware=[
            Middleware(Journal),
            *([cors] if origins else []),
            Middleware(Guard, settings=settings),
            Middleware(Held),
        ],
        docs_url=None,
        redoc_url=None,
    )
    # One of the two: the only model there is, or all of them.
    several = isinstance(backend, Models)
    app.state.models, app.state.backend = (backend, None) if several else (None, backend)
    app.state.step_limit, app.state.show_text = settings.step_limit, settings.show_text
    app.state.owners = {salt: number for number, salt in enumerate(salts_of(settings.keys()), 1)}
    app.state.feed, app.state.trees = Feed(Snapshots(backend)), Trees()
    app.include_router(admin.router)
    app.include_router(root.router)
    for router in (openai.router, anthropic.router, ollama.router, tokens.router, *routers):
        app.include_router(router, dependencies=LOADED)
    app.add_exception_handler(OneKVError, _known)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientGoneError, _gone)
    return app


async def _known(request: Request, error: Exception) -> Response:
    assert isinstance(error, OneKVError)
    return error_response(request.url.path, error)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return error_response(request.url.path, BadRequestError("the body is not valid JSON"))
    field = ".".join(_place(error.body, first["loc"]))
    # Half a character cannot be sent back.
    message = _sendable(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "union_tag_invalid":
        kind, name = _sendable(first["ctx"]["tag"]), first["ctx"]["discriminator"].strip("'")
        message = f"{name} {kind[:40]!r} is not supported; only {first['ctx']['expected_tags']}"
    return error_response(request.url.path, BadRequestError(message, _sendable(field) or None))


def _place(body: Any, location: Sequence[int | str]) -> list[str]:
    """Where in `body` an error is, without the names that pydantic adds for the variants it tried."""
    place: list[str] = []
    for index, key in enumerate(location):
        last = index == len(location) - 1
        if isinstance(body, list) and isinstance(key, int) and key < len(body):
            body = body[key]
        elif isinstance(body, dict) and (key in body or last):
            body = body.get(key)
        else:
            continue
        place.append(str(key))
    return place


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(request.url.path, NotFoundError(f"there is no {request.url.path}"))
    wrong = BadRequestError(f"{request.method} {request.url.path}: {error.detail}")
    wrong.status = error.status_code
    response = error_response(request.url.path, wrong)
    response.headers.update(error.headers or {})
    return response


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    return Response(status_code=499)
