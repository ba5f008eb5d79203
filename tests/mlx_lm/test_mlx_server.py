"""A real mlx_lm.server process with OneKV's classes, beside a stock one, driven by the openai client."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx_lm.models import llama

from onekv.bench.clients import ServerProcess, http, mlx_lm_server, save, words

# 32 KiB of KV for each token and little to compute.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# Writes the most memory MLX has held so far into the file named first.
ENTRY = """
import os, sys, threading, time
file = sys.argv.pop(1)
{start}
import mlx.core as mx
def record():
    while True:
        open(file + ".new", "w").write(str(mx.get_peak_memory()))
        os.replace(file + ".new", file)
        time.sleep(0.1)
threading.Thread(target=record, daemon=True).start()
main()
"""
SIDES = {
    "stock": ENTRY.format(start="import onekv; from mlx_lm.server import main"),
    "ours": ENTRY.format(start="from onekv.mlx_lm.server import main"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    from onekv.models import load_model

    path = tmp_path_factory.mktemp("model")
    tokenizer = load_model(str(smollm2_path), lazy=True).tokenizer
    config = {**CONFIG, "vocab_size": len(tokenizer), "eos_token_id": sorted(tokenizer.eos_token_ids)}
    mx.random.seed(0)
    save(path, llama.Model(llama.ModelArgs.from_dict(config)), config, tokenizer)
    return path


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def conversation(server: ServerProcess, seed: int, turns: int) -> list[str]:
    text = random.Random(seed)
    messages: list[Any] = [{"role": "system", "content": "Be brief. " + words(random.Random(0), 400)}]
    answers = []
    for _ in range(turns):
        messages.append({"role": "user", "content": words(text, 40)})
        answer = client(server).chat.completions.create(
            model="default_model", messages=messages, max_tokens=16, temperature=0
        )
        answers.append(answer.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def run(server: ServerProcess) -> tuple[list[str], list[list[str]]]:
    """Ten turns of one chat, then four chats at once."""
    alone = conversation(server, 1, 10)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: conversation(server, seed, 3), range(2, 6)))
    return alone, together


@pytest.fixture(scope="module")
def stock_answers(folder: Path) -> tuple[Any, int]:
    peak = folder / "stock-peak"
    with mlx_lm_server(SIDES["stock"], str(peak), "--model", str(folder), "--log-level", "WARNING") as server:
        answers = run(server)
        return answers, int(peak.read_text())


def test_the_answers_are_the_stock_servers_and_the_peak_is_lower(folder: Path, stock_answers: tuple[Any, int]) -> None:
    peak = folder / "peak"
    with mlx_lm_server(SIDES["ours"], str(peak), "--model", str(folder), "--log-level", "WARNING") as server:
        assert run(server) == stock_answers[0]
        assert int(peak.read_text()) < stock_answers[1]
        assert "Traceback" not in server.log.read_text()


def test_a_limit_below_one_conversation(folder: Path, stock_answers: tuple[Any, int]) -> None:
    flags = ("--model", str(folder), "--log-level", "INFO", "--prompt-cache-bytes", "1MB")
    with mlx_lm_server(SIDES["ours"], str(folder / "peak"), *flags) as server:
        assert run(server) == stock_answers[0]
        log = server.log.read_text()
    assert "Traceback" not in log
    held = [float(line.split(",")[-1].split()[0]) for line in log.splitlines() if "Prompt Cache:" in line]
    assert held
    assert max(held) <= 0.001


def test_a_prompt_that_is_cached_whole_leaves_the_server_alive(folder: Path) -> None:
    """mlx-lm's own generation thread dies of it."""
    with mlx_lm_server(SIDES["ours"], str(folder / "peak"), "--model", str(folder)) as server:
        for seed in (None, 1):
            prompt = "One two three"
            for _ in range(4):
                answer = client(server).completions.create(
                    model="default_model", prompt=prompt, max_tokens=1, temperature=0, seed=seed
                )
                again = client(server).completions.create(
                    model="default_model", prompt=prompt, max_tokens=1, temperature=0, seed=seed
                )
                assert again.choices[0].text == answer.choices[0].text
                prompt += answer.choices[0].text
        assert http().get(f"{server.url}/health").status_code == 200


def test_a_request_that_does_not_fit_is_refused_and_the_next_is_served(folder: Path) -> None:
    with mlx_lm_server(SIDES["ours"], str(folder / "peak"), "--model", str(folder), "--kv-memory", "12MB") as server:
        with pytest.raises(openai.APIStatusError) as refused:
            conversation(server, 1, 1)
        # mlx-lm answers 404 to whatever goes wrong.
        assert "of KV memory" in refused.value.response.text
        answer = client(server).completions.create(model="default_model", prompt="One", max_tokens=9, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 9
