"""What the benchmarks of servers share: server processes, requests to them, texts of a given length, percentiles.

Nothing here imports MLX; the HTTP library is imported when it is first used.
"""

import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import OneKVError, SettingError
from ..interrupts import uninterrupted

if TYPE_CHECKING:
    import httpx2

START_S = 300.0
STOP_S = 30.0
LOCAL = "127.0.0.1"
KEYS = ("first-key-of-the-bench", "second-key-of-the-bench")

_NOUNS = ("river", "garden", "engine", "letter", "window", "market", "forest", "teacher", "signal", "bridge", "paper")
_VERBS = ("opens", "follows", "carries", "watches", "answers", "moves", "finds", "keeps", "draws", "leaves", "brings")
_ADJECTIVES = ("old", "quiet", "green", "early", "narrow", "bright", "heavy", "small", "distant", "careful", "cold")


@dataclass(frozen=True)
class ServerProcess:
    """A server that listens. `model` is what requests to it must name, `log` what it has written so far. One that
    somebody else has started has no `process`, and no log.
    """

    url: str
    model: str
    process: "subprocess.Popen[bytes] | None"
    log: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEYS[0]}"}

    def resident(self, figure: str = "VmHWM") -> int | None:
        """Bytes of the process in memory, at most so far (VmHWM) or now (VmRSS); None where the system does not say."""
        return resident(self.process.pid, figure) if self.process is not None else None

    def get(self, path: str) -> Any:
        """The JSON at `path`. Raises OneKVError if it is not to be had."""
        answer = http().get(self.url + path, headers=self.headers, timeout=120)
        if answer.status_code != 200:
            raise OneKVError(f"GET {path} of the server answered {answer.status_code}: {answer.text[:500]}")
        return answer.json()


def resident(pid: int, figure: str = "VmRSS") -> int | None:
    """Bytes of a process in memory, as Linux reports them; None if it has ended, or on other systems."""
    try:
        found = re.search(rf"{figure}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def http() -> ModuleType:
    try:
        import httpx2
    except ModuleNotFoundError:
        raise SettingError("this benchmark needs httpx2; install it with: pip install 'onekv[bench]'") from None
    return httpx2


@contextmanager
def onekv_server(
    model: str,
    *flags: str,
    start_s: float = START_S,
    entry: Sequence[str] = ("-m", "onekv"),
    started: Callable[[int], None] | None = None,
) -> Iterator[ServerProcess]:
    """`onekv serve` on a free port, with `KEYS` and nothing cached; it has to answer within `start_s`. `entry` are the
    arguments of Python that run `onekv`; `started` is told the process's id before there is anything to answer.
    """
    command = [sys.executable, *entry, "serve", model, "--port", "0", "--hot-only", "on", *flags]
    with _running(command, {"ONEKV_API_KEYS": ",".join(KEYS)}, started) as (process, log):
        served = re.compile(r"(\S+) is served on (http://\S+)\.\s")
        found = _wait_for(process, log, lambda: served.search(log.read_text()), start_s)
        _wait_for(process, log, lambda: _healthy(found[2]), start_s)
        yield ServerProcess(found[2], found[1], process, log)


def mlx_lm_server(entry: str, *arguments: str) -> AbstractContextManager[ServerProcess]:
    """mlx_lm.server on a free port, started by the Python text `entry` with `arguments`; its model is the default."""
    return other_server([sys.executable, "-c", entry, *arguments], "default_model")


@contextmanager
def other_server(
    command: Sequence[str], model: str, started: Callable[[int], None] | None = None
) -> Iterator[ServerProcess]:
    """A server that gets its port by `--port`, and answers at /health when it is ready; see `onekv_server`."""
    with socket.socket() as free:
        free.bind((LOCAL, 0))
        port = free.getsockname()[1]
    url = f"http://{LOCAL}:{port}"
    with _running([*command, "--port", str(port)], {}, started) as (process, log):
        _wait_for(process, log, lambda: _healthy(url))
        yield ServerProcess(url, model, process, log)


def _healthy(url: str) -> bool:
    # This machine is not asked by a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def _running(
    command: list[str], variables: dict[str, str], started: Callable[[int], None] | None = None
) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """A process that is gone when the block is left, however it is left."""
    # What the caller has set for its own servers is not for this one.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ONEKV_")}
    kept |= {name: os.environ[name] for name in ("ONEKV_CACHE_DIR",) if name in os.environ}
    with tempfile.TemporaryDirectory() as folder:
        log, processes = Path(folder) / "log", list[subprocess.Popen[bytes]]()
        try:
            # Ctrl-C before it is known who has been started would leave it running.
            with log.open("wb") as output, uninterrupted():
                processes.append(subprocess.Popen(command, env=kept | variables, stdout=output, stderr=output))
            if started is not None:
                started(processes[0].pid)
            yield processes[0], log
        finally:
            for process in processes:
                _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for(process: "subprocess.Popen[bytes]", log: Path, ready: Callable[[], Any], start_s: float = START_S) -> Any:
    """What `ready` gives as soon as it gives something. Raises OneKVError if the process ends or takes too long."""
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline and process.poll() is None:
        if found := ready():
            return found
        time.sleep(0.1)
    raise OneKVError(f"a server did not start; its log ends with:\n{log.read_text()[-2000:]}")


# Requests


@dataclass(frozen=True)
class Answer:
    """A streamed answer, with seconds from the request to its first text and to its end."""

    text: str
    prompt_tokens: int
    generated: int
    first: float
    total: float


async def chat(
    client: "httpx2.AsyncClient",
    server: ServerProcess,
    messages: list[dict[str, str]],
    max_tokens: int,
    model: str | None = None,
) -> Answer:
    """The greedy answer to `messages`, streamed; of the server's `model`, unless another is named. Raises OneKVError if
    the server refuses or fails.
    """
    body = {
        "model": model or server.model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text: list[str] = []
    usage: dict[str, Any] = {}
    begin = time.perf_counter()
    first = None
    async with client.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=server.headers) as answer:
        if answer.status_code != 200:
            reason = (await answer.aread()).decode(errors="replace")
            raise OneKVError(f"{server.url} answered {answer.status_code}: {reason[:500]}")
        async for event in events(answer):
            if "error" in event:
                raise OneKVError(f"{server.url} failed: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                piece = choice.get("delta", {}).get("content")
                if piece:
                    first = first or time.perf_counter() - begin
                    text.append(piece)
    total = time.perf_counter() - begin
    if not usage:
        log = f"; its log ends with: {server.log.read_text()[-1000:]}" if server.log.exists() else ""
        raise OneKVError(f"{server.url} ended its answer early{log}")
    return Answer("".join(text), usage["prompt_tokens"], usage["completion_tokens"], first or total, total)


async def events(answer: "httpx2.Response") -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events; the last of OpenAI's, which is none, is left out."""
    async for line in answer.aiter_lines():
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data:"))


# Models, texts and figures


def save(folder: Path, model: Any, config: dict[str, Any], tokenizer: Any) -> None:
    """As mlx-lm reads it."""
    from mlx_lm.utils import save_config, save_model

    save_model(folder, model)
    save_config(config, folder / "config.json")
    tokenizer.save_pretrained(folder)


def words(random_: random.Random, tokens: int) -> str:
    """English sentences of about `tokens` tokens; the same for the same state of `random_`."""
    text: list[str] = []
    while len(text) < tokens:
        first, second = random_.choice(_ADJECTIVES), random_.choice(_ADJECTIVES)
        sentence = ["The", first, random_.choice(_NOUNS), random_.choice(_VERBS), "the", second, random_.choice(_NOUNS)]
        # The full stop is a token too.
        text += [*sentence[:-1], f"{sentence[-1]}.", ""]
    return " ".join(word for word in text[:tokens] if word)


def percentile(values: list[float], part: float) -> float:
    """The smallest of `values` that at least `part` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * part) - 1)]
