"""A store for `remote`: a Valkey or Redis server on this machine, without persistence, which can be made to fail."""

import asyncio
import multiprocessing
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from ..errors import SettingError
from ..tiers.remote.fetches import FETCHERS

# Seconds: the delay of a slow store, and the limit for operations that must not take forever.
DELAY, PATIENCE = 2.0, 60.0


class Store:
    def __enter__(self) -> "Store":
        found = [path for name in ("valkey-server", "redis-server") if (path := shutil.which(name)) is not None]
        if not found:
            raise SettingError("there is no valkey-server or redis-server here; apt-get install redis-server")
        import redis

        self._folder = tempfile.TemporaryDirectory(prefix="onekv-bench-")
        self._binary, self.port = found[0], _free_port()
        self.url = f"valkey://127.0.0.1:{self.port}/0"
        self.client: Any = redis.Redis(port=self.port)
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.become("killed")
        self._folder.cleanup()

    def _start(self) -> None:
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._folder.name]
        command = [self._binary, *where, "--save", "", "--appendonly", "no"]
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _until(self.client.ping)

    def become(self, state: str) -> None:
        """Stopped, killed, or in order; if it is slow, that is not its doing."""
        if self._process is None and state == "up":
            self._start()
        elif self._process is not None:
            self._process.send_signal(signal.SIGSTOP if state == "stopped" else signal.SIGCONT)
            if state == "killed":
                self._process.kill()
                self._process.wait()
                self._process = None

    def get(self) -> float:
        """Seconds to get all blocks, by as many threads as the tier has, each as the tier does it."""
        names = [name for name in self.client.keys("onekv/*") if name.endswith(b".safetensors")]
        begin = time.perf_counter()
        with ThreadPoolExecutor(FETCHERS) as threads:
            list(threads.map(lambda name: len(self.client.getrange(name, 0, -1)), names))
        return time.perf_counter() - begin

    @contextmanager
    def slowed(self) -> Iterator[str]:
        """Its URL where every call takes `DELAY` seconds longer."""
        port = _free_port()
        process = multiprocessing.get_context("spawn").Process(target=_delay, args=(port, self.port), daemon=True)
        process.start()
        try:
            _until(lambda: _connect(port))
            yield f"valkey://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.join()


def _delay(port: int, to: int) -> None:
    """A process: what comes at `port` goes to `to`, `DELAY` seconds later; answers come back at once."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
        while data := await reader.read(2**20):
            await asyncio.sleep(seconds)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", to)
        await asyncio.gather(copy(reader, back, DELAY), copy(there, writer, 0.0), return_exceptions=True)

    async def serve() -> None:
        await (await asyncio.start_server(connect, "127.0.0.1", port)).serve_forever()

    asyncio.run(serve())


def _connect(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)):
        pass


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _until(works: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            works()
            return
        except Exception:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)
