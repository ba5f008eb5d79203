"""Why a miss: the client and the log are told which words did it, and in which message; never another key's."""

import json
import logging
import shlex
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest
from starlette.testclient import TestClient
from test_admin import call, generate, probe

from onekv.server.app import create_app
from onekv.server.backend import Backend
from onekv.server.guard import salts_of
from onekv.server.hygiene import OWN, Hygiene
from onekv.server.settings import ServerSettings
from onekv.server.turns import Said

RULES = "You are the guide of a small museum of clocks. Answer in one short sentence and never make up a date. " * 5
ASK = {"x-onekv-explain": "1"}


def chat(clock: str, *more: str) -> list[dict[str, str]]:
    roles = ("assistant", "user")
    said = [{"role": roles[index % 2], "content": text} for index, text in enumerate(more)]
    system = f"The visitors' clock shows {clock}. {RULES}"
    return [{"role": "system", "content": system}, {"role": "user", "content": "Good morning!"}, *said]


@pytest.fixture
def empty(server: Any) -> Any:
    """The server, with nothing cached."""
    call(server, "DELETE", "/admin/cache").raise_for_status()
    return server


def complete(server: Any, messages: Any, key: int = 0, stream: bool = False) -> dict[str, Any]:
    """What the header says that the client asked for."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys[key], max_retries=0)
    made = client.chat.completions.with_raw_response.create(
        model="default", max_tokens=2, messages=messages, stream=stream, extra_headers=ASK
    )
    told = made.headers["x-onekv-cache"]
    assert told.isascii() and len(told) < 2000
    parsed = made.parse()
    if stream:
        assert list(parsed), "the stream goes on as ever"
    said: dict[str, Any] = json.loads(told)
    return said


@pytest.mark.parametrize("stream", [False, True])
def test_the_words_that_did_it_are_told(empty: Any, stream: bool) -> None:
    first = complete(empty, chat("noon"), stream=stream)
    assert (first["cached"], first["reason"], first["leaves"]) == (0, "never seen", None)
    second = complete(empty, chat("midnight"), stream=stream)
    leaves = second["leaves"]
    assert leaves["position"] == second["cached"] > 3
    assert leaves["message"] == {"index": 0, "role": "system"}
    assert leaves["before"].endswith("clock shows")
    assert leaves["cached"].startswith("noon. You are") and leaves["came"].startswith("midnight. You are")
    assert leaves["again"] > 100


def test_the_header_comes_only_where_it_was_asked_for(empty: Any) -> None:
    body = {"model": "default", "max_tokens": 2, "messages": chat("noon")}
    headers = {"x-api-key": empty.keys[0]}
    for asked in ({}, {"x-onekv-explain": "0"}):
        answer = httpx.post(f"{empty.url}/v1/chat/completions", json=body, headers=headers | asked, timeout=60)
        assert answer.status_code == 200 and "x-onekv-cache" not in answer.headers
    answer = httpx.post(f"{empty.url}/v1/messages", json=body | {"messages": chat("noon")[1:]}, headers=headers | ASK)
    assert json.loads(answer.headers["x-onekv-cache"])["tokens"] > 0
    answer = httpx.post(f"{empty.url}/v1/completions", json=body | {"prompt": "Once"}, headers=headers | ASK)
    assert json.loads(answer.headers["x-onekv-cache"])["tokens"] == 1


def test_a_conversation_that_goes_on_has_nothing_to_explain(empty: Any) -> None:
    client = openai.OpenAI(base_url=f"{empty.url}/v1", api_key=empty.keys[0], max_retries=0)
    messages: Any = chat("noon")
    answer = client.chat.completions.create(model="default", max_tokens=8, messages=messages, temperature=0)
    said = answer.choices[0].message.content or ""
    second = complete(empty, [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}])
    assert second["cached"] >= 100
    assert second["leaves"] is None or second["leaves"]["again"] == 0


def test_the_message_is_found_in_a_long_conversation(empty: Any) -> None:
    turns = [f"This is what was said in turn {number}, at some length, in some words." for number in range(8)]
    complete(empty, chat("noon", *turns))
    for index in (0, 3, 5):
        changed = [*turns[:index], "Something else, said instead.", *turns[index + 1 :]]
        leaves = complete(empty, chat("noon", *changed))["leaves"]
        assert leaves["message"] == {"index": index + 2, "role": ("assistant", "user")[index % 2]}
        assert leaves["came"].startswith("Something else, said instead.")
        assert leaves["cached"].startswith("This is what was said in turn")
    assert probe(empty, {"messages": chat("noon", *changed)})["leaves"] is None


def test_probe_says_the_same(empty: Any) -> None:
    complete(empty, chat("noon"))
    found = probe(empty, {"messages": chat("midnight")})
    told = complete(empty, chat("midnight"))
    assert found == told
    prompt = probe(empty, {"prompt": "Something that is no chat at all"})["leaves"]
    assert (prompt["position"], prompt["message"]) == (0, None)
    assert prompt["came"].startswith("Something that is no chat")


def test_probe_takes_what_a_chat_takes(backend: Backend) -> None:
    settings, headers = ServerSettings(api_key="a-key-that-is-long"), {"x-api-key": "a-key-that-is-long"}
    client = TestClient(create_app(backend, settings), base_url="http://localhost", headers=headers)
    client.delete("/admin/cache").raise_for_status()
    function = {"name": "look", "description": "Looks at a clock", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}, {"type": "web_search"}]
    asked = {"messages": chat("noon"), "chat_template_kwargs": {"mood": "merry"}, "reasoning_effort": "low"}
    for given in ({"tools": tools}, {"functions": [function]}, {"tools": tools, "tool_choice": "none"}):
        body: dict[str, Any] = {"model": "default", "max_tokens": 2, **asked, **given}
        used = client.post("/v1/chat/completions", json=body).json()["usage"]
        found = client.post("/admin/cache/probe", json={**asked, **given})
        assert found.status_code == 200, found.text
        assert found.json()["tokens"] == used["prompt_tokens"] and found.json()["cached"] == used["prompt_tokens"] - 1
    refused = client.post("/admin/cache/probe", json={**asked, "chat_template_kwargs": {"tools": []}})
    assert refused.status_code == 400
    # Turns are the tokens that were generated, as they are in a request.
    odd = [token for letter in "It is late. " for token in backend.tokenizer.encode(letter, add_special_tokens=False)]
    backend.turns.remember(salts_of(["a-key-that-is-long"])[0], chat("noon"), Said("It is late."), odd)
    talk = chat("noon", "It is late.", "Thanks")
    used = client.post("/v1/chat/completions", json={"model": "default", "max_tokens": 2, "messages": talk}).json()
    assert client.post("/admin/cache/probe", json={"messages": talk}).json()["tokens"] == used["usage"]["prompt_tokens"]


def test_nothing_of_another_key_is_told(empty: Any) -> None:
    """Neither its words nor that there are any, in header and probe, whatever both have in common."""
    secret = chat("the secret hour of the first key")
    complete(empty, secret)
    generate(empty, "Hello", key=0)
    mine = chat("midnight")
    for told in (probe(empty, {"messages": mine}, key=1), complete(empty, mine, key=1)):
        assert (told["cached"], told["reason"], told["leaves"]) == (0, "never seen", None)
    # With something of its own, that is what it is compared with.
    told = complete(empty, chat("three"), key=1)
    assert told["leaves"]["cached"].startswith("midnight")
    assert "secret" not in json.dumps(told)
    assert complete(empty, chat("three"), key=0)["leaves"]["cached"].startswith("the secret hour")


def test_text_of_all_kinds_fits_into_a_header(empty: Any) -> None:
    complete(empty, chat("noon"))
    told = complete(empty, chat("\u5348\u524d \U0001f570\ufe0f\r\nX-Other: 1\t\x1b[31m" + "\u00e9" * 500))
    assert set(told) == {"tokens", "cached", "cached_in_memory", "reason", "leaves"}
    assert all(len(told["leaves"][side]) <= 60 for side in ("before", "cached", "came"))
    assert told["leaves"]["came"].isprintable()


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    backend = Backend(kv_memory="64MiB", progress=False)
    backend.start()
    yield backend
    backend.stop(0)


@pytest.mark.parametrize("words", [True, False])
def test_the_line_of_a_request_says_what_was_lost_and_why(
    backend: Backend, words: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backend.log_words = words
    # Not entered: its end would stop the backend.
    client = TestClient(create_app(backend, ServerSettings()), base_url="http://localhost")
    client.delete("/admin/cache").raise_for_status()
    said = [{"role": "user", "content": "Good morning!"}]

    def lines(clock: str, stream: bool) -> dict[str, str | None]:
        caplog.clear()
        system = f"{words} clock shows {clock}. {RULES}"
        body = {"model": "default", "max_tokens": 2, "messages": said, "system": system, "stream": stream}
        answer = client.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("onekv")]
        found = dict(part.split("=", 1) for part in shlex.split(line)[3:])
        return {name: found.get(name) for name in ("lost", "message", "before", "had", "came")}

    nothing = dict.fromkeys(("lost", "message", "before", "had", "came"))
    with caplog.at_level(logging.INFO, "onekv"):
        assert lines("noon", False) == nothing
        assert lines("noon", True) == nothing
        before = "noon"
        for clock, stream in (('mid"night', False), ("three", True)):
            line = lines(clock, stream)
            assert int(line["lost"] or 0) > 100 and line["message"] == "0(system)"
            if words:
                assert (line["before"] or "").endswith("clock shows")
                assert (line["had"] or "").startswith(f"{before}. You") and (line["came"] or "").startswith(clock)
            else:
                assert line["before"] is line["had"] is line["came"] is None
            before = clock
        assert lines("three", False) == nothing
        # Another conversation of the same kind has lost nothing, and leaves with its first words.
        said[0]["content"] = "How old is the oldest clock that you have here?"
        line = lines("three", False)
        assert (line["lost"], line["message"]) == (None, "1(user)")
        if words:
            assert (line["had"] or "").startswith("Good morning!")
            assert (line["came"] or "").startswith("How old is the oldest clock")
        else:
            assert line["before"] is line["had"] is line["came"] is None


def test_a_clock_that_is_rounded_costs_nothing(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "hygiene", Hygiene(OWN.values()))
    client = TestClient(create_app(backend, ServerSettings()), base_url="http://localhost")

    def usage(clock: str) -> dict[str, int]:
        system = {"role": "system", "content": f"Current time: 2026-11-16T{clock}Z. {RULES}"}
        body = {"model": "default", "max_tokens": 2, "messages": [system, {"role": "user", "content": "Hello"}]}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()["usage"]
        return {"prompt": said["prompt_tokens"], "cached": said["prompt_tokens_details"]["cached_tokens"]}

    usage("08:00:01")
    second = usage("19:30:00.123")
    assert second["cached"] == second["prompt"] - 1
    assert backend.metrics.hygiene()["clocks"] == 2


def test_anthropic_clients_can_ask(empty: Any) -> None:
    client = anthropic.Anthropic(base_url=empty.url, api_key=empty.keys[0], max_retries=0)
    with client.messages.with_streaming_response.create(
        model="default",
        max_tokens=2,
        system=RULES,
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
        extra_headers=ASK,
    ) as answer:
        assert json.loads(answer.headers["x-onekv-cache"])["reason"] == "never seen"
        assert "message_stop" in answer.read().decode()
