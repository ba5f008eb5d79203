"""`benchmarks/beside_commit.py` compares the figures that the benchmarks write, those of earlier commits included."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from beside_commit import compare  # noqa: E402

RECORDED = {
    "decode": "cpu-decode-2026-11-16",
    "reuse": "cpu-reuse-2026-11-15",
    "serve": "serve-2026-11-15",
    "disk": "disk-2026-11-15",
    "formats": "cpu-formats-2026-11-15",
}


@pytest.mark.parametrize("bench", RECORDED)
def test_a_commit_is_as_fast_as_itself(bench):
    result = json.loads((BENCHMARKS / f"{RECORDED[bench]}.json").read_text())
    rows = list(compare(bench, [(result, result)]))
    assert len(rows) >= 4 and len({row["figure"] for row in rows}) == len(rows)
    assert all(row["ratio"] == 1 and row["peer"] in (None, 1) and row["then"] > 0 for row in rows)


def test_more_speed_less_time_and_less_memory_are_better():
    before = {"results": [{"format": "q8", "decode_tokens_per_s": 4.0}, {"tokens": 8, "seconds": 2.0, "peak": 100}]}
    after = {"results": [{"format": "q8", "decode_tokens_per_s": 8.0}, {"tokens": 8, "seconds": 4.0, "peak": 50}]}
    rows = {row["figure"]: row["ratio"] for row in compare("formats", [(before, after)])}
    assert rows == {
        "formats q8 decode_tokens_per_s": 2.0,
        "formats 8 seconds": 0.5,
        "formats 8 peak": 2.0,
    }


def test_a_peer_that_had_another_name_is_the_same_one():
    before = {"results": [{"batch": 1, "context": 8, "prefill_tokens_per_s": 4.0, "prefill_mlx_lm": 2.0}]}
    after = {"results": [{"batch": 1, "context": 8, "prefill_tokens_per_s": 4.0, "prefill_peer": 3.0}]}
    (row,) = compare("decode", [(before, after), (before, after)])
    assert (row["figure"], row["ratio"], row["peer"]) == ("decode 1x8 prefill_tokens_per_s", 1.0, 1.5)
