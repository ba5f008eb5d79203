"""Layers of a model wrapped in an adapter: their own weights stay as they are, be they packed, joined or shared.

LoRA adds a product of two narrow matrices to a layer's output. DoRA then scales each output by a learned magnitude over
the norm of the adapted weights: a constant, computed when the adapter is loaded, so that a step need not unpack weights
for it. The matrices have the layout of weights, [outputs, inputs], so that compiled loops read them in place
(`loops.products`); in the file they are transposed.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRASwitchLinear

from .joined import Part

Tensors = dict[str, mx.array]
Shapes = dict[str, tuple[int, ...]]


class Adapted(Module):
    """A linear layer with what an adapter adds to it."""

    def __init__(self, linear: Module, lora_a: mx.array, lora_b: mx.array, scale: float) -> None:
        """`lora_a` is [rank, inputs], `lora_b` [outputs, rank]."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear, self.lora_a, self.lora_b, self.scale = linear, lora_a, lora_b, scale

    def __call__(self, x: mx.array) -> mx.array:
        added = (x @ self.lora_a.T) @ self.lora_b.T
        out: mx.array = self.linear(x) + (self.scale * added).astype(x.dtype)
        return out


class Scaled(Adapted):
    """The same, and each output scaled: DoRA."""

    def set_magnitudes(self, magnitudes: mx.array) -> None:
        """The norms that the rows of the adapted weights are to have."""
        weight, bias = _dense(self.linear)
        norms = mx.linalg.norm(weight + (self.scale * self.lora_b) @ self.lora_a, axis=1)
        self.factor = magnitudes / norms
        if bias is not None:
            # The layer has added its bias, which is not scaled.
            self.shift = (1 - self.factor) * bias

    def __call__(self, x: mx.array) -> mx.array:
        out = self.factor.astype(x.dtype) * super().__call__(x)
        return out + self.shift.astype(x.dtype) if "shift" in self else out


def shapes(layer: Any, rank: int, dora: bool) -> Shapes | None:
    """What an adapter's file has for a layer, with the shapes it must have; None if the layer cannot be adapted."""
    if hasattr(layer, "to_lora"):
        # A layer that works differently, such as one with several outputs.
        return None
    if isinstance(layer, Linear | QuantizedLinear | Part):
        n, k = _dims(layer)
        return {"lora_a": (k, rank), "lora_b": (rank, n), **({"m": (n,)} if dora else {})}
    if dora:
        return None
    if isinstance(layer, SwitchLinear | QuantizedSwitchLinear):
        count = layer.num_experts
        return {"lora_a": (count, rank, layer.input_dims), "lora_b": (count, layer.output_dims, rank)}
    if isinstance(layer, Embedding | QuantizedEmbedding):
        n, k = _dims(layer)
        return {"lora_a": (n, rank), "lora_b": (rank, k)}
    return None


def adapted(layer: Any, tensors: Tensors, scale: float) -> Module:
    """The layer to put in the place of `layer`, with `tensors` of these `shapes`."""
    a, b = tensors["lora_a"], tensors["lora_b"]
    if isinstance(layer, Linear | QuantizedLinear | Part):
        kind = Scaled if "m" in tensors else Adapted
        made = kind(layer, mx.contiguous(a.T), mx.contiguous(b.T), scale)
        if isinstance(made, Scaled):
            made.set_magnitudes(tensors["m"])
        return made
    stock = LoRAEmbedding if isinstance(layer, Embedding | QuantizedEmbedding) else LoRASwitchLinear
    around: Module = stock.from_base(layer, r=1, dropout=0.0, scale=scale)
    around.lora_a, around.lora_b = a, b
    return around


def adapter_bytes(model: Module) -> int:
    """Those of `model`'s weights that are an adapter's."""
    own = [array for _, layer in adapted_layers(model) for array in layer.values() if isinstance(array, mx.array)]
    return sum(array.nbytes for array in own)


def adapted_layers(model: Module) -> list[tuple[str, Module]]:
    """By name, mlx-lm's own layers of that kind among them."""
    return [(name, layer) for name, layer in model.named_modules() if "lora_a" in layer]


def _dims(layer: Any) -> tuple[int, int]:
    """Of the matrix: outputs and inputs, or tokens and their width."""
    stored = layer.stored if isinstance(layer, Part) else layer
    n, k = layer.weight.shape
    return n, k * 32 // stored.bits if isinstance(stored, QuantizedLinear | QuantizedEmbedding) else k


def _dense(layer: Any) -> tuple[mx.array, mx.array | None]:
    """Weights and bias of a linear layer in float32."""
    stored, rows = (layer.stored, layer.rows) if isinstance(layer, Part) else (layer, slice(None))
    weight = stored.weight[rows]
    if isinstance(stored, QuantizedLinear):
        biases = stored.get("biases")
        offsets = None if biases is None else biases[rows]
        how = (stored.group_size, stored.bits, stored.mode)
        weight = mx.dequantize(weight, stored.scales[rows], offsets, *how)
    return weight.astype(mx.float32), stored.bias[rows] if "bias" in stored else None
