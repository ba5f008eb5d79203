"""Puts OneKV's classes in the place of mlx-lm's, and back.

Modules of mlx-lm hold the classes under the names they imported. `install` replaces every such name in the modules that
are loaded; modules that are loaded later import from those. `uninstall` puts back what was there, except for the
attention of models that an `LLM` runs, installed or not. Caches that exist already stay what they are. Classes that
mlx-lm does not have are added where `load_prompt_cache` looks for them.
"""

import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

from mlx_lm.generate import BatchGenerator as StockBatchGenerator
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models import cache

from mlx_lm import server

from ..memory.attention import hook
from .generator import BatchGenerator, generate_step
from .kv import BatchKVCache, KVCache
from .prompt_cache import LRUPromptCache
from .rotating import RotatingKVCache
from .rotating_batch import BatchRotatingKVCache
from .server import ResponseGenerator
from .slabs import POOL
from .turbo import TurboQuantKVCache
from .version import check_version

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
]
_ADDED = [TurboQuantKVCache]


def is_installed() -> bool:
    return cache.KVCache is KVCache


def install(kv_memory: int | str | None = None) -> None:
    """Make mlx-lm use OneKV's caches, prompt cache and attention from now on.

    `kv_memory` limits what KVCache may hold in all: bytes, or a text like 4GiB or 50% (of the memory that is free now);
    by default 80% of what is free when it is first used.
    """
    check_version()
    if kv_memory is not None:
        POOL.set_limit(kv_memory)
    if not is_installed():
        _replace({id(stock): ours for stock, ours in _PAIRS})
        for added in _ADDED:
            setattr(cache, added.__name__, added)


def uninstall() -> None:
    if is_installed():
        _replace({id(ours): stock for stock, ours in _PAIRS}, leave={(name, hook.NAME) for name in hook.hooked})
        for added in _ADDED:
            delattr(cache, added.__name__)


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


def _replace(by: dict[int, Any], leave: Container[tuple[str, str]] = ()) -> None:
    for module, name, value in list(_names([stock for pair in _PAIRS for stock in pair])):
        if id(value) in by and (module.__name__, name) not in leave:
            setattr(module, name, by[id(value)])


def _names(values: list[Any]) -> Iterator[tuple[Any, str, Any]]:
    """Where modules of mlx-lm hold any of `values`."""
    wanted = {id(value) for value in values}
    for module_name, module in list(sys.modules.items()):
        if module_name == "mlx_lm" or module_name.startswith("mlx_lm."):
            for name, value in list(vars(module).items()):
                if id(value) in wanted:
                    yield module, name, value
