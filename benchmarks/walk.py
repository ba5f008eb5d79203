"""The way of one request: which of OneKV's functions run, in how many files, from HTTP to the kernel.

    python benchmarks/walk.py            counts
    python benchmarks/walk.py --list     and names

Two requests of a chat are followed through a real server in this process: one that finds all but its last message in
RAM (`hot`), and one that finds it on disk after a restart (`disk`).
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2 as httpx

from onekv.server.backend import Backend
from onekv.server.connections import Limits
from onekv.server.serve import _listen, make_server
from onekv.server.settings import ServerSettings

SOURCE = str(Path(sys.modules["onekv.server.backend"].__file__ or "").parents[1])
LONG = " ".join(f"Item {i}: the {i}th river of the list flows to the sea." for i in range(60))


class Walk:
    """Counts what runs while it is on, in all threads that start after it was made."""

    def __init__(self) -> None:
        self.on = False
        self.functions: dict[tuple[str, str], int] = {}
        self.deepest = 0
        threading.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not self.on or event != "call" or not code.co_filename.startswith(SOURCE) or code.co_name.startswith("<"):
            return
        name = (frame.f_code.co_filename[len(SOURCE) + 1 :], frame.f_code.co_qualname)
        self.functions[name] = self.functions.get(name, 0) + 1
        depth, outer = 0, frame
        while outer is not None:
            depth += outer.f_code.co_filename.startswith(SOURCE)
            outer = outer.f_back  # type: ignore[assignment]
        self.deepest = max(self.deepest, depth)

    @contextmanager
    def follow(self) -> Iterator[None]:
        self.functions, self.deepest, self.on = {}, 0, True
        try:
            yield
        finally:
            self.on = False

    def report(self, what: str, listed: bool) -> None:
        files = {file for file, _ in self.functions}
        calls = sum(self.functions.values())
        print(
            f"{what}: {len(self.functions)} functions in {len(files)} files, {calls} calls, "
            f"{self.deepest} of them inside each other at most"
        )
        for file, name in sorted(self.functions) if listed else ():
            print(f"    {file}: {name} ({self.functions[file, name]})")


@contextmanager
def served(folder: str) -> Iterator[str]:
    settings = ServerSettings.resolve({"port": 0, "log_level": "error"})
    listener = _listen(settings)
    backend = Backend("smollm2-135m", disk_cache=folder, kv_memory="200MB")
    backend.start()
    listener.listen()
    server = make_server(backend, settings, Limits(settings.max_connections, settings.client_timeout))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def ask(url: str, messages: list[dict[str, str]]) -> str:
    body = {"model": "default", "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the functions, with their numbers of calls")
    listed = parser.parse_args().list
    walk = Walk()
    messages = [{"role": "user", "content": LONG}]
    with tempfile.TemporaryDirectory() as folder:
        for what in ("hot", "disk"):
            with served(folder) as url:
                if what == "hot":
                    messages.append({"role": "assistant", "content": ask(url, messages)})
                messages.append({"role": "user", "content": "Which river is the last?"})
                with walk.follow():
                    answer = ask(url, messages)
                walk.report(what, listed)
                messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
