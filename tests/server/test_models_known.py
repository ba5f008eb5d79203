"""What was found out about a model when it was loaded is not found out again, until it is another model."""

import os
from pathlib import Path
from typing import Any

import pytest
from swaps import COMMON, generate, spec

from onekv.bench.soak import save_tiny
from onekv.engine.known import Known
from onekv.llm import LLM
from onekv.models import load_for
from onekv.models.seen import seen, unchanged
from onekv.server.models.model import Model
from onekv.server.models.registry import Models

# Longer than a block.
PROMPT = "the cat sat on the mat and " * 6
SMALL: dict[str, Any] = {"kv_memory": "32MiB", "block_size": 16, "progress": False}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return save_tiny(tmp_path / "tiny", 0)


def answer(path: Any, known: Known | None = None, **settings: Any) -> tuple[list[int], dict[str, Any]]:
    """Tokens, and what the engine has found out or remembered."""
    with LLM(path, known=known, **{**SMALL, **settings}) as llm:
        runner, stats = llm.engine.runner, llm.stats()
        how = {
            "direct": llm.engine.memory.direct,
            "one by one": (runner.one_by_one, stats.one_by_one),
            "compiled": type(runner.compiled),
            "uncompiled": stats.uncompiled,
            "several": runner.several,
            "eager": runner.eager,
            "unspeculated": stats.unspeculated,
            "drafting": runner.drafting is not None and type(runner.drafting.compiled),
            "divergence": stats.divergence,
        }
        completions = [llm.generate(PROMPT, 24), *llm.generate([PROMPT, "a dog"], 8)]
        return [token for each in completions for token in each.tokens], how


def reload(models: Models, model: Model) -> None:
    models.unload(model)
    generate(models, model)


def test_a_model_that_is_loaded_again_is_not_tried_again(path: str) -> None:
    models = Models([spec("a", path)], "1GiB", COMMON)
    models.start()
    model = models.first
    try:
        assert model.known.trials == 1
        first = model.known.tried
        for _ in range(2):
            reload(models, model)
        assert model.known.trials == 1 and model.known.tried is first
        # Other weights, in the same files.
        save_tiny(Path(path), 1)
        reload(models, model)
        assert model.known.trials == 2 and model.known.tried is not first
        reload(models, model)
        assert model.known.trials == 2
    finally:
        models.stop(0)


@pytest.mark.parametrize("settings", [{}, {"max_batch": 1}, {"kernels": "off"}, {"kv_format": "q4"}, {"draft": True}])
def test_it_runs_as_when_it_was_tried(path: str, settings: dict[str, Any]) -> None:
    if settings.pop("draft", False):
        settings = {"draft_model": path}
    known = Known()
    tried = answer(path, known, **settings)
    assert tried == answer(path, None, **settings)
    assert tried == answer(path, known, **settings)
    assert known.trials == 1


OTHERS: list[dict[str, Any]] = [
    {"prefill_chunk": 2},
    {"max_batch": 1},
    {"kernels": "off"},
    {"block_size": 32},
    {"kv_memory": "16MiB"},
    {"kv_format": "q4"},
    {"max_kv_size": 64},
]


@pytest.mark.parametrize("settings", OTHERS, ids=lambda settings: next(iter(settings)))
def test_other_settings_are_tried(path: str, settings: dict[str, Any]) -> None:
    known = Known()
    answer(path, known)
    assert answer(path, known, **settings) == answer(path, None, **settings)
    assert known.trials == 2


def test_another_draft_model_is_tried(path: str, tmp_path: Path) -> None:
    known, draft = Known(), save_tiny(tmp_path / "draft", 1)
    for trials in (1, 1):
        answer(path, known, draft_model=draft)
        assert known.trials == trials
    save_tiny(Path(draft), 2)
    answer(path, known, draft_model=draft)
    assert known.trials == 2


def test_weights_that_have_changed_are_stored_under_another_name(path: str, tmp_path: Path) -> None:
    """The blocks of other weights must never be found."""
    known, cached = Known(), {"disk_cache": str(tmp_path / "disk")}
    before = answer(path, known, **cached)[0]
    named = known.identity
    assert named is not None
    with LLM(path, known=known, **SMALL, **cached) as llm:
        found = llm.generate(PROMPT, 24)
        assert found.cached_tokens > 0 and found.tokens == before[:24]
    assert known.identity is named
    save_tiny(Path(path), 1)
    with LLM(path, known=known, **SMALL, **cached) as llm:
        assert llm.generate(PROMPT, 24).cached_tokens == 0
    assert known.identity not in (None, named)


def test_the_divergence_of_a_format_is_measured_once(path: str) -> None:
    known = Known()
    found = [answer(path, known, kv_format="tq2")[1]["divergence"] for _ in range(2)]
    assert found[0] is found[1] is known.divergence is not None
    save_tiny(Path(path), 1)
    assert answer(path, known, kv_format="tq2")[1]["divergence"] != found[0]


def test_what_is_in_memory_counts_not_what_the_files_are_by_now(path: str) -> None:
    """A base stays in memory for its adapters, whatever becomes of its files."""
    known, settings = Known(), spec("a", path).engine
    loaded = load_for(path, settings)
    tried = answer(loaded, known)
    save_tiny(Path(path), 1)
    assert answer(loaded, known) == tried and known.trials == 1
    assert answer(load_for(path, settings), known) == answer(path)
    assert known.trials == 2


def test_a_model_object_is_tried_each_time(path: str) -> None:
    loaded, known = load_for(path, spec("a", path).engine), Known()
    for trials in (1, 2):
        with LLM(loaded.model, tokenizer=loaded.tokenizer, known=known, **SMALL):
            assert known.trials == trials


def test_files_that_look_the_same_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    before, time = seen(tmp_path), file.stat().st_mtime_ns
    assert before == seen(tmp_path) == unchanged(tmp_path, before) != seen(file)
    # The same length, and the same time.
    file.with_suffix(".new").write_bytes(b"two")
    os.utime(file.with_suffix(".new"), ns=(time, time))
    file.with_suffix(".new").replace(file)
    after = seen(tmp_path)
    assert after != before and unchanged(tmp_path, before) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert seen(tmp_path) != after
    assert seen(tmp_path / "none") is None and unchanged(tmp_path / "none", None) is None
