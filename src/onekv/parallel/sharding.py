"""A rank's share of a model: mlx-lm's own `shard`, plus the checks that it lacks.

Weights are loaded lazily, sharded as a graph, and only then evaluated, module by module: apart from its share, a rank
never holds more than the full weights of one module.
"""

import hashlib
import os
from pathlib import Path

from mlx.nn.layers.base import Module

from ..errors import SettingError
from ..memory.layout import KVLayer, Layout
from ..memory.layout.reader import read_layout
from ..models import LoadedModel, load_model
from ..models.facts import weight_files
from .group import Group

# What mlx-lm and MLX raise if sizes are not divisible.
_REFUSALS = (ValueError, TypeError, KeyError, AttributeError, AssertionError, RuntimeError)


def open_share(name: str, dtype: str | None, group: Group, progress: bool) -> LoadedModel:
    """This rank's share of a model, lazy: only headers have been read (`models.cpu.evaluate` reads the weights).

    Raises SettingError if the model cannot be sharded, and whatever `load_model` raises.
    """
    loaded = load_model(name, dtype=dtype, lazy=True, join=False, progress=progress)
    refusal = f"{loaded.name} cannot be sharded over {group.size} ranks"
    if loaded.path.is_file():
        raise SettingError(
            f"{refusal}: GGUF files can only be loaded whole; use the model's folder in MLX format (mlx_lm.convert), "
            "or run it without mlx.launch"
        )
    model = loaded.model
    if not hasattr(model, "shard"):
        kind = type(model).__module__.rpartition(".")[2]
        raise SettingError(
            f"{refusal}: mlx-lm's {kind} does not implement `shard`; run it without mlx.launch, or use an architecture "
            "that does, such as llama, qwen3, qwen3_moe or gpt_oss"
        )
    whole = read_layout(model)
    heads = sorted({layer.heads for each in whole.groups for layer in each.layers})
    reason = f"it has {whole.query_heads} query heads and {' and '.join(map(str, heads))} KV heads"
    if whole.query_heads % group.size == 0:
        try:
            model.shard(group.ranks)
        except _REFUSALS as error:
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        else:
            if _divided(model, whole, group.size):
                return loaded
    raise SettingError(f"{refusal}: {reason}; change the number of ranks (mlx.launch -n)")


def _divided(model: Module, whole: Layout, ranks: int) -> bool:
    """Whether a rank has whole heads. mlx-lm divides head counts with truncation and does not check the result: a model
    may run with heads of a different size, or not at all.

    KV heads are split, or replicated (latent attention), or repeated if there are fewer heads than ranks.
    """

    def fits(before: KVLayer, after: KVLayer) -> bool:
        repeated = before.heads < ranks and ranks % max(1, before.heads) == 0
        heads = after.heads in (before.heads / ranks, before.heads) or (repeated and after.heads == 1)
        return heads and (before.k_dim, before.v_dim) == (after.k_dim, after.v_dim)

    try:
        share = read_layout(model)
    except _REFUSALS:
        return False
    groups = zip(whole.groups, share.groups, strict=True)
    layers = [pair for before, after in groups for pair in zip(before.layers, after.layers, strict=True)]
    return share.query_heads * ranks == whole.query_heads and all(fits(*pair) for pair in layers)


def files_digest(path: Path) -> str:
    """Identifies a model's files cheaply: by its configuration, and the names and sizes of the weights."""
    seen = hashlib.blake2b((path / "config.json").read_bytes(), digest_size=16)
    for file in weight_files(path):
        seen.update(f"{file.name} {os.stat(file).st_size}\n".encode())
    return seen.hexdigest()
