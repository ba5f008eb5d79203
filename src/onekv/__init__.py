"""OneKV: language models on MLX with every token's KV cache exactly once in memory."""

import warnings as _warnings

from .models.blas import ensure_fast_blas as _ensure_fast_blas

# Before anything imports MLX: it links its matrix products when it is loaded.
if (_missing := _ensure_fast_blas()) is not None:
    _warnings.warn(_missing, stacklevel=2)

from .models.limits import import_mlx_lm as _import_mlx_lm

_import_mlx_lm()

from .errors import OneKVError  # noqa: E402
from .llm import LLM, Completion, Stats, Stream  # noqa: E402

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "OneKVError", "Stats", "Stream", "__version__"]
