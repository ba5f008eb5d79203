"""What determines the stored bytes, in addition to the model and its tokens: every field, by name.

Two plans with the same text can read each other's blocks and states; whatever is not listed here does not affect them.
"""

import json
from typing import Any

import mlx.core as mx

from .types import Group, KVLayer, Layout, StateLayer


def stored_as(layout: Layout, block_size: int) -> str:
    fields = {
        "block_size": block_size,
        "groups": [_group(group) for group in layout.groups],
        "states": [_state(state) for state in layout.states],
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _group(group: Group) -> dict[str, Any]:
    rule = group.rule
    return {
        "window": rule.window,
        "keep": rule.keep,
        "chunk": rule.chunk,
        "ring": rule.ring,
        "layers": [_layer(layer) for layer in group.layers],
    }


def _layer(layer: KVLayer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "heads": layer.heads,
        "k_dim": layer.k_dim,
        "v_dim": layer.v_dim,
        "dtype": _dtype(layer.dtype),
        "keys": layer.keys.name,
        "values": layer.values.name,
        "centre": layer.centre.name if layer.centre is not None else None,
    }


def _state(state: StateLayer) -> dict[str, Any]:
    parts = [None if part is None else {"shape": list(part[0]), "dtype": _dtype(part[1])} for part in state.parts]
    return {"name": state.name, "parts": parts}


def _dtype(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
