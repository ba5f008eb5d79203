"""Loops for the CPU that are compiled by numba: whether they can be used here, and how they are called.

MLX's graph cannot contain such loops, so they run outside of it, on the memory of evaluated arrays. Compiled code is
cached on disk (`files`) and compiled again when its source file changes, so a file of loops must not call compiled
functions of other files. Nothing here imports numba before a loop is called.
"""

import functools
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from .files import CompiledFiles

log = logging.getLogger("onekv")

INSTALL = "run pip install -U 'onekv[cpu]'"


class Compiled:
    """When a loop was last compiled, by `time.perf_counter`; infinity while one is, which may take a minute."""

    at = -math.inf
    # Messages that were logged: several loops share one.
    said: ClassVar[set[str]] = set()


compiled = Compiled()


@functools.cache
def why_not() -> str | None:
    """None if compiled loops can be used here, else the reason."""
    if find_spec("numba") is None:
        return "numba is not installed"
    try:
        import numba  # noqa: F401
    except ImportError as error:
        # It refuses a numpy that is newer than itself.
        return f"numba cannot be used ({error})"
    return None


@functools.cache
def has_threads() -> bool:
    """Whether numba has threads that several of ours may use; those that it has everywhere may be used by one."""
    try:
        from numba.np.ufunc import omppool  # type: ignore[attr-defined]  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _use_own_names() -> None:
    """Let numba name what it compiles here by numbers that no other process uses.

    It counts from 1 in each process. A loop that another process has kept then brings parts with names that parts
    compiled here have, too, and of two with one name the first is called: wrong numbers, or a crash.
    """
    from numba.core.bytecode import FunctionIdentity

    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(48))


def kept(parallel: bool = False, **options: Any) -> Callable[[Any], Any]:
    """Like numba's njit, without the GIL; kept on disk if numba finds a folder that it may write to."""
    import numba

    _use_own_names()
    if parallel and has_threads():
        numba.config.THREADING_LAYER = "omp"  # type: ignore[attr-defined]
        options["parallel"] = True

    def decorate(function: Any) -> Any:
        try:
            loop = numba.njit(nogil=True, error_model="numpy", cache=True, **options)(function)
        except RuntimeError:
            return numba.njit(nogil=True, error_model="numpy", **options)(function)
        cache = loop._cache
        cache._cache_file = CompiledFiles(Path(cache.cache_path), function, cache._impl.locator.get_source_stamp())
        return loop

    return decorate


def call(loop: Any, message: str, *arguments: Any) -> Any:
    """`loop` of these arguments; says `message` if it is compiled for that, not if what was kept is loaded."""
    # Not `signatures`, which makes a list of them: of tuples of many arrays that takes longer than many a loop.
    if loop.overloads:
        return loop(*arguments)
    from numba.core.event import Event, Listener, install_listener

    class Compiling(Listener):
        def on_start(self, event: Event) -> None:
            if event.data["dispatcher"] is loop:
                compiled.at = math.inf
                if message not in compiled.said:
                    compiled.said.add(message)
                    log.warning(message)

        def on_end(self, event: Event) -> None:
            if event.data["dispatcher"] is loop:
                compiled.at = time.perf_counter()

    with install_listener("numba:compile", Compiling()):
        return loop(*arguments)
