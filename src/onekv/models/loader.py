"""From a name to a model that is ready to run."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import ModelFormatError, ModelNotFoundError, SettingError
from .fetch import KNOWN_FILES, fetch
from .folder import load_folder
from .gguf import load_gguf
from .hub import hub_folder, is_hub_id
from .joined import join_products

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model of mlx-lm's own classes with its tokenizer. `config` has the names of a
    config.json.
    """

    name: str
    model: Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]


def load_model(
    name: str, *, dtype: str | None = None, lazy: bool = False, progress: bool = True, join: bool = True
) -> LoadedModel:
    """Finds and loads the model `name`: a known name, a .gguf file, a folder, or a hub id, in that
    order.

    Weights keep their form on a GPU, where products that share their input are joined (unless
    `join` is off); on CPU they are unpacked and cast to float32, the fast one there. `dtype`
    (float32, float16, bfloat16) overrides both. `lazy` is for learning shapes and sizes: weights of
    a folder are read when first used, weights of a GGUF file are placeholders that hold NaN.
    `progress` shows downloads on stderr. Raises SettingError, ModelNotFoundError, ModelFormatError
    or FetchError.
    """
    target = _parse_dtype(dtype)
    on_cpu = mx.default_device() == mx.cpu
    path = _resolve(name, progress)
    if path.is_file():
        model, tokenizer, config = load_gguf(path, target, dequantize=on_cpu, lazy=lazy)
    else:
        model, tokenizer, config = load_folder(path, target, dequantize=on_cpu, lazy=lazy)
    if join and not (on_cpu or lazy):
        join_products(model)
    return LoadedModel(_display_name(name), model, tokenizer, config)


def context_length(config: dict[str, Any]) -> int | None:
    """The most tokens the model of a config.json was made for; None if it does not say."""
    text = config.get("text_config")
    inner = {**config, **text} if isinstance(text, dict) else config
    length = inner.get("max_position_embeddings")
    # YaRN is often added to a config that still has the length from before.
    scaling = inner.get("rope_scaling") or inner.get("rope_parameters")
    if isinstance(length, int) and isinstance(scaling, dict):
        kind = scaling.get("rope_type", scaling.get("type"))
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
        if kind == "yarn" and isinstance(factor, int | float) and isinstance(original, int):
            return max(length, int(original * factor))
    return length if isinstance(length, int) else None


def _parse_dtype(dtype: str | None) -> mx.Dtype | None:
    if dtype is None:
        return None
    if dtype not in _DTYPES:
        raise SettingError(f"--dtype={dtype} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _resolve(name: str, progress: bool) -> Path:
    """The .gguf file or the folder that `name` means, fetched if it must be."""
    if name in KNOWN_FILES:
        return fetch(KNOWN_FILES[name], progress=progress)
    path = Path(name).expanduser()
    if name and path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelFormatError(f"{path} is not a .gguf file; give such a file or a model's folder")
        return path
    if name and path.is_dir():
        return path
    if is_hub_id(name):
        return hub_folder(name)
    raise ModelNotFoundError(f"no model {name!r}: not a known name, file or folder{_suggestion(name, path)}")


def _suggestion(name: str, path: Path) -> str:
    near = difflib.get_close_matches(name.lower(), KNOWN_FILES, n=1, cutoff=0.5)
    if path.parent.is_dir():
        siblings = [file.name for file in path.parent.iterdir() if _may_be_model(file)]
        found = difflib.get_close_matches(path.name, siblings, n=2, cutoff=0.6)
        near += [str(path.parent / sibling) for sibling in found]
    if not near:
        return f"; the default model is {next(iter(KNOWN_FILES))}"
    return f"; did you mean {' or '.join(near)}?"


def _may_be_model(file: Path) -> bool:
    return file.suffix.lower() == ".gguf" or (file / "config.json").is_file()


def _display_name(name: str) -> str:
    path = Path(name).expanduser()
    if name not in KNOWN_FILES and path.exists():
        return path.stem if path.is_file() else path.resolve().name
    return name
