"""`onekv bench swap` measures a real server and real processes; what it measures is not asserted."""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "models"))

import pytest
from gguf_files import Spec, write

from onekv.bench.soak import save_tiny


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_each_swap_has_a_fresh_process_beside_it(tmp_path: Path, kind: str) -> None:
    """Also where the model is a folder, of which the other one is a copy."""
    model, file = tmp_path / ("tiny.gguf" if kind == "file" else "tiny"), tmp_path / "swap.json"
    if kind == "file":
        write(model, Spec())
    else:
        save_tiny(model)
    command = [sys.executable, "-m", "onekv", "bench", "swap", "--rounds", "1", "--model", str(model)]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["file", "folder"]
    rounds = json.loads(file.read_text())["rounds"]
    assert [each["model"] for each in rounds] == ["folder", "file"]
    assert all(each["swap"] > 0 and each["fresh"] > 0 for each in rounds)
