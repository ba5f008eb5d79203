"""Fixtures that all tests share."""

import functools
import gc
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

import onekv  # noqa: F401  (before MLX, which links its matrix products when it is loaded)
from kernels.fixtures import cuda, gpu, kernels_on_cpu  # noqa: F401
from terminal import Terminal

# Each run tries other examples. What fails is printed with what reproduces it, and is tried first by the next run.
hypothesis.settings.register_profile("explore", derandomize=False, print_blob=True, deadline=None)
hypothesis.settings.load_profile("explore")

# Whatever runs, in this process and in those it starts: when it has ended, all blocks are counted.
os.environ.setdefault("ONEKV_CHECK_INTEGRITY", "on")

# On a GPU, MLX multiplies float32 in TF32 unless told otherwise; tests compare float32.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# A background job of a script is started with Ctrl-C ignored, and so are its children: tests that press it would wait.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def _reads_memory(module: ModuleType) -> bool:
    source = inspect.getsource(module)
    return any(name in source for name in ("get_active_memory", "get_peak_memory"))


@pytest.fixture(autouse=True)
def no_garbage_of_earlier_tests(request: pytest.FixtureRequest) -> None:
    """Reference cycles of earlier tests hold arrays. Collected in the midst of a test that compares two readings of
    MLX's memory, they would make the second one smaller."""
    if _reads_memory(request.module):
        gc.collect()


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
