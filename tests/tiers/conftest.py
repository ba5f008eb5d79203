"""What the tests of the tiers share."""

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from remote_parts import Valkey, llm_of

from onekv import LLM


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a test has its disk cache."""
    return tmp_path / "cache"


@pytest.fixture
def mount() -> Iterator[Callable[[Path, str], None]]:
    """Mounts a tmpfs with these options; skips the test where that is not allowed."""
    mounted: list[Path] = []

    def mount_tmpfs(place: Path, options: str) -> None:
        place.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this needs the right to mount a tmpfs")
        mounted.append(place)

    yield mount_tmpfs
    for place in reversed(mounted):
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def no_thread_dies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An error that ends a thread is an error of the test."""
    died: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda event: died.append(event.exc_value))
    yield
    assert died == []


@pytest.fixture
def no_more_threads() -> Callable[[], AbstractContextManager[None]]:
    """While it is entered, the system starts no thread: no stack is as large as what is asked for."""

    @contextmanager
    def entered() -> Iterator[None]:
        before = threading.stack_size(1 << 46)
        try:
            with pytest.raises(RuntimeError):
                threading.Thread(target=print).start()
            yield
        finally:
            threading.stack_size(before)

    return entered


@pytest.fixture(scope="module")
def right() -> Iterator[LLM]:
    """What uncached runs answer."""
    with llm_of(prefix_cache=False) as llm:
        yield llm


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Valkey]:
    server = Valkey(tmp_path)
    yield server
    server.stop()
