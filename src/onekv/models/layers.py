"""Replaces layers of a model."""

from collections.abc import Callable
from typing import Any

from mlx.nn.layers.base import Module


def replace_layers(model: Module, make: Callable[[Any], Any]) -> int:
    """Puts what `make` gives in the place of every part of `model`, where that is another; how many."""
    count = 0
    for parent in model.modules():
        for places in (parent, *(child for child in parent.values() if isinstance(child, list))):
            for place, child in list(places.items() if isinstance(places, dict) else enumerate(places)):
                made = make(child)
                if made is not child:
                    places[place] = made
                    count += 1
    return count
