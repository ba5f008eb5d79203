"""Request ids, as the real clients read them, and the one line that the log has of each request."""

import json
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

from conftest import Server

QUESTION = "Which of the two is older, the lighthouse or the harbour wall? Say why, and be brief. " * 4


@dataclass
class Log:
    """What a server has logged since the test began."""

    server: Server
    begin: int

    def line(self, known_as: str, level: str = "INFO") -> dict[str, str]:
        """The figures of the one line that a request has; it is written when the answer has been sent."""
        deadline = time.monotonic() + 60
        while not (lines := [line for line in self.text().splitlines() if line.endswith(f" id={known_as}")]):
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)
        (line,) = lines
        head, found = line.partition(" onekv.request: ")[::2]
        assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} {level}", head), line
        method, path, status, *rest = shlex.split(found)
        return {"method": method, "path": path, "status": status, **dict(part.split("=", 1) for part in rest)}

    def text(self) -> str:
        return self.server.log()[self.begin :]


@pytest.fixture
def log(server: Server) -> Iterator[Log]:
    yield Log(server, len(server.log()))
    assert "harbour wall? Say why, and be brief" not in server.log(), "no more of a prompt than a few words"


@pytest.fixture
def chats(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys[0], max_retries=0, timeout=120)


@pytest.fixture
def messages(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=server.keys[0], max_retries=0, timeout=120)


def seconds(figure: str) -> float:
    assert figure.endswith("s")
    return float(figure[:-1])


def test_openai_clients_read_the_id_and_the_log_has_the_figures(log: Log, chats: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    lines = []
    for _ in range(2):
        answer = chats.chat.completions.create(model="default", messages=said, max_tokens=6, temperature=0)
        assert answer._request_id is not None and answer.usage is not None
        lines.append(log.line(answer._request_id))
        line, usage = lines[-1], answer.usage
        cached = usage.prompt_tokens_details.cached_tokens or 0 if usage.prompt_tokens_details else 0
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", "200")
        assert (line["model"], line["prompt"]) == (answer.model, str(usage.prompt_tokens))
        assert line["cached"] == f"{cached}({cached / usage.prompt_tokens:.0%})"
        assert (line["generated"], line["end"]) == (str(usage.completion_tokens), answer.choices[0].finish_reason)
        assert 0 < seconds(line["first_token"]) <= seconds(line["time"])
        # All of them may have been guessed, and have come at once.
        assert float(line.get("speed", "1tokens/s").removesuffix("tokens/s")) > 0
    assert lines[1]["cached"].endswith("(99%)") and lines[0]["id"] != lines[1]["id"]


def test_anthropic_clients_read_the_id_also_of_a_stream(log: Log, messages: anthropic.Anthropic) -> None:
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    answer = messages.messages.create(model="default", messages=said, max_tokens=3)
    assert answer._request_id is not None
    assert log.line(answer._request_id)["end"] == "length"
    with messages.messages.stream(model="default", messages=said, max_tokens=3) as stream:
        known_as = stream.response.headers["request-id"]
        assert known_as == stream.response.headers["x-request-id"]
        stream.until_done()
    line = log.line(known_as)
    assert (line["path"], line["generated"], line["end"]) == ("/v1/messages", "3", "length")


def test_the_line_says_where_a_prompt_leaves_and_which_rules_were_applied(log: Log, chats: openai.OpenAI) -> None:
    lines = []
    answers = []
    for name, ask in (("first", "0"), ("second", "1"), ("second", "0")):
        system = f"x-anthropic-billing-header: {name}\nYou are brief and polite. Today the {name} of us asks."
        made = chats.chat.completions.with_raw_response.create(
            model="default",
            messages=[{"role": "system", "content": system}, {"role": "user", "content": QUESTION}],
            max_tokens=2,
            extra_headers={"x-onekv-explain": ask},
        )
        answers.append(made)
        lines.append(log.line(made.headers["x-request-id"]))
        assert lines[-1]["cleaned"] == "billing:1"
    told = json.loads(answers[1].headers["x-onekv-cache"])
    leaves = told["leaves"]
    assert int(lines[1]["leaves"]) == leaves["position"] > 0
    assert int(lines[1]["lost"]) == leaves["again"] > 50 and lines[1]["message"] == "0(system)"
    assert lines[1]["before"] == leaves["before"][-32:] and lines[1]["before"].endswith("Today the")
    assert (lines[1]["had"], lines[1]["came"]) == (leaves["cached"][:32], leaves["came"][:32])
    assert "lost" not in lines[2], "the same again"


def test_errors_have_the_id(log: Log, chats: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        chats.chat.completions.create(model="nonesuch", messages=[{"role": "user", "content": QUESTION}])
    assert unknown.value.request_id is not None
    assert log.line(unknown.value.request_id)["end"] == "not_found"
    with pytest.raises(anthropic.BadRequestError) as wrong:
        messages.messages.create(model="default", messages=[], max_tokens=3)
    assert isinstance(wrong.value.body, dict)
    assert wrong.value.request_id == wrong.value.body["request_id"] is not None
    line = log.line(wrong.value.request_id or "")
    assert (line["status"], line["end"]) == ("400", "bad_request")
    with pytest.raises(openai.AuthenticationError) as refused:
        chats.with_options(api_key="not one of the keys").models.list()
    assert log.line(refused.value.request_id or "")["end"] == "unauthorized"


def test_an_id_of_the_clients_own(log: Log, server: Server, chats: openai.OpenAI) -> None:
    for given, kept in (
        ("trace-7f:3/a", True),
        ("a b", False),
        ("a" * 129, False),
        ("-dash", False),
        ("x=1\ty", False),
    ):
        headers = {"x-request-id": given, "x-api-key": server.keys[0]}
        answer = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert (answer.headers["x-request-id"] == given) == kept
        assert "request-id" not in answer.headers
        line = log.line(answer.headers["x-request-id"])
        assert (line["path"], line["status"], "model" in line) == ("/v1/models", "200", False)
    headers |= {"anthropic-version": "2023-06-01"}
    assert httpx.get(f"{server.url}/v1/models", headers=headers).headers["request-id"].startswith("req_")


def test_several_choices_and_a_client_that_goes_away(log: Log, chats: openai.OpenAI) -> None:
    answer = chats.completions.create(model="default", prompt=["One two", "Three four five"], n=2, max_tokens=2)
    line = log.line(answer._request_id or "")
    assert (line["choices"], line["generated"], line["end"]) == ("4", "8", "length")
    stream = chats.completions.create(model="default", prompt=QUESTION, max_tokens=400, stream=True)
    next(iter(stream))
    known_as = stream.response.headers["x-request-id"]
    stream.close()
    line = log.line(known_as)
    assert (line["status"], line["end"]) == ("200", "client_gone")
    assert 0 < int(line["generated"]) < 400 and int(line["prompt"]) > 40


def test_probes_have_no_line_and_nothing_looks_like_an_error(log: Log, server: Server) -> None:
    answers = [httpx.get(f"{server.url}/health{path}") for path in ("", "/live", "/ready")]
    strange = httpx.get(f"{server.url}/nowhere%0Aelse?key=hushhush", headers={"x-api-key": server.keys[0]})
    assert log.line(strange.headers["x-request-id"])["path"] == "/nowhere%0Aelse"
    assert not any(answer.headers["x-request-id"] in log.text() for answer in answers)
    assert "hushhush" not in server.log()
    assert not re.search(r"INFO .*(error|uvicorn)", server.log(), re.IGNORECASE)


def test_what_the_log_says_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    for name in (
        "model",
        "prompt",
        "cached",
        "missed",
        "leaves",
        "lost",
        "message",
        "before",
        "had",
        "came",
        "cleaned",
        "generated",
        "first_token",
        "speed",
        "end",
        "time",
        "id",
    ):
        assert f"{name}=" in text
