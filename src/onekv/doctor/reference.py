"""References for exactness: mlx-lm's own caches and MLX's own operations.

For encoded formats, mlx-lm's caches store rows that were encoded and decoded again. Only the codec is OneKV's then, and
its error is measured separately (`relative_error`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..memory.attention import Call, LayerKV
from ..memory.attention.layer import gather
from ..memory.formats import Codec
from ..memory.layout import KVLayer, Layout
from ..memory.layout.reader import stock_caches


def stock_logits(model: Module, layout: Layout, tokens: list[int], prompt: int, chunk: int) -> mx.array:
    """Logits [tokens, vocabulary] after each token from `prompt` on, with mlx-lm's caches.

    The first `prompt` tokens are prefilled in chunks, the others decoded one by one. KV has the formats of `layout`.
    """
    with _stock_caches(model, layout) as caches:
        for start in range(0, prompt, chunk):
            model(mx.array(tokens[start : min(start + chunk, prompt)])[None], cache=caches)
            # Not the logits, which are large and not needed.
            mx.eval([cache.state for cache in caches if not cache.empty()])
        found = []
        for token in tokens[prompt:]:
            found.append(model(mx.array([[token]]), cache=caches)[0, -1])
            mx.eval(found[-1])
    return mx.stack(found)


@contextmanager
def _stock_caches(model: Module, layout: Layout) -> Iterator[list[Any]]:
    caches = stock_caches(model)
    coded: list[Any] = []
    for leaf, cache in layout.leaves(caches):
        layer = layout.groups[leaf.group].layers[leaf.layer] if leaf.group >= 0 else None
        if layer is not None and layer.heads and not layer.plain:
            cache.update_and_fetch = _coding(cache, cache.update_and_fetch, layer)
            coded.append(cache)
    try:
        yield caches
    finally:
        # A cache that references itself would live until the next garbage collection.
        for cache in coded:
            del cache.update_and_fetch


def _coding(cache: Any, update: Callable[..., Any], layer: KVLayer) -> Callable[..., Any]:
    def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
        taken = 0.0 if layer.centre is None else layer.centre.rows(cache.offset, len(keys), keys.shape[2])
        coded = round_trip(layer.keys, keys - taken) + taken
        return update(coded.astype(keys.dtype), round_trip(layer.values, values).astype(values.dtype))

    return update_and_fetch


def round_trip(codec: Codec, rows: mx.array) -> mx.array:
    """Rows encoded and decoded again."""
    return codec.unrotate(codec.decode(codec.encode(rows), rows.dtype))


def relative_error(codec: Codec) -> float:
    """Relative squared error of a codec on Gaussian rows."""
    rows = mx.random.normal((2000, codec.dim), key=mx.random.key(7))
    return float(((round_trip(codec, rows) - rows) ** 2).sum() / (rows * rows).sum())


def attention_error(kv: LayerKV, call: Call, out: mx.array) -> float:
    """Largest difference of `out` to the same attention in float32 by MLX operations, relative to the largest output.

    For calls with one query token per row. Avoids matrix products, which may be rounded to TF32 on CUDA.
    """
    step, layer = call.step, kv.layer
    rows, query_heads = call.queries.shape[:2]
    keys, values = (
        codec.unrotate(codec.decode([gather(step, array, cut=False) for array in arrays], mx.float32))
        for codec, arrays in ((kv.keys, kv.arrays.keys), (kv.values, kv.arrays.values))
    )
    if layer.centre is not None:
        base = step.grid.base
        turned = layer.centre.rows(base.reshape(-1), base.size, step.block_size)
        turned = turned.reshape(rows, -1, layer.heads, step.block_size, layer.k_dim).swapaxes(1, 2)
        keys = keys + turned.reshape(keys.shape)
    queries = call.queries.astype(mx.float32).reshape(rows, layer.heads, -1, 1, layer.k_dim)
    scores = (queries * keys[:, :, None]).sum(axis=-1) * call.scale + step.row_bias(call.mask)[:, None, None]
    if call.sinks is not None:
        sinks = call.sinks.astype(mx.float32).reshape(1, layer.heads, -1, 1)
        scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:3], 1))], axis=-1)
        values = mx.concatenate([values, mx.zeros_like(values[:, :, :1])], axis=2)
    weights = mx.softmax(scores, axis=-1, precise=True)
    wanted = (weights[..., None] * values[:, :, None]).sum(axis=3).reshape(rows, query_heads, 1, layer.v_dim)
    return float(mx.abs(out.astype(mx.float32) - wanted).max() / mx.abs(wanted).max())
