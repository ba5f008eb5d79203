"""Real ranks: processes that are started with the variables that `mlx.launch --backend ring` sets."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

RANKS = 2


class Ranks:
    """Python with the arguments `program` on each rank; `out` and `err` are what each has written."""

    def __init__(self, *program: str, **variables: str) -> None:
        self._files = tempfile.mkdtemp(prefix="onekv-ranks-")
        hosts = Path(self._files) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(RANKS)]))
        # Two processes on few cores: more threads only get into each other's way.
        common = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MLX_HOSTFILE": str(hosts), **variables}
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(RANKS):
            with self._path(rank, "out").open("wb") as out, self._path(rank, "err").open("wb") as err:
                environment = {**common, "MLX_RANK": str(rank)}
                command = [sys.executable, *program]
                self.processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))

    def _path(self, rank: int, stream: str) -> Path:
        return Path(self._files) / f"{rank}.{stream}"

    def out(self, rank: int) -> str:
        return self._path(rank, "out").read_text()

    def err(self, rank: int) -> str:
        return self._path(rank, "err").read_text()

    def results(self) -> list[dict[str, Any]]:
        """The JSON objects that rank 0 has printed."""
        return [json.loads(line) for line in self.out(0).splitlines() if line.startswith("{")]

    def wait(self) -> list[int]:
        """The exit statuses."""
        return [process.wait(timeout=240) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
