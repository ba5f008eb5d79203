"""The CUDA kernels' sources are package data: found by name, whole, and all of them used. They are compiled elsewhere
(`test_cuda.py`, `test_cuda_encoded.py`).
"""

from importlib.resources import files

import mlx.core as mx
import pytest

from onekv.memory.attention import cuda
from onekv.memory.attention.cuda import encoded, plain
from onekv.memory.attention.cuda.source import define, read

# What MLX is asked to compile, by kernel: the files, in order.
PARTS = {"plain": ("mma", "plain"), "encoded": ("mma", "codes", "encoded")}


@pytest.fixture
def compiled(monkeypatch):
    """What the kernels would give to MLX's compiler, by name."""
    asked = {}
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **how: asked.update({how["name"]: how}))
    for module in (plain, encoded):
        module._kernel.cache_clear()
    yield asked
    for module in (plain, encoded):
        module._kernel.cache_clear()


@pytest.mark.parametrize("module", [plain, encoded], ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_kernel_is_made_of_its_files_and_constants(module, compiled):
    module._kernel(mx.bfloat16, (("H", 4), ("SCALE", 0.125), ("NEW", True)))
    (how,) = compiled.values()
    *header, body = PARTS[module.__name__.rpartition(".")[2]]
    constants = define(mx.bfloat16, (("H", 4), ("SCALE", 0.125), ("NEW", True)))
    assert how["header"] == read(header[0]) + constants + "".join(read(name) for name in header[1:])
    assert how["source"] == read(body)
    # Every input that MLX passes is named in the body or in what the body calls.
    assert [name for name in how["input_names"] + how["output_names"] if name not in how["source"]] == []


def test_every_file_is_used_and_included_ones_are_put_in():
    names = {file.name.removesuffix(".cu") for file in files(cuda).iterdir() if file.name.endswith(".cu")}
    assert names == {"mma", "codes", "place", "last", "plain", "encoded"}
    for kernel in PARTS:
        source = read(kernel)
        assert "#include" not in source
        assert 0 < source.index(read("place")[1:]) < source.index(read("last")[1:])
    # Only whole statements were cut: the braces of every body and of every helper are balanced.
    for name in names - {"place", "last"}:
        assert read(name).count("{") == read(name).count("}"), name


def test_constants_are_written_as_c():
    lines = define(mx.float16, (("D", 128), ("SCALE", 0.5), ("SINKS", False))).splitlines()
    assert lines[0] == "using T = __half;"
    assert lines[1:] == ["constexpr int64_t D = 128;", "constexpr float SCALE = 0.5;", "constexpr bool SINKS = false;"]
