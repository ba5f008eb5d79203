"""What the tests of the tiers share."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a test has its disk cache."""
    return tmp_path / "cache"


@pytest.fixture
def no_thread_dies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An error that ends a thread is an error of the test."""
    died: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda event: died.append(event.exc_value))
    yield
    assert died == []
