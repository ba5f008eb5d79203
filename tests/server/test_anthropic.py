"""The Messages API, by Anthropic's own client against a real server."""

import itertools
import json
import time
from typing import Any

import anthropic
import httpx2 as httpx
import pytest
from anthropic.types import MessageParam, ToolParam

GREEDY = {"temperature": 0}
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(server: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=server.keys[0], max_retries=0)


def ask(client: anthropic.Anthropic, messages: list[MessageParam] | str, **options: Any) -> anthropic.types.Message:
    said: list[MessageParam] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    options = {"model": "default", "max_tokens": 8, "extra_body": GREEDY, **options}
    return client.messages.create(messages=said, **options)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_create(server: Any, client: anthropic.Anthropic) -> None:
    message = ask(client, "Write one long sentence about the sea.")
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", server.backend_name)
    assert [block.type for block in message.content] == ["text"]
    assert text_of(message).strip()
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 8
    assert message.usage.cache_creation_input_tokens == 0


def test_an_answer_that_ends_by_itself(client: anthropic.Anthropic) -> None:
    message = ask(client, "What is the capital of France? Answer in one short sentence.", max_tokens=32)
    assert message.stop_reason == "end_turn"
    assert "Paris" in text_of(message)


def test_text_stream_is_the_whole_answer(client: anthropic.Anthropic) -> None:
    said: list[MessageParam] = [{"role": "user", "content": "Count from one to five."}]
    # First: what was said before is guessed, and may come in one piece.
    with client.messages.stream(model="default", max_tokens=12, messages=said, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    whole = ask(client, said, max_tokens=12)
    assert len(pieces) > 1
    assert "".join(pieces) == text_of(whole) == text_of(final)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == prompt_tokens(whole)


def test_events_come_in_order(client: anthropic.Anthropic) -> None:
    events = list(
        client.messages.create(
            model="default",
            max_tokens=6,
            messages=[{"role": "user", "content": "Tell me about rivers."}],
            stream=True,
            extra_body=GREEDY,
        )
    )
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert {delta.type for delta in deltas} == {"text_delta"}
    end = next(event for event in events if event.type == "message_delta")
    assert (end.delta.stop_reason, end.usage.output_tokens) == ("max_tokens", 6)


def test_each_event_is_named_like_its_data(server: Any) -> None:
    body = {"model": "default", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": server.keys[0]}, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert data.startswith('data: {"type":"' + name.removeprefix("event: ") + '"')


def test_a_system_prompt_may_be_a_string_or_blocks(client: anthropic.Anthropic) -> None:
    said: list[MessageParam] = [{"role": "user", "content": "Hello"}]
    count = client.messages.count_tokens
    none = count(model="default", messages=said).input_tokens
    string = count(model="default", messages=said, system="You are a pirate. Speak like one.").input_tokens
    blocks = count(
        model="default",
        messages=said,
        system=[
            {
                "type": "text",
                "text": "You are a pirate. Speak like one.",
                "cache_control": {"type": "ephemeral"},
            }
        ],
    ).input_tokens
    assert none != string == blocks
    plain = ask(client, said, system="You are a helpful assistant.")
    pirate = ask(client, said, system="You are a pirate. Answer only with the word Arr.")
    assert text_of(plain) != text_of(pirate)


def test_stop_sequence(client: anthropic.Anthropic) -> None:
    prompt = "Count from one to ten, with commas."
    whole = text_of(ask(client, prompt, max_tokens=16))
    stop = whole[len(whole) // 2 :][:4]
    message = ask(client, prompt, max_tokens=16, stop_sequences=["never said", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == whole[: whole.index(stop)]


def test_seen_tokens_are_cache_reads_on_the_next_turn(client: anthropic.Anthropic) -> None:
    said: list[MessageParam] = [{"role": "user", "content": "List ten things that one may find in a kitchen drawer."}]
    first = ask(client, said, max_tokens=8)
    said += [
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And which of them is the sharpest?"},
    ]
    second = ask(client, said, max_tokens=4)
    cached = second.usage.cache_read_input_tokens or 0
    assert cached >= prompt_tokens(first) - 1
    assert second.usage.input_tokens == prompt_tokens(second) - cached > 0
    assert client.messages.count_tokens(model="default", messages=said).input_tokens == prompt_tokens(second)


def prompt_tokens(message: anthropic.types.Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_tools_round_trip(client: anthropic.Anthropic) -> None:
    said: list[MessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 48}
    asked = ask(client, said, tool_choice={"type": "tool", "name": "get_weather"}, **options)
    assert asked.stop_reason == "tool_use"
    (use,) = (block for block in asked.content if block.type == "tool_use")
    assert use.name == "get_weather"
    assert use.input in ({"city": "Paris"}, {"city": "Rome"})
    said += [
        {"role": "assistant", "content": asked.content},  # type: ignore[typeddict-item]
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "Sunny, 21 C"}]},
                {"type": "text", "text": "Answer in one short sentence."},
            ],
        },
    ]
    answer = ask(client, said, tool_choice={"type": "none"}, tools=[WEATHER], max_tokens=16)
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert text_of(answer).strip()


def test_a_tool_call_as_events(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="default",
        max_tokens=48,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body=GREEDY,
    ) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert "input_json" in [event.type for event in events]
    (use,) = final.content
    assert use.type == "tool_use"
    assert use.input in ({"city": "Paris"}, {"city": "Rome"})
    assert final.stop_reason == "tool_use"


def test_json_that_fits_a_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    message = ask(
        client,
        "Which colour is the sky?",
        max_tokens=24,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert text_of(message).replace(" ", "").replace("\n", "") in ('{"colour":"red"}', '{"colour":"blue"}')


def test_thinking_without_a_place_is_dropped_and_turns_of_one_role_are_joined(client: anthropic.Anthropic) -> None:
    def count(messages: Any) -> int:
        return client.messages.count_tokens(model="default", messages=messages).input_tokens

    thought = {"type": "thinking", "thinking": "It is a greeting.", "signature": ""}
    end = {"role": "user", "content": "Bye"}
    plain = count([{"role": "user", "content": "Hi\nthere"}, {"role": "assistant", "content": "Hello"}, end])
    blocks = count(
        [
            {"role": "user", "content": "Hi"},
            {"role": "user", "content": [{"type": "text", "text": "there"}]},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "Hello"}]},
            end,
        ]
    )
    assert plain == blocks


def test_a_claude_is_served_by_the_model_there_is(server: Any, client: anthropic.Anthropic) -> None:
    message = ask(client, "Hi", model="claude-of-tomorrow", max_tokens=1, thinking={"type": "disabled"})
    assert message.model == server.backend_name


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"extra_body": {"max_tokens": None}}, "max_tokens"),
        ({"extra_body": {"max_tokens": "4"}}, "max_tokens"),
        ({"extra_body": {"system": {"a": 1}}}, "system"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [{"name": "web_search"}]}, "tools.0.input_schema"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "output_config.format"),
    ],
)
def test_bad_fields_are_named(client: anthropic.Anthropic, options: dict[str, Any], said: str) -> None:
    options = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], **options}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**options)
    body = caught.value.body
    assert isinstance(body, dict)
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert said in body["error"]["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "\\ud800"},
        {"system": "\\ud800"},
        {"messages": [{"role": "user", "content": "\\ud800"}]},
        {"messages": [{"role": "user", "content": [{"type": "\\ud800"}]}]},
        {"tools": [{"name": "a", "input_schema": {"\\udc00": 1}}]},
    ],
)
def test_half_a_character_is_refused(server: Any, change: dict[str, Any]) -> None:
    body = {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], **change}
    text = json.dumps(body).replace("\\\\", "\\")
    headers = {"x-api-key": server.keys[0], "content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/messages", content=text, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_errors_are_the_clients_own(server: Any, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="gpt-4"):
        ask(client, "Hi", model="gpt-4")
    stranger = anthropic.Anthropic(base_url=server.url, api_key="nobody's key", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        ask(stranger, "Hi")
    too_long = "word " * 30_000
    with (
        pytest.raises(anthropic.BadRequestError, match="prompt is too long"),
        client.messages.stream(
            model="default", max_tokens=10, messages=[{"role": "user", "content": too_long}], timeout=60
        ) as stream,
    ):
        stream.get_final_message()


def test_max_tokens_beyond_the_context_is_as_far_as_it_goes(client: anthropic.Anthropic) -> None:
    """Agents send what the model they know can do, whatever model answers."""
    answer = ask(client, "Say yes.", max_tokens=100_000, stop_sequences=["e", "a", "o", "i"], timeout=60)
    assert answer.usage.output_tokens < 200


def test_a_client_that_leaves_frees_the_batch(server: Any, client: anthropic.Anthropic) -> None:
    headers = {"x-api-key": server.keys[0]}
    stream = client.messages.create(
        model="default",
        max_tokens=1000,
        messages=[{"role": "user", "content": "Write a very long story about a lighthouse."}],
        stream=True,
        extra_body=GREEDY,
    )
    for event in stream:
        if event.type == "content_block_delta":
            break
    stream.close()
    deadline = time.monotonic() + 10
    while httpx.get(f"{server.url}/admin/cache", headers=headers).json()["requests"]["running"]:
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.1)
