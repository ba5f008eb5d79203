"""What the README says is what the program and the recorded files say."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from onekv.config import Settings, flag
from onekv.server.model_settings import ModelSettings
from onekv.server.models.settings import BudgetSettings
from onekv.server.settings import ServerSettings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text()
MIB = 2**20
DOCS = runpy.run_path(str(ROOT / "docs" / "generate.py"))
TABLES, generated = DOCS["TABLES"], DOCS["generated"]


def recorded(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / name).read_text())


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def numbers(text: str) -> list[str]:
    """As they are written, without links and names of models."""
    text = re.sub(r"\]\([^)]*\)|\[[a-z0-9-]*$|H200|8B", " ", re.sub(r"\(\[[^]]*\]\([^)]*\)\)", " ", text))
    return re.findall(r"(?<![\w.-])\d[\d,.]*\d|(?<![\w.-])\d", text)


# For each file that the README names, the numbers in the line that names it, in order.


def of_reuse(file: str) -> list[str]:
    largest = recorded(file)["results"][-1]
    sizes = (largest["kv_bytes"], largest["peak"], largest["peak_mlx_lm"])
    return [f"{sizes[0] / MIB:.0f}", *(f"{size / MIB:.1f}" for size in sizes[1:])]


def of_decode(file: str) -> list[str]:
    one, four = recorded(file)["results"]
    assert (one["batch"], four["batch"]) == (1, 4)
    return [
        f"{case[name]:{form}}"
        for case in (one, four)
        for name, form in (("context", ","), ("decode_ratio", ".2f"), ("prefill_ratio", ".2f"))
    ]


def of_shared(file: str) -> list[str]:
    (case,) = recorded(file)["results"]
    assert case["batch"] == 8
    return [f"{case['shared']:,}", f"{case['decode_ratio']:.2f}"]


def of_speculate(file: str) -> list[str]:
    about = recorded(file)
    assert all(case["same_tokens"] for case in about["results"])
    return [f"{about['summary'][kind]:.2f}" for kind in ("copy", "free")]


def of_disk(file: str) -> list[str]:
    restart = recorded(file)["restart"]
    return [f"{restart['cached_tokens']:,}", f"{restart['seconds']:.1f}", f"{restart['seconds_cold']:.1f}"]


def of_serve(file: str) -> list[str]:
    about = recorded(file)
    chats, agent = about["results"]["chats"], about["results"]["agent"]
    assert about["clients"] == 8
    sides = ("onekv", "mlx_lm")
    return [
        *(f"{chats[side]['first_mean']:.1f}" for side in sides),
        *(f"{chats[side]['kv'] / MIB:.0f}" for side in sides),
        str(about["turns"]),
        *(f"{agent[side]['total']:.0f}" for side in sides),
    ]


def of_h200(file: str) -> list[str]:
    results = json.loads((ROOT / "benchmarks" / file).read_text())["results"]
    (row,) = (each for each in results if (each["batch"], each["context"]) == (8, 4096))
    return [f"{row['decode_ratio']:.2f}", f"{row['prefill_ratio']:.2f}", "4,096"]


LINES = {
    "cpu-reuse": of_reuse,
    "cpu-decode": of_decode,
    "cpu-shared": of_shared,
    "cpu-speculate": of_speculate,
    "disk": of_disk,
    "serve": of_serve,
    "h200": of_h200,
}


def measured() -> list[str]:
    return section("Measured").split("\n- ")[1:]


def test_every_line_names_its_file():
    assert [re.findall(r"\[([a-z0-9-]+)\]\(benchmarks/", line) for line in measured()] == [[name] for name in LINES]


@pytest.mark.parametrize("name", LINES)
def test_figures_are_those_of_the_recorded_file(name):
    (line,) = (line for line in measured() if f"[{name}](" in line)
    (file,) = re.findall(r"\(benchmarks/([^)]+)\)", line)
    assert sorted(numbers(line)) == sorted(LINES[name](file))


def test_no_figure_stands_outside_those_lines():
    assert numbers(section("Measured").split("\n- ")[0]) == ["0.32.2", "1"]


def test_the_decode_rows_of_the_benchmarks_page():
    for case in recorded("cpu-decode-2026-11-19.json")["results"]:
        shape = f"{case['batch']} x {case['context']} tokens"
        for kind, digits in (("decode", 1), ("prefill", 0)):
            speed, other = (f"{case[f'{kind}_{side}']:.{digits}f}" for side in ("tokens_per_s", "peer"))
            assert f"| {kind}, {shape} | {speed} tokens/s | {other} | {case[f'{kind}_ratio']:.2f} |" in BENCHMARKS


def test_the_benchmarks_page_lists_every_file():
    files = {path.name for path in (ROOT / "benchmarks").iterdir()} - {"README.md"}
    assert set(re.findall(r"^\| (\S+\.(?:json|md|py)) \|", BENCHMARKS, re.MULTILINE)) == files


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_settings_are_those_of_the_definitions(name):
    assert (ROOT / name).read_text() == generated(name), "run `make docs`"


def test_every_setting_is_in_a_table():
    flags = re.findall(r"^\| `(--[a-z-]+) ", "".join((ROOT / name).read_text() for name in TABLES), re.MULTILINE)
    kinds = (Settings, ServerSettings, ModelSettings, BudgetSettings)
    assert set(flags) == {flag(name) for kind in kinds for name in kind.names()}
