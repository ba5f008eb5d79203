"""Arguments of tool calls come as they are generated, through each API, and its own client puts them together."""

import json
from typing import Any

import anthropic
import openai
import pytest

from conftest import start_server, stop_server

WRITE = {
    "type": "object",
    "properties": {"path": {"enum": ["north/garden.txt", "south/garden.txt"]}, "lines": {"type": "integer"}},
    "required": ["path", "lines"],
    "additionalProperties": False,
}
QUESTION: Any = [{"role": "user", "content": "Write the file of the garden."}]


@pytest.fixture(scope="module")
def server() -> Any:
    """Without guesses: what was said before would come in few pieces."""
    running = start_server("--kv-memory", "256MiB", "--max-batch", "4", "--speculate", "off", "--hot-only", "on")
    yield running
    stop_server(running)


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys[0], max_retries=0)


def test_chat_completions(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "default",
        "messages": QUESTION,
        "tools": [{"type": "function", "function": {"name": "write", "parameters": WRITE}}],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 64,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(**asked) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        message = stream.get_final_completion().choices[0].message
    assert len(events) > 3, "not in one piece"
    (call,) = message.tool_calls
    assert "".join(event.arguments_delta for event in events) == call.function.arguments
    assert (call.function.name, json.loads(call.function.arguments)) == ("write", json.loads(whole.arguments))


def test_legacy_functions(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="default",
        messages=QUESTION,
        functions=[{"name": "write", "parameters": WRITE}],
        function_call={"name": "write"},
        max_tokens=64,
        stream=True,
    )
    calls = [choice.delta.function_call for chunk in chunks for choice in chunk.choices if choice.delta.function_call]
    assert [call.name for call in calls] == ["write", *[None] * (len(calls) - 1)] and len(calls) > 3
    assert set(json.loads("".join(call.arguments for call in calls))) == {"path", "lines"}


def test_responses(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "write", "parameters": WRITE, "strict": True}]
    with client.responses.stream(
        model="default",
        input=QUESTION,
        tools=tools,
        tool_choice="required",
        max_output_tokens=64,
    ) as stream:
        events = list(stream)
        made = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    (item,) = made.output
    assert len(deltas) > 3 and "".join(deltas) == done.arguments == item.arguments
    assert set(json.loads(item.arguments)) == {"path", "lines"}
    # A response that is kept has the call in it, too.
    later = client.responses.create(
        model="default",
        previous_response_id=made.id,
        tools=tools,
        input=[{"type": "function_call_output", "call_id": item.call_id, "output": "Done."}],
        max_output_tokens=2,
    )
    used = made.usage
    assert later.usage.input_tokens_details.cached_tokens >= used.input_tokens + used.output_tokens - 2


def test_messages(server: Any) -> None:
    claude = anthropic.Anthropic(base_url=server.url, api_key=server.keys[0], max_retries=0)
    asked: Any = {
        "model": "default",
        "messages": QUESTION,
        "tools": [{"name": "write", "input_schema": WRITE}],
        "tool_choice": {"type": "tool", "name": "write"},
    }
    with claude.messages.stream(**asked, max_tokens=64) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    (block,) = message.content
    assert len(pieces) > 3 and json.loads("".join(pieces)) == block.input
    assert message.stop_reason == "tool_use" and set(block.input) == {"path", "lines"}
    # What was sent before the limit stays, as far as it came.
    with claude.messages.stream(**asked, max_tokens=message.usage.output_tokens - 12) as stream:
        cut = stream.get_final_message()
    assert cut.stop_reason == "max_tokens" and [block.type for block in cut.content] == ["tool_use"]
