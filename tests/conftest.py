"""Fixtures that all tests share."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

import onekv  # noqa: F401  (before MLX, which links its matrix products when it is loaded)
from terminal import Terminal

# Each run tries other examples. What fails is printed with what reproduces it, and is tried first by the next run.
hypothesis.settings.register_profile("explore", derandomize=False, print_blob=True, deadline=None)
hypothesis.settings.load_profile("explore")

# Whatever runs, in this process and in those it starts: when it has ended, all blocks are counted.
os.environ.setdefault("ONEKV_CHECK_INTEGRITY", "on")

# A background job of a script is started with Ctrl-C ignored, and so are its children: tests that press it would wait.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts commands in terminals of their own, which end with the test."""
    opened: list[Terminal] = []

    def start(*argv: str) -> Terminal:
        opened.append(Terminal(*argv))
        return opened[-1]

    yield start
    for each in opened:
        each.close(force=True)
    assert not any("Traceback" in each.seen.getvalue() for each in opened)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, fetched once into the user's cache folder."""
    from onekv.models import DEFAULT_MODEL
    from onekv.models.fetch import KNOWN_FILES, fetch

    return fetch(KNOWN_FILES[DEFAULT_MODEL], progress=False)
