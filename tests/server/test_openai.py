"""Chat and completions through the real client, against a real server."""

import json
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from canned import frames_of
from test_metrics import CANCELLED, scrape, until_cancelled

from conftest import WEATHER
from onekv.engine import Delta, End, Event, Timings
from onekv.errors import RequestFailedError
from onekv.server.openai.chat import ChatAnswer
from onekv.server.openai.schema import ChatBody

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": WEATHER,
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys[0], max_retries=0)


@pytest.fixture
def model(server: Any) -> str:
    return server.backend_name


def refused(client: openai.OpenAI, path: str, body: dict[str, Any]) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(path, body=body, cast_to=object)
    return caught.value


def test_models(client: openai.OpenAI, model: str):
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError, match="nothing"):
        client.models.retrieve("nothing")


def test_chat(client: openai.OpenAI, model: str):
    first = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, temperature=0)
    assert "Paris" in (first.choices[0].message.content or "")
    assert first.choices[0].finish_reason in ("stop", "length")
    assert first.usage is not None and first.usage.prompt_tokens_details is not None
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    again = client.chat.completions.create(model="default", messages=QUESTION, max_tokens=8, temperature=0)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.system_fingerprint == first.system_fingerprint and again.id != first.id


def test_content_in_parts(client: openai.OpenAI, model: str):
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    answers = [
        client.chat.completions.create(model=model, messages=messages, max_tokens=6, temperature=0)
        for messages in (QUESTION, parts)
    ]
    assert answers[0].choices[0].message == answers[1].choices[0].message


def test_stream(client: openai.OpenAI, model: str):
    whole = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, temperature=0)
    chunks = list(
        client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, temperature=0, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_usage(client: openai.OpenAI, model: str):
    *chunks, last = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == 4


def test_stop_strings(client: openai.OpenAI, model: str):
    whole = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, temperature=0)
    text = whole.choices[0].message.content or ""
    stop = text.split()[2]
    cut = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, temperature=0, stop=stop)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_seed_repeats(client: openai.OpenAI, model: str):
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=12, temperature=2, seed=seed)
        return answer.choices[0].message.content

    assert ask(1) == ask(1) != ask(2)


def test_several_choices(client: openai.OpenAI, model: str):
    options: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 8, "temperature": 2, "seed": 5}
    whole = client.chat.completions.create(n=2, **options)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 2
    assert whole.usage is not None and whole.usage.completion_tokens == 16
    streamed = ["", ""]
    for chunk in client.chat.completions.create(n=2, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_logprobs(client: openai.OpenAI, model: str):
    options: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 5, "temperature": 0}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=3, **options)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert bytes(entry.bytes or []).decode() == entry.token
    chunks = client.chat.completions.create(logprobs=True, stream=True, **options)
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert [entry.token for entry in streamed] == [entry.token for entry in logprobs.content]


def test_logit_bias(client: openai.OpenAI, model: str):
    options: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 1, "temperature": 0}
    answer = client.chat.completions.create(logit_bias={"17": 100}, **options)
    assert answer.choices[0].message.content == "!"


def test_tools_round_trip(client: openai.OpenAI, model: str):
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
    options: dict[str, Any] = {"model": model, "tools": [TOOL], "temperature": 0}
    asked = client.chat.completions.create(messages=messages, tool_choice="required", max_tokens=48, **options)
    choice = asked.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 30 degrees"}]
    answer = client.chat.completions.create(messages=messages, max_tokens=8, **options)
    assert answer.choices[0].message.content
    # The call was rendered as the model had written it.
    assert asked.usage is not None and answer.usage is not None and answer.usage.prompt_tokens_details is not None
    known = asked.usage.total_tokens - 2
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= known


def test_a_named_tool_streamed(client: openai.OpenAI, model: str):
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    chunks = client.chat.completions.create(
        model=model, messages=QUESTION, tools=[TOOL], tool_choice=named, max_tokens=48, temperature=0, stream=True
    )
    deltas = [chunk.choices[0] for chunk in chunks]
    calls = [call for choice in deltas for call in choice.delta.tool_calls or []]
    assert [call.index for call in calls] == [0] * len(calls)
    assert calls[0].id and [call.id for call in calls[1:]] == [None] * (len(calls) - 1)
    assert json.loads("".join(call.function.arguments or "" for call in calls if call.function is not None))
    assert deltas[-1].finish_reason == "tool_calls"
    assert not any(choice.delta.content for choice in deltas)


def test_json_schema(client: openai.OpenAI, model: str):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=24,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    )
    assert answer.choices[0].finish_reason == "stop"
    parsed = json.loads(answer.choices[0].message.content or "")
    assert parsed["city"] in ("Paris", "Rome") and isinstance(parsed["big"], bool) and len(parsed) == 2


def test_json_object(client: openai.OpenAI, model: str):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=24, temperature=0, response_format={"type": "json_object"}
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_completions(client: openai.OpenAI, model: str):
    prompt = "The capital of France is"
    one = client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0)
    assert "Paris" in one.choices[0].text
    two = client.completions.create(model=model, prompt=[prompt, "One, two,"], n=2, max_tokens=4, temperature=0)
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    assert two.choices[0].text == two.choices[1].text == one.choices[0].text
    assert two.usage is not None and one.usage is not None and two.usage.completion_tokens == 16
    streamed = client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.choices[0].text


def test_completions_from_tokens(client: openai.OpenAI, model: str):
    tokens = [504, 3575, 282, 4649, 314]
    one = client.completions.create(model=model, prompt=tokens, max_tokens=4, temperature=0, logprobs=2)
    assert one.usage is not None and one.usage.prompt_tokens == 5
    logprobs = one.choices[0].logprobs
    assert logprobs is not None and "".join(logprobs.tokens or []) == one.choices[0].text
    assert [len(top) for top in logprobs.top_logprobs or []] == [2] * 4
    assert (logprobs.text_offset or [])[0] == 0


def test_unknown_model(client: openai.OpenAI, model: str):
    with pytest.raises(openai.NotFoundError, match=f"gpt-none.*{model}"):
        client.chat.completions.create(model="gpt-none", messages=QUESTION)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 3),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_k", -2),
        ("n", 0),
        ("n", 17),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("top_logprobs", 2),
        ("logit_bias", {"99999999": 1}),
        ("logit_bias", {"5": 101}),
        ("stop", ["x"] * 17),
        ("tool_choice", "required"),
        ("tool_choice", "sometimes"),
        ("tools", [{"function": {"name": "x"}}]),
        ("tools", [{"type": ["web_search"]}]),
        ("chat_template_kwargs", {"tools": []}),
        ("seed", True),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}),
        ("messages", []),
    ],
)
def test_bad_fields(client: openai.OpenAI, model: str, field: str, value: Any):
    error = refused(client, "/chat/completions", {"model": model, "messages": QUESTION, field: value})
    assert error.param is not None and error.param.split(".")[0] == field


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "user"}, "messages.0"),
        ({"role": "user", "content": 3}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content"),
        ({"role": "wizard", "content": "x"}, "messages.0.role"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "x", "arguments": 3}}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_bad_messages(client: openai.OpenAI, model: str, message: Any, place: str):
    assert refused(client, "/chat/completions", {"model": model, "messages": [message]}).param == place


@pytest.mark.parametrize("prompt", [[], "", [[]], [-1], [10**9], [1, "x"], [True], {"a": 1}, None, ["x", ""]])
def test_bad_prompts(client: openai.OpenAI, model: str, prompt: Any):
    assert refused(client, "/completions", {"model": model, "prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(
    "body",
    [
        '{"model": "default", "messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"model": "default", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        '{"model": "default", "messages": [{"role": "user", "content": "x"}], "stop": "\\udfff"}',
        '{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
        '{"model": "default", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", '
        '"function": {"name": "x", "parameters": {"\\ud800": 1}}}]}',
        '{"model": "default", "messages": [{"role": "user", "content": "x"}], "logit_bias": {"\\ud800": 1}}',
    ],
)
def test_what_is_no_text_or_number(server: Any, body: str):
    headers = {"Authorization": f"Bearer {server.keys[0]}", "Content-Type": "application/json"}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"]


def test_cancelling_mid_stream(server: Any, client: openai.OpenAI, model: str):
    before = scrape(server)[CANCELLED]
    with client.chat.completions.create(model=model, messages=QUESTION, max_tokens=2000, stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
    client.chat.completions.create(model=model, messages=QUESTION, max_tokens=1, n=4)
    until_cancelled(server, before)


def test_null_means_not_given():
    given = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    nulls = dict.fromkeys(set(ChatBody.model_fields) - set(given))
    assert ChatBody.model_validate({**given, **nulls}) == ChatBody.model_validate(given)


def test_thinking_that_is_sent_back_has_two_names():
    for name in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "Yes", name: "hm"}
        (message,) = ChatBody.model_validate({"model": "m", "messages": [said]}).messages
        assert message.as_message() == {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}


def chunks_of(*said: Event, thinking: bool = False, **asked: Any) -> list[dict[str, Any]]:
    """The chunks of an answer whose model said all of `said`."""
    backend: Any = SimpleNamespace(name="m", tokenizer=None)
    messages = [{"role": "user", "content": "x"}]
    answer = ChatAnswer(backend, ChatBody.model_validate({"model": "m", "messages": messages, **asked}))
    *frames, done = frames_of(answer, list(said), thinking=thinking)
    assert done == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


END = End("stop", None, 5, 0, 3, Timings(0, 0, 0))


def test_reasoning_is_apart_from_content():
    said = Delta("hm</thi", [1, 2]), Delta("nk>\nYes", [3]), END
    *chunks, last = chunks_of(*said, thinking=True, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "Yes"}, {}]
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


def test_an_error_after_the_beginning_is_an_event():
    first, second, last = chunks_of(Delta("Yes", [1]), RequestFailedError("it broke"))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert second["choices"][0]["delta"] == {"content": "Yes"}
    assert last["error"]["message"] == "it broke" and last["error"]["type"] == "server_error"


def test_a_bug_after_the_beginning_is_an_event_without_its_text(caplog: pytest.LogCaptureFixture):
    wrong: Any = "no piece at all"
    last = chunks_of(Delta("Yes", [1]), wrong)[-1]["error"]["message"]
    assert "req_" in last and "attribute" not in last
    assert last.rpartition(" ")[2] in caplog.text and "AttributeError" in caplog.text


def test_an_answer_cut_off_by_shutdown_is_an_error():
    cancelled = End("cancelled", None, 5, 0, 3, Timings(0, 0, 0))
    assert "shutting down" in chunks_of(cancelled)[-1]["error"]["message"]
