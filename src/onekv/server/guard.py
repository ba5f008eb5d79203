"""Checks before every route: host names, origins, keys, sizes.

host      must be an allowed name of the server, so that no web page can reach it under its own name
body      read here, at most `--max-body` bytes of a reasonable shape, then passed on as JSON, whatever the client calls
          it (`curl -d` calls it a form); so no handler sees more
origin    a web page from another origin may not call the server unless it is in `--cors-origin`
key       compared in constant time with each of the server's keys; determines the salt of cached prefixes

Starlette's TrustedHostMiddleware is not used for hosts: it supports lists of names, but not "any address of this
machine", rejects clients that send no Host, and responds in plain text.
"""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

from ..errors import OneKVError
from . import journal
from .around import Around
from .errors import (
    BadRequestError,
    ForbiddenError,
    MisdirectedError,
    TooLargeError,
    UnauthorizedError,
    anthropic_body,
    for_client,
    headers_of,
    ollama_body,
    openai_body,
    status_of,
)
from .page.files import PREFIX
from .settings import ServerSettings
from .shape import check_shape

# Anyone may ask these, and for the files of the page.
OPEN_PATHS = ("/", "/health", "/health/live", "/health/ready")


def salts_of(keys: Sequence[str]) -> list[str]:
    """What keeps the cached prefixes of each key apart from those of others."""
    return [hashlib.sha256(key.encode()).hexdigest()[:32] for key in keys]


class Guard(Around):
    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        super().__init__(app)
        self._settings = settings
        self._max_body, self._origins = settings.body_bytes, settings.origins
        keys = settings.keys()
        self._keys = [key.encode() for key in keys]
        self._salts = salts_of(keys)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["method"] == "HEAD":
            # The same as GET; the connection, which has the scope as it was, sends no body.
            scope = {**scope, "method": "GET"}
        try:
            self._check_host(headers)
            self._check_origin(scope, headers)
            key = self._key(scope["path"], headers)
            # The first key is the operator's.
            state = {"salt": self._salts[key] if self._keys else "", "administrator": key == 0}
            scope.setdefault("state", {}).update(state)
            body = await self._read(headers, receive)
        except OneKVError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        kept = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope = {**scope, "headers": [*kept, (b"content-type", b"application/json")]}
        await self._answer(scope, _replay(body, receive), send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error that no handler knows is logged; the client only learns where to find it in the log."""
        started = False

        async def sending(message: ASGIMessage) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except Exception as error:  # noqa: BLE001  a bug; it is logged, and other requests continue
            told = error_response(scope["path"], for_client(error))
            # An answer that has begun is cut off.
            if not started:
                await told(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        given = headers.get("host")
        # Browsers always send one.
        if given is None:
            return
        if not self._settings.allows_host(_host_name(given), keys=bool(self._keys)):
            raise MisdirectedError(f"this server is not available as {given!r} (--allowed-hosts adds names)")

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        if origin != f"{scope['scheme']}://{headers.get('host')}":
            raise ForbiddenError(f"web pages from {origin} may not call this server (--cors-origin allows origins)")

    def _key(self, path: str, headers: Headers) -> int:
        """Which key the request has. Raises UnauthorizedError if it has none that is known."""
        if not self._keys or path in OPEN_PATHS or path.startswith(PREFIX):
            return 0
        given = headers.get("x-api-key", "").encode()
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if not given and scheme.lower() == "bearer":
            given = token.strip().encode()
        if not given:
            raise UnauthorizedError("no API key; send it as Authorization: Bearer KEY or as x-api-key")
        # All are compared, so that time does not tell which one was close.
        known = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(known):
            raise UnauthorizedError("the API key is unknown to this server")
        return known.index(True)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            raise TooLargeError(f"the body has {length} bytes; at most {self._max_body} are accepted (--max-body)")
        received: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise BadRequestError("the connection was closed before the body was complete")
            received.append(message.get("body", b""))
            size += len(received[-1])
            if size > self._max_body:
                raise TooLargeError(f"the body has more than {self._max_body} bytes (--max-body)")
            more = message.get("more_body", False)
        body = b"".join(received)
        await check_shape(body)
        return body


def _host_name(host: str) -> str:
    """The name or address in a Host header: without the port, brackets or the dot that ends a full name."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _replay(body: bytes, receive: Receive) -> Callable[[], Awaitable[ASGIMessage]]:
    """`receive` as if the body had not been read yet."""
    given = False

    async def replayed() -> ASGIMessage:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def error_response(path: str, error: OneKVError) -> JSONResponse:
    """`error` in the format of the API that `path` belongs to."""
    if (entry := journal.current.get()) is not None:
        entry.error = type(error).__name__
    forms = {"/v1/messages": anthropic_body, "/api/": ollama_body}
    form = next((form for start, form in forms.items() if path.startswith(start)), openai_body)
    return JSONResponse(form(error), status_of(error), headers_of(error))
