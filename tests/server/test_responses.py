"""/v1/responses through the real client, against a real server."""

import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from canned import frames_of
from openai.types.responses import Response

from conftest import WEATHER
from onekv.engine import Delta, End, Event, Timings
from onekv.errors import RequestFailedError
from onekv.server.openai.response_answer import ResponseAnswer
from onekv.server.openai.responses_schema import Item, ResponsesBody, messages_of
from onekv.server.openai.store import ResponseStore, Stored
from onekv.server.sampling_defaults import SamplingDefaults

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": WEATHER,
    "strict": True,
}


def client_of(server: Any, key: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys[key], max_retries=0)


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return client_of(server)


@pytest.fixture
def model(server: Any) -> str:
    return server.backend_name


def test_what_the_template_is_told() -> None:
    def told(**fields: Any) -> dict[str, Any]:
        return ResponsesBody.model_validate({"model": "m", "input": "Hi", **fields}).template()

    assert told() == {}
    assert told(reasoning={"effort": "none"}) == {"reasoning_effort": "none", "enable_thinking": False}
    assert told(thinking_budget=99, chat_template_kwargs={"enable_thinking": True, "x": None}) == {
        "thinking_budget": 99,
        "enable_thinking": True,
    }
    assert told(reasoning_effort="low") == told(reasoning={"effort": "low"}) == {"reasoning_effort": "low"}


def test_create_get_delete(client: openai.OpenAI, server: Any, model: str):
    made = client.responses.create(
        model=model,
        input="What is the capital of France?",
        max_output_tokens=24,
        temperature=0,
        metadata={"a": "b"},
        reasoning={"effort": "low"},
    )
    assert made.reasoning is not None and made.reasoning.effort == "low"
    assert "Paris" in made.output_text and made.status == "completed" and made.metadata == {"a": "b"}
    assert made.usage is not None and made.usage.input_tokens_details.cached_tokens >= 0
    got = client.responses.retrieve(made.id)
    assert got.output_text == made.output_text and got.id == made.id
    with pytest.raises(openai.NotFoundError):
        client_of(server, 1).responses.retrieve(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_not_stored(client: openai.OpenAI, model: str):
    made = client.responses.create(model=model, input="Hi", max_output_tokens=2, store=False)
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_stream(client: openai.OpenAI, model: str):
    options: dict[str, Any] = {"model": model, "input": "Count to three.", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**options)
    events = list(client.responses.create(stream=True, **options))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text and events[-1].response.output_text == text


def test_the_clients_own_accumulation(client: openai.OpenAI, model: str):
    with client.responses.stream(
        model=model, input="How is Rome?", tools=[TOOL], tool_choice="required", max_output_tokens=48, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and kinds[-1] == "response.completed"
    call = final.output[0]
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Paris", "Rome")


def test_tools_and_previous_response(client: openai.OpenAI, model: str):
    options: dict[str, Any] = {"model": model, "tools": [TOOL], "temperature": 0}
    asked = client.responses.create(
        input="How is the weather in Rome?",
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=48,
        **options,
    )
    call = asked.output[0]
    assert call.type == "function_call" and call.name == "get_weather"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    answer = client.responses.create(input=[result], previous_response_id=asked.id, max_output_tokens=6, **options)
    assert answer.output_text and answer.previous_response_id == asked.id
    assert asked.usage is not None and answer.usage is not None
    # The whole conversation so far was found in the cache.
    assert answer.usage.input_tokens_details.cached_tokens >= asked.usage.total_tokens - 2


def test_json_schema(client: openai.OpenAI, model: str):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    made = client.responses.create(
        model=model,
        instructions="Answer in JSON.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Name a city."}]}],
        text={"format": {"type": "json_schema", "name": "city", "schema": schema}},
        max_output_tokens=24,
    )
    assert json.loads(made.output_text)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", []),
        ("input", 3),
        ("input", [{"role": "user"}]),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("max_output_tokens", 0),
        ("tools", [{"type": 3}]),
        ("tool_choice", "required"),
        ("text", {"format": {"type": "json_schema", "name": "x", "schema": {"type": "foo"}}}),
        ("background", "later"),
        ("conversation", "conv_1"),
    ],
)
def test_bad_fields(client: openai.OpenAI, model: str, field: str, value: Any):
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body={"model": model, "input": "Hi", field: value}, cast_to=object)
    assert caught.value.param is not None and caught.value.param.split(".")[0] == field


def test_unknown_previous_response(client: openai.OpenAI, model: str):
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        client.responses.create(model=model, input="Hi", previous_response_id="resp_none")


def test_items_of_one_turn_are_one_message():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "b", "arguments": '{"x": 1}'},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "custom_tool_call", "call_id": "3", "name": "c", "input": "x"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "3", "output": "three"},
        {"role": "assistant", "content": "Done."},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": {}}}
    other = {"id": "2", "type": "function", "function": {"name": "b", "arguments": {"x": 1}}}
    custom = {"id": "3", "type": "function", "function": {"name": "c", "arguments": {"input": "x"}}}
    assert messages_of([Item.model_validate(item) for item in items]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call, other, custom]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "3", "content": "three"},
        {"role": "assistant", "content": "Done."},
    ]


def test_the_store_is_bounded():
    store = ResponseStore(max_responses=3, max_bytes=400)
    for number in range(5):
        store.put("a", Stored({"id": f"r{number}"}, [], []))
    store.put("b", Stored({"id": "other"}, [], []))
    assert store.get("a", "r2").response == {"id": "r2"}
    store.put("a", Stored({"id": "big"}, [{"content": "x" * 170}], [{"content": "x" * 170}]))
    assert store.get("a", "big")
    for salt, name in (("a", "r4"), ("b", "big")):
        with pytest.raises(Exception, match=name):
            store.get(salt, name)
    assert store.get("b", "other")


def test_the_store_drops_none_that_runs():
    store = ResponseStore(max_responses=2)
    background: Any = SimpleNamespace(running=True, frames=["x" * 10])
    store.put("a", Stored({"id": "running"}, [], [], background))
    for number in range(3):
        store.put("a", Stored({"id": f"r{number}"}, [], []))
    assert store.get("a", "running").size > 10 and store.get("a", "r2")
    assert list(store.running()) == [background]
    with pytest.raises(Exception, match="r1"):
        store.get("a", "r1")
    background.running = False
    store.put("a", Stored({"id": "r3"}, [], []))
    with pytest.raises(Exception, match="running"):
        store.get("a", "running")


def events_of(*said: Event, thinking: bool = False) -> list[dict[str, Any]]:
    """What a response tells of a model that said all of `said`."""
    backend: Any = SimpleNamespace(name="m", tokenizer=None, defaults=SamplingDefaults())
    body = ResponsesBody.model_validate({"model": "m", "input": "x"})
    answer = ResponseAnswer(backend, body, lambda said: None)
    return [json.loads(frame.partition("data: ")[2]) for frame in frames_of(answer, list(said), thinking=thinking)]


def test_reasoning_is_an_item_of_its_own():
    end = End("stop", None, 5, 0, 3, Timings(0, 0, 0))
    events = events_of(Delta("hm</thi", [1, 2]), Delta("nk>\nYes", [3]), end, thinking=True)
    assert [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"] == ["hm"]
    final = Response.model_validate(events[-1]["response"])
    assert [item.type for item in final.output] == ["reasoning", "message"] and final.output_text == "Yes"
    assert final.usage is not None and final.usage.output_tokens_details.reasoning_tokens == 2


def test_an_error_after_the_beginning_is_an_event():
    *_, last = events_of(Delta("Yes", [1]), RequestFailedError("it broke"))
    assert last["type"] == "response.failed" and last["response"]["error"]["message"] == "it broke"
