"""Connections are bounded, and so is the time a client may take; raw sockets against a real server."""

import json
import os
import re
import resource
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import start_server, stop_server
from onekv.errors import SettingError
from onekv.server.connections import LOG_EVERY_S, Limits
from onekv.server.settings import ServerSettings

BOUND = 24
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
# The tests that made more connections than there may be.
FLOODED: list[str] = []
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def small() -> Iterator[Any]:
    """A server for few connections, whose clients have two seconds; its log is read at the end."""
    flags = ("--kv-memory", "64MiB", "--max-connections", str(BOUND), "--client-timeout", "2", "--grace", "0")
    running, begun = start_server(*flags, keys=[]), time.monotonic()
    yield running
    log = stop_server(running)
    assert running.process.returncode == 0, log
    assert "Traceback" not in log and "Too many open files" not in log, log
    # Hundreds were refused, if those tests ran in this process, and that is said once a minute.
    said = log.count("--max-connections")
    assert bool(said) == bool(FLOODED) and said <= 1 + (time.monotonic() - begun) / LOG_EVERY_S, log
    # But for the greeting and a line for each request that was one.
    told = [line for line in log.splitlines() if re.match(r"\d{4}-\d\d-", line) and " onekv.request: " not in line]
    assert len(told) < 15, log


def connect(server: Any) -> socket.socket:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=60)


def read_all(client: socket.socket) -> bytes:
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


def handles(server: Any) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def until_free(server: Any) -> None:
    """Waits until connections that were closed here are closed there too."""
    for _ in range(600):
        with connect(server) as client:
            client.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            if b" 200 " in read_all(client).partition(b"\r\n")[0]:
                return
        time.sleep(0.1)
    raise AssertionError("no connection is free")


def test_beyond_the_bound_all_are_told(small: Any) -> None:
    FLOODED.append("told")
    held = []
    for _ in range(BOUND):
        held.append(client := connect(small))
        # Answered, so that it counts.
        client.sendall(HEALTH)
        assert client.recv(12) == b"HTTP/1.1 200"
    for _ in range(20):
        with connect(small) as client:
            client.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
            head, _, body = read_all(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"Retry-After" in head and b"x-request-id: req_" in head
        assert "--max-connections" in json.loads(body)["error"]["message"]
    for client in held:
        client.close()
    until_free(small)


def test_handles_stay_below_the_bound(small: Any) -> None:
    FLOODED.append("handles")
    before = handles(small)
    flood = [connect(small) for _ in range(500)]
    most = max(handles(small) for _ in range(50))
    # The bound, those that are being refused, and those just accepted.
    assert most <= before + BOUND + 64 + 4 * 64
    for client in flood:
        client.close()
    until_free(small)


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HT", HEAD + b"Content-Length: 100\r\n\r\n{", HEALTH + b"GET /hea", HEALTH + HEAD],
    ids=["nothing", "half a head", "half a body", "half a second head", "half a second request"],
)
def test_a_client_that_stalls_is_closed(small: Any, sent: bytes) -> None:
    with connect(small) as client:
        client.sendall(sent)
        # Ends, that is.
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 200") == sent.startswith(HEALTH)


def test_one_byte_at_a_time_does_not_hold_a_connection(small: Any) -> None:
    with connect(small) as client, pytest.raises((BrokenPipeError, ConnectionResetError)):
        for _ in range(600):
            client.sendall(b"G")
            time.sleep(0.1)


def test_a_client_that_does_not_read_is_closed(small: Any) -> None:
    before = handles(small)
    with connect(small) as client:
        # Answers of some ten megabytes: more than the system keeps for a reader.
        client.sendall(HEALTH.replace(b"/health", b"/openapi.json") * 300)
        assert client.recv(12) == b"HTTP/1.1 200"
        for _ in range(600):
            if handles(small) <= before:
                break
            time.sleep(0.1)
        assert handles(small) <= before


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff" * 100 + b"\r\n\r\n",
        b"GET /nowhere HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nnot a length\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        # An answer has been sent when the rest comes.
        HEAD.replace(b"localhost", b"evil.example") + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nnot a length\r\n",
    ],
)
def test_garbage_is_answered_and_not_logged(small: Any, garbage: bytes) -> None:
    for _ in range(10):
        with connect(small) as client:
            client.sendall(garbage)
            # Its head is written at once.
            head = client.recv(65536)
            assert head.startswith(b"HTTP/1.1 4") and b"\r\nx-request-id: req_" in head
    until_free(small)


def test_the_bound_comes_from_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert Limits(None, 60).connections == 128
        with pytest.raises(SettingError, match="ulimit -n"):
            Limits(129, 60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(SettingError, match="--client-timeout"):
        ServerSettings(client_timeout=0)
