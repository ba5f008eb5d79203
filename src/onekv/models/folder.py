"""A folder in mlx-lm's format: config.json, safetensors, a tokenizer. Checked first, then read by
mlx-lm.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_model, load_tokenizer

from ..errors import ModelFormatError
from .cpu import evaluate, unpack, weight_dtypes
from .facts import read_json, weight_files

_MAX_HEADER = 100 << 20
# One of these has a tokenizer's vocabulary. Without any, transformers may make a tokenizer that knows no text.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")


def load_folder(
    folder: Path,
    dtype: mx.Dtype | None,
    *,
    dequantize: bool,
    lazy: bool,
    tokenizer: TokenizerWrapper | None = None,
) -> tuple[Module, TokenizerWrapper, dict[str, Any]]:
    """Model, tokenizer and configuration. With `dequantize` no layer stays packed and `dtype` is
    float32 if None; without it the weights stay as they are unless `dtype` is given. With `lazy`
    nothing is read but the headers; weights are read when first used. The folder's own `tokenizer`
    is not read again where it is given.

    Raises ModelFormatError, naming the file, when one is missing, damaged or of an unknown kind.
    """
    _check_files(folder)
    try:
        model, config = load_model(folder, lazy=True)
        tokenizer = tokenizer or load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
    except json.JSONDecodeError as error:
        raise ModelFormatError(f"{folder}: a JSON file is damaged ({error})") from error
    except (ValueError, TypeError, KeyError, RuntimeError, OSError, ImportError) as error:
        # What mlx-lm and transformers raise for files they cannot make sense of.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelFormatError(f"{folder} cannot be loaded: {reason}") from error
    if not tokenizer.encode("a", add_special_tokens=False):
        raise ModelFormatError(
            f"{folder} has a tokenizer that encodes no text; copy the model's own tokenizer files into it"
        )
    before = weight_dtypes(model)
    if dequantize:
        unpack(model, dtype or mx.float32)
        config = {k: v for k, v in config.items() if not k.startswith("quantization")}
    elif dtype is not None:
        model.set_dtype(dtype)
    if not lazy:
        # What stays as it is in the file is there once.
        evaluate(model, forms=1 if weight_dtypes(model) == before else 2)
    return model, tokenizer, config


def _check_files(folder: Path) -> None:
    config_file = folder / "config.json"
    if not config_file.is_file():
        others = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"; it has {others[0]}, give that file instead" if others else ""
        raise ModelFormatError(f"{folder} has no config.json, so it is not a model's folder{hint}")
    config = read_json(config_file)
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelFormatError(f"{config_file} has no model_type")
    for file in weight_files(folder):
        check_safetensors(file)
    if not any(any(folder.glob(name)) for name in _VOCABULARIES):
        missing = f"{folder} has no tokenizer: {', '.join(_VOCABULARIES[:-1])} or {_VOCABULARIES[-1]} is missing"
        raise ModelFormatError(f"{missing}; copy the model's own tokenizer files into it")


def check_safetensors(file: Path) -> None:
    """The file has all the bytes its header speaks of. MLX finds out only when it reads a tensor,
    too late.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ModelFormatError(f"{file} is damaged or truncated; download it again")
            header = json.loads(opened.read(length))
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ModelFormatError(f"{file} is damaged: its header is not valid") from error
    except OSError as error:
        raise ModelFormatError(f"{file} cannot be read: {error.strerror}") from error
    if 8 + length + max(ends, default=0) > size:
        raise ModelFormatError(f"{file} is truncated ({size} bytes); download it again")
