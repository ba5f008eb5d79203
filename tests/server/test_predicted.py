"""Speculation as clients and operators see it: OpenAI's predicted outputs, usage, metrics and the log agree."""

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage
from test_metrics import scrape

from conftest import Server, start_server, stop_server
from onekv.engine import Delta, End, Request
from onekv.server.journal import Entry
from onekv.server.metrics import Metrics

SAID: list[Any] = [{"role": "user", "content": "What is the capital of France? Tell me a little about it."}]


@pytest.fixture
def own() -> Iterator[Server]:
    """A new server that nobody else asks. It has not learned what steps cost, so its first request is guessed at."""
    server = start_server()
    yield server
    stop_server(server)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys[0], max_retries=0, timeout=120)


def guessed(usage: CompletionUsage | None) -> tuple[int, int]:
    """Tokens that were accepted and rejected."""
    assert usage is not None and usage.completion_tokens_details is not None
    details = usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted is not None and rejected is not None and accepted <= usage.completion_tokens
    return accepted, rejected


def test_a_prediction_is_accepted_and_changes_nothing(server: Server, own: Server):
    plain = client_of(server).chat.completions.create(model="default", messages=SAID, max_tokens=32, temperature=0)
    expected = plain.choices[0].message.content
    assert expected
    told = client_of(own).chat.completions.create(
        model="default",
        messages=SAID,
        max_tokens=32,
        temperature=0,
        prediction={"type": "content", "content": expected},
    )
    assert told.choices[0].message.content == expected
    assert told.usage is not None and plain.usage is not None
    assert told.usage.completion_tokens == plain.usage.completion_tokens
    assert guessed(told.usage)[0] > 0


@pytest.mark.parametrize(
    "content",
    [
        "Nothing of this will be said.",
        [{"type": "text", "text": "Bonjour, "}, {"type": "text", "text": "welcome"}],
        "<|im_end|>",
        "",
    ],
)
def test_any_prediction_is_taken_and_a_stream_counts_it(server: Server, content: Any):
    client = client_of(server)
    plain = client.chat.completions.create(model="default", messages=SAID, max_tokens=12, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="default",
            messages=SAID,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            prediction={"type": "content", "content": content},
        )
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == plain.choices[0].message.content
    guessed(chunks[-1].usage)


def test_what_is_no_prediction_is_refused(server: Server):
    body = {"model": "default", "messages": SAID, "prediction": {"type": "image", "content": "x"}}
    with pytest.raises(openai.BadRequestError, match="prediction"):
        client_of(server).post("/chat/completions", body=body, cast_to=object)


def test_usage_metrics_and_log_agree(own: Server):
    client, before = client_of(own), scrape(own)
    counts = []
    for _ in range(2):
        answer = client.completions.create(
            model="default", prompt="One two three four one two three four one two", max_tokens=24, temperature=0
        )
        counts.append((answer, guessed(answer.usage)))
    after = scrape(own)
    accepted, rejected = (sum(count[place] for _, count in counts) for place in (0, 1))

    def moved(name: str) -> float:
        return after[f"onekv_speculation_{name}_total"] - before[f"onekv_speculation_{name}_total"]

    assert accepted > 0
    assert moved("accepted_tokens") == accepted
    assert moved("proposed_tokens") == accepted + rejected
    assert 0 < moved("steps") <= moved("proposed_tokens")
    for answer, (right, wrong) in counts:
        line = line_of(own, answer._request_id or "")
        assert (f" guessed={right}/{right + wrong} " in line) == (right + wrong > 0)


def line_of(server: Server, known_as: str) -> str:
    """What the log has of a request; it is written when the answer has been sent."""
    deadline = time.monotonic() + 60
    while not (lines := [line for line in server.log().splitlines() if line.endswith(f" id={known_as}")]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (line,) = lines
    return line


def test_tokens_that_came_at_once_have_no_speed():
    request = Request([1, 2, 3], 8)
    request.proposed, request.accepted = 7, 4
    observed = Metrics().observe(request)
    observed(Delta("five", [1, 2, 3, 4, 5]))
    observed(End("stop", None, 3, 0, 5, request.timings))
    fields = Entry("req_1", "POST", "/v1/chat/completions", generations=[observed]).fields()
    line = " ".join(field.text for field in fields)
    assert " generated=5 guessed=4/7 first_token=" in line and "speed=" not in line


def test_a_server_without_speculation_counts_nothing():
    server = start_server("--speculate", "off")
    try:
        answer = client_of(server).chat.completions.create(
            model="default",
            messages=SAID,
            max_tokens=4,
            prediction={"type": "content", "content": "Bonjour"},
        )
        assert guessed(answer.usage) == (0, 0)
        assert not [name for name in scrape(server) if "speculation" in name]
        assert "guessed=" not in line_of(server, answer._request_id or "")
    finally:
        stop_server(server)
