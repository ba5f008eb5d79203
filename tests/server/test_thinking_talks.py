"""A thinking model that calls tools, twelve turns through each API: at least 98 % of every prompt is cached.

The server, its engine and the clients are real; what the model says is given (thinker.py), with white space that
clients trim. The system prompt has a clock that moves.
"""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from anthropic import Anthropic
from openai import OpenAI
from thinker import start_thinker

from conftest import KEYS, Server, stop_server
from onekv.bench.clients import words

TURNS = 12
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}, "amount": {"type": "integer"}}}
RULES = words(random.Random("rules"), 4500)


class Turn(NamedTuple):
    """Tokens; whether the user asked, or a tool's result came; what was thought, and how many calls were made."""

    prompt: int
    cached: int
    generated: int
    asked: bool
    thought: str | None
    calls: int


def script(turn: int) -> tuple[str, str]:
    """What is thought and said in a turn."""
    thought = f"Week {turn} again: let me see.\n"
    if turn % 3 == 1:
        call = f'{{"name": "water",  "arguments": {{"zone": "north",   "amount": {turn}}}}}'
        return thought, f"I look. \n<tool_call>\n{call}\n</tool_call>"
    return thought, f"  The garden is fine in week {turn}. \n"


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start_thinker(
        tmp_path_factory.mktemp("thinker"), [script(turn) for turn in range(TURNS)], "--hygiene", "billing,clocks"
    )
    yield running
    stop_server(running)


def system(turn: int, name: str) -> str:
    return f"You look after the garden of {name}. Now it is 2026-11-18 at 12:{turn:02}:59.\n{RULES}"


def asks(talk: list[Any]) -> bool:
    """The user asks, unless a tool's result is what comes next."""
    last = talk[-1] if talk else {}
    if last.get("role") == "tool" or last.get("type") == "function_call_output" or last.get("role") == "user":
        return False
    talk.append({"role": "user", "content": f"What about week {len(talk)}?"})
    return True


def through_chat(url: str, kept: bool, **more: Any) -> Iterator[Turn]:
    client = OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0)
    tools: Any = [{"type": "function", "function": {"name": "water", "parameters": PARAMETERS}}]
    talk: list[Any] = []
    for turn in range(TURNS):
        asked = asks(talk)
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "system", "content": system(turn, f"chat {kept} {len(more)}")}, *talk],
            tools=tools,
            max_tokens=200,
            **more,
        )
        used, message = answer.usage, answer.choices[0].message
        thought, calls = getattr(message, "reasoning_content", None), message.tool_calls or []
        cached = used.prompt_tokens_details.cached_tokens
        yield Turn(used.prompt_tokens, cached, used.completion_tokens, asked, thought, len(calls))
        said: dict[str, Any] = {"role": "assistant", "content": (message.content or "").strip()}
        if kept:
            said["reasoning_content"] = thought
        if calls:
            said["tool_calls"] = [call.model_dump() for call in calls]
            function = said["tool_calls"][0]["function"]
            function["arguments"] = json.dumps(dict(sorted(json.loads(function["arguments"]).items())))
        talk.append(said)
        talk += [{"role": "tool", "tool_call_id": call.id, "content": "Done."} for call in calls]


def through_responses(url: str, kept: bool, **more: Any) -> Iterator[Turn]:
    client = OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0)
    tools: Any = [{"type": "function", "name": "water", "parameters": PARAMETERS, "strict": False}]
    talk: list[Any] = []
    for turn in range(TURNS):
        asked = asks(talk)
        with client.responses.stream(
            model="default",
            instructions=system(turn, f"responses {kept} {len(more)}"),
            input=talk,
            tools=tools,
            max_output_tokens=200,
            store=False,
            **more,
        ) as stream:
            answer = stream.get_final_response()
        used, items = answer.usage, [item.to_dict() for item in answer.output]
        calls = [item for item in items if item["type"] == "function_call"]
        thought = next(item["content"][0]["text"] for item in items if item["type"] == "reasoning")
        cached = used.input_tokens_details.cached_tokens
        yield Turn(used.input_tokens, cached, used.output_tokens, asked, thought, len(calls))
        talk += [item for item in items if kept or item["type"] != "reasoning"]
        for call in calls:
            call["arguments"] = json.dumps(dict(sorted(json.loads(call["arguments"]).items())))
            talk.append({"type": "function_call_output", "call_id": call["call_id"], "output": "Done."})


def through_messages(url: str, kept: bool, **more: Any) -> Iterator[Turn]:
    client = Anthropic(base_url=url, api_key=KEYS[0], max_retries=0)
    tools: Any = [{"name": "water", "input_schema": PARAMETERS}]
    talk: list[Any] = []
    for turn in range(TURNS):
        asked = asks(talk)
        with client.messages.stream(
            model="claude-any",
            system=system(turn, f"messages {kept} {len(more)}"),
            messages=talk,
            tools=tools,
            thinking={"type": "enabled", "budget_tokens": 1024},
            max_tokens=2048,
            **more,
        ) as stream:
            answer = stream.get_final_message()
        used, blocks = answer.usage, [block.to_dict() for block in answer.content]
        thought = next(block["thinking"] for block in blocks if block["type"] == "thinking")
        calls = [block for block in blocks if block["type"] == "tool_use"]
        prompt = used.input_tokens + used.cache_read_input_tokens
        yield Turn(prompt, used.cache_read_input_tokens, used.output_tokens, asked, thought, len(calls))
        for block in blocks:
            if block["type"] == "text":
                block["text"] = block["text"].strip()
            elif block["type"] == "tool_use":
                block["input"] = dict(sorted(block["input"].items()))
        content = [block for block in blocks if kept or block["type"] != "thinking"]
        talk.append({"role": "assistant", "content": content})
        if calls:
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "Done."} for call in calls]
            talk.append({"role": "user", "content": results})


@pytest.mark.parametrize("kept", [True, False], ids=["thinking sent back", "thinking dropped"])
@pytest.mark.parametrize("through", [through_chat, through_responses, through_messages])
def test_nearly_all_of_every_prompt_is_cached(talker: Server, through: Any, kept: bool) -> None:
    check(list(through(talker.url, kept)))


ONE_CALL: Any = {"parallel_tool_calls": False}
ONE_TOOL_USE: Any = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}


@pytest.mark.parametrize(
    ("through", "alone"),
    [(through_chat, ONE_CALL), (through_responses, ONE_CALL), (through_messages, ONE_TOOL_USE)],
)
def test_so_it_is_where_a_call_ends_the_answer(talker: Server, through: Any, alone: Any) -> None:
    check(list(through(talker.url, False, **alone)))


def check(turns: list[Turn]) -> None:
    assert len(turns) == TURNS and [turn.calls for turn in turns] == [int(at % 3 == 1) for at in range(TURNS)]
    assert all(turn.thought and "let me see" in turn.thought for turn in turns)
    before = turns[0]
    asked = before
    for turn in turns[1:]:
        assert turn.cached >= 0.98 * turn.prompt, turns
        if turn.asked:
            # The template drops what was thought since the last question: all before that is cached.
            assert turn.cached >= asked.prompt - len("<think>\n"), turns
            asked = turn
        else:
            # The token that ends a turn was never fed back.
            assert turn.cached >= before.prompt + before.generated - 2, turns
        before = turn
