"""One real server process for all tests of this folder: the default model, two API keys, any free port."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

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
    process: subprocess.Popen[str]


def start_server(*flags: str, keys: list[str] = KEYS, **variables: str) -> Server:
    """Without a disk cache, unless that is asked for: the user's own is not for tests."""
    disk = {} if "--disk-cache" in flags else {"ONEKV_HOT_ONLY": "on"}
    environment = {**os.environ, **disk, **variables, "ONEKV_API_KEYS": ",".join(keys)}
    command = [sys.executable, "-m", "onekv", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        found = re.search(r"(\S+) is served on (http://\S+)\.", line)
        if found:
            return Server(found[2], keys, found[1], process)
    raise AssertionError("the server did not start:\n" + "".join(seen))


def stop_server(server: Server) -> str:
    """What it had to say, after it was told to stop."""
    server.process.terminate()
    _, errors = server.process.communicate(timeout=60)
    return errors


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run in several processes share one server all the same: those of this folder stay together."""
    for item in items:
        if "server" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("server"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    disk = str(tmp_path_factory.mktemp("disk") / "kv")
    running = start_server("--kv-memory", "256MiB", "--max-batch", "4", "--disk-cache", disk, "--disk-limit", "1GB")
    yield running
    errors = stop_server(running)
    assert running.process.returncode == 0, errors
    assert "Traceback" not in errors, errors
