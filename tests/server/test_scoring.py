"""/v1/completions as programs that score texts use it (lm_eval), and text between two others."""

import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from conftest import KEYS
from onekv.bench.soak import save_tiny
from onekv.server.app import create_app
from onekv.server.backend import Backend
from onekv.server.settings import ServerSettings

TEXT = "The capital of France is Paris, and the capital of Italy is Rome."


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys[0], max_retries=0)


def test_a_prompt_is_scored_as_its_tokens_were_when_they_were_generated(client: openai.OpenAI, server: Any) -> None:
    said = client.completions.create(model="default", prompt=TEXT, max_tokens=8, logprobs=1, temperature=0).choices[0]
    found = httpx2.post(
        f"{server.url}/tokenize", json={"content": TEXT + said.text}, headers={"Authorization": f"Bearer {KEYS[0]}"}
    )
    tokens = found.json()["tokens"]
    answers = [
        # As lm_eval asks: the token that is generated is the last, and is cut off.
        client.completions.create(model="default", prompt=tokens, max_tokens=1, logprobs=1, temperature=0, echo=True)
        for _ in range(2)
    ]
    for answer in answers:
        scores = answer.choices[0].logprobs
        assert len(scores.token_logprobs) == len(tokens) + 1, "one for each token, and the generated one"
        assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
        assert scores.token_logprobs[-9:-1] == pytest.approx(said.logprobs.token_logprobs, abs=1e-3)
        # They were the likeliest.
        tops = [max(top.values()) for top in scores.top_logprobs[-9:-1]]
        assert tops == pytest.approx(scores.token_logprobs[-9:-1], abs=1e-6)
        assert answer.choices[0].text.startswith(TEXT + said.text)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0, "all of it is computed"
    assert answers[0].choices[0].logprobs == answers[1].choices[0].logprobs


def test_several_prompts_and_none_generated(client: openai.OpenAI) -> None:
    prompts: Any = [TEXT, "A cat sat.", "Dogs"]
    answer = client.completions.create(model="default", prompt=prompts, max_tokens=0, logprobs=0, echo=True)
    assert [choice.text for choice in answer.choices] == prompts and answer.usage.completion_tokens == 0
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        assert "".join(choice.logprobs.tokens) == prompt and choice.logprobs.token_logprobs[0] is None
        assert all(score < 0 for score in choice.logprobs.token_logprobs[1:])
        assert choice.logprobs.text_offset == [
            len("".join(choice.logprobs.tokens[:at])) for at in range(len(choice.logprobs.tokens))
        ]
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(model="default", prompt="Hi", max_tokens=0)


def test_echo_without_scores_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "prompt": TEXT, "max_tokens": 4, "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    echoed = client.completions.create(**asked, echo=True)
    assert echoed.choices[0].text == TEXT + plain
    assert echoed.usage.prompt_tokens_details.cached_tokens > 0
    chunks = list(client.completions.create(**asked, echo=True, logprobs=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT + plain
    assert chunks[0].choices[0].text == TEXT


def test_scoring_leaves_nothing_behind(client: openai.OpenAI, server: Any) -> None:
    prompt = "Nobody has ever asked this before, nor will anybody ask it again: " + TEXT
    client.completions.create(model="default", prompt=prompt, max_tokens=1, logprobs=1, echo=True)
    used = client.completions.create(model="default", prompt=prompt, max_tokens=1).usage
    assert used.prompt_tokens_details.cached_tokens < used.prompt_tokens // 2
    checked = httpx2.get(f"{server.url}/admin/integrity", headers={"Authorization": f"Bearer {KEYS[0]}"})
    assert checked.status_code == 200, checked.text


def test_a_model_without_tokens_for_it_refuses_a_suffix(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"suffix: .* has no tokens for filling in the middle"):
        client.completions.create(model="default", prompt="def f(", suffix="return x", max_tokens=4)


def test_a_suffix_where_the_model_can(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Some of its own tokens by other names: the model has no more.
    file = tmp_path / "tokenizer.json"
    text = file.read_text()
    for token, name in ((3, "<fim_prefix>"), (4, "<fim_suffix>"), (5, "<fim_middle>")):
        text = text.replace(json.dumps(tokenizer.convert_ids_to_tokens(token)), json.dumps(name))
    file.write_text(text)
    backend = Backend(folder, kv_memory="34MiB", progress=False)
    backend.start()
    asked = {"model": "default", "max_tokens": 6, "temperature": 0}
    with TestClient(create_app(backend, ServerSettings()), base_url="http://localhost") as client:
        filled, written = (
            client.post("/v1/completions", json=asked | prompt).json()
            for prompt in (
                {"prompt": "def f(", "suffix": "return x"},
                {"prompt": [3, *_tokens(client, "def f("), 4, *_tokens(client, "return x"), 5]},
            )
        )
        options = {"num_predict": 6, "temperature": 0}
        asked = {"model": "default", "prompt": "def f(", "suffix": "return x", "stream": False, "options": options}
        insertion = client.post("/api/generate", json=asked).json()
        shown = client.post("/api/show", json={"model": "default"}).json()
    assert insertion["response"] == written["choices"][0]["text"] and "insert" in shown["capabilities"]
    assert filled["choices"][0]["text"] == written["choices"][0]["text"]
    assert filled["usage"]["prompt_tokens"] == written["usage"]["prompt_tokens"]
    assert written["usage"]["prompt_tokens_details"]["cached_tokens"] == written["usage"]["prompt_tokens"] - 1


def _tokens(client: TestClient, text: str) -> list[int]:
    found: list[int] = client.post("/tokenize", json={"content": text}).json()["tokens"]
    return found
