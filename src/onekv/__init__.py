"""OneKV: language models on MLX with every token's KV cache exactly once in memory."""

import warnings as _warnings
from typing import TYPE_CHECKING, Any

from .cuda.graphs import allow_misses as _allow_misses
from .errors import OneKVError
from .models.blas import ensure_fast_blas as _ensure_fast_blas
from .models.build import overwritten_build as _overwritten_build
from .models.build import require_mlx as _require_mlx

if TYPE_CHECKING:
    from .async_llm import AsyncBatchStream, AsyncLLM, AsyncStream
    from .llm import LLM, BatchStream, Completion, Sampling, Stats, Stream

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncBatchStream",
    "AsyncLLM",
    "AsyncStream",
    "BatchStream",
    "Completion",
    "OneKVError",
    "Sampling",
    "Stats",
    "Stream",
    "__version__",
]

# Before anything imports MLX: it reads its environment, and links its matrix products, when it is loaded.
_allow_misses()
for _missing in (_overwritten_build(), _ensure_fast_blas()):
    if _missing is not None:
        _warnings.warn(_missing, stacklevel=2)


def __getattr__(name: str) -> Any:
    """MLX and its models are imported when they are first used: a command's help does not need them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _require_mlx()
    if name.startswith("Async"):
        from . import async_llm

        return getattr(async_llm, name)
    from . import llm

    return getattr(llm, name)
