"""LoRA adapters: a folder with adapters.safetensors and adapter_config.json, as written by `mlx_lm.lora`.

Layers for which the file has tensors are adapted; all others stay as they are.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..errors import ModelFormatError, SettingError
from .adapted import Tensors, adapted, shapes
from .facts import ADAPTER_CONFIG as CONFIG
from .facts import ADAPTER_WEIGHTS as WEIGHTS
from .facts import read_json
from .folder import check_safetensors

# `fine_tune_type`, and the tensors each has for a layer.
KINDS = {"lora": {"lora_a", "lora_b"}, "dora": {"lora_a", "lora_b", "m"}}


@dataclass(frozen=True)
class Adapter:
    folder: Path
    kind: str
    rank: int
    scale: float
    # By layer; nothing is read before it is used.
    layers: dict[str, Tensors]

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def check_no_adapter(given: str | None) -> None:
    """Where the model is an object. Raises SettingError."""
    if given is not None:
        raise SettingError(
            f"--adapter is {given!r}, and the model is an object; give its path, or load the adapter into it with "
            "mlx_lm.utils.load_adapters"
        )


def read_adapter(given: str) -> Adapter:
    """The adapter in the folder `given`. Raises SettingError or ModelFormatError."""
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise SettingError(f"--adapter is {given!r}, which is not a folder; give the one written by mlx_lm.lora")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelFormatError(f"--adapter is {given!r}, which has no {name}; {_other_format(folder)}")
    kind, rank, scale = _read_config(folder / CONFIG)
    check_safetensors(folder / WEIGHTS)
    layers: dict[str, Tensors] = defaultdict(dict)
    tensors: dict[str, mx.array] = mx.load(str(folder / WEIGHTS))  # type: ignore[assignment]
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if part not in KINDS[kind]:
            raise ModelFormatError(f"{folder / WEIGHTS} has {name}, which does not belong to an adapter of type {kind}")
        layers[layer][part] = tensor
    for layer, parts in layers.items():
        if missing := sorted(KINDS[kind] - parts.keys()):
            raise ModelFormatError(f"{folder / WEIGHTS} has no {layer}.{missing[0]}, which {kind} needs")
    return Adapter(folder, kind, rank, scale, dict(layers))


def _other_format(folder: Path) -> str:
    if (folder / "adapter_model.safetensors").is_file():
        return "it is a PEFT adapter, and OneKV reads only those written by mlx_lm.lora"
    return "give the folder written by mlx_lm.lora"


def _read_config(file: Path) -> tuple[str, int, float]:
    """Type, rank and scale."""
    config = read_json(file)
    config = config if isinstance(config, dict) else {}
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise ModelFormatError(
            f"{file}: fine_tune_type is 'full', whole weights instead of an adapter; fuse it into a model with "
            "mlx_lm.fuse, and use that"
        )
    if kind not in KINDS:
        raise ModelFormatError(f"{file}: fine_tune_type is {kind!r}; OneKV supports {' and '.join(KINDS)}")
    said = config.get("lora_parameters")
    said = said if isinstance(said, dict) else {}
    rank, scale = said.get("rank"), said.get("scale")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ModelFormatError(f"{file}: rank in lora_parameters is {rank!r}; it must be a whole number of at least 1")
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        raise ModelFormatError(f"{file}: scale in lora_parameters is {scale!r}; it must be a number")
    return kind, rank, float(scale)


def adapt(
    model: Module, adapter: Adapter, dtype: mx.Dtype | None, lazy: bool, heads: Mapping[str, int] | None = None
) -> None:
    """Puts adapted layers in the place of those that `adapter` is for; their weights are not touched.

    Its tensors become `dtype`, or stay as they are; with `lazy`, nothing of them is read. `heads` are those of layers
    whose rows are in llama.cpp's order (`gguf`), by the last part of their names. Raises ModelFormatError if it is for
    another model.
    """
    checked = [(path, *_checked(model, path, tensors, adapter)) for path, tensors in adapter.layers.items()]
    for path, layer, tensors in checked:
        cast = {name: tensor if dtype is None else tensor.astype(dtype) for name, tensor in tensors.items()}
        if heads and (count := heads.get(path.rpartition(".")[2])):
            cast = {name: tensor if name == "lora_a" else _reordered(tensor, count) for name, tensor in cast.items()}
        made = adapted(layer, cast, adapter.scale)
        if not lazy:
            # One layer at a time: DoRA unpacks its weights for this.
            mx.eval([value for value in made.values() if isinstance(value, mx.array)])
        parent, place = _parent(model, path)
        parent[place] = made
    model.eval()


def _checked(model: Module, path: str, tensors: Tensors, adapter: Adapter) -> tuple[Any, Tensors]:
    try:
        parent, place = _parent(model, path)
        layer = parent[place]
    except (KeyError, IndexError, TypeError, ValueError):
        raise ModelFormatError(
            f"--adapter is {str(adapter.folder)!r}, which is for another model: it adapts {path}, which "
            f"{type(model).__module__.rpartition('.')[2]} does not have"
        ) from None
    expected = shapes(layer, adapter.rank, adapter.kind == "dora")
    if expected is None:
        raise ModelFormatError(
            f"--adapter is {str(adapter.folder)!r}, which adapts {path}; a {type(layer).__name__} cannot be adapted "
            f"by {adapter.kind}"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ModelFormatError(
                f"--adapter is {str(adapter.folder)!r}, which is for another model: {path}.{name} is "
                f"{_text(tensors[name].shape)}, but must be {_text(shape)} here with rank {adapter.rank}"
            )
    return layer, tensors


def _reordered(tensor: mx.array, heads: int) -> mx.array:
    """Outputs of each head, from (first half, second half) to neighbours."""
    *rest, outputs = tensor.shape
    return tensor.reshape(*rest, heads, 2, outputs // heads // 2).swapaxes(-1, -2).reshape(tensor.shape)


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _parent(model: Module, path: str) -> tuple[Any, Any]:
    """What has the layer `path`, and under which name or number."""
    *parents, last = path.split(".")
    at: Any = model
    for name in parents:
        at = at[int(name) if isinstance(at, list) else name]
    return at, int(last) if isinstance(at, list) else last
