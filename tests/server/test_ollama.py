"""Ollama's API through its own client, against a real server."""

import json
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import ollama
import pytest
from canned import Client, run

import onekv.server.answer as answers
from conftest import WEATHER
from onekv.engine import Delta, End, Timings
from onekv.errors import RequestFailedError
from onekv.server.deltas import ToolCallDelta
from onekv.server.ollama.chat import ChatAnswer
from onekv.server.ollama.convert import call_of, messages_of
from onekv.server.ollama.schema import ChatBody
from onekv.server.sampling_defaults import SamplingDefaults

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 6}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}}


@pytest.fixture
def client(server: Any) -> ollama.Client:
    return ollama.Client(host=server.url, headers={"authorization": f"Bearer {server.keys[0]}"})


@pytest.fixture
def model(server: Any) -> str:
    return str(server.backend_name)


def post(server: Any, path: str, body: Any, key: bool = True) -> httpx.Response:
    headers = {"x-api-key": server.keys[0]} if key else {}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


def refused(client: ollama.Client, call: str, **options: Any) -> ollama.ResponseError:
    with pytest.raises(ollama.ResponseError) as caught:
        getattr(client, call)(**options)
    return caught.value


def test_chat(client: ollama.Client, model: str) -> None:
    whole = client.chat(model, QUESTION, options=GREEDY)
    assert "Paris" in (whole.message.content or "")
    assert (whole.model, whole.message.role, whole.done, whole.eval_count) == (model, "assistant", True, 6)
    *pieces, last = client.chat(model, QUESTION, options=GREEDY, stream=True)
    # What was said before is guessed, and may come in one piece.
    assert pieces and not any(piece.done for piece in pieces)
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert (last.message.content, last.done, last.done_reason) == ("", True, "length")


def test_what_it_took(server: Any, client: ollama.Client, model: str) -> None:
    talk = [{"role": "user", "content": "Name a river, a lake and a sea."}]
    took = post(server, "/api/chat", {"model": model, "messages": talk, "options": GREEDY, "stream": False}).json()
    counted = post(server, "/tokenize", {"messages": talk}).json()["count"]
    assert (took["prompt_eval_count"], took["eval_count"]) == (counted, 6)
    parts = [took[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
    assert all(part > 0 for part in parts) and sum(parts) == took["total_duration"]
    again = post(server, "/api/chat", {"model": model, "messages": talk, "options": GREEDY, "stream": False}).json()
    assert (again["prompt_eval_count"], again["prompt_cached_count"]) == (counted, counted - 1)


def test_it_streams_unless_it_is_told_not_to(server: Any, model: str) -> None:
    answer = post(server, "/api/chat", {"model": model, "messages": QUESTION, "options": GREEDY})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    whole = post(server, "/api/chat", {"model": model, "messages": QUESTION, "options": GREEDY, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["message"]["content"] == "".join(line["message"]["content"] for line in lines)


def test_generate(client: ollama.Client, model: str) -> None:
    whole = client.generate(model, QUESTION[0]["content"], options=GREEDY)
    assert whole.response == client.chat(model, QUESTION, options=GREEDY).message.content
    pieces = list(client.generate(model, QUESTION[0]["content"], options=GREEDY, stream=True))
    assert "".join(piece.response or "" for piece in pieces) == whole.response
    assert (pieces[-1].done, pieces[-1].done_reason, pieces[-1].eval_count) == (True, "length", 6)
    system = "You are a pirate."
    told = client.generate(model, "Who are you?", system=system, options=GREEDY)
    talk = [{"role": "system", "content": system}, {"role": "user", "content": "Who are you?"}]
    assert told.response == client.chat(model, talk, options=GREEDY).message.content


def test_raw_goes_on_with_the_text(client: ollama.Client, model: str) -> None:
    answer = client.generate(model, "The capital of France is", raw=True, options={"temperature": 0, "num_predict": 1})
    assert (answer.response, answer.prompt_eval_count) == (" Paris", 5)


def test_options(client: ollama.Client, model: str) -> None:
    def ask(**options: Any) -> str:
        answer = client.generate(model, "Tell me a story.", options={"num_predict": 12.0, **options})
        assert answer.eval_count == 12 or answer.done_reason == "stop"
        return answer.response

    assert ask(temperature=2, seed=1) == ask(temperature=2, seed=1) != ask(temperature=2, seed=2)
    greedy = ask(temperature=0)
    for one_token in ({"top_k": 1}, {"top_p": 0}, {"min_p": 1}):
        assert ask(temperature=2, seed=1, **one_token) == greedy, one_token
    assert ask(temperature=0, repeat_penalty=50.0) != greedy
    assert ask(temperature=0, frequency_penalty=90.0) != greedy
    word = greedy.split()[2]
    cut = client.generate(model, "Tell me a story.", options={"temperature": 0, "stop": [word], "num_predict": 12})
    assert (cut.response, cut.done_reason) == (greedy[: greedy.index(word)], "stop")


def test_a_form(client: ollama.Client, model: str) -> None:
    options = {"temperature": 0, "num_predict": 60}
    answer = client.chat(model, QUESTION, format=WEATHER, options=options)
    assert json.loads(answer.message.content or "")["city"] in ("Paris", "Rome")
    raw = client.generate(model, "The weather of", raw=True, format=WEATHER, options=options)
    assert json.loads(raw.response)["city"] in ("Paris", "Rome")
    any_object = client.generate(model, "Answer with {}", format="json", options={**options, "stop": ["}"]})
    assert any_object.response.startswith("{")
    unusable = refused(client, "chat", model=model, messages=QUESTION, format={"type": "nothing"})
    assert unusable.status_code == 400 and unusable.error.startswith("format: ")


def test_a_talk_with_tools(client: ollama.Client, model: str) -> None:
    calls = [{"function": {"name": "get_weather", "arguments": {"city": city}}} for city in ("Paris", "Rome")]
    talk: list[Any] = [
        *QUESTION,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
        {"role": "tool", "tool_name": "get_weather", "content": "rain"},
    ]
    with_tools = client.chat(model, talk, tools=[TOOL], options=GREEDY)
    without = client.chat(model, talk, options=GREEDY)
    assert with_tools.eval_count and with_tools.prompt_eval_count and without.prompt_eval_count
    assert with_tools.prompt_eval_count > without.prompt_eval_count + 50, "the tools are described"
    made = messages_of(ChatBody.model_validate({"model": "m", "messages": talk}).messages or [])
    ids = [call["id"] for call in made[1]["tool_calls"]]
    assert len(set(ids)) == 2 and [message["tool_call_id"] for message in made[2:]] == ids


def test_how_much_is_thought_is_told_to_the_template() -> None:
    backend: Any = SimpleNamespace(defaults=SamplingDefaults())
    effort = {"reasoning_effort": "high"}
    for think, thinking, template in ((True, True, {}), (False, False, {}), ("high", True, effort)):
        body = ChatBody.model_validate({"model": "m", "messages": QUESTION, "think": think})
        call = call_of(backend, body, "", QUESTION)
        assert (call.thinking, call.template) == (thinking, template)


def test_an_answer_without_a_limit_has_the_servers() -> None:
    backend: Any = SimpleNamespace(defaults=SamplingDefaults())
    for given, limit in ((-2, None), (-1, None), (7, 7)):
        body = ChatBody.model_validate({"model": "m", "messages": QUESTION, "options": {"num_predict": given}})
        assert call_of(backend, body, "", QUESTION).max_tokens == limit


def test_log_probabilities(client: ollama.Client, model: str) -> None:
    answer = client.chat(model, QUESTION, options=GREEDY, logprobs=True, top_logprobs=2)
    assert answer.logprobs is not None and "".join(each.token for each in answer.logprobs) == answer.message.content
    for each in answer.logprobs:
        assert each.top_logprobs is not None and len(each.top_logprobs) == 2
        assert each.logprob == each.top_logprobs[0].logprob <= 0
    pieces = list(client.chat(model, QUESTION, options=GREEDY, logprobs=True, stream=True))
    streamed = [each.token for piece in pieces for each in piece.logprobs or []]
    assert streamed == [each.token for each in answer.logprobs]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_says_nothing_is_for_loading(client: ollama.Client, model: str, stream: bool) -> None:
    for answer in (client.generate(model, stream=stream), client.chat(model, stream=stream, keep_alive="5m")):
        (last,) = answer if stream else [answer]
        assert (last.done, last.done_reason, last.eval_count) == (True, "load", None)


def test_what_there_is(server: Any, client: ollama.Client, model: str) -> None:
    (listed,) = client.list().models
    assert listed.model == model and listed.size and listed.size > 90_000_000 and listed.modified_at is not None
    assert listed.digest is not None and len(listed.digest) == 64 and listed.details is not None
    details = listed.details.format, listed.details.family, listed.details.parameter_size
    assert details == ("gguf", "llama", "135M") and listed.details.quantization_level == "Q4_1"
    shown = client.show(f"{model}:latest")
    assert shown.capabilities == ["completion", "tools"] and "messages" in (shown.template or "")
    assert shown.modelinfo is not None and shown.modelinfo["general.parameter_count"] == 134_515_008
    assert "temperature 1" in (shown.parameters or "")
    (loaded,) = client.ps().models
    assert loaded.context_length == shown.modelinfo["llama.context_length"] <= 8192
    assert loaded.size is not None and loaded.size > 256 * 2**20, "the KV pool is a part of it"
    headers = {"x-api-key": server.keys[0]}
    assert httpx.get(f"{server.url}/api/version", headers=headers).json()["version"].count(".") == 2
    assert httpx.head(f"{server.url}/api/tags", headers=headers).status_code == 200


def test_refusals_say_why(server: Any, client: ollama.Client, model: str) -> None:
    unknown = refused(client, "chat", model="nothing", messages=QUESTION)
    assert unknown.status_code == 404 and "'nothing'" in unknown.error and model in unknown.error
    picture = {"role": "user", "content": "What is this?", "images": [b"GIF89a"]}
    for wrong in (
        refused(client, "chat", model=model, messages=[picture]),
        refused(client, "generate", model=model, prompt="What is this?", images=[b"GIF89a"]),
    ):
        assert wrong.status_code == 400 and "images are not supported" in wrong.error
    for call in ("embed", "embeddings"):
        given = {"input": "x"} if call == "embed" else {"prompt": "x"}
        assert "embeddings are not supported" in refused(client, call, model=model, **given).error
    assert "models cannot be changed" in refused(client, "pull", model="other").error
    gap = refused(client, "generate", model=model, prompt="x", suffix="end").error
    assert gap.startswith("suffix: ") and "has no tokens for filling in the middle" in gap
    for field, value in (("template", "{{ .Prompt }}"), ("context", [1, 2])):
        assert (
            f"{field} is not supported" in refused(client, "generate", model=model, prompt="x", **{field: value}).error
        )
    hot = refused(client, "chat", model=model, messages=QUESTION, options={"temperature": -1})
    assert hot.error.startswith("options.temperature: ")
    assert list(post(server, "/api/chat", {"model": model}, key=False).json()) == ["error"]
    assert "there is no /api/nothing" in post(server, "/api/nothing", {}).json()["error"]


# What no small model says on demand: the engine's events are given.


def answer(**options: Any) -> ChatAnswer:
    body = ChatBody.model_validate({"model": "m", "messages": QUESTION, **options})
    return ChatAnswer(SimpleNamespace(), body)  # type: ignore[arg-type]


END = End("stop", None, 5, 2, 3, Timings(0.5, 0.25, 0.125))


def lines(client: Client) -> list[ollama.ChatResponse]:
    return [ollama.ChatResponse(**json.loads(line)) for line in "".join(client.writes).splitlines()]


def test_thinking_and_calls() -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    said = [Delta("hm</think>Yes", [1]), Delta(call, [2]), Delta(call, [3]), END]
    *parts, last = lines(run(lambda: Client(answer(), said, thinking=True)))
    assert [(part.message.thinking, part.message.content) for part in parts[:2]] == [("hm", ""), (None, "Yes")]
    for part in parts[2:]:
        assert part.message.tool_calls is not None
        (made,) = part.message.tool_calls
        assert (made.function.name, made.function.arguments) == ("get_weather", {"city": "Rome"})
    assert len(parts) == 4 and last.done_reason == "stop"
    assert (last.prompt_eval_duration, last.eval_duration) == (250_000_000, 125_000_000)
    whole = json.loads("".join(run(lambda: Client(answer(), said, thinking=True, stream=False)).writes))
    assert (whole["message"]["thinking"], whole["message"]["content"]) == ("hm", "Yes")
    assert [call["function"]["index"] for call in whole["message"]["tool_calls"]] == [0, 1]


def test_a_call_that_was_cut_off_is_left_out() -> None:
    (line,) = answer().add(0, ToolCallDelta("get_weather", '{"city": "Ro'))
    assert json.loads(line)["message"] == {"role": "assistant", "content": ""}


def test_while_nothing_comes_a_piece_of_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEEP_ALIVE_S", 0.02)

    def goes_on(client: Client) -> None:
        client.inbox.put(0, Delta("Yes", [1]))
        client.inbox.put(0, END)

    first, *others = lines(run(lambda: Client(answer(), []), goes_on))
    assert (first.message.content, first.done) == ("", False)
    assert [other.message.content for other in others][-2:] == ["Yes", ""] and others[-1].done


def test_an_answer_that_fails_says_so_in_a_line() -> None:
    said = [Delta("Yes", [1]), RequestFailedError("the model gave no numbers")]
    *_, last = "".join(run(lambda: Client(answer(), said)).writes).splitlines()
    assert json.loads(last) == {"error": "the model gave no numbers"}
