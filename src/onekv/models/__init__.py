"""Finding and loading a model: a name, a folder, a GGUF file or a hub id becomes an mlx-lm model.

Names are resolved on first use, because `onekv.models.blas` must run before MLX is imported.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .facts import context_length
    from .loader import LoadedModel, load_for, load_model, share

DEFAULT_MODEL = "smollm2-135m"

__all__ = ["DEFAULT_MODEL", "LoadedModel", "context_length", "load_for", "load_model", "share"]


def __getattr__(name: str) -> Any:
    if name == "context_length":
        from .facts import context_length

        return context_length
    if name in ("LoadedModel", "load_for", "load_model", "share"):
        from .limits import import_mlx_lm

        import_mlx_lm()
        from . import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
