"""The CUDA kernels' sources are package data: found by name, whole, and all of them used. They are compiled and run by
`test_cuda.py`, `test_cuda_spread.py`, `test_cuda_encoded.py` and `test_cuda_products.py`.
"""

import os
import subprocess
import sys
from importlib.resources import files

import mlx.core as mx
import pytest

from onekv import cuda
from onekv.cuda import products
from onekv.cuda.source import define, read
from onekv.memory.attention import cuda as attention
from onekv.memory.attention.cuda import encoded, plain

# What MLX is asked to compile, by kernel: the files of the header behind mma.cu and the constants, and of the body.
PARTS = {
    plain._kernel: (["rope"], ["plain", "alone"]),
    plain._parts_kernel: (["rope"], ["together"]),
    plain._join_kernel: ([], ["join"]),
    plain._store_kernel: (["rope"], ["store"]),
    encoded._kernel: (["codes"], ["encoded", "encoded_alone"]),
    encoded._parts_kernel: (["codes"], ["encoded"]),
    encoded._join_kernel: (["codes"], ["encoded_join"]),
    encoded._store_kernel: (["codes"], ["encoded_store"]),
}
CONSTANTS = (("H", 4), ("SCALE", 0.125), ("NEW", True))


def body_of(name) -> str:
    return read(name, attention.__name__)


@pytest.fixture
def compiled(monkeypatch):
    """What the kernels would give to MLX's compiler, by name."""
    asked = {}
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **how: asked.update({how["name"]: how}))
    for kernel in (*PARTS, products._kernel):
        kernel.cache_clear()
    yield asked
    for kernel in (*PARTS, products._kernel):
        kernel.cache_clear()


@pytest.mark.parametrize("kernel", PARTS, ids=lambda kernel: f"{kernel.__module__}{kernel.__name__}")
def test_a_kernel_is_made_of_its_files_and_constants(kernel, compiled):
    kernel(mx.bfloat16, CONSTANTS)
    (how,) = compiled.values()
    header, body = PARTS[kernel]
    tensor_cores = "" if kernel in (plain._join_kernel, plain._store_kernel) else read("mma")
    assert how["header"] == "".join([tensor_cores, define(mx.bfloat16, CONSTANTS), *map(body_of, header)])
    assert how["source"] == "".join(map(body_of, body))
    # Every input that MLX passes is named in the body or in what the body calls.
    assert [name for name in how["input_names"] + how["output_names"] if name not in how["source"]] == []


def test_a_product_has_an_output_for_each_part(compiled):
    products._kernel(mx.float16, CONSTANTS, (64, 96, 128))
    (how,) = compiled.values()
    assert how["output_names"] == ["out0", "out1", "out2"] and how["source"].endswith(read("product"))
    assert how["header"] == read("mma") + define(mx.float16, CONSTANTS)
    choices = ["if (first >= 96) return {out2, first - 96, 32};", "if (first >= 64) return {out1, first - 64, 32};"]
    assert "".join(f"    {choice}\n" for choice in choices) in how["source"]


def test_every_file_is_used_and_included_ones_are_put_in():
    names = {file.name.removesuffix(".cu") for file in files(attention).iterdir() if file.name.endswith(".cu")}
    assert names == {name for header, body in PARTS.values() for name in header + body} | {
        "place",
        "queries",
        "tile",
        "parts",
        "last",
    }
    texts = {name: body_of(name) for name in names} | {name: read(name) for name in ("mma", "product")}
    assert {file.name for file in files(cuda).iterdir() if file.name.endswith(".cu")} == {"mma.cu", "product.cu"}
    for name, text in texts.items():
        # Only whole statements were cut: the braces of every body and of every helper are balanced.
        assert "#include" not in text and text.count("{") == text.count("}"), name
    for name, part in (
        ("plain", "tile"),
        ("plain", "parts"),
        ("encoded", "queries"),
        ("encoded_alone", "last"),
        ("alone", "last"),
    ):
        assert texts[part][1:] in texts[name]


def test_constants_are_written_as_c():
    lines = define(mx.float16, (("D", 128), ("SCALE", 0.5), ("SINKS", False))).splitlines()
    assert lines[0] == "using T = __half;"
    assert lines[1:] == ["constexpr int64_t D = 128;", "constexpr float SCALE = 0.5;", "constexpr bool SINKS = false;"]


def test_the_cache_of_graphs_never_raises():
    """MLX's check counts all graphs that were ever made. It is off unless a user wants it."""
    show = "import os, onekv; print(os.environ['MLX_ENABLE_CACHE_THRASHING_CHECK'])"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLX_")}
    for given, expected in (({}, "0"), ({"MLX_ENABLE_CACHE_THRASHING_CHECK": "1"}, "1")):
        out = subprocess.run([sys.executable, "-c", show], env=environment | given, capture_output=True, check=True)
        assert out.stdout.decode().strip() == expected
