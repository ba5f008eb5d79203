"""`onekv bench quality` and `onekv bench formats`: the texts, perplexity and divergence through the pool, and their
figures.
"""

import json
import logging
import math
from itertools import pairwise

import mlx.core as mx
import pytest

from onekv import LLM
from onekv.bench import quality
from onekv.bench.divergence import read_together
from onekv.bench.soak import save_tiny
from onekv.bench.texts import TEXTS
from onekv.cli import main
from onekv.engine.divergence import divergences, log_probabilities
from onekv.engine.runner import Runner
from onekv.memory.layout.calibration import calibration_tokens
from onekv.models import load_model
from stock import small_llama, stock_logits
from test_cli import refused


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_model(str(smollm2_path))


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_are_long_enough_and_always_the_same(kind, smollm2):
    text = TEXTS[kind]()
    assert len(smollm2.tokenizer.encode(text)) >= 20_480
    assert len(text.encode()) < 300_000 and TEXTS[kind]() == text


def test_the_json_is_json():
    assert {"id", "customer", "items"} < set(json.loads(TEXTS["json"]())[17])


def perplexity(engine, tokens, window):
    return read_together(engine, [], tokens, window)[0].perplexity


def test_plain_perplexity_is_that_of_the_model_alone():
    model = small_llama(3, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2)
    tokens = [(7 * i * i + i // 5) % 90 for i in range(700)]
    engine = quality.make_engine(model, "auto", 512)
    logits = mx.concatenate([stock_logits(model, part, 299, 64)[:-1] for part in (tokens[:300], tokens[300:600])])
    following = mx.array(tokens[1:300] + tokens[301:600])
    logs = mx.take_along_axis(logits - mx.logsumexp(logits, axis=-1, keepdims=True), following[:, None], axis=-1)
    # Two windows; what is left does not fill a third.
    assert perplexity(engine, tokens, 300) == pytest.approx(math.exp(-logs.mean().item()), rel=1e-4)
    engine.check_integrity()


def test_q8_reads_a_real_text_as_plain_does_and_q4_needs_the_centres_of_keys(smollm2):
    tokens = smollm2.tokenizer.encode(TEXTS["prose"]())[3000:3768]
    calibration = calibration_tokens(smollm2.tokenizer)

    names = ("auto", "q8", "k5v4", "q4", "q4")
    given = ((), (), calibration, calibration, ())
    engines = [quality.make_engine(smollm2.model, name, 768, 0, own) for name, own in zip(names, given, strict=True)]
    plain, q8, k5v4, q4, as_it_is = read_together(engines[0], engines[1:], tokens, 768)
    assert q8.perplexity == pytest.approx(plain.perplexity, rel=2e-3)
    assert abs(q4.perplexity / plain.perplexity - 1) < 0.5 * (as_it_is.perplexity / plain.perplexity - 1)
    # What a perplexity may hide, divergence shows.
    assert q8.mean < 0.1 * k5v4.mean < 0.1 * q4.mean < 0.05 * as_it_is.mean
    assert q8.agreement > q4.agreement > as_it_is.agreement


def test_divergence_is_that_of_the_definition():
    wanted, found = mx.array([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]), mx.array([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    got = divergences(mx.log(wanted), log_probabilities(mx.log(found) + 7))
    assert got.tolist() == pytest.approx([0.25 * math.log(2), math.log(2)])
    assert divergences(mx.log(found), mx.log(found)).tolist() == [0, 0]


def test_numbers_lie_at_equal_distances(smollm2):
    tokens = smollm2.tokenizer.encode(TEXTS["prose"]())
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
    argv = ["--model", save_tiny(model), "--format", "tq4", "--tokens", "600", "--window", "300", "--needle", "500"]
    assert main(["bench", "quality", *argv, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "tokens per GiB" in out and "99.9 % KL" in out
    plain, tq4 = json.loads(file.read_text())["results"]
    assert (plain["format"], tq4["format"]) == ("auto", "tq4")
    assert plain["token_bytes"] > 6 * tq4["token_bytes"]
    assert [text["text"] for text in plain["texts"]] == [text["text"] for text in tq4["texts"]] == [*TEXTS]
    for own, text in zip(plain["texts"], tq4["texts"], strict=True):
        assert (own["change"], own["mean_kl"], own["tail_kl"], own["agreement"]) == (0, 0, 0, 100)
        assert own["tokens"] == text["tokens"] == 2 * 299
        assert text["perplexity"] == pytest.approx(own["perplexity"], rel=0.05)
        assert 0 < text["mean_kl"] < text["tail_kl"] and 0 < text["agreement"] < 100
    assert plain["asked"] == 8 and plain["answers"] < 0


@pytest.mark.usefixtures("smollm2_path")
def test_bench_formats_writes_its_figures(capsys, tmp_path, monkeypatch):
    """And prefills as the engine does."""
    model, file = tmp_path / "model", tmp_path / "result.json"
    stored, store = [], Runner.store

    def recorded(runner, sequences, tokens):
        stored.append(len(tokens[0]))
        store(runner, sequences, tokens)

    monkeypatch.setattr(Runner, "store", recorded)
    model.mkdir()
    argv = ["--model", save_tiny(model), "--format", "q8", "--context", "300", "--tokens", "2", "--rounds", "1"]
    assert main(["bench", "formats", *argv, "--json", str(file)]) == 0
    assert "against plain" in capsys.readouterr().out
    plain, q8 = json.loads(file.read_text())["results"]
    assert plain["ratio"] == 1 and q8["ratio"] > 0 and q8["decode_tokens_per_s"] > 0
    assert q8["kv_bytes"] == 300 * q8["token_bytes"] < plain["kv_bytes"] / 3
    assert stored == [256, 44] * 2


def test_what_cannot_be_measured_is_refused(capsys):
    status = main(["bench", "quality", "--format", "q7"])
    assert "--kv-format is 'q7'" in refused((status, *capsys.readouterr()))


def test_one_kind_of_text_without_needles(capsys, smollm2_path, tmp_path):
    file = tmp_path / "result.json"
    argv = ["--model", save_tiny(tmp_path), "--format", "q5", "--text", "json", "--tokens", "100", "--needle"]
    assert main(["bench", "quality", *argv, "0", "--json", str(file)]) == 0
    capsys.readouterr()
    for result in json.loads(file.read_text())["results"]:
        assert [(text["text"], text["tokens"]) for text in result["texts"]] == [("json", 99)]
        assert (result["asked"], result["answers"]) == (0, None)
    assert "--needle is -1" in refused((main(["bench", "quality", *argv, "-1"]), *capsys.readouterr()))
    argv[argv.index("100")] = "1000000"
    assert "--tokens is 1000000" in refused((main(["bench", "quality", *argv, "0"]), *capsys.readouterr()))


@pytest.mark.parametrize("kv_format, lines", [("tq3", 1), ("q4", 0), ("ktq4vtq2", 0), ("ktq2v4", 1)])
def test_keys_of_few_bits_are_warned_of_once(kv_format, lines, smollm2, caplog):
    with caplog.at_level(logging.WARNING, "onekv"):
        LLM(smollm2.model, tokenizer=smollm2.tokenizer, kv_memory="16MiB", kv_format=kv_format).close()
    assert len([record for record in caplog.records if "keeps keys in" in record.getMessage()]) == lines


def test_plan_shows_what_each_format_holds(capsys, smollm2_path):
    assert main(["plan", str(smollm2_path), "--kv-memory", "256MiB", "--kv-format", "q4"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    held = {
        line[0]: int(line[-1].replace(",", "")) for line in lines if line and line[0] in ("auto", "q8", "q4", "tq2")
    }
    assert held["auto"] < held["q8"] / 3 < held["q4"] / 5 and held["q4"] < held["tq2"]
    assert any(line[:3] == ["q4", "(this", "plan)"] for line in lines)
