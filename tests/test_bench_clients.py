"""Servers that benchmarks start."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from onekv.bench import clients


def test_ctrl_c_while_a_server_is_being_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(subprocess.Popen[bytes]):
        """Ctrl-C comes when there is a process, and nobody knows of it yet."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            there.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    there: list[Started] = []
    monkeypatch.setattr(subprocess, "Popen", Started)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            clients._running([sys.executable, "-c", "import time; time.sleep(60)"], {}),
        ):
            pytest.fail("it was interrupted before")
        assert there[0].returncode is not None
    finally:
        there[0].kill()
        there[0].wait()
