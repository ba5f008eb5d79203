"""`make cluster`: two real replicas, a real store and a real proxy. Skipped where one of them is not installed."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from conftest import KEYS
from onekv.bench.soak import save_tiny

SCRIPT = Path(__file__).parents[2] / "scripts" / "cluster.py"
QUESTION = "Here is a list of words to remember: " + ", ".join(f"word {number}" for number in range(60)) + ". Say yes."


class Cluster:
    """The script's process; `urls` of its parts by name, once it has greeted."""

    def __init__(self, *arguments: str) -> None:
        for names, package in ((("valkey-server", "redis-server"), "redis-server"), (("caddy",), "caddy")):
            if not any(map(shutil.which, names)):
                pytest.skip(f"there is no {' or '.join(names)}: apt-get install {package}")
        self._said = tempfile.NamedTemporaryFile()  # noqa: SIM115  (closed when nobody has the cluster any more)
        command = [sys.executable, str(SCRIPT), *arguments]
        self.process = subprocess.Popen(command, stdout=self._said, stderr=subprocess.STDOUT)
        self.urls: dict[str, str] = {}

    def log(self) -> str:
        return Path(self._said.name).read_text()

    def until(self, text: str) -> None:
        """Wait until it has said so."""
        while text not in self.log():
            assert self.process.poll() is None, self.log()
            time.sleep(0.05)

    def ready(self) -> "Cluster":
        self.until("Ctrl-C stops all.")
        self.urls = dict(re.findall(r"^  (\S+) +(\S+) +process \d+$", self.log(), re.MULTILINE))
        assert sorted(self.urls) == sorted(self.processes) == ["proxy", "replica-1", "replica-2", "store"]
        return self

    @property
    def processes(self) -> dict[str, int]:
        """Of all that were started so far."""
        found = re.findall(r"^(\S+) +\| process (\d+)$", self.log(), re.MULTILINE)
        return {name: int(process) for name, process in found}

    def replica(self, answer: httpx.Response) -> str:
        """The name of the replica that has answered through the proxy."""
        (name,) = [name for name, url in self.urls.items() if url == f"http://{answer.headers['x-replica']}"]
        return name

    def ended(self) -> int:
        """Its exit status; nothing that it has started is left."""
        status = self.process.wait(timeout=120)
        assert [name for name, process in self.processes.items() if exists(process)] == []
        assert "Traceback" not in self.log(), self.log()
        return status


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    """Starts clusters, which end with the test."""
    started: list[Cluster] = []

    def start(*arguments: str) -> Cluster:
        started.append(Cluster(*arguments))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.terminate()
            each.process.wait(timeout=120)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def ask(url: str, key: str, *messages: str) -> httpx.Response:
    roles = ("user", "assistant")
    body = {
        "model": "default",
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)],
        "max_tokens": 8,
        "temperature": 0,
    }
    headers = {"x-conversation": "a", "authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer


def text(answer: httpx.Response) -> str:
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


def cached(answer: httpx.Response) -> int:
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def remote(url: str) -> dict[str, Any]:
    cache = httpx.get(f"{url}/admin/cache", headers={"authorization": f"Bearer {KEYS[0]}"}).json()
    (tier,) = [tier for tier in cache["tiers"] if tier["name"] == "remote"]
    return tier


def test_a_conversation_outlives_its_replica(
    smollm2_path: Path, cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEKV_API_KEYS", ",".join(KEYS))
    ports = [str(port) for port in free_ports(4)]
    # Look-ups may take long: others use the machine, too.
    store = f"valkey://127.0.0.1:{ports[1]}/0?timeout=60s"
    flags = ["--kv-memory", "128MiB", "--remote-tier", store]
    running = cluster("--model", str(smollm2_path), "--ports", *ports, "--", *flags).ready()
    proxy = running.urls["proxy"]
    assert proxy == f"http://127.0.0.1:{ports[0]}"
    talk = [QUESTION]
    first = ask(proxy, KEYS[0], *talk)
    home = running.replica(first)
    assert cached(first) == 0
    talk += [text(first), "Say it again."]
    second = ask(proxy, KEYS[0], *talk)
    # In its pool, not in the store.
    assert running.replica(second) == home and cached(second) > 200 and remote(running.urls[home])["hits"] == 0
    # Written while nothing else is to do.
    end = time.monotonic() + 60
    while (wrote := remote(running.urls[home]))["writes"] < cached(second) // 16:
        assert time.monotonic() < end, wrote
        time.sleep(0.05)
    os.kill(running.processes[home], signal.SIGTERM)
    running.until(f"{home} has stopped")
    talk += [text(second), "And now say no."]
    third = ask(proxy, KEYS[0], *talk)
    other = running.replica(third)
    assert other != home and cached(third) > 200
    # Blocks of 16 tokens, all of them from the store.
    assert remote(running.urls[other])["hits"] == cached(third) // 16
    # Nothing is shared between keys.
    uncached = ask(proxy, KEYS[1], *talk)
    assert cached(uncached) == 0 and text(uncached) == text(third)

    running.process.terminate()
    assert running.ended() == 0


def test_conversations_are_spread_and_stay(tmp_path: Path, cluster: Callable[..., Cluster]) -> None:
    running = cluster("--model", save_tiny(tmp_path / "tiny"), "--", "--kv-memory", "16MiB").ready()

    def homes(conversations: range) -> dict[int, str]:
        url = f"{running.urls['proxy']}/health"
        answers = {number: httpx.get(url, headers={"x-conversation": str(number)}) for number in conversations}
        return {number: running.replica(answer) for number, answer in answers.items()}

    before = homes(range(41))
    # In another order, which a proxy that takes turns would not get right.
    assert set(before.values()) == {"replica-1", "replica-2"} and homes(range(40, -1, -1)) == before
    # A replica that fails ends the cluster, and is named.
    os.kill(running.processes["replica-2"], signal.SIGKILL)
    assert running.ended() == 1
    assert "error: replica-2 was killed by SIGKILL" in running.log()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_can_be_stopped_while_it_starts(
    tmp_path: Path, cluster: Callable[..., Cluster], number: signal.Signals
) -> None:
    running = cluster("--model", save_tiny(tmp_path / "tiny"), "--", "--kv-memory", "16MiB")
    running.until("replica-1 | process")
    running.process.send_signal(number)
    assert running.ended() == 0
    assert "replica-1" in running.processes


def test_a_replica_that_does_not_start(tmp_path: Path, cluster: Callable[..., Cluster]) -> None:
    running = cluster("--model", str(tmp_path / "nothing"))
    assert running.ended() == 1
    assert re.search(r"^replica-\d \| .*nothing", running.log(), re.MULTILINE), running.log()
    assert re.search(r"^error: replica-\d ended with status [1-9]", running.log(), re.MULTILINE), running.log()


def test_what_is_missing_is_named_with_its_package(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "error: not installed: valkey-server or redis-server, caddy; on Debian: apt-get install redis-server caddy\n"
    )
