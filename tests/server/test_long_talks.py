"""Twelve turns with tools through each API, by the real clients, sent back as clients do: nothing is computed twice.

The system prompt has a clock that moves, which a rule of hygiene takes out. What a client sends back is trimmed, its
calls are spelled anew, with keys in another order.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from conftest import KEYS, Server, start_server, stop_server

TURNS = 12
PARAMETERS = {
    "type": "object",
    "properties": {"zone": {"enum": ["north", "south"]}, "amount": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["zone", "amount"],
    "additionalProperties": False,
}
# Prompt, cached and generated tokens of a turn.
Counts = tuple[int, int, int]


@pytest.fixture(scope="module")
def talker(smollm2_path: Path) -> Iterator[Server]:
    running = start_server(str(smollm2_path), "--kv-memory", "256MiB", "--hygiene", "billing,clocks")
    yield running
    stop_server(running)


def system(turn: int) -> str:
    return f"You look after a house and its garden. Today is 2026-11-16T12:{turn:02}:59Z. Be brief."


def question(turn: int) -> str:
    return f"What about the garden in week {turn}?"


def calls(turn: int) -> bool:
    """Whether this turn must call the tool; the next one brings its result."""
    return turn % 3 == 1


def spelled(arguments: str) -> str:
    """As a client that keeps objects would send them back."""
    return json.dumps(dict(sorted(json.loads(arguments).items())), indent=1)


def through_chat(url: str) -> Iterator[Counts]:
    client = OpenAI(base_url=f"{url}/v1", api_key=KEYS[0])
    tool = {"type": "function", "function": {"name": "water", "parameters": PARAMETERS}}
    talk: list[Any] = []
    for turn in range(TURNS):
        if not (talk and talk[-1]["role"] == "tool"):
            talk.append({"role": "user", "content": question(turn)})
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "system", "content": system(turn)}, *talk],
            tools=[tool],
            tool_choice="required" if calls(turn) else "auto",
            max_tokens=48,
            temperature=1.2,
            seed=turn,
        )
        usage, message = answer.usage, answer.choices[0].message
        yield usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens
        said: dict[str, Any] = {"role": "assistant", "content": (message.content or "").strip()}
        if message.tool_calls:
            said["tool_calls"] = [call.model_dump() for call in message.tool_calls]
            for call in said["tool_calls"]:
                call["function"]["arguments"] = spelled(call["function"]["arguments"])
            talk += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "Done."}]
        else:
            talk.append(said)


def through_responses(url: str) -> Iterator[Counts]:
    client = OpenAI(base_url=f"{url}/v1", api_key=KEYS[0])
    tool = {"type": "function", "name": "water", "parameters": PARAMETERS}
    talk: list[Any] = []
    for turn in range(TURNS):
        if not (talk and talk[-1].get("type") == "function_call_output"):
            talk.append({"role": "user", "content": question(turn)})
        answer = client.responses.create(
            model="default",
            instructions=system(turn),
            input=talk,
            tools=[tool],
            tool_choice="required" if calls(turn) else "auto",
            max_output_tokens=48,
            temperature=1.2,
            extra_body={"seed": turn},
        )
        usage = answer.usage
        yield usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens
        for item in answer.output:
            talk.append(item.model_dump(exclude_none=True))
            if item.type == "function_call":
                talk[-1]["arguments"] = spelled(item.arguments)
                talk.append({"type": "function_call_output", "call_id": item.call_id, "output": "Done."})


def through_messages(url: str) -> Iterator[Counts]:
    client = Anthropic(base_url=url, api_key=KEYS[0])
    tool = {"name": "water", "input_schema": PARAMETERS}
    talk: list[Any] = []
    for turn in range(TURNS):
        if not (talk and talk[-1]["role"] == "user"):
            talk.append({"role": "user", "content": question(turn)})
        answer = client.messages.create(
            model="claude-sonnet-4-5",
            system=system(turn),
            messages=talk,
            tools=[tool],
            tool_choice={"type": "any" if calls(turn) else "auto"},
            max_tokens=48,
        )
        usage = answer.usage
        yield usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens, usage.output_tokens
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        for block in blocks:
            if block["type"] == "text":
                block["text"] = block["text"].strip() or "."
            else:
                block["input"] = dict(sorted(block["input"].items()))
        talk.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "Done."}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        if results:
            talk.append({"role": "user", "content": results})


@pytest.mark.parametrize("through", [through_chat, through_responses, through_messages])
def test_a_long_talk_is_computed_once(talker: Server, through: Any) -> None:
    counts = list(through(talker.url))
    assert len(counts) == TURNS
    for (prompt, _, generated), (_, cached, _) in itertools.pairwise(counts):
        # Its last token was never fed back; where that was not the one that ends a turn, the template's own follows.
        assert cached >= 0.98 * (prompt + generated) - 2, counts
