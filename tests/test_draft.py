"""A draft model: guesses for another one, whose answers stay what they are; its KV lies in the same blocks."""

import mlx.core as mx
import pytest

from architectures import build
from onekv import LLM
from onekv.engine import Request
from onekv.engine.params import Sampling
from onekv.errors import SettingError
from onekv.memory.looped import LoopedDecode
from onekv.models.draft import WithDraft, check_vocabularies
from onekv.models.identity import identity
from stock import engine_of, small_llama

PROMPTS = [[7 * i % 61 + 1 for i in range(n)] for n in (40, 23, 131)]
RULES = [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=5), Sampling(repetition_penalty=1.3)]
SETTINGS = {"kv_memory": "8MB", "block_size": 16, "max_batch": 3, "prefill_chunk": 64}
DRAFTS = {"speculate": "draft", "draft_model": "given as an object", "draft_tokens": 4}


def llama(seed: int, layers: int):
    return small_llama(seed, num_hidden_layers=layers, intermediate_size=64, num_key_value_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def target():
    return llama(11, 3)


def run(engine, prompts=PROMPTS, count=50, rules=RULES) -> list[Request]:
    # By this clock all steps take the same time, so that guessing always pays.
    engine.now = lambda: 0.0
    requests = [Request(prompt, count, sampling=rule) for prompt, rule in zip(prompts, rules, strict=True)]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    engine.check_integrity()
    # Nothing is kept of requests that have ended.
    assert engine.speculation is None or not engine.speculation._guesses
    return requests


def tokens(requests: list[Request]) -> list[list[int]]:
    return [request.tokens for request in requests]


@pytest.mark.parametrize("seed", [11, 12], ids=["right", "wrong"])
def test_answers_are_those_without_a_draft_model(target, seed):
    plain = run(engine_of(target, speculate="off", **SETTINGS))
    draft = llama(seed, 3 if seed == 11 else 1)
    engine = engine_of(WithDraft(target, draft), **DRAFTS, **SETTINGS)
    assert isinstance(engine.runner.compiled, LoopedDecode), engine.runner.uncompiled
    assert tokens(run(engine)) == tokens(plain)
    stats = engine.speculation.stats()
    assert stats.proposed > stats.accepted > 0 if seed == 12 else stats.accepted > 0.8 * stats.proposed > 0


@pytest.mark.parametrize("name", ["gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3"])
def test_windows_and_latent_attention_of_the_larger_model(name):
    model = build(name)
    draft = small_llama(3, num_hidden_layers=1, intermediate_size=64, num_key_value_heads=2, head_dim=32)
    settings = {**SETTINGS, "kv_memory": "32MB"}
    prompts = [[token % 90 + 1 for token in prompt] for prompt in PROMPTS]
    plain = run(engine_of(model, speculate="off", **settings), prompts)
    engine = engine_of(WithDraft(model, draft), **DRAFTS, **settings)
    assert tokens(run(engine, prompts)) == tokens(plain)
    assert engine.speculation.stats().proposed > 0


def test_after_a_hit_it_guesses_as_before(target, tmp_path):
    """Its KV is cached with the prompt: in the pool, and after a restart on disk."""
    pair = WithDraft(target, llama(11, 3))
    settings = {**SETTINGS, **DRAFTS, "disk_cache": str(tmp_path), "disk_limit": "50MB"}
    engine = engine_of(pair, **settings)
    first = run(engine)
    longer = [prompt + request.tokens[:20] for prompt, request in zip(PROMPTS, first, strict=True)]
    cold = run(engine_of(pair, **SETTINGS, **DRAFTS), longer, 20, [Sampling()] * 3)
    hot = run(engine, longer, 20, [Sampling()] * 3)
    engine.close()
    engine = engine_of(pair, **settings)
    restored = run(engine, longer, 20, [Sampling()] * 3)
    engine.close()
    for some in (hot, restored):
        assert min(request.cached_tokens for request in some) >= 32
        assert tokens(some) == tokens(cold)
        # A draft that does not know what came before would guess wrong.
        assert all(request.accepted >= 0.9 * request.proposed > 0 for request in some)


def test_both_are_in_one_budget_and_one_name(target):
    draft = llama(12, 1)
    alone, both = engine_of(target, **SETTINGS), engine_of(WithDraft(target, draft), **DRAFTS, **SETTINGS)
    assert both.plan.pool_bytes <= both.plan.budget == alone.plan.budget
    assert both.plan.blocks[0] < alone.plan.blocks[0]
    assert len(both.memory.pools) == len(alone.memory.pools) == 1
    assert len({identity(target), identity(WithDraft(target, draft)), identity(WithDraft(target, llama(13, 1)))}) == 3


def test_the_pool_stays_where_it_is(target):
    engine = engine_of(WithDraft(target, llama(12, 1)), **DRAFTS, **SETTINGS)
    run(engine)
    before = mx.get_active_memory()
    run(engine)
    assert mx.get_active_memory() <= before + 2**16


def test_a_recurrent_draft_model_is_refused():
    model = WithDraft(build("llama"), build("mamba2"))
    with pytest.raises(SettingError, match=r"--draft-model is 'given as an object', .* recurrent states"):
        engine_of(model, **{**DRAFTS, "speculate": "auto"}, kv_memory="16MB", max_batch=2)


def test_settings_that_contradict_each_other():
    with pytest.raises(SettingError, match="set --draft-model"):
        engine_of(build("llama"), speculate="draft", kv_memory="8MB")
    with pytest.raises(SettingError, match="--speculate is 'off', but --draft-model is 'x'"):
        engine_of(build("llama"), speculate="off", draft_model="x", kv_memory="8MB")


class Words:
    def __init__(self, **words: int) -> None:
        self._words = words

    def get_vocab(self) -> dict[str, int]:
        return self._words


def test_another_vocabulary_is_refused_by_name():
    check_vocabularies(Words(a=1, b=2), Words(a=1, b=2), "small")
    check_vocabularies(None, Words(a=1), "small")
    with pytest.raises(SettingError, match=r"'small', whose vocabulary differs .* in 2 entries.*'b' with id 2"):
        check_vocabularies(Words(a=1, b=2), Words(a=1, c=2), "small")


def test_a_real_model_that_guesses_for_itself():
    prompt = "The capital of France is Paris. The capital of Italy is"
    with LLM(kv_memory="128MB", speculate="off", progress=False) as llm:
        expected = llm.generate(prompt, max_tokens=24).tokens
    with LLM(kv_memory="128MB", draft_model="smollm2-135m", speculate="draft", progress=False) as llm:
        assert llm.generate(prompt, max_tokens=24).tokens == expected
        stats = llm.engine.speculation.stats()
    assert stats.accepted > 0.8 * stats.proposed > 0
