"""Sampling defaults, if a request sets none: `--temperature` and the like, otherwise the model's generation_config.json
(in a GGUF file: general.sampling), otherwise the model's own probabilities. The same for all APIs.

OpenAI and Anthropic document 1 as the default of `temperature` and `top_p`. That is the default here, too, unless the
model's authors recommend other values in its generation_config.json, which then serve such a request best (vLLM and
SGLang do the same). `do_sample` in that file is ignored: servers sample.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..engine import Sampling
from ..errors import SettingError
from ..models.gguf_header import read_header
from .model_settings import ModelSettings

FILE = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    temperature: float = 1.0
    top_p: float = 1.0
    # 0: all tokens.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @staticmethod
    def of(settings: ModelSettings, model: Path | None) -> "SamplingDefaults":
        """For the model of a folder or file. Raises SettingError if what that recommends makes no sense."""
        recommended = _recommended(model) if settings.generation_config and model is not None else {}
        given = {name: getattr(settings, name) for name in _NAMES}
        return SamplingDefaults(**recommended | {name: value for name, value in given.items() if value is not None})

    def sampling(self, **given: Any) -> Sampling:
        """`given` are fields of `Sampling`; None is not given."""
        values = {**vars(self), **{name: value for name, value in given.items() if value is not None}}
        if values["top_p"] == 0:
            # A share that no token makes up: the likeliest one is left.
            values |= {"top_p": 1.0, "top_k": 1}
        if values["top_k"] == -1:
            # As llama.cpp's clients say that all tokens are kept.
            values["top_k"] = 0
        return Sampling(**values)


_NAMES = [field.name for field in fields(SamplingDefaults)]
# In a GGUF file, after general.sampling.
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def _recommended(model: Path) -> dict[str, Any]:
    """What the model's makers say. Raises SettingError if that makes no sense."""
    file = model if model.is_file() else model / FILE
    if not file.is_file():
        return {}
    try:
        said = _in_gguf(file) if model.is_file() else json.loads(file.read_bytes())
        if not isinstance(said, dict):
            raise SettingError("it is not a JSON object")
        found = {name: said[name] for name in _NAMES if said.get(name) is not None}
        # It knows which values can be used.
        SamplingDefaults().sampling(**found)
    except (OSError, ValueError, SettingError) as error:
        hint = "--generation-config off ignores it"
        raise SettingError(f"the sampling settings in {file} cannot be used: {error}; {hint}") from None
    return found


def _in_gguf(file: Path) -> dict[str, Any]:
    metadata = read_header(file).metadata
    said = {name: metadata.get(f"general.sampling.{_GGUF_NAMES.get(name, name)}") for name in _NAMES}
    # It has single precision: 0.6 would be 0.6000000238.
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in said.items()}
