"""What MLX would compile for Metal, read by clang; and the files it is made of."""

from functools import partial
from importlib.resources import files

import mlx.core as mx
import pytest

import test_cuda
import test_cuda_spread
from onekv.memory.attention import metal
from onekv.memory.attention.metal import language
from onekv.memory.attention.metal.backend import MetalPlain
from onekv.memory.attention.metal.language import METAL
from onekv.memory.attention.metal.plain import decode
from onekv.memory.layout import Rule

from .lint import Texts, complaints, tidy


@pytest.fixture
def texts(monkeypatch) -> dict[str, str]:
    """All kernels of a model in each dtype, by name."""
    collected = Texts()
    monkeypatch.setattr(mx.fast, "metal_kernel", collected.metal_kernel)
    # Nothing runs here: what is stored and what comes out is wrong.
    monkeypatch.setattr(test_cuda, "check_stored", lambda *stored: None)
    monkeypatch.setattr(test_cuda_spread, "check_stored", lambda *stored: None)
    language.kernel.cache_clear()
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        # Few rows and few query heads: MLX passes short arrays as constants.
        case = (dtype, (64, 80), 2, (30, 1), Rule(window=20), 16)
        test_cuda.error(*case, with_sinks=True, decode=partial(decode, METAL))
        test_cuda_spread.error(dtype, ((64, 80), 2), ((30,), (3,), Rule()), 16, MetalPlain, "metal")
        long = (dtype, (128, 128), 4, (40,) * 9, Rule(), 16)
        test_cuda.error(*long, with_sinks=True, decode=partial(decode, METAL))
    language.kernel.cache_clear()
    return collected.texts


def test_short_arrays_come_as_constants_and_long_ones_do_not(texts):
    attends = [text for name, text in texts.items() if "_attend_" in name]
    assert {"const constant int32_t* lengths" in text for text in attends} == {False, True}
    joins = [text for name, text in texts.items() if "_join_" in name]
    assert {"const device float* sinks" in text or "16_t* sinks" in text for text in joins} == {False, True}
    for text in texts.values():
        assert "[[thread_index_in_simdgroup]]" in text and "[[threadgroup_position_in_grid]]" in text


@pytest.mark.skipif(tidy() is None, reason="clang-tidy is not installed")
def test_clang_has_nothing_to_say(texts, tmp_path):
    assert {name: found for name, text in texts.items() if (found := complaints(text, tmp_path))} == {}


WRONG = [
    # A pointer into another address space, or into none.
    ("const DEVICE int* rows", "const PRIVATE int* rows"),
    ("const DEVICE int* rows", "const int* rows"),
    ("SHARED_AT float* space", "DEVICE float* space"),
    # A pointer to what may be a constant.
    ("  int latest = -1", "  const DEVICE int* at = lengths;\n  int latest = at[0]"),
    # A write to an input that is not cast.
    ("((DEVICE uint4*)(k + slot * D))[n]", "((const DEVICE uint4*)(k + slot * D))[n]"),
    # Names that there are not, or not in Metal.
    ("metal::simd_shuffle_xor", "metal::simd_shufle_xor"),
    ("block_barrier();\n\n", "__syncthreads();\n\n"),
    ("int(simdgroup_index_in_threadgroup)", "int(simdgroup_index)"),
    ("float top = NONE", "double top = NONE"),
    ("CONSTANT float NONE", "constexpr float NONE_OF_IT"),
    ("  const int v_lane", "  const auto twice = [](int x) { return 2 * x; };\n  const int v_lane"),
]


@pytest.mark.skipif(tidy() is None, reason="clang-tidy is not installed")
@pytest.mark.parametrize(("old", "new"), WRONG)
def test_clang_finds_what_metal_would_not_compile(texts, tmp_path, old, new):
    text = next(text for name, text in texts.items() if "_attend_1_" in name and "const constant" in text)
    changed = text.replace(old, new)
    assert changed != text and complaints(changed, tmp_path) != []


def test_every_file_is_used():
    names = {file.name for file in files(metal).iterdir() if file.name.endswith((".metal", ".cu"))}
    assert names == {f"{name}.metal" for name in ("lanes", "rows", "attend", "join", "store")} | {"lanes.cu"}
