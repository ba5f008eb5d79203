"""`onekv bench disk`, briefly, with a small model: three real processes, the same tokens, figures that are there."""

import json
import os

import pytest

from onekv.bench.disk import _in_new_process
from onekv.bench.soak import save_tiny
from onekv.cli import main
from test_cli import refused


@pytest.mark.usefixtures("smollm2_path")
def test_bench_disk_writes_its_figures(capsys, tmp_path):
    model, file, place = tmp_path / "model", tmp_path / "result.json", tmp_path / "place"
    model.mkdir()
    place.mkdir()
    argv = ["--model", save_tiny(model), "--tokens", "200", "--rounds", "1", "--folder", str(place)]
    assert main(["bench", "disk", *argv, "--json", str(file)]) == 0
    assert "first token after a restart" in capsys.readouterr().out
    result = json.loads(file.read_text())
    restart, peak = result["restart"], result["peak"]
    # 200 tokens and 8 answered, of which the last was never stored: three blocks of 64, and what follows them.
    assert restart["cached_tokens"] >= 192
    assert restart["tokens_identical"] is True
    assert restart["seconds"] > 0 and restart["seconds_cold"] > 0 and restart["first_after_restart"] > 0
    speeds = {speed["what"]: speed for speed in result["speeds"]}
    assert {"read, page cache warm", "write"} <= set(speeds)
    for speed in speeds.values():
        assert speed["speed"] > 0 and speed["raw"] > 0 and speed["bytes"] >= 3 * peak["block"]
    # Two threads read, each with a buffer of one block.
    assert 0 < peak["counted"] < 3 * peak["block"]
    assert list(place.iterdir()) == []


def test_every_part_has_a_process_of_its_own():
    first, second = (_in_new_process(os.getpid) for _ in range(2))
    assert len({first, second, os.getpid()}) == 3


def test_a_folder_that_is_not_there_is_refused(capsys):
    status = main(["bench", "disk", "--folder", "no/such"])
    assert "--folder is 'no/such'" in refused((status, *capsys.readouterr()))
