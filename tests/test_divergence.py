"""At load, an encoded format is compared with plain KV on a short text: models that it breaks are told of."""

import logging

import mlx.core as mx
import pytest

from onekv import LLM
from onekv.bench.soak import save_tiny
from onekv.engine import divergence
from onekv.memory.formats import compared, larger, parse
from onekv.memory.layout.calibration import calibration_tokens
from onekv.models import load_model
from stock import engine_of, small_llama


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_model(str(smollm2_path), lazy=True).tokenizer


def tiny(tokenizer, outlier: float = 1.0):
    """A random model that looks at single tokens. In each head, a pair of channels of keys is `outlier` times larger
    and that of queries smaller: with plain KV, nothing changes.
    """
    model = small_llama(
        3, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2, head_dim=64, vocab_size=len(tokenizer)
    )
    factors = mx.ones(64)
    factors[mx.array([5, 37])] = outlier
    for layer in model.layers:
        attention = layer.self_attn
        for name, own, size in (("q_proj", 1 / factors, 2.0), ("k_proj", factors, 2.0), ("v_proj", None, 4.0)):
            projection = getattr(attention, name)
            rows = mx.tile(own, projection.weight.shape[0] // 64)[:, None] if own is not None else 1
            projection.weight = projection.weight * rows * size
    return model


def opened(model, tokenizer, kv_format: str, **settings) -> LLM:
    return LLM(model, tokenizer=tokenizer, kv_memory="8MB", block_size=16, kv_format=kv_format, **settings)


def told(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "is a poor fit for this model" in record.getMessage()]


def test_a_model_that_a_format_breaks_is_told_of(tokenizer, caplog):
    with caplog.at_level(logging.WARNING, "onekv"), opened(tiny(tokenizer, 300.0), tokenizer, "q4") as llm:
        found = llm.stats().divergence
    assert found > divergence.BOUND
    (line,) = told(caplog)
    assert "--kv-format q4" in line and f"{found:.2g} nats" in line and line.endswith("the next larger format is k5v4")


def test_a_model_that_suits_it_is_not(tokenizer, caplog):
    with caplog.at_level(logging.WARNING, "onekv"), opened(tiny(tokenizer), tokenizer, "q4") as llm:
        stats = llm.stats()
    assert 0 < stats.divergence < divergence.BOUND and not told(caplog)
    assert f"diverges from plain by {stats.divergence:.2g} nats" in repr(stats)


def test_more_bits_diverge_less(tokenizer):
    model, text = tiny(tokenizer), calibration_tokens(tokenizer)
    engines = {name: engine_of(model, kv_format=name, kv_memory="8MB") for name in ("auto", "q8", "q6", "q5", "q4")}
    found = [divergence.measure(engine, text) for engine in engines.values()]
    assert found == sorted(found) and found[0] < 1e-6 and found[1] < 0.1 * found[-1]


def test_plain_kv_and_token_ids_alone_are_not_checked(tokenizer):
    model = tiny(tokenizer)
    for given, kv_format in ((tokenizer, "auto"), (None, "q8")):
        with opened(model, given, kv_format) as llm:
            assert llm.stats().divergence is None and "diverges" not in repr(llm.stats())


def test_it_stays_within_the_workspace_and_leaves_nothing(tokenizer):
    text = calibration_tokens(tokenizer)
    engine = engine_of(tiny(tokenizer), kv_format="q4", kv_memory="8MB")
    divergence.measure(engine, text)
    mx.clear_cache()
    level = mx.get_active_memory()
    mx.reset_peak_memory()
    divergence.measure(engine, text)
    assert mx.get_peak_memory() - level < engine.plan.workspace
    assert mx.get_active_memory() <= level + 2**16
    engine.check_integrity()
    assert all(pool.held == 0 for pool in engine.memory.stats().pools)


def test_what_is_forgotten_is_not_the_formats_fault(tokenizer):
    with opened(tiny(tokenizer), tokenizer, "q8", max_kv_size=32) as llm:
        assert llm.stats().divergence < 0.001


def test_a_pool_that_is_shorter_than_the_text(tokenizer):
    engine = engine_of(tiny(tokenizer), kv_format="q4", kv_memory="32KB", block_size=16, max_batch=1, prefill_chunk=16)
    assert engine.plan.longest < divergence.LENGTH
    assert divergence.measure(engine, calibration_tokens(tokenizer)) > 0


def test_what_is_no_number_is_not_lost():
    logs = mx.log(mx.array([[0.5, 0.5]]))
    assert mx.isnan(divergence.divergences(logs, logs * mx.nan)).item()


@pytest.mark.parametrize(
    "kv_format, next_larger",
    [
        ("tq2", "tq3"),
        ("tq3", "q4"),
        ("q4", "k5v4"),
        ("tq4", "k5v4"),
        ("ktq4vtq2", "q4"),
        ("k5v4", "k6v4"),
        ("k6v4", "k8v4"),
        ("k8v4", "q8"),
        ("q5", "q8"),
        ("kautov4", "auto"),
        ("q8", "auto"),
    ],
)
def test_the_next_larger_format(kv_format, next_larger):
    assert larger(parse(kv_format))[0] == next_larger


def test_every_format_ends_at_plain():
    for name in compared()[1:]:
        assert larger(parse(name))[-1] == "auto"
    assert larger(parse("auto")) == []


def test_only_formats_that_can_store_the_layers_are_named():
    model = small_llama(3, num_hidden_layers=1, intermediate_size=64, num_key_value_heads=2, head_dim=80)
    layout = engine_of(model, kv_format="tq3", kv_memory="8MB").plan.layout
    assert divergence._fitting(layout, parse("tq3")) == "auto"


@pytest.mark.usefixtures("smollm2_path")
def test_the_random_model_of_other_tests_passes(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "onekv"), LLM(save_tiny(tmp_path), kv_memory="8MB", kv_format="tq4") as llm:
        assert llm.stats().divergence < divergence.BOUND
    assert not told(caplog)
