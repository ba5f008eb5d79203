"""`onekv bench quality` and `onekv bench formats`: the text, perplexity through the pool, and their figures."""

import json
import logging
import math
from itertools import pairwise

import mlx.core as mx
import pytest

from onekv import LLM
from onekv.bench import quality
from onekv.bench.soak import _save_tiny
from onekv.cli import main
from onekv.memory.layout.calibration import calibration_tokens
from onekv.models import load_model
from stock import small_llama, stock_logits
from test_cli import refused


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_model(str(smollm2_path))


def test_the_text_is_long_enough(smollm2):
    assert len(smollm2.tokenizer.encode(quality.alice())) >= 20_480
    assert len(quality.alice().encode()) < 200_000


def test_plain_perplexity_is_that_of_the_model_alone():
    model = small_llama(3, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2)
    tokens = [(7 * i * i + i // 5) % 90 for i in range(700)]
    engine = quality.make_engine(model, "auto", 512)
    logits = mx.concatenate([stock_logits(model, part, 299, 64)[:-1] for part in (tokens[:300], tokens[300:600])])
    following = mx.array(tokens[1:300] + tokens[301:600])
    logs = mx.take_along_axis(logits - mx.logsumexp(logits, axis=-1, keepdims=True), following[:, None], axis=-1)
    # Two windows; what is left does not fill a third.
    assert quality.text_perplexity(engine, tokens, 300) == pytest.approx(math.exp(-logs.mean().item()), rel=1e-4)
    engine.check_integrity()


def test_q8_reads_a_real_text_as_plain_does_and_q4_needs_the_centres_of_keys(smollm2):
    tokens = smollm2.tokenizer.encode(quality.alice())[3000:3768]
    calibration = calibration_tokens(smollm2.tokenizer)

    def perplexity(name, calibration=()):
        return quality.text_perplexity(quality.make_engine(smollm2.model, name, 768, 0, calibration), tokens, 768)

    plain = perplexity("auto")
    assert perplexity("q8") == pytest.approx(plain, rel=2e-3)
    centred, as_it_is = perplexity("q4", calibration), perplexity("q4")
    assert abs(centred / plain - 1) < 0.5 * (as_it_is / plain - 1)


def test_numbers_lie_at_equal_distances(smollm2):
    tokens = smollm2.tokenizer.encode(quality.alice())
    prompt = quality.haystack(smollm2.tokenizer, tokens, 1000)
    assert len(prompt) == 1000
    text = smollm2.tokenizer.decode(prompt)
    places = [text.index(f"{place} {number}") for place, number in zip(quality.PLACES, quality.NUMBERS, strict=True)]
    gaps = [b - a for a, b in pairwise(places)]
    assert places == sorted(places) and min(gaps) > 0.7 * max(gaps)


@pytest.mark.usefixtures("smollm2_path")
def test_bench_quality_writes_its_figures(capsys, tmp_path):
    model, file = tmp_path / "model", tmp_path / "result.json"
    model.mkdir()
    argv = ["--model", _save_tiny(model), "--format", "tq4", "--tokens", "600", "--window", "300", "--needle", "500"]
    assert main(["bench", "quality", *argv, "--json", str(file)]) == 0
    assert "tokens per GiB" in capsys.readouterr().out
    plain, tq4 = json.loads(file.read_text())["results"]
    assert (plain["format"], tq4["format"]) == ("auto", "tq4")
    assert plain["change"] == 0 and plain["token_bytes"] > 6 * tq4["token_bytes"]
    assert tq4["perplexity"] == pytest.approx(plain["perplexity"], rel=0.05)
    assert plain["asked"] == 8 and plain["answers"] < 0


@pytest.mark.usefixtures("smollm2_path")
def test_bench_formats_writes_its_figures(capsys, tmp_path):
    model, file = tmp_path / "model", tmp_path / "result.json"
    model.mkdir()
    argv = ["--model", _save_tiny(model), "--format", "q8", "--context", "300", "--tokens", "2", "--rounds", "1"]
    assert main(["bench", "formats", *argv, "--json", str(file)]) == 0
    assert "against plain" in capsys.readouterr().out
    plain, q8 = json.loads(file.read_text())["results"]
    assert plain["ratio"] == 1 and q8["ratio"] > 0 and q8["decode_tokens_per_s"] > 0
    assert q8["kv_bytes"] == 300 * q8["token_bytes"] < plain["kv_bytes"] / 3


def test_what_cannot_be_measured_is_refused(capsys):
    status = main(["bench", "quality", "--format", "q5"])
    assert "--kv-format is 'q5'" in refused((status, *capsys.readouterr()))


@pytest.mark.parametrize("kv_format, lines", [("tq3", 1), ("q4", 0), ("ktq4vtq2", 0), ("ktq2v4", 1)])
def test_keys_of_few_bits_are_warned_of_once(kv_format, lines, smollm2, caplog):
    with caplog.at_level(logging.WARNING, "onekv"):
        LLM(smollm2.model, tokenizer=smollm2.tokenizer, kv_memory="16MiB", kv_format=kv_format).close()
    assert len([record for record in caplog.records if "--kv-format" in record.getMessage()]) == lines


def test_plan_shows_what_each_format_holds(capsys, smollm2_path):
    assert main(["plan", str(smollm2_path), "--kv-memory", "256MiB", "--kv-format", "q4"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    held = {
        line[0]: int(line[-1].replace(",", "")) for line in lines if line and line[0] in ("auto", "q8", "q4", "tq2")
    }
    assert held["auto"] < held["q8"] / 3 < held["q4"] / 5 and held["q4"] < held["tq2"]
    assert any(line[:3] == ["q4", "(this", "plan)"] for line in lines)
