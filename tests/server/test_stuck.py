"""Real servers whose model call hangs, or whose model takes long to load: what probes, logs and signals say and do."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from several import complete, start_several
from test_server_disk import ask

from conftest import Server, begin_server, start_server, stop_server
from onekv.bench.soak import save_tiny
from onekv.server.backend import Backend
from onekv.server.connections import Limits
from onekv.server.serve import make_server
from onekv.server.settings import ServerSettings
from onekv.tiers.maintain import verify

# `onekv` with a model that does not return while there is a file named by the first argument.
HANGS = """
import sys, threading
import onekv
from pathlib import Path
from mlx_lm.models import llama
file, call = Path(sys.argv.pop(1)), llama.Model.__call__
def hanging_model(self, *inputs, **options):
    if file.exists():
        threading.Event().wait()
    return call(self, *inputs, **options)
llama.Model.__call__ = hanging_model
from onekv.cli import main
sys.exit(main())
"""
# Where it then is, in a stack.
HUNG = "line 9, in hanging_model\n"
# The same with a model that is loaded when there is such a file.
LOADS = """
import sys, time
import onekv.models.loader as loader
from pathlib import Path
file, load = Path(sys.argv.pop(1)), loader.load_model
def waiting_load(*given, **options):
    while not file.exists():
        time.sleep(0.01)
    return load(*given, **options)
loader.load_model = waiting_load
from onekv.cli import main
sys.exit(main())
"""
# `onekv` with an engine that loses the room of a block with every request.
LEAKS = """
import sys
import onekv
from onekv.prefix.lease import Lease
finish = Lease.finish
def leaking_finish(lease, tokens):
    pool = lease.sequence.tables[0].pool
    finish(lease, tokens)
    pool.reserve(1)
Lease.finish = leaking_finish
from onekv.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def eventually(question: Callable[[], Any]) -> Any:
    """What `question` answers as soon as that is something."""
    deadline = time.monotonic() + 120
    while not (answer := question()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


def health(url: str, path: str = "/health") -> httpx.Response:
    return httpx.get(url + path, timeout=60)


def ask_in_vain(server: Server) -> threading.Thread:
    """Somebody asks and is cut off."""

    def client() -> None:
        body = {"model": "default", "prompt": "Where does it hang?", "max_tokens": 4}
        with suppress(httpx.TransportError):
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).status_code >= 429

    thread = threading.Thread(target=client)
    thread.start()
    return thread


def test_a_model_call_that_hangs(tiny: str, tmp_path: Path) -> None:
    disk, hang = tmp_path / "kv", tmp_path / "hang"
    flags = [tiny, "--kv-memory", "34MiB", "--disk-cache", str(disk), "--disk-policy", "write_through"]
    limits = ["--step-limit", "2", "--grace", "1"]
    server = start_server(*flags, *limits, keys=[], program=("-c", HANGS, str(hang)))
    first = ask(server)
    eventually(lambda: health(server.url).status_code == 200)

    def written() -> bool:
        tier = httpx.get(f"{server.url}/admin/cache", timeout=60).json()["tiers"][0]
        return tier["writes"] > 0 and tier["queued_bytes"] == 0

    eventually(written)
    hang.touch()
    client = ask_in_vain(server)
    stuck = eventually(lambda: (answer := health(server.url)).status_code == 503 and answer).json()
    assert stuck["status"] == "stuck" and stuck["step_limit_s"] == 2 < stuck["engine"]["for_s"]
    assert (stuck["engine"]["doing"], stuck["engine"]["requests"]) == ("prefilling for 1 request", 1)
    assert [health(server.url, f"/health/{probe}").status_code for probe in ("live", "ready")] == [503, 503]
    assert httpx.get(f"{server.url}/metrics", timeout=60).status_code == 200, "a scrape does not wait for a step"
    eventually(lambda: "the engine is stuck: prefilling for 1 request" in server.log())
    time.sleep(1)
    assert server.log().count(HUNG) == 1, "once, and with the stacks"
    errors = stop_server(server)
    client.join(60)
    assert server.process.returncode == 1, errors
    assert errors.splitlines()[-1].startswith("onekv: the engine is stuck: prefilling for 1 request")
    assert "thread onekv-engine, most recent call last:" in errors and "thread MainThread" in errors

    report = verify(disk)
    assert report.checked > 0 and report.corrupt == report.missing == 0, report
    again = start_server(*flags, keys=[])
    second = ask(again)
    stop_server(again)
    assert second["choices"][0]["message"] == first["choices"][0]["message"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_one_of_several_models_hangs(tiny: str, tmp_path: Path) -> None:
    hang, other = tmp_path / "hang", save_tiny(tmp_path / "other", 1)
    tables = {"a": {"model": tiny}, "b": {"model": other}}
    limits = ["--step-limit", "2", "--grace", "1"]
    server = start_several(tmp_path, tables, *limits, program=("-c", HANGS, str(hang)))
    try:
        for name in tables:
            complete(server, name)
        eventually(lambda: health(server.url).json()["status"] == "ok")
        hang.touch()
        client = ask_in_vain(server)
        stuck = eventually(lambda: (answer := health(server.url)).status_code == 503 and answer).json()
        engines = {row["name"]: row["engine"] for row in stuck["models"]}
        assert stuck["status"] == "stuck" and engines["a"]["doing"] == "prefilling for 1 request"
        assert engines["a"]["for_s"] > stuck["step_limit_s"] == 2 and engines["b"]["requests"] == 0
        assert [health(server.url, f"/health/{probe}").status_code for probe in ("live", "ready")] == [503, 503]
        eventually(lambda: "stuck: prefilling for 1 request" in server.log() and HUNG in server.log())
    finally:
        errors = stop_server(server)
    client.join(60)
    assert server.process.returncode == 1, errors


def test_blocks_are_counted_where_that_is_asked_for(tiny: str) -> None:
    """After the first request one is missing. Clients are not told to try again: only a new process helps."""
    flags = ["--kv-memory", "34MiB", "--check-integrity", "on"]
    server = start_server(tiny, *flags, keys=[], program=("-c", LEAKS))
    try:
        assert ask(server)["choices"]
        ended = eventually(lambda: (answer := health(server.url, "/health/live")).status_code == 503 and answer)
        assert ended.json()["status"] == "ended"
        body = {"model": "default", "prompt": "Hello", "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 500 and "Retry-After" not in answer.headers
        assert "the engine could not continue" in answer.json()["error"]["message"]
    finally:
        errors = stop_server(server)
    assert "IntegrityError" in errors and "1 reserved" in errors


@pytest.mark.parametrize(
    ("program", "limit", "said"),
    [
        (HANGS, "1", HUNG),
        (HANGS.replace("threading.Event().wait()", "raise SystemExit"), "300", "the engine cannot continue"),
    ],
    ids=["stuck", "ended"],
)
def test_exit_when_stuck(tiny: str, tmp_path: Path, program: str, limit: str, said: str) -> None:
    hang = tmp_path / "hang"
    limits = ["--step-limit", limit, "--exit-when-stuck", "on", "--kv-memory", "34MiB"]
    server = start_server(tiny, *limits, keys=[], program=("-c", program, str(hang)))
    hang.touch()
    client = ask_in_vain(server)
    assert server.process.wait(timeout=120) == 70
    client.join(60)
    assert said in server.log() and "--exit-when-stuck" in server.log()


def test_who_presses_ctrl_c_twice_does_not_wait(tiny: str, tmp_path: Path) -> None:
    """Of a step that may take long, by --step-limit."""
    hang = tmp_path / "hang"
    server = start_server(tiny, "--kv-memory", "34MiB", "--grace", "0", keys=[], program=("-c", HANGS, str(hang)))
    hang.touch()
    client = ask_in_vain(server)
    eventually(lambda: health(server.url).json()["engine"]["requests"] == 1)
    server.process.send_signal(signal.SIGINT)

    def refused() -> bool:
        try:
            health(server.url)
        except httpx.TransportError:
            return True
        return False

    eventually(refused)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=60) == 130, server.log()
    client.join(60)
    assert server.log().splitlines()[-1] == "onekv: interrupted"


def test_a_signal_while_it_starts_is_not_lost(tiny: str) -> None:
    backend = Backend(tiny, kv_memory="34MiB", progress=False)
    backend.start()
    server = make_server(backend, ServerSettings(grace=0), Limits(None, 60))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # As uvicorn does when one comes.
        server.should_exit = True
        asyncio.run(server.serve([listener]))
    assert backend.thread.doing.what == "ended" and server.error is None


def test_it_answers_while_the_model_is_loaded(tiny: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    go = tmp_path / "go"
    flags = [tiny, "--kv-memory", "34MiB", "--port", str(port)]
    server = begin_server(*flags, keys=[], program=("-c", LOADS, str(go)))
    url = f"http://127.0.0.1:{port}"

    def reached() -> httpx.Response | None:
        try:
            return health(url)
        except httpx.TransportError:
            assert server.process.poll() is None, server.log()
            return None

    loading = eventually(reached)
    assert (loading.status_code, loading.json()["status"], loading.json()["model"]) == (503, "loading", None)
    assert loading.json()["engine"]["doing"] == "loading the model"
    assert [health(url, f"/health/{probe}").status_code for probe in ("live", "ready")] == [200, 503]
    body = {"model": "default", "prompt": "Hello", "max_tokens": 2}
    early = httpx.post(f"{url}/v1/completions", json=body)
    assert early.status_code == 503 and int(early.headers["Retry-After"]) > 0
    assert "being loaded" in early.json()["error"]["message"]
    assert httpx.get(f"{url}/metrics").status_code == 503
    go.touch()
    eventually(lambda: health(url, "/health/ready").status_code == 200)
    assert httpx.head(f"{url}/health").status_code == 200
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    errors = stop_server(server)
    assert server.process.returncode == 0, errors


def test_loading_ends_when_the_server_is_told_to(tiny: str, tmp_path: Path) -> None:
    """It may be a download of an hour."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = begin_server(tiny, "--port", str(port), keys=[], program=("-c", LOADS, str(tmp_path / "never")))

    def listens() -> bool:
        try:
            return health(f"http://127.0.0.1:{port}").status_code == 503
        except httpx.TransportError:
            return False

    eventually(listens)
    errors = stop_server(server)
    assert (server.process.returncode, errors) == (0, "")
