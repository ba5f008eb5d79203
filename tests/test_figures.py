"""Tables of measured figures say what the recorded files say.

A number in such a table must be in its file, rounded as it is written, in one of the units in which people read it; or
the quotient of two that are in the same row. Files with several rounds count with their medians.
"""

import json
import re
import statistics
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# A page, how the header of its table begins (with the lines around it, where several begin alike), and its files.
TABLES = [
    ("docs/formats.md", "| format | per token | text |", ["quality-2026-11-18", "quality-code-json-2026-11-18"]),
    ("docs/formats.md", "| format | per token | tokens per GiB |", ["quality-2026-11-15"]),
    ("docs/disk.md", "| | disk cache | compared with |", ["disk-2026-11-15"]),
    ("benchmarks/README.md", "| | OneKV | mlx-lm | ratio |", ["cpu-decode-2026-11-19", "cpu-reuse-2026-11-15"]),
    ("benchmarks/README.md", "| | with | without |", ["cpu-speculate-2026-11-19"]),
    ("benchmarks/README.md", "| | after a swap | fresh process |", ["swap-2026-11-19"]),
    ("benchmarks/README.md", "| scenario | | OneKV |", ["bench-all-2026-11-19"]),
    ("benchmarks/README.md", "| | ratio |\n", ["beside-commit-2026-11-19"]),
    ("benchmarks/README.md", "\n| | OneKV | mlx_lm.server | ratio |", ["serve-2026-11-15"]),
    ("benchmarks/README.md", "| | OneKV | mlx_lm.server |\n", ["meet-2026-11-19"]),
]
H200 = "benchmarks/h200-2026-11-18-exact-guesses.md"
TABLES += [
    (H200, "| | prefill tokens/s | mlx-lm |", ["h200-decode-2026-11-18"]),
    (H200, "| | decode tokens/s | apart |", ["h200-shared-16-2026-11-18", "h200-shared-32-2026-11-18"]),
]
H200_LATER = "benchmarks/h200-2026-11-19.md"
TABLES += [
    (H200_LATER, "h200-decode-2026-11-19.json):\n\n| | prefill tokens/s | mlx-lm |", ["h200-decode-2026-11-19"]),
    (H200_LATER, "with 32 rows:\n\n| | prefill tokens/s | mlx-lm |", ["h200-decode-long-rounds-2026-11-19"]),
    (H200_LATER, "| | decode tokens/s | apart | ratio | of roofline |", ["h200-shared-16-2026-11-19"]),
    (H200_LATER, "| right | 2 proposed |", ["h200-speculate-2026-11-19"]),
]
# Sentences that are about a file, by how they begin.
SENTENCES = [
    ("docs/speculation.md", "answer copies are generated", ["cpu-speculate-2026-11-19"]),
    ("benchmarks/README.md", "took 1.93 s, and the short request", ["meet-2026-11-19"]),
    ("benchmarks/README.md", "In `phases`, MLX's peak was", ["bench-all-2026-11-19"]),
    ("benchmarks/README.md", "`onekv bench soak --requests 2000 --clients 32` (a small", ["soak-2026-11-15"]),
]
# As it is, KiB, MiB, GiB, MB, per cent.
SCALES = (1.0, 2**-10, 2**-20, 2**-30, 1e-6, 100.0)
# What is no figure: names of formats and models, statuses of HTTP, commands.
NAMES = r"k\dv\d|\btq\d|\bq\d|99\.9 %|p95|SmolLM2|\([^)]*\d{3}, \d{3}[^)]*\)|`[^`]*`"


def leaves(found: Any) -> Iterator[float]:
    if isinstance(found, dict):
        yield from (each for value in found.values() for each in leaves(value))
    elif isinstance(found, list):
        yield from (each for value in found for each in leaves(value))
        yield from medians([each for each in found if isinstance(each, dict)])
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield float(found)


def medians(records: list[dict[str, Any]]) -> Iterator[float]:
    """Of all rounds of what has the same model."""
    for model in {record.get("model") for record in records}:
        same = [record for record in records if record.get("model") == model]
        for name in same[0]:
            values = [record[name] for record in same if isinstance(record.get(name), float)]
            if values:
                yield statistics.median(values)


def recorded(files: list[str]) -> set[float]:
    return {each for file in files for each in leaves(json.loads((ROOT / "benchmarks" / f"{file}.json").read_text()))}


def written(text: str) -> list[str]:
    text = re.sub(NAMES, " ", text)
    return [each.replace(",", "") for each in re.findall(r"(?<![\w.])\d(?:[\d,]*\d)?(?:\.\d+)?", text)]


def close(value: float, number: str) -> bool:
    return abs(abs(value) - float(number)) <= 0.5000001 * 10 ** -len(number.partition(".")[2])


def unknown(text: str, values: set[float]) -> list[str]:
    """The numbers of a row or a sentence that are neither recorded nor quotients of those that are."""
    numbers = written(text)
    found = {number: [value for value in values for by in SCALES if close(value * by, number)] for number in numbers}
    pairs = [(a, b) for one, other in permutations([*found.values()], 2) for a in one for b in other if b]
    return [number for number in numbers if not found[number] and not any(close(a / b, number) for a, b in pairs)]


def rows(page: str, header: str) -> list[str]:
    text = (ROOT / page).read_text()
    assert text.count(header) == 1, f"{page}: {header}"
    table = text[text.index(header) :].partition("\n\n")[0]
    found: list[str] = []
    for row in table.strip().splitlines()[2:]:
        # One without a title continues the one before.
        found.append(f"{found[-1]} {row}" if row.startswith("| | ") else row)
    return found


@pytest.mark.parametrize(("page", "header", "files"), TABLES)
def test_rows_have_the_figures_of_their_file(page, header, files):
    values = recorded(files)
    wrong = {row: missing for row in rows(page, header) if (missing := unknown(row, values))}
    assert wrong == {}


@pytest.mark.parametrize(("page", "begin", "files"), SENTENCES)
def test_sentences_have_the_figures_of_their_file(page, begin, files):
    text = (ROOT / page).read_text()
    assert text.count(begin) == 1, f"{page}: {begin}"
    sentence = re.split(r"[.;]\s", text[text.index(begin) :])[0]
    assert unknown(sentence, recorded(files)) == []


def test_a_figure_that_is_not_recorded_is_found():
    values = {12.346, 3.0, 2.5 * 2**20}
    assert unknown("| q8 | 12.35 s | 3.00 | 4.12 | 2.5 MiB |", values) == []
    assert unknown("| q8 | 12.36 s | 3.00 | 4.13 |", values) == ["12.36", "4.13"]
