"""`onekv bench remote`, briefly, with a small model and a real store: the same tokens, figures that are there."""

import json
import shutil

import pytest

from onekv.bench.soak import save_tiny
from onekv.cli import main
from test_cli import refused


@pytest.mark.usefixtures("smollm2_path")
@pytest.mark.skipif(not (shutil.which("valkey-server") or shutil.which("redis-server")), reason="there is no server")
def test_bench_remote_writes_its_figures(capsys, tmp_path):
    model, file = tmp_path / "model", tmp_path / "result.json"
    model.mkdir()
    argv = ["--model", save_tiny(model), "--tokens", "400", "--rounds", "1", "--format", "q8", "--json", str(file)]
    assert main(["bench", "remote", *argv]) == 0
    assert "decoding, store" in capsys.readouterr().out
    result = json.loads(file.read_text())
    rows = {(row["model"], row["kv_format"]): row for row in result["first"]}
    assert set(rows) == {(argv[1], "auto"), (argv[1], "q8"), ("windows", "auto"), ("recurrent", "auto")}
    for row in rows.values():
        assert row["tokens_identical"] is True and row["cached_tokens"] >= 320 and row["bytes"] > 0
        assert row["seconds"] > 0 and row["computed"] > 0 and row["raw"] > 0
    assert [row["store"] for row in result["decoding"]] == ["up", "slow", "stopped", "killed"]
    assert all(row["ratio"] > 0 and row["tokens_per_s"] > 0 for row in result["decoding"])


def test_a_machine_without_a_store_is_told(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    status = main(["bench", "remote"])
    assert "no valkey-server or redis-server" in refused((status, *capsys.readouterr()))
