"""On what MLX computes. Asked for when a model is loaded: what is chosen by it stays."""

from typing import Literal

import mlx.core as mx

Kind = Literal["cpu", "metal", "cuda"]


def kind() -> Kind:
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
