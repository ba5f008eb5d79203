"""For tests of the remote tier: real stores, and LLMs over them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from architectures import build
from onekv import LLM
from onekv.tiers.base import TierStats

BLOCK = 16
SECRET = "a secret of some length"
# Seconds, for what must not wait for ever.
PATIENCE = 60
# Enough for a machine that is busy with other things.
SLOW = "60s"


def server_binary() -> str:
    """A Valkey or Redis server; without one the test is skipped."""
    for name in ("valkey-server", "redis-server"):
        if (path := shutil.which(name)) is not None:
            return path
    pytest.skip("there is no valkey-server or redis-server: apt-get install valkey-server, or redis-server")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Valkey:
    """A server of its own, in memory alone, that can be killed, paused and started again."""

    def __init__(self, folder: Path, *options: str, password: str | None = None) -> None:
        self.binary, self.port, self._folder, self._password = server_binary(), free_port(), folder, password
        self._options = [*options, *(["--requirepass", password] if password else [])]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def url(self, timeout: str = SLOW, more: str = "") -> str:
        at = f":{self._password}@" if self._password else ""
        return f"valkey://{at}127.0.0.1:{self.port}/0?timeout={timeout}{more}"

    def start(self) -> None:
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        keep = ["--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([self.binary, *where, *keep, *self._options], stdout=subprocess.DEVNULL)
        until(lambda: self.client().ping())

    def client(self, password: str | None = None) -> Any:
        import redis

        return redis.Redis(port=self.port, password=password or self._password, socket_timeout=5)

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def names(self) -> list[bytes]:
        """Of all blocks."""
        return sorted(name for name in self.client().keys("*") if name.endswith(b".safetensors"))


class Cluster(Valkey):
    """A cluster of one node."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder, "--cluster-enabled", "yes", "--cluster-port", str(free_port()), *options)
        self.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        self.wait()

    def url(self, timeout: str = SLOW, more: str = "") -> str:
        return super().url(timeout, f"{more}&cluster=on")

    def wait(self) -> None:
        """Until it answers for its slots."""
        until(lambda: b"cluster_state:ok" in self.client().execute_command("CLUSTER", "INFO"))


class SlowLink:
    """A proxy in front of a server on this machine: all that a client sends arrives `seconds` later."""

    def __init__(self, port: int, seconds: float = 0.0) -> None:
        self.seconds, self._to = seconds, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as server:
            back = threading.Thread(target=self._copy, args=(server, client), daemon=True)
            back.start()
            self._copy(client, server, slow=True)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket, slow: bool = False) -> None:
        with suppress(OSError):
            while data := source.recv(2**20):
                if slow:
                    time.sleep(self.seconds)
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # A thread that waits for a connection does not see that the socket was closed.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def until(what: Callable[[], object]) -> None:
    """Wait until it is so."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if what():
                return
        except Exception:
            if time.monotonic() > end:
                raise
        assert time.monotonic() < end, "it does not become true"
        time.sleep(0.01)


@contextmanager
def object_store() -> Iterator[tuple[dict[str, str], Any]]:
    """An S3 server with a bucket, kv-blocks: the variables by which it is found, and a client of it."""
    pytest.importorskip("moto.server", reason="there is no S3 server: pip install 'moto[s3]' flask flask-cors")
    import boto3

    where = f"http://127.0.0.1:{(port := free_port())}"
    known = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", "AWS_ENDPOINT": where}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = boto3.client(
            "s3", endpoint_url=where, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
        )
        until(lambda: client.create_bucket(Bucket="kv-blocks"))
        yield known, client
    finally:
        server.kill()
        server.wait()


def llm_of(model: str | nn.Module = "llama", url: str | None = None, **settings: object) -> LLM:
    values: dict[str, object] = {"kv_memory": "8MB", "block_size": BLOCK, "max_batch": 2, "prefill_chunk": 48}
    if url is not None:
        values |= {"remote_tier": url, "remote_write": "all", "tier_secret": SECRET}
    return LLM(
        build(model) if isinstance(model, str) else model, progress=False, check_integrity=True, **(values | settings)
    )


def ask(llm: LLM, prompt: list[int], count: int = 6) -> tuple[list[int], int]:
    """What it answers, and how many tokens were cached."""
    completion = llm.generate(prompt, count, temperature=0.0)
    return list(completion.tokens), completion.cached_tokens


def prompt_of(seed: int, length: int = 150) -> list[int]:
    return mx.random.randint(1, 90, (length,), key=mx.random.key(seed)).tolist()


def remote(llm: LLM) -> TierStats:
    (stats,) = [tier for tier in llm.stats().tiers if tier.name == "remote"]
    return stats


def flush(llm: LLM) -> None:
    """All that is wanted is in the store, or lost."""
    while llm.engine.prefix.unshared:
        llm.engine.prefix.share(1.0)
        time.sleep(0.01)
    for tier in llm.engine.prefix.tiers:
        tier.flush()


def reading_is_worth_it(llm: LLM) -> None:
    """These models compute faster than anything is read: tell the tiers otherwise."""
    for _ in range(50):
        llm.engine.prefix.computed(1, 60.0)
