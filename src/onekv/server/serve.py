"""`onekv serve`: load, say what there is, listen until told to stop."""

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial

import uvicorn
from fastapi import APIRouter

from ..config import Settings
from ..errors import SettingError
from ..report import plan_table
from ..units import format_size
from .app import create_app
from .backend import Backend
from .connections import Connection, Limits, quiet_uvicorn
from .settings import ServerSettings

BACKLOG = 2048


def serve(model: str, settings: ServerSettings, engine: Settings) -> None:
    """Blocks until SIGINT or SIGTERM; running requests then get `--grace` seconds."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    # Wrong keys, or an address that is taken, should not show only after a model was loaded.
    keys = settings.keys()
    limits = Limits(settings.max_connections, settings.client_timeout)
    listener = _listen(settings)
    backend = Backend(
        model,
        max_waiting=settings.max_waiting,
        max_wait=settings.max_wait,
        default_max_tokens=settings.default_max_tokens,
        **vars(engine),
    )
    backend.start()
    # Before anyone is told the address.
    listener.listen(BACKLOG)
    _greet(backend, listener, keys)
    server = make_server(backend, settings, limits)
    for stop in (signal.SIGINT, signal.SIGTERM):
        # Uvicorn handles them, and when it has shut down raises them again for whoever was there before.
        signal.signal(stop, lambda *_: None)
    server.run(sockets=[listener])


def make_server(
    backend: Backend, settings: ServerSettings, limits: Limits, routers: Sequence[APIRouter] = ()
) -> "Server":
    """A server for a backend that was started; `run` or `serve` it with a socket that listens."""
    quiet_uvicorn()
    config = uvicorn.Config(
        create_app(backend, settings, routers),
        http=partial(Connection, limits),  # type: ignore[arg-type]
        ws="none",
        backlog=limits.accepted_at_once,
        log_level=settings.log_level,
        access_log=settings.log_level == "debug",
        # The engine ends all requests when the time is over; their answers then still have to be sent.
        timeout_graceful_shutdown=settings.grace + 10,
        log_config=None,
    )
    return Server(config, backend, settings.grace)


class Server(uvicorn.Server):
    """Stops the engine while connections are still there, so that requests that are cut off are told."""

    def __init__(self, config: uvicorn.Config, backend: Backend, grace: int) -> None:
        super().__init__(config)
        self._backend, self._grace = backend, grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            # Uvicorn's backlog is also how many asyncio accepts at once; more may wait for that.
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.create_task(asyncio.to_thread(self._backend.stop, self._grace))
        await super().shutdown(sockets)
        await stopping


def _listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except (OSError, UnicodeError) as error:
        listener.close()
        raise SettingError(
            f"cannot listen on {settings.host}, port {settings.port}: {error}; choose others with --host and --port"
        ) from None
    return listener


def _greet(backend: Backend, listener: socket.socket, keys: list[str]) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    body = {"model": backend.name, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}
    key = " -H 'Authorization: Bearer KEY'" if keys else ""
    print(plan_table(backend.llm.plan), file=sys.stderr)
    tiers = backend.llm.stats().tiers
    for tier in tiers:
        print(f"\n{tier.name} cache: {format_size(tier.bytes)} of {format_size(tier.limit)}", file=sys.stderr)
    print(f"{backend.name} is served on http://{shown}:{port}. Try:", file=sys.stderr)
    print(
        f"  curl http://{shown}:{port}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'",
        file=sys.stderr,
        flush=True,
    )
