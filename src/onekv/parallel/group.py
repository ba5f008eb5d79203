"""The ranks of a launch, and how they find each other.

`mlx.launch` and `mpirun` pass each process its rank and the addresses of the others in environment variables, different
ones for every backend; `mx.distributed.init` understands them all. Once it has connected the ranks, a single collective
broadcasts where rank 0 listens and the secret of this launch (wire.py). That is the only collective outside of the
model, and it comes first on every rank. So membership in the group authenticates a rank, whatever the backend.
"""

import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ParallelError
from .guard import STEP_LIMIT
from .wire import Gone, Wire

if TYPE_CHECKING:
    import mlx.core as mx

# Set by mlx.launch, Open MPI, and MPICH and its derivatives.
_RANKS = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# Size of the broadcast, in bytes.
_NOTE = 512
# How long rank 0 waits for the others to connect.
CONNECT_SECONDS = 30.0


def launched_rank() -> int | None:
    """The rank that the launcher assigned to this process; None if it was not launched as one of several."""
    given = next((os.environ[name] for name in _RANKS if os.environ.get(name)), None)
    if given is not None and not given.isdecimal():
        raise ParallelError(f"the rank of this process is {given!r}, which is not a number; start it with mlx.launch")
    return None if given is None else int(given)


@dataclass(frozen=True)
class Group:
    """The ranks of this launch; `rank` is this process."""

    rank: int
    size: int
    # MLX's own handle.
    ranks: "mx.distributed.Group"

    @property
    def leads(self) -> bool:
        return self.rank == 0


def connect() -> Group | None:
    """Connect MLX on all ranks; None if there is only one. Raises ParallelError."""
    # `mlx.launch -n 1` writes an empty host file, which MLX fails to parse.
    if launched_rank() is None or _hosts() == []:
        return None
    import mlx.core as mx

    try:
        with _endable():
            group = mx.distributed.init()
    except (RuntimeError, ValueError) as error:
        raise ParallelError(f"the ranks cannot connect: {error}; check that all of them are running") from error
    return Group(group.rank(), group.size(), group) if group.size() > 1 else None


@contextmanager
def _endable() -> Iterator[None]:
    """While MLX waits for ranks that may never come, without end and without letting Python run, signals end this
    process at once: mlx.launch sends one when another rank has failed. An alarm does if none has come in time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [(number, signal.signal(number, signal.SIG_DFL)) for number in ending]
    signal.alarm(int(STEP_LIMIT))
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before:
            signal.signal(number, handler)


def versions() -> str:
    """What must be the same on all ranks: the protocol, and the arithmetic."""
    return ", ".join(f"{name} {version(name)}" for name in ("onekv", "mlx", "mlx-lm"))


def device_of_rank() -> str:
    """Names this rank's device; ranks with the same name share its memory."""
    return f"{socket.gethostname()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"


def meet(group: Group) -> list[Wire]:
    """The connections outside of MLX: on rank 0 one to each other rank, in order; elsewhere one to rank 0.

    Raises ParallelError.
    """
    if not group.leads:
        return [_reach(group, **_broadcast(group, b""))]
    host = _host_of_first()
    secret = secrets.token_bytes(32)
    with _listen(host) as listener:
        note = {"host": host, "port": listener.getsockname()[1], "secret": secret.hex()}
        _broadcast(group, json.dumps(note).encode())
        return _accept(group, listener, secret)


def _broadcast(group: Group, note: bytes) -> dict[str, str]:
    """Broadcast `note` from rank 0, as a sum to which the others contribute zeros."""
    import mlx.core as mx
    import numpy as np

    ours = mx.array(list(note.ljust(_NOTE, b" ")) if group.leads else [0] * _NOTE, mx.int32)
    try:
        with _endable():
            summed = np.array(mx.distributed.all_sum(ours, group=group.ranks), np.uint8)
        heard: dict[str, str] = json.loads(summed.tobytes())
    except (RuntimeError, ValueError) as error:
        raise ParallelError(f"the ranks cannot communicate: {error}") from error
    return heard


def _host_of_first() -> str:
    """The address at which the others reach rank 0, according to the launcher."""
    if hosts := _hosts():
        return hosts[0][0].rpartition(":")[0].strip("[]")
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rpartition(":")[0].strip("[]")
    return os.environ.get("NCCL_HOST_IP") or socket.gethostname()


def _hosts() -> list[list[str]] | None:
    """The addresses of all ranks, if the launcher provides them in a file."""
    file = os.environ.get("MLX_HOSTFILE")
    if not file:
        return None
    try:
        found: list[list[str]] = json.loads(Path(file).read_text().strip() or "[]")
    except (OSError, ValueError) as error:
        raise ParallelError(f"MLX_HOSTFILE is {file!r}, which has no list of hosts: {error}") from error
    return found


def _listen(host: str) -> socket.socket:
    """Listen on `host` only, or on all addresses if that is not one of this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError:
        return socket.create_server(("", 0))


def _accept(group: Group, listener: socket.socket, secret: bytes) -> list[Wire]:
    """Rank 0: accept one connection per rank; clients that do not know the secret are rejected."""
    wires: dict[int, Wire] = {}
    listener.settimeout(CONNECT_SECONDS)
    while len(wires) < group.size - 1:
        try:
            opened, _ = listener.accept()
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in range(1, group.size) if rank not in wires)
            raise ParallelError(f"no connection from rank {missing} in {CONNECT_SECONDS:.0f} s") from None
        try:
            wire = Wire(opened, secret, leads=True)
            hello = wire.receive()
            wire.send({"do": "welcome"})
        except (Gone, ParallelError):
            opened.close()
            continue
        wire.greeted()
        wires[hello["rank"]] = wire
        if hello["versions"] != versions():
            raise ParallelError(
                f"rank {hello['rank']} runs {hello['versions']}, rank 0 runs {versions()}; install the same versions "
                "on all machines"
            )
    return [wires[rank] for rank in range(1, group.size)]


def _reach(group: Group, host: str, port: str, secret: str) -> Wire:
    try:
        opened = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
        wire = Wire(opened, bytes.fromhex(secret), leads=False)
        wire.send({"rank": group.rank, "versions": versions()})
        wire.receive()
    except (OSError, Gone) as error:
        raise ParallelError(f"rank {group.rank} cannot reach rank 0 at {host}, port {port}: {error}") from error
    wire.greeted()
    return wire
