"""One real server process for all tests of this folder: the default model, two API keys, any free port."""

import atexit
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# The parameters of the tool that is called in tests.
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
KEYS = ["first-key-of-the-tests", "second-key-of-the-tests"]


@dataclass
class Server:
    url: str
    keys: list[str]
    backend_name: str
    process: subprocess.Popen[bytes]
    # A file for what the process writes to stderr: nobody reads a pipe meanwhile, and it would fill up.
    errors: Any

    def log(self) -> str:
        """All that it has said so far."""
        return Path(self.errors.name).read_text()


def begin_server(
    *flags: str, keys: list[str] = KEYS, program: Sequence[str] = ("-m", "onekv"), **variables: str
) -> Server:
    """Start a process that will be a server; `program` are Python's arguments in the place of `-m onekv`.

    Without a disk cache, unless that is asked for: the user's own is not for tests.
    """
    disk = {} if "--disk-cache" in flags else {"ONEKV_HOT_ONLY": "on"}
    environment = {**os.environ, **disk, **variables, "ONEKV_API_KEYS": ",".join(keys)}
    port = [] if "--port" in flags else ["--port", "0"]
    errors = tempfile.NamedTemporaryFile()  # noqa: SIM115  (closed when nobody has the server any more)
    process = subprocess.Popen([sys.executable, *program, "serve", *port, *flags], env=environment, stderr=errors)
    # A test that fails may leave one behind that does not end by itself.
    atexit.register(process.kill)
    return Server("", keys, "", process, errors)


def start_server(
    *flags: str, keys: list[str] = KEYS, program: Sequence[str] = ("-m", "onekv"), **variables: str
) -> Server:
    """A server that has greeted; see `begin_server`."""
    server = begin_server(*flags, keys=keys, program=program, **variables)
    while (found := re.search(r"(\S+) is served on (http://\S+)\. .*\n(.*\n)+  curl .*\n", server.log())) is None:
        ended = server.process.poll() is not None
        assert not ended, f"the server did not start:\n{server.log()}"
        time.sleep(0.02)
    server.backend_name, server.url = found[1], found[2]
    return server


def stop_server(server: Server) -> str:
    """What it had to say, from its start on, after it was told to stop."""
    server.process.terminate()
    server.process.wait(timeout=60)
    return server.log()


@pytest.fixture
def running() -> Iterator[list[Server]]:
    """Servers of one test, which are stopped at its end, without a traceback."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        said = stop_server(server)
        assert server.process.returncode == 0 and "Traceback" not in said, said


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    disk = str(tmp_path_factory.mktemp("disk") / "kv")
    running = start_server("--kv-memory", "256MiB", "--max-batch", "4", "--disk-cache", disk, "--disk-limit", "1GB")
    yield running
    errors = stop_server(running)
    assert running.process.returncode == 0, errors
    assert "Traceback" not in errors, errors


@pytest.fixture
def sockets() -> Iterator[str]:
    """A folder with a short name: the path of a socket has little room."""
    with tempfile.TemporaryDirectory(prefix="okv", dir="/tmp") as folder:
        yield f"ipc://{folder}"
