"""A server among clients that behave badly: polite ones get the right answers, and nothing is held afterwards.

What is sent depends on a seed, which is printed; ONEKV_SIM_SEED=N repeats it (the network's timing is not repeated).
"""

import asyncio
import logging
import os
import random
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from rough import KINDS, TIMEOUT_S, Polite, rough

from onekv.bench.soak import save_tiny
from onekv.llm import LLM
from onekv.server.backend import Backend
from onekv.server.connections import Limits
from onekv.server.serve import Server, make_server
from onekv.server.settings import ServerSettings

SEED = int(os.environ.get("ONEKV_SIM_SEED") or secrets.randbelow(2**32))
ROUGH, POLITE, QUESTIONS = 12, 4, 8
# Only a hang takes this long.
DEADLINE_S = 240
QUESTION = [(f"Tell me about number {index}. " * (1 + index % 4), 6 + index % 5) for index in range(QUESTIONS)]


@dataclass
class Running:
    backend: Backend
    server: Server
    port: int
    loop: asyncio.AbstractEventLoop

    def held(self) -> dict[str, Any]:
        """What the process has open, but for threads that are kept for the next time."""
        state = self.server.server_state
        threads = {thread.name for thread in threading.enumerate()}
        stats = self.backend.thread.call(lambda engine: self.backend.llm.stats()).result(60)
        return {
            "connections": len(state.connections),
            "requests": len(state.tasks),
            "tasks": len(asyncio.all_tasks(self.loop)),
            "threads": sorted(name for name in threads if not name.startswith(("asyncio_", "ThreadPool", "AnyIO"))),
            "sockets": sockets(self.port),
            "engine": (stats.running, stats.waiting, self.backend.thread.open_jobs),
        }


def sockets(port: int) -> int:
    """How many this process has that begin or end at `port`: others may be left from other tests."""
    own = set()
    for handle in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{handle}"))
    count = 0
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *rest = line.split()
        ends = {int(address.rpartition(":")[2], 16) for address in (local, remote)}
        count += port in ends and f"socket:[{rest[6]}]" in own
    return count


@pytest.fixture
def running(tmp_path: Any) -> Iterator[Running]:
    backend = Backend(
        save_tiny(tmp_path), max_waiting=16, kv_memory="34MiB", block_size=16, max_batch=4, progress=False
    )
    backend.start()
    settings = ServerSettings(max_connections=96, client_timeout=TIMEOUT_S, grace=0)
    server = make_server(backend, settings, Limits(settings.max_connections, settings.client_timeout))
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve([listener]),), name="server")
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Running(backend, server, listener.getsockname()[1], loop)
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


async def polite(port: int) -> tuple[list[str], Polite]:
    client = Polite(port)
    return [await client.ask(*question) for question in QUESTION], client


async def storm(port: int) -> tuple[list[tuple[list[str], Polite]], dict[str, int]]:
    over, seen = asyncio.Event(), {}
    generators = [random.Random(SEED + index) for index in range(ROUGH)]
    bad = [asyncio.create_task(rough(port, generator, over, seen)) for generator in generators]
    try:
        results = await asyncio.wait_for(asyncio.gather(*(polite(port) for _ in range(POLITE))), DEADLINE_S)
    finally:
        over.set()
        await asyncio.gather(*bad)
    return results, seen


def test_polite_clients_are_served_and_nothing_is_held(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    print(f"ONEKV_SIM_SEED={SEED}")
    caplog.set_level(logging.INFO)
    expected, alone = asyncio.run(polite(running.port))
    assert len(set(expected)) > QUESTIONS // 2
    before = settled(running, None)
    assert before["sockets"] >= 1, "the server's own is there"
    results, seen = asyncio.run(storm(running.port))
    latencies = sorted(latency for _, client in results for latency in client.latencies)
    print(f"rough clients: {sum(seen.values())} of {len(seen)} kinds; refusals: {[c.refusals for _, c in results]}")
    print(
        f"latency alone: median {statistics.median(alone.latencies) * 1000:.0f} ms; in the storm: median "
        f"{statistics.median(latencies) * 1000:.0f} ms, p99 {latencies[int(len(latencies) * 0.99)] * 1000:.0f} ms, "
        f"of {len(latencies)}"
    )
    for answers, _ in results:
        assert answers == expected
    assert len(seen) > len(KINDS) // 2
    assert settled(running, before) == before
    found = httpx.get(f"http://127.0.0.1:{running.port}/admin/integrity", timeout=60).json()
    assert found["ok"]
    running.backend.thread.call(lambda engine: LLM.check_integrity(running.backend.llm)).result(60)
    bad = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert bad == [], [record.getMessage() for record in bad]
    assert sum("--max-connections" in record.getMessage() for record in caplog.records) <= 2


def settled(running: Running, wanted: dict[str, Any] | None) -> dict[str, Any]:
    """What is held once nothing changes any more, or as soon as it is `wanted`."""
    for _ in range(300):
        held = running.held()
        idle = held["connections"] == held["requests"] == sum(held["engine"]) == 0
        if held == wanted or (wanted is None and idle):
            return held
        time.sleep(0.1)
    return held
