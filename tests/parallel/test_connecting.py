"""Ranks that never meet: MLX waits for them without end, but not this process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import free_ports

# As `onekv serve` has it: a signal asks for an orderly shutdown, which needs Python to run.
WAITING = """
import signal, sys
import onekv
from onekv.parallel import group
signal.signal(signal.SIGTERM, lambda *_: None)
group.STEP_LIMIT = float(sys.argv[1])
group.connect()
"""


def listens(port: int) -> bool:
    """Without connecting, which would be taken for the other rank."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(each[1].endswith(f":{port:04X}") and each[3] == "0A" for each in map(str.split, lines))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
@pytest.mark.parametrize(
    ("limit", "sent", "ended"), [("300", signal.SIGTERM, signal.SIGTERM), ("1", 0, signal.SIGALRM)]
)
def test_a_rank_that_waits_for_another_can_be_ended(tmp_path: Path, limit: str, sent: int, ended: int) -> None:
    """By mlx.launch, when the other one has failed; or by itself, when nobody has come within the limit."""
    ports = free_ports(2)
    hosts = tmp_path / "hosts.json"
    hosts.write_text(str([[f"127.0.0.1:{port}"] for port in ports]).replace("'", '"'))
    variables = {**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": "0"}
    process = subprocess.Popen([sys.executable, "-c", WAITING, limit], env=variables)
    try:
        while sent and not listens(ports[0]):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(sent)
        assert process.wait(timeout=60) == -ended
    finally:
        process.kill()
        process.wait()
