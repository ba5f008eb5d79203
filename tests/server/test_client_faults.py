"""What real clients send and expect, by the clients themselves: each of these once went wrong."""

import json
import logging
import re
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

from conftest import WEATHER

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": WEATHER}
TOOL: Any = {"type": "function", "function": FUNCTION}
FOREIGN_CHAT: list[Any] = [{"type": "web_search"}, {"type": "custom", "custom": {"name": "patch"}}]
FOREIGN_RESPONSES: list[Any] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
    {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
    {"type": "local_shell"},
]
FOREIGN_ANTHROPIC: list[Any] = [
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
]


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys[0], max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=server.keys[0], max_retries=0)


def chat(client: openai.OpenAI, messages: list[Any] = QUESTION, **options: Any) -> Any:
    options = {"model": "default", "max_tokens": 2, "temperature": 0, **options}
    return client.chat.completions.create(messages=messages, **options)


def ask(claude: anthropic.Anthropic, messages: list[Any] = QUESTION, **options: Any) -> anthropic.types.Message:
    options = {"model": "default", "max_tokens": 2, "extra_body": {"temperature": 0}, **options}
    return claude.messages.create(messages=messages, **options)


LONG: list[Any] = [{"role": "user", "content": "word " * 9000}]


def test_too_long_in_openais_words(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    longest = (model.model_extra or {})["context_length"]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, LONG, max_tokens=7, stream=stream)
        assert caught.value.code == "context_length_exceeded"
        message = caught.value.message
        assert f"This model's maximum context length is {longest} tokens. However, you requested 90" in message
        assert "in the messages, 7 in the completion). Please reduce the length" in message
        assert "--kv-memory" in message
    with pytest.raises(openai.BadRequestError, match=r"your messages resulted in 90\d\d tokens"):
        chat(client, LONG, max_tokens=None)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(model="default", input=LONG)


def test_too_long_in_anthropics_words(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, LONG, max_tokens=32_000, timeout=60)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    message = body["error"]["message"]
    assert re.match(r"prompt is too long: 90\d\d tokens > [5-8]\d\d\d maximum \(max_tokens is 32000\)", message)
    assert "--kv-memory" in message


def test_tools_that_cannot_be_run_are_left_out(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    plain = chat(client).usage.prompt_tokens
    assert chat(client, tools=FOREIGN_CHAT).usage.prompt_tokens == plain
    with_tool = chat(client, tools=[TOOL]).usage.prompt_tokens
    assert chat(client, tools=[*FOREIGN_CHAT, TOOL]).usage.prompt_tokens == with_tool > plain

    answer = client.responses.create(model="default", input="Hi", max_output_tokens=1, tools=FOREIGN_RESPONSES)
    assert answer.tools == []

    def count(tools: list[Any]) -> int:
        return claude.messages.count_tokens(model="default", messages=QUESTION, tools=tools).input_tokens

    own = {"name": "get_weather", "input_schema": WEATHER}
    assert count(FOREIGN_ANTHROPIC) == count([]) < count([own]) == count([*FOREIGN_ANTHROPIC, own])


def test_a_choice_among_tools_that_are_left_out(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.BadRequestError, match="no tools; tools of type custom, web_search are left out"):
        chat(client, tools=FOREIGN_CHAT, tool_choice="required")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, tools=[*FOREIGN_CHAT, TOOL], tool_choice={"type": "function", "function": {"name": "spawn"}})
    assert "'spawn', which is not in tools" in caught.value.message and caught.value.param == "tool_choice"
    with pytest.raises(anthropic.BadRequestError, match="'bash', but there are no tools; tools of type bash_20250124"):
        ask(claude, tools=FOREIGN_ANTHROPIC[1:2], tool_choice={"type": "tool", "name": "bash"})


def test_the_log_names_a_kind_of_tool_once(caplog: pytest.LogCaptureFixture) -> None:
    from onekv.server.tools import OtherTool, leave_out

    with caplog.at_level(logging.INFO, "onekv.server"):
        for kind in ("of_the_log", "of_the_log", "another_of_the_log"):
            leave_out([OtherTool(type=kind)])
    assert ["'of_the_log'" in caplog.messages[0], "'another_of_the_log'" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2


def test_legacy_functions(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"functions": [FUNCTION], "max_tokens": 48}
    asked = chat(client, function_call={"name": "get_weather"}, **options).choices[0]
    assert asked.finish_reason == "function_call" and asked.message.tool_calls is None
    call = asked.message.function_call
    assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    chunks = list(chat(client, function_call={"name": "get_weather"}, stream=True, **options))
    streamed = [chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call]
    assert (streamed[0].name, "".join(part.arguments for part in streamed)) == (call.name, call.arguments)
    assert chunks[-1].choices[0].finish_reason == "function_call"
    result = {"role": "function", "name": "get_weather", "content": "Sunny"}
    assert chat(client, [*QUESTION, asked.message, result], functions=[FUNCTION]).choices[0].message.content


def test_numbers_that_mean_none(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    greedy = chat(client, max_tokens=6).choices[0].message.content
    body = {"top_p": 0, "top_k": -1}
    assert chat(client, temperature=2, max_tokens=6, extra_body=body).choices[0].message.content == greedy
    assert ask(claude, max_tokens=6, extra_body=body).content[0].text == greedy  # type: ignore[union-attr]
    ended = chat(client, [{"role": "user", "content": "Say yes."}], max_tokens=-1, stop=["e", "a", "o", "i"])
    assert ended.choices[0].finish_reason == "stop"
    plain = client.completions.create(
        model="default", prompt="One, two,", max_tokens=-1, stop=["e", "r"], temperature=0
    )
    assert plain.choices[0].finish_reason == "stop"
    unlimited: Any = {**body, "max_output_tokens": -1, "stop": greedy[-3:], "temperature": 2}
    made = client.responses.create(model="default", input=QUESTION, extra_body=unlimited)
    assert (made.status, made.output_text) == ("completed", greedy[:-3])


def test_broken_arguments_and_images_of_tools_stay_in_the_history(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    broken = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"city": '}}
    image: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    talk = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [broken]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "Seen:"}, image]},
    ]
    answer = chat(client, talk)
    named = [*talk[:-1], {**talk[-1], "content": "Seen:\n[image_url left out: this model reads text only]"}]
    assert chat(client, named).usage.prompt_tokens == answer.usage.prompt_tokens
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    used = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    history = [
        *QUESTION,
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [picture]}]},
    ]
    assert ask(claude, history).content
    items: Any = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{broken"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": "x"}]},
    ]
    assert client.responses.create(model="default", input=items, max_output_tokens=2).output


def test_an_answer_goes_on_from_the_assistants_message(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    said = chat(client, begun, max_tokens=3).choices[0].message.content
    assert said.startswith(" Paris")
    assert ask(claude, begun, max_tokens=3).content[0].text == said  # type: ignore[union-attr]
    made = client.responses.create(model="default", input=begun, max_output_tokens=3, temperature=0)  # type: ignore[arg-type]
    assert made.output_text == said


def test_an_error_names_its_field(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body={"model": "default", "messages": QUESTION, "n": 99}, cast_to=object)
    assert caught.value.message.count("n: ") == 1 and "16" in caught.value.message
    # In words for people, without those of the library that found it.
    with pytest.raises(openai.BadRequestError, match=r"- max_tokens: must be at least 1, or -1 for as many as fit$"):
        chat(client, max_tokens=0)
    picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match="type 'image' is not supported; only 'text', 'tool"):
        ask(claude, [{"role": "user", "content": [picture]}])


def test_models_in_anthropics_form(server: Any, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    page = claude.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, server.backend_name, server.backend_name)
    (model,) = page
    assert (model.type, model.id, model.display_name) == ("model", server.backend_name, server.backend_name)
    assert model.created_at.year >= 2024
    assert claude.models.list(after_id=model.id).data == [], "nothing comes after the only page"
    assert claude.models.retrieve("claude-of-tomorrow").id == server.backend_name
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("gpt-4")
    assert client.models.list().data[0].object == "model"


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models"])
def test_head_is_get_without_a_body(server: Any, path: str) -> None:
    headers = {"Authorization": f"Bearer {server.keys[0]}"}
    answer = httpx.head(server.url + path, headers=headers)
    assert (answer.status_code, answer.content) == (200, b"")
    assert httpx.get(server.url + path, headers=headers).content
    assert httpx.head(f"{server.url}/v1/chat/completions", headers=headers).status_code == 405


def test_embeddings_are_refused_in_a_sentence(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no embedding model"):
        client.embeddings.create(model="default", input="Hi")


def test_names_for_the_template(client: openai.OpenAI) -> None:
    names: dict[str, Any] = {"enable_thinking": False, "mood": "merry", "nothing": None}
    assert chat(client, reasoning_effort="low", extra_body={"chat_template_kwargs": names}).choices
    with pytest.raises(openai.BadRequestError, match=r"chat_template_kwargs: .*chat_template cannot be set"):
        chat(client, extra_body={"chat_template_kwargs": {"chat_template": "{{ 1 }}"}})


def test_the_answer_ends_after_its_first_call(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    # A model this small goes on when it has begun.
    talk: list[Any] = [*QUESTION, {"role": "assistant", "content": f"{call}\n" * 3}]
    one = chat(client, talk, tools=[TOOL], parallel_tool_calls=False, max_tokens=100)
    several = chat(client, talk, tools=[TOOL], max_tokens=100)
    assert one.choices[0].finish_reason == "tool_calls" and one.choices[0].message.content is None
    assert len(one.choices[0].message.tool_calls) == 1 <= len(several.choices[0].message.tool_calls)
    assert one.usage.completion_tokens < several.usage.completion_tokens
    tool = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": WEATHER}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    used = ask(claude, talk, tools=[tool], tool_choice=choice, max_tokens=100)
    assert [block.type for block in used.content] == ["tool_use"]
    assert used.usage.output_tokens == one.usage.completion_tokens
    made = client.responses.create(
        model="default",
        input=talk,
        tools=[{"type": "function", **FUNCTION}],  # type: ignore[list-item]
        parallel_tool_calls=False,
        max_output_tokens=100,
        temperature=0,
    )
    assert [item.type for item in made.output] == ["function_call"] and made.status == "completed"
    assert made.usage is not None and made.usage.output_tokens == one.usage.completion_tokens


def test_a_call_that_is_cut_off(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    whole = chat(client, tools=[TOOL], tool_choice="required", max_tokens=48)
    full = whole.choices[0].message.tool_calls[0].function.arguments
    begun = []
    # Of these, some are in the midst of the arguments.
    for left in range(8, 12):
        count = whole.usage.completion_tokens - left
        choice = chat(client, tools=[TOOL], tool_choice="required", max_tokens=count).choices[0]
        assert choice.finish_reason == "length" and not choice.message.content
        for call in choice.message.tool_calls or []:
            assert call.function.name == "get_weather" and full.startswith(call.function.arguments)
            begun += [count] if call.function.arguments != full else []
    assert begun
    none = chat(client, tools=[TOOL], tool_choice="required", max_tokens=4).choices[0]
    assert (none.finish_reason, none.message.content, none.message.tool_calls) == ("length", "", None)
    tool = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": WEATHER}
    half = ask(claude, tools=[tool], tool_choice={"type": "any"}, max_tokens=begun[0])
    assert (half.stop_reason, half.content) == ("max_tokens", [])
    asked: Any = {"input": QUESTION, "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}
    made = client.responses.create(model="default", max_output_tokens=begun[0], temperature=0, **asked)
    (item,) = made.output
    assert item.type == "function_call" and (made.status, item.status) == ("incomplete", "incomplete")
    assert item.name == "get_weather" and full.startswith(item.arguments) and item.arguments != full


def test_the_start_of_a_message_knows_what_was_cached(claude: anthropic.Anthropic) -> None:
    talk: list[Any] = [{"role": "user", "content": "Which birds sing at night, and which at dawn?"}]
    prompt = ask(claude, talk).usage
    with claude.messages.stream(model="default", max_tokens=2, messages=talk) as stream:
        start = next(event for event in stream if event.type == "message_start").message.usage
        end = stream.get_final_message().usage
    assert start.cache_read_input_tokens == end.cache_read_input_tokens
    assert (start.cache_read_input_tokens or 0) >= prompt.input_tokens - 1
    assert start.input_tokens == end.input_tokens


def test_input_items_and_cancel(client: openai.OpenAI, server: Any) -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x"},
        {"type": "function_call_output", "call_id": "1", "output": "Seen."},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "Done."},
    ]
    made = client.responses.create(model="default", input=items, max_output_tokens=1)
    listed = list(client.responses.input_items.list(made.id, limit=2, order="asc"))
    assert [item.type for item in listed] == [item.get("type", "message") for item in items], "page by page"
    assert listed[1].content[0].text == "Hi" and listed[2].arguments == '{"a": 1}'  # type: ignore[union-attr]
    assert [item.id for item in client.responses.input_items.list(made.id)] == [item.id for item in listed[::-1]]
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_none")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_body_is_json_whatever_it_is_called(server: Any, path: str, kind: str | None) -> None:
    """`curl -d` calls it a form, as in Ollama's documentation."""
    body = json.dumps({"model": "default", "messages": QUESTION, "max_tokens": 2, "options": {"num_predict": 2}})
    headers = {"Authorization": f"Bearer {server.keys[0]}", **({"Content-Type": kind} if kind else {})}
    answer = httpx.post(server.url + path, content=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    page = httpx.post(server.url + path, content=body, headers={**headers, "Origin": "null"})
    assert page.status_code == 403, "a web page needs no preflight for such a body"
