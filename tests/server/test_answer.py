"""Answers on their way to a client that is slow, silent, or gone."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from canned import Client, run
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseInProgressEvent

from onekv.engine import Delta, End, Timings
from onekv.inbox import MOST_AT_ONCE, ClientGoneError
from onekv.server import answer as answers
from onekv.server.anthropic.messages import MessageAnswer
from onekv.server.anthropic.schema import MessagesBody
from onekv.server.openai.chat import ChatAnswer
from onekv.server.openai.completions import CompletionAnswer
from onekv.server.openai.response_answer import ResponseAnswer
from onekv.server.openai.responses_schema import ResponsesBody
from onekv.server.openai.schema import ChatBody, CompletionBody
from onekv.server.sampling_defaults import SamplingDefaults

END = End("stop", None, 5, 0, 3, Timings(0, 0, 0))
PING = 'event: ping\ndata: {"type":"ping"}\n\n'


def message() -> MessageAnswer:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    return MessageAnswer("m", MessagesBody.model_validate(body))


def kinds(text: str) -> list[str]:
    """The types of the server-sent events in `text`."""
    return [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]


def test_an_event_is_sent_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEEP_ALIVE_S", 0.02)

    def goes_on(client: Client) -> None:
        client.inbox.put(0, Delta("Yes", [1]))
        client.inbox.put(0, END)

    wait: Any = lambda client: None  # noqa: E731
    writes = run(lambda: Client(message(), []), wait, goes_on).writes
    # What was cached is not known yet, and not said.
    assert kinds(writes[0]) == ["message_start", "ping"] and '"cache_read_input_tokens":null' in writes[0]
    assert writes[1] == PING
    assert PING not in writes[2:] and kinds(writes[-1])[-1] == "message_stop"


def test_each_api_has_an_event_that_says_nothing() -> None:
    """The clients' own types take it; Codex counts events and no comments."""
    llm = SimpleNamespace(stop_tokens=set())
    backend: Any = SimpleNamespace(name="m", tokenizer=None, llm=llm, defaults=SamplingDefaults())
    talk = [{"role": "user", "content": "Hi"}]
    chat = ChatAnswer(backend, ChatBody.model_validate({"model": "m", "messages": talk}))
    chunk = ChatCompletionChunk.model_validate_json(data(chat.waiting()))
    assert chunk.choices[0].delta.model_dump(exclude_unset=True) == {} and chunk.choices[0].finish_reason is None
    text = CompletionAnswer(backend, CompletionBody.model_validate({"model": "m", "prompt": "Hi"}))
    (choice,) = json.loads(data(text.waiting()))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", None)
    body = ResponsesBody.model_validate({"model": "m", "input": "Hi"})
    response = ResponseAnswer(backend, body, lambda said: None)
    numbers = [json.loads(data(frame))["sequence_number"] for frame in response.begin(3)]
    event = ResponseInProgressEvent.model_validate_json(data(response.waiting()))
    assert event.type == "response.in_progress" and [*numbers, event.sequence_number] == [0, 1, 2]


def data(frame: str) -> str:
    return frame.partition("data: ")[2]


def test_an_event_is_sent_while_tokens_come_that_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEEP_ALIVE_S", 0.02)

    def goes_on(client: Client) -> None:
        if PING in client.writes:
            client.inbox.put(0, END)
            return
        client.inbox.put(0, Delta("x", [1]))
        asyncio.get_running_loop().call_later(0.005, goes_on, client)

    writes = run(lambda: Client(message(), [Delta("<tool_call>", [1])]), goes_on).writes
    assert writes.index(PING) == 1 and "<tool_call>x" in "".join(writes)


def test_what_is_ready_together_is_written_together() -> None:
    writes = run(lambda: Client(message(), [Delta("Yes", [1]), Delta(" and", [2]), Delta(" no", [3]), END])).writes
    blocks = ["content_block_start", *["content_block_delta"] * 3, "content_block_stop"]
    assert [kinds(text) for text in writes] == [["message_start", *blocks, "message_delta", "message_stop"]]


def test_a_long_backlog_is_written_in_several_turns_of_the_event_loop() -> None:
    writes = run(lambda: Client(message(), [*[Delta("x", [1])] * (2 * MOST_AT_ONCE), END])).writes
    assert [text.count("content_block_delta\n") for text in writes] == [MOST_AT_ONCE, MOST_AT_ONCE, 0]


def test_nothing_is_written_to_a_client_that_is_gone() -> None:
    def leaves(client: Client) -> None:
        client.gone.set()

    client = run(lambda: Client(message(), [Delta("Yes", [1])]), leaves)
    assert kinds("".join(client.writes)) == ["message_start", "content_block_start", "content_block_delta"]
    assert client.inbox.open == {0}, "so it is cancelled"


def test_the_whole_of_an_answer_is_not_made_for_a_client_that_is_gone() -> None:
    def gone() -> Client:
        client = Client(message(), [Delta("Yes", [1])], stream=False)
        client.gone.set()
        return client

    with pytest.raises(ClientGoneError):
        run(gone)


def test_in_one_piece() -> None:
    client = run(lambda: Client(message(), [Delta("Yes", [1]), Delta(" no", [2]), END], stream=False))
    assert dict(client.started["headers"])[b"content-type"] == b"application/json"
    assert json.loads("".join(client.writes))["content"] == [{"type": "text", "text": "Yes no"}]
