"""Replaces layers of a model, and finds the modules that they are written in."""

import sys
from collections.abc import Callable, Collection
from types import ModuleType
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


def modules_with(model: Module, name: str, functions: Collection[Any]) -> list[ModuleType]:
    """The Python modules of a model's parts in which `name` is one of `functions`."""
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    return [module for module in modules if getattr(module, name, None) in functions]
