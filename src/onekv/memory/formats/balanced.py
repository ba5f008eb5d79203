"""Keys moved and stretched by constants of their layer before they are encoded, so that 4 bits are enough for them.

Softmax does not change when all scores of a query change by the same number, so a constant vector can be taken from all
keys; and <q, k> does not change when channels of k are multiplied and those of q divided by the same. Rotated formats
spread a row's error evenly over its channels, whatever matters there. In SmolLM2 six tenths of the keys' energy is such
a constant vector, and queries are large where keys are small. Moved and stretched, 4 bits for all keys cost 1.5 % of
perplexity there instead of 5.8 (q4), or 1.2 instead of 4.5 (tq4): one text of 640 tokens, the constants from another.

    stored    (k - mean) * stretch          query    q / stretch          <q, k> = <rotate(q), row> + <q, mean>

The constants belong to the layer and are part of the codec's name: keep them with what was stored.
"""

import hashlib
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .base import Codec, Factors

# How much larger or smaller than their mean the factors of channels may be.
MOST = 16.0


class Balanced(Codec):
    """`inner` with constants [heads, dim]; rows are [..., heads, tokens, dim] here."""

    def __init__(self, inner: Codec, mean: mx.array, stretch: mx.array) -> None:
        self.inner, self.dim, self.parts = inner, inner.dim, inner.parts
        self._mean, self._stretch = (array.astype(mx.float32)[:, None] for array in (mean, stretch))
        constants = np.array(mx.concatenate([self._mean, self._stretch]))
        self.name = f"{inner.name}-b{hashlib.sha256(constants.tobytes()).hexdigest()[:16]}"

    def encode(self, rows: mx.array) -> tuple[mx.array, ...]:
        return self.inner.encode((rows.astype(mx.float32) - self._mean) * self._stretch)

    def rotate(self, rows: mx.array) -> mx.array:
        """For queries: a key comes back moved and stretched."""
        return self.inner.rotate((rows.astype(mx.float32) / self._stretch).astype(rows.dtype))

    def unrotate(self, rows: mx.array) -> mx.array:
        return (self.inner.unrotate(rows.astype(mx.float32)) * self._stretch).astype(rows.dtype)

    def read(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        return self.inner.read(parts, dtype)

    def factors(self, parts: Sequence[mx.array]) -> Factors:
        return self.inner.factors(parts)

    def missing(self, queries: mx.array) -> mx.array:
        """<q, mean>, [..., heads, G, 1]: what scores lack before they are scaled. Sinks must be lowered by it."""
        return (queries.astype(mx.float32) * self._mean).sum(axis=-1, keepdims=True)


def constants(keys: mx.array, queries: mx.array) -> tuple[mx.array, mx.array]:
    """Mean and stretch for a layer, from sample `keys` [heads, tokens, dim] and `queries` [heads, any number, dim].

    After RoPE both depend on the position: take samples from all over the context. The error of a product is
    E|q / s|^2 * E|(k - mean) * s|^2, the least for s^4 = E q^2 / E (k - mean)^2 in every channel.
    """
    keys, queries = keys.astype(mx.float32), queries.astype(mx.float32)
    mean = keys.mean(axis=1)
    energy = ((keys - mean[:, None]) ** 2).mean(axis=1)
    logs = mx.log(mx.maximum((queries**2).mean(axis=1), 1e-12)) - mx.log(mx.maximum(energy, 1e-12))
    logs = logs - logs.mean(axis=-1, keepdims=True)
    return mean, mx.clip(mx.exp(logs / 4), 1 / MOST, MOST)
