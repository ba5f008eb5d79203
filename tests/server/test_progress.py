"""What a client is told while its prompt is being stored, and what the template is told of how much to think."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient
from templates import plain_backend, with_template

from onekv.bench.soak import save_tiny
from onekv.engine import thread
from onekv.server import answer
from onekv.server.anthropic.convert import full_call
from onekv.server.anthropic.schema import MessagesBody
from onekv.server.app import create_app
from onekv.server.backend import Backend
from onekv.server.call import ChatCall
from onekv.server.openai.schema import ChatBody
from onekv.server.prompt import render
from onekv.server.sampling_defaults import SamplingDefaults
from onekv.server.settings import ServerSettings

LONG = "The old river follows the quiet garden. " * 100


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Prompts of many small chunks, so that there is time to tell of them also on a busy machine."""
    model = save_tiny(tmp_path_factory.mktemp("tiny"))
    backend = Backend(model, kv_memory="34MiB", prefill_chunk=2, progress=False)
    backend.start()
    with TestClient(create_app(backend, ServerSettings()), base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_progress_is_told_while_a_prompt_is_stored(
    slow: TestClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "PROGRESS_S", 0.001)
    monkeypatch.setattr(thread, "VIEW_SECONDS", 0.0)
    text = f"{path} {LONG}"
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    body = {"model": "default", "max_tokens": 2, "stream": True, "return_progress": True, **prompt}
    told = slow.post(path, json=body | {"stream_options": {"include_usage": True}}).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in told.splitlines() if line.startswith("data: {")]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    stored = [each["processed"] for each in progress]
    assert stored == sorted(stored) and len(set(stored)) > 2, "as it goes on"
    assert progress[-1]["processed"] == usage["prompt_tokens"]
    assert {each["total"] for each in progress} == {usage["prompt_tokens"]}
    assert progress[-1]["cache"] == usage["prompt_tokens_details"]["cached_tokens"]
    del body["return_progress"]
    assert "prompt_progress" not in slow.post(path, json=body).text, "nobody asked"


def test_openais_client_reads_a_stream_with_progress(server: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys[0], max_retries=0)
    talk: Any = [{"role": "user", "content": "Hi"}]
    chunks: list[Any] = list(
        client.chat.completions.create(
            model="default", messages=talk, max_tokens=4, stream=True, extra_body={"return_progress": True}
        )
    )
    assert any(chunk.choices[0].delta.content for chunk in chunks)
    (last,) = [chunk.prompt_progress for chunk in chunks if hasattr(chunk, "prompt_progress")][-1:]
    assert last["processed"] == last["total"]


def test_a_budget_and_an_effort_of_thinking_reach_the_template() -> None:
    model = with_template(
        plain_backend(),
        "{% for m in messages %}{{ m.content }}{% endfor %}|{{ thinking_budget }}|{{ reasoning_effort }}",
    )
    talk: Any = [{"role": "user", "content": "Hi"}]

    def prompt(call: ChatCall) -> str:
        return str(model.tokenizer.decode(render(model, call).tokens))

    body: dict[str, Any] = {"model": "m", "messages": talk}
    chat = ChatBody.model_validate(body | {"thinking_budget": 512, "reasoning_effort": "low"})
    assert prompt(ChatCall(talk, template=chat.template())) == "Hi|512|low"
    thinking = {"type": "enabled", "budget_tokens": 2048}
    asked = body | {"max_tokens": 9, "thinking": thinking, "output_config": {"effort": "high"}}
    assert prompt(full_call(MessagesBody.model_validate(asked), "", SamplingDefaults())) == "Hi|2048|high"
    asked["thinking"] = {"type": "disabled"}
    assert prompt(full_call(MessagesBody.model_validate(asked), "", SamplingDefaults())) == "Hi||high"
