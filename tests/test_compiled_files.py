"""Compiled loops on disk: processes that start at the same time, changed sources, damaged files, full disks."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

from onekv.loops.files import CompiledFiles

SOURCE = """
from onekv.loops import kept

@kept()
def total(array):
    result = {first}
    for i in range(len(array)):
        result += array[i]
    return result
"""
ARRAYS = [np.arange(9, dtype=name) for name in ("float32", "float64", "int16", "uint16", "int64")]


@pytest.fixture(autouse=True)
def in_tree(monkeypatch):
    """numba keeps the loop beside its source, and imports its module by name."""
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setitem(sys.modules, "some_loop", None)


def load(path):
    spec = importlib.util.spec_from_file_location("some_loop", path)
    module = sys.modules["some_loop"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.total


def write(folder, first=0):
    path = folder / "some_loop.py"
    path.write_text(SOURCE.format(first=first))
    return path


def files(folder):
    return sorted((folder / "__pycache__").glob("*.nbc"))


def hits(loop):
    return sum(loop.stats.cache_hits.values())


def test_two_that_save_at_the_same_time_keep_what_is_theirs(tmp_path, monkeypatch):
    """Both have looked before one has written, and both have named their files before one is there."""
    together, replace = threading.Barrier(2, timeout=20), os.replace

    def wait(*paths):
        together.wait()
        replace(*paths)

    monkeypatch.setattr(os, "replace", wait)
    caches = [CompiledFiles(tmp_path, write, "stamp") for _ in range(2)]
    savers = [threading.Thread(target=caches[i].save, args=(f"key {i}", f"code {i}")) for i in range(2)]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join()
    fresh = CompiledFiles(tmp_path, write, "stamp")
    assert [fresh.load(f"key {i}") for i in range(2)] == ["code 0", "code 1"]


def test_processes_that_compile_for_different_signatures_at_the_same_time(tmp_path):
    write(tmp_path)
    code = (
        "import numpy as np, sys; from some_loop import total; sys.stdin.read(1);"
        "print(total(np.arange(9, dtype=sys.argv[1])))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "NUMBA_CACHE_DIR": ""}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, array.dtype.name],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for array in ARRAYS
    ]
    for process in started:
        process.stdin.write(b"x")
        process.stdin.flush()
    assert [float(process.communicate(timeout=300)[0]) for process in started] == [36.0] * len(ARRAYS)
    assert len(files(tmp_path)) == len(ARRAYS)
    loop = load(tmp_path / "some_loop.py")
    assert [loop(array) for array in ARRAYS] == [36] * len(ARRAYS)
    assert hits(loop) == len(ARRAYS)


def test_another_source_is_compiled_again_and_the_old_code_removed(tmp_path):
    loop = load(write(tmp_path))
    assert loop(ARRAYS[0]) == 36
    [old] = files(tmp_path)
    again = load(write(tmp_path, first=100))
    assert again(ARRAYS[0]) == 136 and hits(again) == 0
    [new] = files(tmp_path)
    assert new != old


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-1], lambda data: data[:-1] + b"\xff"])
def test_a_damaged_file_is_compiled_again(tmp_path, damage):
    path = write(tmp_path)
    assert load(path)(ARRAYS[0]) == 36
    [file] = files(tmp_path)
    good = file.read_bytes()
    file.write_bytes(damage(good))
    loop = load(path)
    assert loop(ARRAYS[0]) == 36 and hits(loop) == 0
    loop = load(path)
    assert loop(ARRAYS[0]) == 36 and hits(loop) == 1


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch, caplog):
    def full(path, data):
        raise OSError(28, "No space left on device")

    path = write(tmp_path)
    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    assert load(path)(ARRAYS[0]) == 36
    assert "No space left on device" in caplog.text and str(tmp_path) in caplog.text
    assert files(tmp_path) == []


def test_what_two_processes_compile_has_different_names(tmp_path):
    """Of two parts with one name, as of loops for different kinds of weights, only the first would be called."""
    script = """
import onekv
import mlx.core as mx, mlx.nn as nn, numpy as np
from onekv.loops.products import product
layer = nn.QuantizedLinear(64, 48, bias=False, group_size=64, bits=8)
mx.eval(layer.parameters())
product(layer)(np.ones((2, 64), np.float32))
"""
    names = []
    for folder in (tmp_path / "one", tmp_path / "another"):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(folder), "OPENBLAS_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
        (kept,) = folder.rglob("product_kernel.multiply_packed8.*.nbc")
        names.append(set(re.findall(rb"columnsB\d+v(\d+)B", kept.read_bytes())))
        assert names[-1]
    assert names[0].isdisjoint(names[1])
