"""Clients that behave badly, one coroutine each, on raw sockets; what they do depends on their random generator."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

PATH = "/v1/completions"
# How long the server waits for a request.
TIMEOUT_S = 3


def request(body: Any, path: str = PATH, *headers: str, method: str = "POST") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


def completion(prompt: str, max_tokens: int, stream: bool = False) -> dict[str, Any]:
    return {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}


@dataclass
class Client:
    """A connection that is always closed."""

    port: int
    rng: random.Random

    async def __aenter__(self) -> "Client":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.rng.random() < 0.5:
            self.writer.transport.abort()
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def pause(self, most: float = 0.1) -> None:
        await asyncio.sleep(self.rng.random() * most)


async def stops_reading(client: Client) -> None:
    await client.send(request(completion("stop reading", client.rng.randrange(20, 200), stream=True)))
    await client.reader.read(client.rng.randrange(1, 400))
    await client.pause(0.5)


async def half_a_body(client: Client) -> None:
    whole = request(completion("half " * 50, 4))
    await client.send(whole[: client.rng.randrange(1, len(whole))])
    await client.pause(0.5)


async def closes_anywhere(client: Client) -> None:
    await client.send(request(completion("close", client.rng.randrange(1, 60), stream=client.rng.random() < 0.5)))
    await client.pause()


async def one_byte_at_a_time(client: Client) -> None:
    for byte in request(completion("slow", 2))[: client.rng.randrange(5, 60)]:
        await client.send(bytes([byte]))
        await client.pause(0.02)


async def large_head(client: Client) -> None:
    await client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * client.rng.randrange(10_000, 200_000))
    await client.reader.read()


async def pipelined(client: Client) -> None:
    parts = [request(completion("one", 3)), request({}, "/nowhere"), request(b"", "/health", method="GET")]
    await client.send(b"".join(client.rng.choice(parts) for _ in range(client.rng.randrange(2, 12))))
    await client.reader.read(client.rng.randrange(1, 3000))


async def garbage(client: Client) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    await client.send(
        client.rng.choice([b"", head]) + client.rng.randbytes(client.rng.randrange(1, 3000)) + b"\r\n\r\n"
    )
    await client.pause()


async def wrong_bodies(client: Client) -> None:
    bodies = [b"[" * 2_000_000, b"[" + b"[]," * 500_000 + b"1]", b"{", b'"' + b"\\" * 9, b"\xff\xfe", b"[1,2", b"{}"]
    await client.send(request(client.rng.choice(bodies), client.rng.choice([PATH, "/v1/messages", "/v1/responses"])))
    await client.reader.read(1000)


async def many_connections(client: Client) -> None:
    opened = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", client.port) for _ in range(client.rng.randrange(20, 120))),
        return_exceptions=True,
    )
    await client.pause(0.3)
    for each in opened:
        if not isinstance(each, BaseException):
            each[1].transport.abort()


async def many_requests(client: Client) -> None:
    async def one() -> None:
        async with Client(client.port, client.rng) as other:
            await other.send(request(completion("many", 4)))
            await other.pause(0.5)

    await asyncio.gather(*(one() for _ in range(client.rng.randrange(5, 30))), return_exceptions=True)


KINDS: list[Callable[[Client], Awaitable[None]]] = [
    stops_reading,
    half_a_body,
    closes_anywhere,
    one_byte_at_a_time,
    large_head,
    pipelined,
    garbage,
    wrong_bodies,
    many_connections,
    many_requests,
]


@dataclass
class Polite:
    """Clients that take no for an answer: after 429 or 503 they come back later."""

    port: int
    latencies: list[float] = field(default_factory=list)
    refusals: int = 0

    async def ask(self, prompt: str, max_tokens: int) -> str:
        """The answer's text; its latency is that of the try that was let in."""
        while True:
            began = time.perf_counter()
            status, body = await self._once(request(completion(prompt, max_tokens), PATH, "Connection: close"))
            if status == 200:
                self.latencies.append(time.perf_counter() - began)
                text: str = json.loads(body)["choices"][0]["text"]
                return text
            assert status in (0, 429, 503), (status, body)
            self.refusals += 1
            await asyncio.sleep(0.05)

    async def _once(self, data: bytes) -> tuple[int, bytes]:
        """0 for a connection that was closed without a word, as one that is refused in a flood may be, or where this
        client was too slow, as on a busy machine."""
        began = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(data)
                slow = time.perf_counter() - began > TIMEOUT_S
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
        except ConnectionError:
            return 0, b""
        status = int(head.split()[1]) if head else 0
        return (0, b"") if status == 408 and slow else (status, body)


async def rough(port: int, rng: random.Random, until: asyncio.Event, seen: dict[str, int]) -> None:
    """One bad client after the other."""
    while not until.is_set():
        kind = rng.choice(KINDS)
        seen[kind.__name__] = seen.get(kind.__name__, 0) + 1
        # Whatever the server does to them is what they are for.
        with suppress(OSError, asyncio.TimeoutError):
            async with Client(port, rng) as client:
                await asyncio.wait_for(kind(client), 5)
