"""`onekv doctor` finds what is not exact and what is not flat, and says which switch avoids it; else it is clean.

Each test runs only the check concerned, in this process, with the fault planted in what the check examines. The other
planted faults are in test_doctor.py.
"""

from collections import deque
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from examining import KERNELS_OFF, clean, examine, found
from onekv.config import Settings
from onekv.doctor import choices, exactness, flat, model, serving
from onekv.doctor.base import Case, Finding, Status, switch
from onekv.doctor.bounds import bounds
from onekv.memory.attention import chunk, layer, paged
from onekv.memory.attention import loops as attention_loops
from onekv.memory.attention.numba import encoded
from onekv.memory.formats import parse
from onekv.memory.layout.reader import read_layout
from onekv.memory.layout.stored import encoded as encoded_as
from onekv.memory.plan.device import Device

FULL = "full attention"


def only(monkeypatch: pytest.MonkeyPatch, *cells: tuple[str, str, str]) -> None:
    """Of what exactness is measured for."""
    monkeypatch.setattr(exactness, "wanted", lambda device: cells)


# 1. A kernel with a wrong constant


@pytest.fixture
def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the compiled loops that attend over plain KV: a thousandth too much."""
    right = attention_loops.plain_decode

    def wrong(*given: Any) -> Any:
        *others, scale, sinks = given
        return right(*others, scale * 1.001, sinks)

    monkeypatch.setattr(attention_loops, "plain_decode", wrong)


def test_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """On models of every kind of layer; all formats and types are in a run of all checks."""
    some = [*((kind, "float32", "auto") for kind in exactness.KINDS), (FULL, "float32", "tq3")]
    only(monkeypatch, *some, (FULL, "bfloat16", "auto"))
    result = examine(exactness.CHECK)
    assert clean(result), result.findings
    assert {figure.name.partition(",")[0] for figure in result.figures} >= {"memory", "compiled", "Paged", "Shared"}
    assert all(figure.limit is not None and figure.value <= figure.limit for figure in result.figures)


def test_a_kernel_with_a_wrong_constant(wrong_scale: None, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, (FULL, "float32", "auto"))
    (finding,) = found(examine(exactness.CHECK))
    assert "compiled is wrong for full attention, --kv-format auto, float32" in finding.text
    assert finding.remedy == KERNELS_OFF


def test_the_switch_avoids_it(wrong_scale: None, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, (FULL, "float32", "auto"))
    assert clean(examine(exactness.CHECK, Case(Settings(kernels="off"))))


def test_an_encoded_kernel_with_a_wrong_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    right = encoded.encoded_decode

    def wrong(*given: Any) -> Any:
        *others, scale, sinks, turns = given
        return right(*others, scale * 1.001, sinks, turns)

    monkeypatch.setattr(encoded, "encoded_decode", wrong)
    only(monkeypatch, (FULL, "float32", "q8"))
    (finding,) = found(examine(exactness.CHECK))
    assert "Numba is wrong for full attention, --kv-format q8" in finding.text and finding.remedy == KERNELS_OFF


def test_a_loop_over_prompts_with_a_wrong_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend decodes with it: what it stores is wrong, and without it that is right."""
    right = chunk.prompts.weigh
    monkeypatch.setattr(chunk.prompts, "weigh", lambda *given, causal: 1.01 * right(*given, causal=causal))
    only(monkeypatch, (FULL, "float32", "auto"))
    (finding,) = found(examine(exactness.CHECK))
    assert finding.text.startswith("memory is wrong for full attention") and finding.remedy == KERNELS_OFF


def test_a_kernel_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(encoded, "encoded_decode", refuse)
    monkeypatch.setattr(exactness, "try_compiled", lambda *given: None)
    only(monkeypatch, (FULL, "float32", "q8"))
    (finding,) = found(examine(exactness.CHECK))
    assert finding.text.endswith("RuntimeError: no such instruction") and finding.remedy == KERNELS_OFF


def test_a_model_that_mlx_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise RuntimeError("[conv1d] has no GPU implementation.")

    monkeypatch.setattr(exactness, "stock_logits", refuse)
    only(monkeypatch, ("recurrent", "float32", "auto"))
    result = examine(exactness.CHECK)
    assert result.findings[0] == Finding(Status.SKIPPED, "recurrent in float32: [conv1d] has no GPU implementation.")


def test_operations_of_mlx_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel to do without, another way of storing KV is what helps."""
    right = paged.run_decode
    monkeypatch.setattr(paged, "run_decode", lambda q, k, v, scale, by: mx.nan * right(q, k, v, scale, by))
    monkeypatch.setattr(paged, "paged_decode", lambda *given: mx.nan * given[0])
    only(monkeypatch, (FULL, "float32", "auto"))
    findings = found(examine(exactness.CHECK))
    assert {finding.text.partition(" is wrong")[0] for finding in findings} >= {"Paged"}
    assert {finding.remedy for finding in findings} == {switch("kv_format", "q8")}


def test_a_codebook_with_a_wrong_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of a comparison would use it: what a format loses is measured by itself."""
    right = exactness.relative_error
    monkeypatch.setattr(exactness, "relative_error", lambda codec: 1.1 * right(codec))
    only(monkeypatch)
    assert len(found(examine(exactness.CHECK))) == len(exactness.FORMAT)


# 2. A write that copies


def test_flat() -> None:
    result = examine(flat.CHECK)
    assert clean(result), result.findings


def test_a_write_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the last two steps: a slice of each array outlives its step.
    pinned: deque[mx.array] = deque(maxlen=16)
    right = layer.write

    def pinning(step: Any, pool: mx.array, new: mx.array) -> mx.array:
        written = right(step, pool, new)
        pinned.append(written[:, :1])
        return written

    monkeypatch.setattr(layer, "write", pinning)
    monkeypatch.setattr(flat, "DECODED", 20)
    findings = found(examine(flat.CHECK))
    said = "\n".join(finding.text for finding in findings)
    assert "kernels off: the pool's arrays moved to new buffers" in said
    assert "above weights and pool: writes copy the pool" in said and "it copies the cached blocks" in said
    assert all("--kv-memory" in str(finding.remedy) for finding in findings)


def test_choices_are_told_with_their_reasons() -> None:
    result = examine(choices.CHECK)
    assert clean(result)
    told = [finding.text.partition(":")[0] for finding in result.findings]
    assert told == ["donation", "overlap", "compile", "several tokens a step (speculation)"]
    copied = {figure.name: figure.value for figure in result.figures}["copied by an MLX write, array being read"]
    assert copied >= choices.SIZE, "why steps do not overlap where MLX writes the pool"


# 3. A model that does not fit


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("small")
    serving.save_chat_model(folder)
    return str(folder)


def test_a_model(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "bandwidth", lambda most: 1e10)
    # What a user has set of the disk cache and speculation is not for this.
    settings = Settings(kv_memory="64MB", disk_cache="somewhere", disk_limit="1GB", speculate="lookup")
    result = examine(model.CHECK, Case(settings, small))
    assert clean(result), result.findings
    figures = {figure.name: figure.value for figure in result.figures}
    assert figures["tokens equal to mlx-lm's, cold"] == model.COMPARED
    assert figures["decode"] > 0 and figures[model.SHARE] > 0
    assert not Path("somewhere").exists()


def test_a_model_whose_tokens_are_others(small: str, wrong_scale: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is wrong by too little for the test at load."""
    monkeypatch.setattr(model, "bandwidth", lambda most: 1e10)
    right = attention_loops.plain_decode
    monkeypatch.setattr(attention_loops, "plain_decode", lambda *given: right(*given[:-2], 0.4 * given[-2], given[-1]))
    monkeypatch.setattr("onekv.engine.selftest._close", lambda *_: True)
    findings = found(examine(model.CHECK, Case(Settings(kv_memory="64MB"), small)))
    assert any("of an answer differs from mlx-lm's" in each.text and each.remedy == KERNELS_OFF for each in findings)


def test_a_model_that_does_not_fit(small: str) -> None:
    (finding,) = found(examine(model.CHECK, Case(Settings(kv_memory="1000TiB"), small)))
    assert "does not fit: the plan needs" in finding.text and "--kv-memory SIZE" in str(finding.remedy)


def test_nothing_is_downloaded_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "fetched", dict)
    result = examine(model.CHECK)
    assert result.status is Status.SKIPPED and "`onekv doctor smollm2-135m` downloads it" in result.findings[0].text


def test_processes_compare_as_this_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, where each compiles kernels."""
    asked = [("recurrent", "float32", "auto", True), ("latent attention", "float32", "auto", True)]
    assert list(exactness._in_turn(asked, 2)) == list(exactness._in_turn(asked, 0))
    assert exactness.workers(100) == 0 or mx.default_device() == mx.gpu
    monkeypatch.setattr(exactness, "device_kind", lambda: "cuda")
    monkeypatch.setattr(exactness.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(exactness, "read_device", lambda: Device("a GPU", 80 * 2**30, 79 * 2**30))
    assert [exactness.workers(count) for count in (1, 100)] == [0, exactness.MOST_WORKERS]
    monkeypatch.setattr(exactness, "read_device", lambda: Device("a GPU", 8 * 2**30, 7 * 2**30))
    assert exactness.workers(100) == 3


@pytest.mark.parametrize("format", ["q4", "tq3", "tq2"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bounds_tell_rounding_from_another_row(dtype: str, format: str) -> None:
    """On every device; encoded formats in half precision are compared on a GPU alone."""
    small = exactness.small_model("sliding window")
    small.set_dtype(exactness.DTYPES[dtype])
    layout = encoded_as(read_layout(small), parse(format), 0)
    expected = exactness._expected(small, layout)
    logits = exactness.try_backend(small, layout, exactness.Stock, False).logits
    for device in ("cpu", "cuda"):
        limit = bounds(dtype, False, device).memory
        assert exactness._apart(logits, expected) < limit < exactness._apart(logits[::-1], expected) / 2
