"""`onekv serve`: listen, load, print a greeting, serve until told to stop.

main thread     the event loop: responds from the start, with 503 until the model is loaded
onekv-loading   waits until the model is loaded, greets, and ends; if loading fails, so does the server
onekv-engine    loads the model and owns it (`EngineThread`); one for each that is loaded
onekv-models    loads and unloads, where there are several (`Models`)
onekv-events    tells routers which blocks are cached (`Publisher`); one for each model, if that is requested
onekv-watchdog  checks whether the engine makes progress (`Watch`)
onekv-stopping  at shutdown: waits until the engine's thread has ended, or is stuck
"""

import asyncio
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import APIRouter

from ..errors import SettingError, StuckError
from ..parallel import launched_rank
from .app import create_app
from .backend import Backend
from .connections import Connection, Limits
from .events.figures import EventFigures
from .events.opening import open_publishers
from .greeting import greeting
from .hygiene import Hygiene
from .logs import log_to_stderr, quiet_uvicorn
from .models.registry import Models
from .models.settings import idle_seconds
from .models.spec import ModelSpec
from .settings import ServerSettings
from .watch import Watch

if TYPE_CHECKING:
    from .events.publisher import Publisher

log = logging.getLogger("onekv.server")

BACKLOG = 2048
# How long a step in flight at shutdown may take, even if --step-limit is higher: supervisors do not wait forever.
LAST_STEP_S = 60


def serve(specs: list[ModelSpec], memory: str | int | None, settings: ServerSettings, hygiene: Hygiene) -> None:
    """Blocks until SIGINT or SIGTERM; running requests then get `--grace` seconds.

    One model without `memory` is there from the start to the end; otherwise models come and go within that many bytes.
    Raises what made loading the model fail, StuckError if the engine could not be stopped, and KeyboardInterrupt if the
    user did not want to wait for that: then its thread is left, and the process must end.
    """
    log_to_stderr(settings.log_level, settings.log_format)
    # Wrong keys, or an address that is taken, should not show only after a model was loaded.
    keys = settings.keys()
    limits = Limits(settings.max_connections, settings.client_timeout)
    listener = _listen(settings)
    publishers = open_publishers(settings, [spec.name for spec in specs], listener.getsockname()[1])
    backend = _backend(specs, memory, settings, hygiene, publishers)
    kept = [backend.metrics] if isinstance(backend, Backend) else [model.metrics for model in backend.models]
    for metrics, publisher in zip(kept, publishers, strict=True):
        if publisher is not None:
            metrics.add(EventFigures(publisher.stats))
    server = make_server(backend, settings, limits)
    for stop in (signal.SIGINT, signal.SIGTERM):
        # Uvicorn handles them while it runs, and after its shutdown raises them again for the previous handlers.
        signal.signal(stop, server.end)
    # Before the address is printed.
    listener.listen(BACKLOG)
    host, port = listener.getsockname()[:2]

    def load() -> None:
        try:
            backend.start()
            told = greeting(backend, host, port, bool(keys))
            if settings.log_format == "json":
                log.info("%s", told)
            else:
                print(told, file=sys.stderr, flush=True)
        except BaseException as error:  # noqa: BLE001  raised below
            server.fail(error)

    threading.Thread(target=load, name="onekv-loading", daemon=True).start()
    server.run(sockets=[listener])
    for publisher in publishers:
        if publisher is not None:
            # After the engines: what they remove at their end is published, too.
            publisher.close()
    if server.error is not None:
        raise server.error


def _backend(
    specs: list[ModelSpec],
    memory: str | int | None,
    settings: ServerSettings,
    hygiene: Hygiene,
    publishers: "list[Publisher | None]",
) -> Backend | Models:
    """What answers: one model, or several. Every engine gets a watchdog."""
    common: dict[str, Any] = {
        "max_waiting": settings.max_waiting,
        "max_wait": settings.max_wait,
        "default_max_tokens": settings.default_max_tokens,
        "turn_memory": settings.turn_bytes,
        "hygiene": hygiene,
        "log_words": settings.log_words,
        "step_limit": settings.step_limit,
    }

    def watched(backend: Backend) -> None:
        Watch(backend.thread, settings.step_limit).start(settings.exit_when_stuck)

    listeners = [None if publisher is None else publisher.unsent.add for publisher in publishers]
    first = specs[0]
    if len(specs) > 1 or memory is not None or idle_seconds(first.keep) < math.inf:
        if launched_rank() is not None:
            raise SettingError(
                "under mlx.launch a server has a single model that stays loaded; name one, and omit --memory and --keep"
            )
        return Models(specs, memory, common, watched, listeners)
    settled = common | vars(first.engine)
    backend = Backend(first.model, name=first.name, served=first.served, listener=listeners[0], **settled)
    watched(backend)
    return backend


def make_server(
    backend: Backend | Models, settings: ServerSettings, limits: Limits, routers: Sequence[APIRouter] = ()
) -> "Server":
    """A server for a backend; `run` or `serve` it with a socket that listens.

    It answers before the backend has been started: with 503, except for its health.
    """
    quiet_uvicorn()
    config = uvicorn.Config(
        create_app(backend, settings, routers),
        http=partial(Connection, limits),  # type: ignore[arg-type]
        ws="none",
        backlog=limits.accepted_at_once,
        log_level=settings.log_level,
        # Every request has a line in our own log.
        access_log=False,
        # The engine ends all requests when the time is over; their answers then still have to be sent.
        timeout_graceful_shutdown=settings.grace + 10,
        log_config=None,
    )
    return Server(config, backend, settings)


class Server(uvicorn.Server):
    """Stops the engine while connections are still there, so that requests that are cut off get an error.

    `error` is why it ended, if that was not because it was told to, or how the end failed.
    """

    def __init__(self, config: uvicorn.Config, backend: Backend | Models, settings: ServerSettings) -> None:
        super().__init__(config)
        self._backend, self._settings = backend, settings
        self.error: BaseException | None = None
        # Not uvicorn's `should_exit`: where that is set before it has started, it leaves out the shutdown.
        self._ending = False

    def end(self, *_: object) -> None:
        """Shut down; called by any thread or signal."""
        self._ending = True

    def fail(self, error: BaseException) -> None:
        """Shut down because of `error`."""
        self.error = error
        self.end()

    async def on_tick(self, counter: int) -> bool:
        return self._ending or await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit and self.started:
            # A signal has come meanwhile.
            self.should_exit = False
            self.end()
        for listener in sockets or []:
            # Uvicorn's backlog is also how many asyncio accepts at once; more may wait for that.
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Not one of asyncio's threads: it waits for those when it ends, and this one may have to be left.
        stopping = threading.Thread(target=self._stop_engine, name="onekv-stopping", daemon=True)
        stopping.start()
        await super().shutdown(sockets)
        if self.force_exit:
            # Uvicorn leaves that out, and then logs that it was.
            await self.lifespan.shutdown()
        while stopping.is_alive() and not self.force_exit:
            await asyncio.sleep(0.05)
        if stopping.is_alive() and self.error is None:
            # Ctrl-C once more: exit without waiting.
            self.error = KeyboardInterrupt()

    def _stop_engine(self) -> None:
        try:
            self._backend.stop(self._settings.grace, min(self._settings.step_limit, LAST_STEP_S))
        except StuckError as error:
            self.fail(error)
            # Answers that will never come are not waited for.
            self.force_exit = True


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
