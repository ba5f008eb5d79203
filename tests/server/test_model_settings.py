"""The model as clients see it: its names, its chat template, how it is sampled where a request does not say."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx2 as httpx
import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from conftest import start_server, stop_server
from onekv.bench.soak import save_tiny
from onekv.cli import main
from onekv.config import flag
from onekv.errors import SettingError
from onekv.models import load_model
from onekv.models.templates import with_template
from onekv.server.app import create_app
from onekv.server.backend import Backend
from onekv.server.call import ChatCall
from onekv.server.model_settings import ModelSettings
from onekv.server.prompt import knows_tools, render
from onekv.server.sampling_defaults import SamplingDefaults
from onekv.server.settings import ServerSettings

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "[{{ mood }}{{ reasoning_effort }}{{ thinking_budget }}]"
)
MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """A model whose makers recommend to sample from one token, under three names, with a template of the server's."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    name = save_tiny(folder)
    (folder / "generation_config.json").write_text('{"temperature": 1.5, "top_k": 1, "do_sample": true, "min_p": null}')
    served = ModelSettings(
        alias="one, two", chat_template=TEMPLATE, chat_template_args='{"mood": "calm"}', repetition_penalty=1.25
    )
    made = Backend(name, served=served, kv_memory="34MiB", block_size=16, max_batch=4, progress=False)
    made.start()
    yield made
    made.stop(0)


@pytest.fixture(scope="module")
def client(backend: Backend) -> TestClient:
    # Without its lifespan: that would stop the backend.
    return TestClient(create_app(backend, ServerSettings()), base_url="http://localhost")


def said(client: TestClient, **options: Any) -> str:
    body = {"model": "one", "messages": MESSAGES, "max_tokens": 12, **options}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_all_names_are_the_model(client: TestClient, backend: Backend) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny", "one", "two"]
    assert client.get("/v1/models/two").json()["id"] == "two"
    refused = client.post("/v1/chat/completions", json={"model": "three", "messages": MESSAGES})
    assert refused.status_code == 404
    told = refused.json()["error"]["message"]
    assert "'three'" in told and "'tiny' or 'one' or 'two'" in told and "--any-model" in told


def test_ollamas_clients_see_all_names_and_the_same_defaults(client: TestClient) -> None:
    assert [each["name"] for each in client.get("/api/tags").json()["models"]] == ["tiny", "one", "two"]

    def text(seed: int, **options: Any) -> str:
        sampled = {"num_predict": 12, "seed": seed, **options}
        body = {"model": "two", "prompt": "Go on.", "stream": False, "options": sampled}
        answer = client.post("/api/generate", json=body).json()
        assert answer["model"] == "two"
        return str(answer["response"])

    assert text(1) == text(2)
    assert text(1, top_k=0) != text(2, top_k=0)
    shown = client.post("/api/show", json={"name": "one"}).json()
    assert shown["template"] == TEMPLATE and "repetition_penalty 1.25" in shown["parameters"].splitlines()


def test_the_models_makers_say_how_it_is_sampled(client: TestClient) -> None:
    # From one token there is nothing to choose, whatever the seed.
    assert said(client, seed=1) == said(client, seed=2)
    assert said(client, seed=1, top_k=0) != said(client, seed=2, top_k=0)
    body = {"model": "tiny", "input": "Go on.", "max_output_tokens": 1}
    made = client.post("/v1/responses", json=body).json()
    assert (made["temperature"], made["top_p"]) == (1.5, 1.0)


def test_anthropics_api_has_the_same_defaults(client: TestClient) -> None:
    def text(**options: Any) -> str:
        body = {"model": "claude-x", "messages": MESSAGES, "max_tokens": 24, **options}
        return json.dumps(client.post("/v1/messages", json=body).json()["content"])

    assert text() == text()
    assert len({text(top_k=0, temperature=1) for _ in range(3)}) > 1


def test_the_template_and_its_values(backend: Backend) -> None:
    def text(call: ChatCall) -> str:
        return str(backend.tokenizer.decode(render(backend, call).tokens))

    assert text(ChatCall(MESSAGES)) == "<user>Say something.[calm]"
    assert text(ChatCall(MESSAGES, template={"mood": "wild"})) == "<user>Say something.[wild]"


# What a request may tell the template, by path: alone, and with what it is told.
MUCH, BUDGET = "much " * 9, 987_654_321
OPENAIS: list[dict[str, Any]] = [{"chat_template_kwargs": {"mood": MUCH}}, {"thinking_budget": BUDGET}]
TOLD: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 1}, [*OPENAIS, {"reasoning_effort": MUCH}]),
    "/v1/responses": ({"input": "Go on.", "max_output_tokens": 1}, [*OPENAIS, {"reasoning": {"effort": MUCH}}]),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 1},
        [{"output_config": {"effort": MUCH}}, {"thinking": {"type": "enabled", "budget_tokens": BUDGET}}],
    ),
    "/api/chat": ({"messages": MESSAGES, "options": {"num_predict": 1}, "stream": False}, [{"think": "high"}]),
    "/tokenize": ({"messages": MESSAGES}, OPENAIS[:1]),
    "/admin/cache/probe": ({"messages": MESSAGES}, [*OPENAIS, {"reasoning_effort": MUCH}]),
}


@pytest.mark.parametrize("path", TOLD)
def test_each_api_tells_the_template_what_a_request_gives(client: TestClient, path: str) -> None:
    def length(given: dict[str, Any]) -> int:
        answer = client.post(path, json={"model": "one", **plain, **given})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        counts = found.get("usage", found)
        names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "prompt_eval_count", "count", "tokens")
        return sum(counts[name] for name in names if isinstance(counts.get(name), int))

    plain, told = TOLD[path]
    shortest = length({})
    for given in told:
        assert length(given) > shortest, given


def test_a_template_brings_the_parser_of_its_calls(smollm2_path: Path) -> None:
    tokenizer = load_model(str(smollm2_path), lazy=True).tokenizer
    assert not knows_tools(tokenizer)
    teaches = TEMPLATE + "{% for tool_call in tools or [] %}<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}"
    changed = with_template(tokenizer, teaches)
    assert knows_tools(changed) and changed.tool_call_start == "<tool_call>"
    assert changed.tool_parser('{"name": "add", "arguments": {}}', None) == {"name": "add", "arguments": {}}
    assert changed.eos_token_ids == tokenizer.eos_token_ids


def test_flags_win_over_the_file_and_that_over_one(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}')
    assert SamplingDefaults.of(ModelSettings(), tmp_path) == SamplingDefaults(temperature=0.6, top_p=0.9)
    flags = ModelSettings(temperature="0", top_k="20", min_p=0.1)
    assert SamplingDefaults.of(flags, tmp_path) == SamplingDefaults(0.0, 0.9, 20, 0.1)
    assert SamplingDefaults.of(ModelSettings(generation_config="off"), tmp_path) == SamplingDefaults()
    assert SamplingDefaults.of(ModelSettings(), None) == SamplingDefaults()


def test_a_gguf_file_says_it_too(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert SamplingDefaults.of(ModelSettings(), file) == SamplingDefaults(temperature=0.6, top_k=20)
    assert SamplingDefaults.of(ModelSettings(top_k=5), file) == SamplingDefaults(temperature=0.6, top_k=5)


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": "hot"}', '{"top_k": -7}'])
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    with pytest.raises(SettingError) as caught:
        SamplingDefaults.of(ModelSettings(), tmp_path)
    assert str(file) in str(caught.value) and "--generation-config off" in str(caught.value)
    assert SamplingDefaults.of(ModelSettings(generation_config=False), tmp_path) == SamplingDefaults()


def test_what_a_request_gives_wins() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20)
    assert defaults.sampling(temperature=0.0, top_k=None).rule == (0.0, 1.0, 20, 0.0)
    assert defaults.sampling(top_p=0).rule == (0.6, 1.0, 1, 0.0), "the likeliest token alone"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "warm"),
        ("temperature", -1),
        ("temperature", "nan"),
        ("top_p", 1.5),
        ("top_k", -1),
        ("repetition_penalty", 0),
        ("chat_template_args", "[1]"),
        ("chat_template_args", "{"),
        ("alias", 3),
    ],
)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"{flag(name)} is {value!r}".replace("[", r"\[").replace("{", r"\{")):
        ModelSettings(**{name: value})


def test_values_for_the_template_are_not_the_servers_own() -> None:
    with pytest.raises(SettingError, match="--chat-template-args has 'tools', which the server itself passes"):
        ModelSettings(chat_template_args={"mood": "calm", "tools": []})


def test_a_template_is_a_file_or_text(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    for given in (str(file), TEMPLATE):
        assert ModelSettings(chat_template=given).template() == TEMPLATE
    with pytest.raises(
        SettingError, match=r"cannot read the file 'missing\.jinja' given as --chat-template: No such file"
    ):
        ModelSettings(chat_template="missing.jinja").template()


@pytest.mark.parametrize(
    ("template", "reason"), [("{{ messages", "line 1"), ("{{ raise_exception('only tools') }}", "only tools")]
)
def test_a_template_that_cannot_render_is_refused(backend: Backend, tmp_path: Path, template: str, reason: str) -> None:
    broken = Backend(str(backend.llm.path), served=ModelSettings(chat_template=template), kv_memory="34MiB")
    with pytest.raises(SettingError, match=f"--chat-template cannot render.*{reason}"):
        broken.start()


def test_flags_of_a_real_server(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ ending }}")
    flags = ["--model", "smollm2-135m", "--kv-memory", "64MiB"]
    flags += ["--alias", "gpt-x", "--alias", "a,b", "--any-model", "on"]
    flags += ["--chat-template", str(template), "--chat-template-args", '{"ending": " is"}', "--temperature", "0"]
    running = start_server(*flags, keys=[], ONEKV_API_KEY="a-key-of-this-test")
    try:
        assert httpx.get(f"{running.url}/v1/models").status_code == 401
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="a-key-of-this-test", max_retries=0)
        assert [each.id for each in client.models.list()] == ["smollm2-135m", "gpt-x", "a", "b"]
        asked: list[Any] = [{"role": "user", "content": "The capital of France"}]
        for name in ("gpt-x", "never-heard-of-it"):
            answer = client.chat.completions.create(model=name, messages=asked, max_tokens=2)
            # Rendered by that template, it goes on, and the likeliest word is this one.
            assert answer.choices[0].message.content == " Paris."
    finally:
        errors = stop_server(running)
    assert "a-key-of-this-test" not in errors


def test_two_models_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "smollm2-135m", "--model", "other"]) == 1
    assert "--model is 'other', but 'smollm2-135m' is given too" in capsys.readouterr().err
