"""In which format each layer of a layout is stored."""

from dataclasses import replace

from ..formats import KVFormat
from .types import KVLayer, Layout


def encoded(layout: Layout, format: KVFormat, plain_layers: int) -> Layout:
    """`layout` with its keys and values stored in `format`, except for the first and the last `plain_layers` layers.

    Recurrent states stay as they are. Raises UnsupportedLayerError for head dims that the format cannot store.
    """
    numbers = sorted({_number(layer) for group in layout.groups for layer in group.layers})
    kept = {*numbers[:plain_layers], *numbers[len(numbers) - plain_layers :]}
    groups = tuple(
        replace(
            group,
            layers=tuple(
                layer if _number(layer) in kept or not layer.heads else replace(layer, format=format)
                for layer in group.layers
            ),
        )
        for group in layout.groups
    )
    # Makes every codec: what cannot be stored is refused here, before anything is allocated.
    for group in groups:
        for layer in group.layers:
            _ = layer.keys, layer.values
    return replace(layout, groups=groups)


def _number(layer: KVLayer) -> int:
    """Which layer of the model it belongs to."""
    return int(layer.name.split()[1].split(".")[0])
