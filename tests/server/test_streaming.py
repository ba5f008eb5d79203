"""Streams that are silent for a while, and pages that may call the server."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.testclient import TestClient

from onekv.server import streaming
from onekv.server.app import create_app
from onekv.server.backend import Backend
from onekv.server.settings import ServerSettings


def test_a_comment_is_sent_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.02)
    go_on = asyncio.Event()

    async def events() -> AsyncIterator[str]:
        await go_on.wait()
        yield "data: 1\n\n"
        yield "data: 2\n\n"

    async def collect() -> list[str]:
        seen = []
        async for event in streaming._with_keep_alive(events()):
            seen.append(event)
            if seen.count(": keep-alive\n\n") == 2:
                go_on.set()
        return seen

    seen = asyncio.run(collect())
    assert seen[:2] == [": keep-alive\n\n"] * 2
    assert seen[-2:] == ["data: 1\n\n", "data: 2\n\n"]


@pytest.mark.parametrize(("allowed", "granted"), [("https://mine.example", True), (None, False)])
def test_pages_of_other_origins_need_to_be_named(allowed: str | None, granted: bool) -> None:
    # Not started: such a question is answered before anything else is looked at.
    client = TestClient(create_app(Backend(), ServerSettings(cors_origin=allowed)))
    asked = {"Origin": "https://mine.example", "Access-Control-Request-Method": "POST"}
    answer = client.options("/v1/chat/completions", headers=asked)
    assert (answer.status_code == 200) == granted
    assert answer.headers.get("access-control-allow-origin") == ("https://mine.example" if granted else None)
