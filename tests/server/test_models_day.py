"""Many clients, three models of which two fit, one that never does: no answer is wrong or cut off, no byte too many."""

import json
import subprocess
import sys
from pathlib import Path


def test_a_day_with_more_models_than_fit(tmp_path: Path) -> None:
    """In a process of its own, whose footprint is compared: swaps under load leave less than 5 % of it behind."""
    file = tmp_path / "day.json"
    flags = ["--requests", "60", "--clients", "4", "--seed", "1", "--json", str(file)]
    command = [sys.executable, "-m", "onekv", "bench", "day", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["wrong"] == []
    outcomes, loads = report["outcomes"], report["loads"]
    assert outcomes["answered"] > 30 and outcomes["closed"] and outcomes["refused"]
    assert loads["b"] >= 2 and loads["c"] >= 2 and report["resumed"] >= 3
    assert all(0 < report[what] <= report["limit"] for what in ("counted", "active", "process"))
    assert 0 < report["footprint_after"] <= report["footprint_before"] * 1.05


def test_more_clients_than_conversations(tmp_path: Path) -> None:
    """Each has one to go on with, and a place in the queue."""
    command = [sys.executable, "-m", "onekv", "bench", "day", "--requests", "30", "--clients", "14"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 of 14 clients" in done.stdout
