"""The door for a new endpoint: one that no file of the server knows, built on the base of all others; a real server."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx2 as httpx
import pytest
from fastapi import APIRouter, Request
from starlette.responses import Response

from onekv.bench.soak import save_tiny
from onekv.errors import OneKVError
from onekv.server.answer import Answer, AnswerResponse
from onekv.server.backend import Backend
from onekv.server.body import Body
from onekv.server.call import ChatCall
from onekv.server.chat import prepare
from onekv.server.connections import Limits
from onekv.server.deltas import Finish, TextDelta, TypedDelta
from onekv.server.errors import openai_body
from onekv.server.serve import make_server
from onekv.server.settings import ServerSettings

router = APIRouter()


# While it is not set, the engine does not go on.
go_on = threading.Event()


@router.post("/v1/hold")
async def hold(request: Request) -> Response:
    """Stop the engine's thread, as a very long step would."""
    request.app.state.backend.thread.call(lambda engine: go_on.wait(60))
    return Response()


class EchoBody(Body):
    text: str
    max_tokens: int = 8
    n: int = 1
    stream: bool = True


@router.post("/v1/echo-tokens")
async def echo_tokens(body: EchoBody, request: Request) -> Response:
    call = ChatCall([{"role": "user", "content": body.text}], max_tokens=body.max_tokens, n=body.n)
    return AnswerResponse(request, EchoAnswer(), partial(prepare, request.app.state.backend, call), body.stream)


class EchoAnswer(Answer):
    """A line of JSON for each delta."""

    media_type = "application/x-ndjson"
    keep_alive = "\n"

    def add(self, index: int, delta: TypedDelta) -> Iterator[str]:
        yield json.dumps(_line(index, delta)) + "\n"

    def end(self) -> Iterator[str]:
        yield from ()

    def fail(self, error: OneKVError) -> Iterator[str]:
        yield json.dumps(openai_body(error)) + "\n"

    def whole(self, said: list[list[TypedDelta]]) -> dict[str, Any]:
        return {"lines": [_line(index, delta) for index, deltas in enumerate(said) for delta in deltas]}


def _line(index: int, delta: TypedDelta) -> dict[str, Any]:
    if isinstance(delta, Finish):
        return {"choice": index, "finish": delta.reason, "generated": delta.generated}
    return {"choice": index, "tokens": delta.tokens if isinstance(delta, TextDelta) else [], "call": str(delta)}


@pytest.fixture
def client(tmp_path: Any) -> Iterator[httpx.Client]:
    # Without guesses, or an answer that is given again comes in fewer pieces.
    settings = {"kv_memory": "34MiB", "block_size": 16, "max_batch": 4, "speculate": "off"}
    backend = Backend(save_tiny(tmp_path), progress=False, **settings)
    backend.start()
    server = make_server(backend, ServerSettings(grace=0), Limits(None, 60), [router])
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
        yield client
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


def test_an_endpoint_of_its_own(client: httpx.Client) -> None:
    said = {"text": "Tell me a story.", "n": 2}
    answer = client.post("/v1/echo-tokens", json=said)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines() if line]
    for choice in (0, 1):
        *texts, last = [line for line in lines if line["choice"] == choice]
        assert last == {"choice": choice, "finish": "length", "generated": 8}
        assert 0 < sum(len(line["tokens"]) for line in texts) <= 8
    whole = client.post("/v1/echo-tokens", json={**said, "stream": False}).json()["lines"]
    assert sorted(map(str, whole)) == sorted(map(str, lines)), "in one piece it is the same"


def test_it_has_what_all_endpoints_have(client: httpx.Client) -> None:
    assert client.post("/v1/echo-tokens", json={"text": 3}).json()["error"]["param"] == "text"
    assert client.post("/v1/echo-tokens", json={"text": "x", "max_tokens": 10**6}).status_code == 400
    with client.stream("POST", "/v1/echo-tokens", json={"text": "Go on.", "max_tokens": 200}) as answer:
        next(answer.iter_lines())
    # The client is gone, and so is its request.
    while client.get("/admin/cache").json()["requests"] != {"waiting": 0, "running": 0}:
        time.sleep(0.05)
    assert client.get("/admin/integrity").json()["ok"]


def test_metrics_do_not_wait_for_a_long_step(client: httpx.Client) -> None:
    go_on.clear()
    try:
        client.post("/v1/hold")
        figures = client.get("/metrics").text
        assert not go_on.is_set()
        assert "onekv_requests_running 0.0" in figures and "onekv_kv_pool_bytes{" in figures
    finally:
        go_on.set()
    assert client.get("/admin/integrity").json()["ok"]
