"""Connections: how many there are, and how long a client may take.

    opened -> request -> answer -> request ...     each step has a time limit
        \\_ too many: 503 and closed, before a byte was read

Every connection is a file handle, and so are the files of the disk cache and of the model. When none are left, asyncio
logs an error for every connection it cannot accept, thousands of times a second. So connections are limited below that,
counted from the moment they are accepted; uvicorn's own limit counts once a request's head has arrived, and so does not
limit connections that send none.
"""

import asyncio
import json
import logging
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import SettingError
from .journal import new_id

log = logging.getLogger("onekv.server")

DEFAULT_CONNECTIONS = 1024
# How long a client that was refused may take to read that, and how often that it happens is logged.
LINGER_S, LOG_EVERY_S = 1.0, 60.0


def _answer(status: str, kind: str, message: str) -> bytes:
    """Sent before it is known which API is meant, in a form that the clients of both understand."""
    known_as = new_id()
    error = {"type": kind, "message": message, "param": None, "code": None}
    body = json.dumps({"type": "error", "error": error, "request_id": known_as}).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    head += f"x-request-id: {known_as}\r\nrequest-id: {known_as}\r\nConnection: close\r\n"
    # What is wrong with a request is wrong with it later on, too.
    again = "" if kind == "invalid_request_error" else "Retry-After: 2\r\n"
    return f"{head}{again}\r\n".encode() + body


class Limits:
    """What all connections of a server share."""

    def __init__(self, wanted: int | None, timeout: float) -> None:
        """`wanted` connections, or as many as the process's file handles allow; `timeout` seconds for each step."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = 2**20 if soft == resource.RLIM_INFINITY else soft
        # The rest is for files, for those being refused, and for accepted ones that asyncio has not yet reported.
        most = files // 2
        if wanted is not None and wanted > most:
            raise SettingError(
                f"--max-connections is {wanted}, but this process may open {files} files and at most {most} of them "
                "may be connections; raise that limit (ulimit -n) or lower --max-connections"
            )
        self.connections = wanted if wanted is not None else min(DEFAULT_CONNECTIONS, most)
        # In one turn of the event loop; some turns pass until one of them is closed again.
        self.accepted_at_once = max(1, min(64, files // 32))
        self.timeout = timeout
        self._most_lingering = max(1, min(64, files // 16))
        self._lingering = self._refused = 0
        self._logged = -LOG_EVERY_S

    def refuse(self, transport: asyncio.Transport) -> None:
        self._refused += 1
        if time.monotonic() - self._logged >= LOG_EVERY_S:
            self._logged = time.monotonic()
            text = "%d connections are open; %d were rejected (--max-connections)"
            log.warning(text, self.connections, self._refused)
            self._refused = 0
        message = f"{self.connections} connections are open, which is the limit (--max-connections); try again later"
        transport.write(_answer("503 Service Unavailable", "overloaded_error", message))
        if self._lingering >= self._most_lingering:
            transport.set_protocol(asyncio.Protocol())
            transport.close()
            return
        self._lingering += 1
        transport.set_protocol(_Refused(self, transport))

    def gone(self) -> None:
        self._lingering -= 1


class _Refused(asyncio.Protocol):
    """Reads what comes: to close before it is read would reset the connection, and the client would not see why."""

    def __init__(self, limits: Limits, transport: asyncio.Transport) -> None:
        self._limits = limits
        self._end = asyncio.get_running_loop().call_later(LINGER_S, transport.abort)
        try:
            transport.write_eof()
        except OSError:
            # The client is gone already.
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        self._limits.gone()


class Connection(H11Protocol):
    """One client. A request must be there in time, and what is sent must be read."""

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._request_due: asyncio.TimerHandle | None = None
        self._read_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._limits.connections:
            self._limits.refuse(transport)
            return
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_due = _cancelled(self._request_due)
        self._read_due = _cancelled(self._read_due)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._expect_request()
        else:
            self._request_due = _cancelled(self._request_due)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The next one has come already, in part.
        if self.conn.their_state is h11.SEND_BODY:
            self._expect_request()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._give_up()
            self.transport.write(_answer("400 Bad Request", "invalid_request_error", msg))
            self.transport.close()
        else:
            # An answer has begun; there is no place for another.
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._read_due = _cancelled(self._read_due)
        super().resume_writing()

    def _expect_request(self) -> None:
        """Counted from its first byte, not its last: else one byte now and then would hold a connection forever."""
        if self._request_due is None and not self.transport.is_closing():
            self._request_due = self.loop.call_later(self._limits.timeout, self._too_slow)

    def _too_slow(self) -> None:
        if self.conn.their_state is h11.IDLE or not self.cycle.response_started:
            self._give_up()
            message = f"the request took more than {self._limits.timeout:g} s (--client-timeout)"
            self.transport.write(_answer("408 Request Timeout", "timeout_error", message))
        self.transport.close()

    def _give_up(self) -> None:
        """Answers what is still unanswered; what the application sends for it is dropped."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _expect_reading(self, unread: int) -> None:
        self._read_due = self.loop.call_later(self._limits.timeout, self._check_reading, unread)

    def _check_reading(self, unread: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < unread:
            self._expect_reading(left)
        else:
            self.transport.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None
