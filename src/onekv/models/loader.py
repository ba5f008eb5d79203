"""Loads a model by name, ready to run."""

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .. import loops
from ..config import Settings
from ..errors import ModelFormatError, ModelNotFoundError, SettingError
from .adapter import adapt, read_adapter
from .cpu import evaluate
from .fetch import KNOWN_FILES, fetch, fetched_file
from .folder import load_folder
from .gguf import load_gguf
from .hub import cached_folder, hub_folder, is_hub_id
from .joined import fuse
from .packed import keep_packed
from .seen import seen, unchanged
from .sharing import copy_sharing

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model of mlx-lm's own classes with its tokenizer, and the file or folder it is from. `config` has the names of
    a config.json.

    One that has not been run can be had several times, with adapters or without, over the same weights (`share`).
    """

    name: str
    model: Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    path: Path
    # What it is called without its adapter, if it has one.
    base: str | None = None
    # What its files, and those of its adapter, looked like (`seen`); None if they changed while they were read.
    seen: str | None = None


def load_for(
    name: str,
    settings: Settings,
    *,
    adapter: str | None = None,
    lazy: bool = False,
    progress: bool = True,
    tokenizer: TokenizerWrapper | None = None,
) -> LoadedModel:
    """The model `name` as an engine with these settings runs it; see `load_model`."""
    kernels = settings.kernels != "off"
    how = {"lazy": lazy, "progress": progress, "packed": kernels, "kernels": kernels}
    return load_model(name, dtype=settings.dtype, adapter=adapter, tokenizer=tokenizer, **how)


def load_model(
    name: str,
    *,
    dtype: str | None = None,
    adapter: str | None = None,
    lazy: bool = False,
    progress: bool = True,
    join: bool = True,
    packed: bool = False,
    kernels: bool = True,
    tokenizer: TokenizerWrapper | None = None,
) -> LoadedModel:
    """Finds and loads the model `name`: a known name, a .gguf file, a folder, or a hub id, in that order.

    Weights keep their form on a GPU, where products that share their input are joined (unless `join` is off), and few
    rows are multiplied by OneKV's CUDA kernel (unless `kernels` is off). On CPU they are float32, the fast one there:
    unpacked, or with `packed` as small as in the file where there are loops for that (`packed.keep_packed`). `dtype`
    (float32, float16, bfloat16) overrides both, and then weights on CPU are unpacked. `adapter` is a folder with a LoRA
    adapter, which is put around the model's layers. `lazy` is for learning shapes and sizes: weights of a folder are
    read when first used, weights of a GGUF file are placeholders that hold NaN. `tokenizer` is the model's own, if it
    has been loaded before: loading it takes as long as a small model's weights, and several times its memory for a
    moment. `progress` shows downloads on stderr. Raises SettingError, ModelNotFoundError, ModelFormatError or
    FetchError.
    """
    target = _parse_dtype(dtype)
    on_cpu = mx.default_device() == mx.cpu
    path = _resolve(name, progress)
    before = seen(path)
    packed = packed and on_cpu and dtype in (None, "float32") and loops.why_not() is None
    load = load_gguf if path.is_file() else load_folder
    dtype_of_weights, dequantize = mx.float32 if packed else target, on_cpu and not packed
    model, tokenizer, config = load(path, dtype_of_weights, dequantize=dequantize, lazy=lazy, tokenizer=tokenizer)
    # Building a model draws random weights, which are replaced unused. Only the key is left, as an unevaluated graph
    # of all the draws: 1 MiB for each model that this thread has ever loaded.
    mx.eval(mx.random.state)
    if packed:
        unpacked = keep_packed(model)
        for layer in () if lazy else unpacked:
            evaluate(layer, reads=False)
    if join and not (on_cpu or lazy):
        fuse(model, kernels)
    loaded = LoadedModel(display_name(name), model, tokenizer, config, path, seen=unchanged(path, before))
    return loaded if adapter is None else _adapted(loaded, adapter, dtype, lazy)


def share(loaded: LoadedModel, dtype: str | None = None, adapter: str | None = None) -> LoadedModel:
    """The same model for another engine, with an adapter or without: modules of its own, weights in memory once.

    `loaded` has been loaded with the same `dtype`, and has neither been run nor has an adapter.
    """
    assert loaded.base is None, "an adapter is around the base"
    shared = replace(loaded, model=copy_sharing(loaded.model))
    return shared if adapter is None else _adapted(shared, adapter, dtype, lazy=False)


def _adapted(loaded: LoadedModel, given: str, dtype: str | None, lazy: bool) -> LoadedModel:
    folder = Path(given).expanduser()
    before = seen(folder)
    adapter = read_adapter(given)
    # As with weights: on a GPU they keep their form.
    target = mx.float32 if dtype is None and mx.default_device() == mx.cpu else _parse_dtype(dtype)
    heads: dict[str, int] = {}
    if loaded.path.is_file() and loaded.config.get("rope_traditional"):
        heads = {"q_proj": loaded.config["num_attention_heads"], "k_proj": loaded.config["num_key_value_heads"]}
    adapt(loaded.model, adapter, target, lazy, heads)
    after = unchanged(folder, before)
    both = f"{loaded.seen} {after}" if loaded.seen is not None and after is not None else None
    return replace(loaded, name=f"{loaded.name}+{adapter.name}", base=loaded.name, seen=both)


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
        return hub_folder(name, progress)
    raise ModelNotFoundError(f"no model {name!r}: not a known name, file or folder{_suggestion(name, path)}")


def local_path(name: str) -> Path | None:
    """The .gguf file or the folder that `name` means, if it is on this machine: nothing is fetched."""
    if name in KNOWN_FILES:
        return fetched_file(KNOWN_FILES[name])
    path = Path(name).expanduser()
    if path.exists():
        return path
    return cached_folder(name) if is_hub_id(name) else None


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


def display_name(name: str) -> str:
    path = Path(name).expanduser()
    if name not in KNOWN_FILES and path.exists():
        return path.stem if path.is_file() else path.resolve().name
    return name
