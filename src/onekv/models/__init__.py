"""Finding and loading a model: a name, a folder, a GGUF file or a hub id becomes an mlx-lm model.

Names are resolved on first use, because `onekv.models.blas` must run before MLX is imported.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loader import LoadedModel, context_length, load_model

DEFAULT_MODEL = "smollm2-135m"

__all__ = ["DEFAULT_MODEL", "LoadedModel", "context_length", "load_model"]


def __getattr__(name: str) -> Any:
    if name in ("LoadedModel", "context_length", "load_model"):
        from .limits import import_mlx_lm

        import_mlx_lm()
        from . import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
