"""What can be learned of a model from its files, without its weights: for listings of models."""

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import ModelFormatError
from .gguf_header import read_header

_INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapters.safetensors"


@dataclass(frozen=True)
class ModelFacts:
    """`quantization` is how most of the weights are stored: Q4_0, BF16, 4-bit."""

    format: str
    bytes: int
    # Seconds since 1970.
    modified: float
    parameters: int
    quantization: str
    # Of the names, sizes and times of the files: another model has another one.
    digest: str


@lru_cache(maxsize=4)
def model_facts(path: Path, adapter: Path | None = None) -> ModelFacts:
    """Of a .gguf file or a folder in mlx-lm's format, which has been loaded, and the folder of an adapter for it."""
    files = [path] if path.is_file() else weight_files(path)
    format, counts = ("gguf", _in_gguf(path)) if path.is_file() else ("safetensors", _in_folder(path, files))
    parameters = sum(counts.values())
    if adapter is not None:
        files = [*files, *(adapter / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))]
        parameters += sum(math.prod(tensor["shape"]) for tensor in _tensors(adapter / ADAPTER_WEIGHTS).values())
    stats = [(file.name, file.stat()) for file in files]
    seen = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return ModelFacts(
        format,
        sum(stat.st_size for _, stat in stats),
        max(stat.st_mtime for _, stat in stats),
        parameters,
        counts.most_common(1)[0][0],
        hashlib.sha256(seen.encode()).hexdigest(),
    )


def _in_gguf(file: Path) -> Counter[str]:
    """Parameters by how they are stored."""
    counts: Counter[str] = Counter()
    for tensor in read_header(file).tensors.values():
        counts[tensor.type] += math.prod(tensor.shape)
    return counts


def _in_folder(folder: Path, files: list[Path]) -> Counter[str]:
    tensors = {name: tensor for file in files for name, tensor in _tensors(file).items()}
    quantization = json.loads((folder / "config.json").read_bytes()).get("quantization") or {}
    counts: Counter[str] = Counter()
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        scales = tensors.get(f"{layer}.scales")
        said = {**quantization, **_own(quantization, layer)}
        if scales is None or not {"bits", "group_size"} <= said.keys():
            counts[tensor["dtype"]] += math.prod(tensor["shape"])
        elif kind == "weight":
            # Packed: one scale is for a group of parameters.
            counts[f"{said['bits']}-bit"] += math.prod(scales["shape"]) * said["group_size"]
    return counts


def _tensors(file: Path) -> dict[str, Any]:
    """What a file of safetensors has."""
    with file.open("rb") as opened:
        tensors: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    tensors.pop("__metadata__", None)
    return tensors


def _own(quantization: dict[str, Any], layer: str) -> dict[str, Any]:
    """What a config.json says of one layer, where that is another than of all."""
    own = quantization.get(layer)
    return own if isinstance(own, dict) else {}


def weight_files(folder: Path) -> list[Path]:
    """Raises ModelFormatError if there are none, or one is missing that the index has."""
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        raise ModelFormatError(f"{folder} has no weights: model.safetensors is missing")
    index = folder / _INDEX
    if index.is_file():
        listed = read_json(index)
        names = listed.get("weight_map", {}) if isinstance(listed, dict) else {}
        for name in sorted(set(map(str, names.values()))):
            if not (folder / name).is_file():
                raise ModelFormatError(f"{folder} is incomplete: {name} is missing")
    return weights


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelFormatError(f"{file} is damaged: {error}") from error
    except OSError as error:
        raise ModelFormatError(f"{file} cannot be read: {error.strerror}") from error


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
