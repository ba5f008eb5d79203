"""Warnings about a model before it runs: what will be slow, or worse than necessary."""

from typing import Any

import mlx.core as mx

from .. import loops
from ..config import Settings
from ..memory.formats import KVFormat


def notices(settings: Settings, kv_format: KVFormat, tokenizer: Any) -> list[str]:
    found = [kv_format.warning] if kv_format.warning is not None else []
    if kv_format.centred and tokenizer is None:
        found.append(
            f"--kv-format {kv_format} without a tokenizer: keys are not centred, which makes answers worse; "
            "pass tokenizer=..., or use q8"
        )
    if mx.default_device() == mx.cpu and settings.kernels != "off" and (reason := loops.why_not()) is not None:
        found.append(f"{reason}, so decoding is slow on CPU and weights take more memory; {loops.INSTALL}")
    return found
