"""Replaces mlx-lm's classes with OneKV's, and restores them.

mlx-lm's modules hold the classes under the names they imported. `install` replaces every such name in the loaded
modules; modules that are loaded later import from those. `uninstall` restores the originals. Existing caches are not
changed. Classes that mlx-lm does not have are added where `load_prompt_cache` looks for them.

Nothing else in mlx-lm is changed: `REPLACES` has the names as mlx-lm defines them, and `replaced()` every name that is
currently replaced. The attention of models that an `LLM` runs is not among them: it is replaced with and without
`install`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from mlx_lm.generate import BatchGenerator as StockBatchGenerator
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models import cache
from mlx_lm.utils import maybe_set_recommended_wired_limit

from mlx_lm import server

from ..memory import hook
from ..memory.layout import reader  # noqa: F401  (has to find mlx-lm's own classes when it is loaded)
from .generator import BatchGenerator, generate_step
from .kv import KVCache
from .kv_batch import BatchKVCache
from .prompt_cache import LRUPromptCache
from .rotating import RotatingKVCache
from .rotating_batch import BatchRotatingKVCache
from .server import ResponseGenerator
from .slabs import SLABS
from .turbo import TurboQuantKVCache
from .version import check_version

T = TypeVar("T")


def keep_wired_limit() -> None:
    """In the place of the function by which mlx-lm lets MLX wire as much memory as Metal recommends: runs of others
    tie kernel panics of macOS to that. None tells mlx-lm that there is no limit to put back.
    """


_PAIRS: list[tuple[Any, Any]] = [
    (cache.KVCache, KVCache),
    (cache.BatchKVCache, BatchKVCache),
    (cache.RotatingKVCache, RotatingKVCache),
    (cache.BatchRotatingKVCache, BatchRotatingKVCache),
    (cache.LRUPromptCache, LRUPromptCache),
    (StockBatchGenerator, BatchGenerator),
    (stock_generate_step, generate_step),
    (server.ResponseGenerator, ResponseGenerator),
    (hook.stock_attention, hook.attention),
    (maybe_set_recommended_wired_limit, keep_wired_limit),
]
_ADDED = [TurboQuantKVCache]
# What is replaced, where mlx-lm defines it; other modules of mlx-lm import it from there.
REPLACES: tuple[str, ...] = tuple(f"{stock.__module__}.{stock.__name__}" for stock, _ in _PAIRS)


def is_installed() -> bool:
    return cache.KVCache is KVCache


def install(kv_memory: int | str | None = None) -> None:
    """Make mlx-lm use OneKV's caches, prompt cache and attention from now on.

    `kv_memory` limits the total that KVCache may hold: bytes, or a text like 4GiB or 50% (of free memory);
    by default 80% of what is free when it is first used.
    """
    check_version()
    if kv_memory is not None:
        SLABS.set_limit(kv_memory)
    if not is_installed():
        for module, name, ours in _held({id(stock): ours for stock, ours in _PAIRS}):
            setattr(module, name, ours)
        for added in _ADDED:
            setattr(cache, added.__name__, added)


def uninstall() -> None:
    if is_installed():
        for module, name, stock in _held({id(ours): stock for stock, ours in _PAIRS}):
            if not _hooked(module, name):
                setattr(module, name, stock)
        for added in _ADDED:
            delattr(cache, added.__name__)


def replaced() -> list[str]:
    """The names that `install` has set and `uninstall` puts back or takes away: `mlx_lm.models.llama.KVCache`, ..."""
    ours = {id(value): value for value in (*(ours for _, ours in _PAIRS), *_ADDED)}
    return sorted(f"{module.__name__}.{name}" for module, name, _ in _held(ours) if not _hooked(module, name))


@contextmanager
def installed(kv_memory: int | str | None = None) -> Iterator[None]:
    """`install` for the time of a block."""
    was = is_installed()
    install(kv_memory)
    try:
        yield
    finally:
        if not was:
            uninstall()


def _held(values: dict[int, T]) -> list[tuple[ModuleType, str, T]]:
    """Where modules of mlx-lm hold an object with one of these ids, and what belongs to that id."""
    return [
        (module, name, values[id(value)])
        for module_name, module in list(sys.modules.items())
        if module_name == "mlx_lm" or module_name.startswith("mlx_lm.")
        for name, value in list(vars(module).items())
        if id(value) in values
    ]


def _hooked(module: ModuleType, name: str) -> bool:
    """Whether the name is the attention of a model that an `LLM` runs."""
    return name == hook.NAME and module.__name__ in hook.hooked
