"""The Messages API without a server: bodies as calls, and events of what the default model never says."""

import base64
import json
from typing import Any

from canned import HERMES, Client, frames_of, run

from onekv.engine import Delta, End, Event, Timings
from onekv.errors import RequestFailedError
from onekv.server.anthropic.convert import full_call
from onekv.server.anthropic.messages import MessageAnswer
from onekv.server.anthropic.schema import MessagesBody
from onekv.server.chat import ChatChoice
from onekv.server.deltas import Finish, ToolCallDelta
from onekv.server.sampling_defaults import SamplingDefaults
from onekv.server.segments import Splitter


def answer_to(**asked: Any) -> MessageAnswer:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **asked}
    return MessageAnswer("model", MessagesBody.model_validate(body))


def events_of(said: list[Event], **asked: Any) -> list[dict[str, Any]]:
    """The events of an answer whose model said all of `said`."""
    return [json.loads(frame.split("data: ")[1]) for frame in frames_of(answer_to(**asked), said)]


END = End("stop", None, 10, 4, 7, Timings(0, 0, 0))
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def test_events_of_thinking_text_and_calls() -> None:
    said = ["<think>", "Let me", " see.", "</think>", "I look.", CALL, CALL]
    events = events_of([*(Delta(text, [1]) for text in said), END], thinking={"type": "adaptive"})
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    content, signatures = [""] * 4, []
    for event in events:
        if event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            kind = delta.pop("type")
            if kind == "signature_delta":
                signatures.append((event["index"], delta["signature"]))
                continue
            assert kind == ["thinking_delta", "text_delta", "input_json_delta", "input_json_delta"][event["index"]]
            (piece,) = delta.values()
            content[event["index"]] += piece
    assert content[:2] == ["Let me see.", "I look."]
    assert [json.loads(text) for text in content[2:]] == [{"a": 1}, {"a": 1}]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    ((place, signature),) = signatures
    assert place == 0 and len(base64.b64decode(signature)) == 32
    assert events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 7,
        },
    }
    assert events[-1] == {"type": "message_stop"}


THOUGHT: list[Event] = [Delta("<think>Hm.</think>Yes", [1, 2, 3]), END]


def test_thinking_is_signed_and_comes_if_it_was_asked_for() -> None:
    def content(**asked: Any) -> Any:
        client = run(lambda: Client(answer_to(**asked), THOUGHT, stream=False))
        return json.loads("".join(client.writes))["content"]

    thinking, text = content(thinking={"type": "enabled", "budget_tokens": 1024})
    assert (thinking["thinking"], text["text"]) == ("Hm.", "Yes")
    assert thinking["signature"] == content(thinking={"type": "adaptive"})[0]["signature"] != ""
    for asked in ({}, {"thinking": {"type": "disabled"}}):
        assert content(**asked) == [{"type": "text", "text": "Yes"}]
    kinds = [event["content_block"]["type"] for event in events_of(THOUGHT) if "content_block" in event]
    assert kinds == ["text"]


def test_the_start_says_what_was_cached() -> None:
    start = events_of([Delta("Yes", [1], [], 3), END])[0]["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (2, 3)


def test_a_call_that_is_cut_off_is_left_out() -> None:
    cut = End("length", None, 10, 4, 7, Timings(0, 0, 0))
    events = events_of([Delta("I look." + CALL[:-20], [1]), cut])
    assert [event["content_block"]["type"] for event in events if "content_block" in event] == ["text"]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_failure_ends_the_events() -> None:
    events = events_of([Delta("Hello", [1]), RequestFailedError("the model failed")])
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "the model failed"}}
    assert [event["type"] for event in events[:-1]] == ["message_start", "content_block_start", "content_block_delta"]


def test_an_empty_answer_has_no_blocks() -> None:
    assert [event["type"] for event in events_of([END])] == ["message_start", "message_delta", "message_stop"]


def test_the_call_that_a_body_becomes() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    searched = {"type": "server_tool_use", "id": "0", "name": "web_search", "input": {"query": "x"}}
    thought = {"type": "thinking", "thinking": "A file.", "signature": "any"}
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": "no such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "2"},
    ]
    body = MessagesBody.model_validate(
        {
            "model": "default",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, searched, thought, use]},
                {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["END"],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "metadata": {"user_id": "someone"},
        }
    )
    call = full_call(body, "salt", SamplingDefaults())
    assert call.messages == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "A file.",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Error: no such file"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "f", "description": "", "parameters": {"type": "object"}}
    assert call.tools == [{"type": "function", "function": function}]
    assert (call.tool_choice, call.thinking, call.stops, call.salt) == ("required", True, ("END",), "salt")
    assert (call.max_tokens, call.sampling.temperature, call.sampling.top_p, call.sampling.top_k) == (9, 0.5, 0.9, 5)


def test_calls_after_the_first_are_left_out_if_one_is_wanted() -> None:
    choice = ChatChoice(Splitter(HERMES), {0}, one_call="</tool_call>")
    found = [*choice.read(Delta(CALL + CALL + "And so on.", [1])), *choice.read(END)]
    assert [type(delta) for delta in found] == [ToolCallDelta, Finish]
    assert found[-1].reason == "tool_calls"
