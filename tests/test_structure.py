"""Files up to 400 lines, functions up to 60, in src and tests; whatever is longer is listed here with its reason.

The direction of imports is checked by `make lint`; here, that CONTRIBUTING.md has the same map.
"""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE_LINES, FUNCTION_LINES = 400, 60

# A path, or a path and a function's name. What has become short enough must be taken out again.
LONGER = {
    "src/onekv/loops/product_kernel.py": "numba's cache sees changes of this file alone",
    "src/onekv/memory/attention/numba/kernel.py": "numba's cache sees changes of this file alone",
    "src/onekv/memory/attention/numba/plain_kernel.py": "numba's cache sees changes of this file alone",
    "src/onekv/memory/attention/cuda/encoded.py encoded_decode": "one launch with all its inputs",
    "tests/architectures.py": "a list: one small configuration for each architecture",
}


def too_long(root: Path) -> dict[str, int]:
    """Lines of the files and functions below `root` that are over the limits."""
    found = {}
    for file in sorted(path for folder in ("src", "tests") for path in (root / folder).rglob("*.*")):
        if file.suffix not in (".py", ".cu", ".metal", ".cpp", ".h"):
            continue
        name, text = file.relative_to(root).as_posix(), file.read_text()
        if (lines := len(text.splitlines())) > FILE_LINES:
            found[name] = lines
        if file.suffix == ".py":
            for function in ast.walk(ast.parse(text)):
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    assert function.end_lineno is not None
                    if (lines := function.end_lineno - function.lineno + 1) > FUNCTION_LINES:
                        found[f"{name} {function.name}"] = lines
    return found


def test_only_what_is_listed_is_longer() -> None:
    longer = too_long(ROOT)
    assert {name: lines for name, lines in longer.items() if name not in LONGER} == {}
    assert [name for name in LONGER if name not in longer] == [], "no longer over the limit: take it out of the list"


def test_the_limits(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "tests").mkdir()
    body = "    pass\n" * (FUNCTION_LINES - 1)
    (tmp_path / "src" / "at_limit.py").write_text("#\n" * (FILE_LINES - FUNCTION_LINES) + "def f():\n" + body)
    assert too_long(tmp_path) == {}
    (tmp_path / "src" / "over.cu").write_text("//\n" * (FILE_LINES + 1))
    method = "    async def f():\n" + "        pass\n" * FUNCTION_LINES
    (tmp_path / "tests" / "over.py").write_text("class A:\n" + method)
    assert too_long(tmp_path) == {"src/over.cu": FILE_LINES + 1, "tests/over.py f": FUNCTION_LINES + 1}


def test_the_map_of_packages_is_the_contract() -> None:
    contract, memory, _ = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Packages\n")[2].partition("\n## ")[0]
    drawn = section.split("```")[1].strip().splitlines()
    assert [line.partition("  ")[0] for line in drawn] == contract["layers"]
    inside = section.partition("from the top down: ")[2].partition(". ")[0]
    assert [layer for layer in inside.split("`") if layer in memory["layers"]] == memory["layers"]
