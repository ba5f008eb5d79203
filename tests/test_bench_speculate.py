"""`onekv bench speculate`, briefly, with a small model: both parts of it, and figures that are there."""

import json

import pytest

from onekv.bench.soak import TINY, save_tiny
from onekv.bench.speculate import prompts
from onekv.cli import main


@pytest.fixture(scope="module")
def tiny(smollm2_path, tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def figures(tmp_path, *argv: str) -> list[dict]:
    file = tmp_path / "result.json"
    assert main(["bench", "speculate", *argv, "--rounds", "1", "--json", str(file)]) == 0
    return json.loads(file.read_text())["results"]


def test_prompts_that_copy_and_that_do_not(tiny, capsys, tmp_path):
    results = figures(tmp_path, "--model", tiny, "--tokens", "12")
    assert [result["prompt"] for result in results] == [prompt.name for prompt in prompts()]
    assert {result["kind"] for result in results} == {"copy", "free", "again"}
    assert all(result["same_tokens"] and result["tokens"] == 12 for result in results)
    assert all(result["ratio"] > 0 and result["accepted"] <= result["proposed"] for result in results)
    assert "NOT the same" not in capsys.readouterr().out


def test_a_prompt_that_copies_begins_to(tiny):
    """Its end is in it before, but for the one change."""
    for prompt in prompts():
        if prompt.kind == "copy":
            end = prompt.text[-40:]
            assert prompt.text.index(end) < len(prompt.text) - 40


@pytest.mark.usefixtures("smollm2_path")
def test_guesses_of_which_a_share_is_right(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(TINY, "tie_word_embeddings", False)
    argv = ["--model", save_tiny(tmp_path), "--oracle", "0.2", "1.0", "--proposed", "2", "4", "--batch", "1", "3"]
    results = figures(tmp_path, *argv, "--tokens", "24", "--context", "40")
    cases = [(r["batch"], r["share"], r["proposed_at_once"]) for r in results]
    assert cases == [(batch, share, count) for batch in (1, 3) for share in (0.2, 1.0) for count in (2, 4)]
    assert all(result["same_answers"] == 1 for result in results)
    for few, many in zip(results[0::4] + results[1::4], results[2::4] + results[3::4], strict=True):
        assert few["accepted"] / few["proposed"] < 0.5 < many["accepted"] / many["proposed"]
        # As sure as a trained model: few tokens are computed again.
        assert many["doubtful"] < many["proposed"] / 10
    assert "doubtful rows" in capsys.readouterr().out


def test_a_model_whose_output_cannot_be_decided_is_refused(tiny, capsys):
    assert main(["bench", "speculate", "--model", tiny, "--oracle"]) == 1
    assert "--oracle needs a model with its own output layer" in capsys.readouterr().err
