"""`--log-format json`: every line that a real server writes is an object, and a request's has its figures by name."""

import json
import logging
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import openai
import pytest

from conftest import KEYS, Server, begin_server, stop_server
from onekv.bench.soak import save_tiny
from onekv.cli import main
from onekv.server.logs import Field, _Objects, log_fields

QUESTION = "Which of the two is older, the lighthouse or the harbour wall? Say why, and be brief. " * 4


def lines(server: Server) -> list[dict[str, Any]]:
    """All that it has written so far, less a line that is not at its end yet."""
    return [json.loads(line) for line in server.log().splitlines(keepends=True) if line.endswith("\n")]


def wait_for(server: Server, **members: Any) -> dict[str, Any]:
    """The line that has these members."""
    deadline = time.monotonic() + 120
    while not (found := [line for line in lines(server) if members.items() <= line.items()]):
        assert server.process.poll() is None and time.monotonic() < deadline, server.log()
        time.sleep(0.02)
    (line,) = found
    return line


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tiny = save_tiny(tmp_path_factory.mktemp("tiny"))
    server = begin_server("--model", tiny, "--kv-memory", "32MiB", "--log-format", "json")
    while not (found := re.search(r"is served on (http://\S+?)\.[ \\]", server.log())):
        assert server.process.poll() is None, server.log()
        time.sleep(0.02)
    server.url = found[1]
    yield server
    stop_server(server)
    assert all({"time", "level", "logger"} <= line.keys() for line in lines(server)), server.log()


@pytest.fixture
def client(served: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEYS[0], max_retries=0, timeout=120)


def test_a_requests_figures_by_name(served: Server, client: openai.OpenAI) -> None:
    said = []
    for name in ("first", "second"):
        system = f"x-anthropic-billing-header: {name}\nYou are brief and polite. Today the {name} of us asks."
        messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
        answer = client.chat.completions.create(model="default", messages=messages, max_tokens=6, temperature=0)
        assert answer.usage is not None
        line = wait_for(served, id=answer._request_id)
        said.append(line)
        at = datetime.fromisoformat(line["time"])
        assert at.utcoffset() == timedelta(0) and abs(datetime.now(UTC) - at) < timedelta(minutes=10)
        assert (line["level"], line["logger"]) == ("info", "onekv.request") and "message" not in line
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
        assert line["model"] == answer.model and line["cleaned"] == {"billing": 1}
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens or 0 if usage.prompt_tokens_details else 0
        assert (line["prompt_tokens"], line["cached_tokens"]) == (usage.prompt_tokens, cached)
        assert (line["generated_tokens"], line["end"]) == (usage.completion_tokens, answer.choices[0].finish_reason)
        assert 0 < line["first_token_s"] <= line["total_s"]
    assert "lost" not in said[0]
    missed = said[1]
    assert 0 < missed["leaves"] < missed["prompt_tokens"] and missed["lost"] > 50
    assert (missed["message_index"], missed["message_role"]) == (0, "system")
    assert missed["before"].endswith("Today the") and (missed["had"][:5], missed["came"][:6]) == ("first", "second")


def test_an_error_and_the_greeting_are_objects_too(served: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nonesuch", messages=[{"role": "user", "content": QUESTION}])
    line = wait_for(served, id=unknown.value.request_id)
    assert (line["status"], line["end"]) == (404, "not_found") and "prompt_tokens" not in line
    (greeting,) = [line for line in lines(served) if "is served on" in line.get("message", "")]
    assert (greeting["level"], greeting["logger"]) == ("info", "onekv.server")
    assert f"{served.url}/v1" in greeting["message"]


def test_both_forms_are_of_the_same_fields(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("onekv.request")
    with caplog.at_level(logging.INFO, "onekv.request"):
        log_fields(log, logging.INFO, [Field("GET", method="GET"), Field("guessed=1/2", proposed=2, accepted=1)])
        try:
            raise ValueError("two\nlines")
        except ValueError:
            log.exception("this failed")
    first, second = caplog.records
    assert first.getMessage() == "GET guessed=1/2"
    made = json.loads(_Objects().format(first))
    assert {name: made[name] for name in ("method", "proposed", "accepted")} == {
        "method": "GET",
        "proposed": 2,
        "accepted": 1,
    }
    text = _Objects().format(second)
    assert "\n" not in text
    failed = json.loads(text)
    assert (failed["message"], failed["level"]) == ("this failed", "error")
    assert failed["exception"].startswith("Traceback") and failed["exception"].endswith("ValueError: two\nlines")


def test_another_form_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--log-format", "xml"]) == 1
    assert "--log-format is 'xml'" in capsys.readouterr().err


def test_the_members_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    names = (
        *("method", "path", "status", "model", "choices", "prompt_tokens", "cached_tokens", "generated_tokens"),
        *("proposed_tokens", "accepted_tokens", "first_token_s", "tokens_per_s", "total_s", "missed", "leaves", "lost"),
        *("message_index", "message_role", "before", "had", "came", "cleaned", "end", "id", "exception"),
    )
    assert [name for name in names if f"`{name}`" not in text] == []
