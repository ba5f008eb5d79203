"""A KV cache of mlx-lm whose keys and values are stored in 4, 3 or 2 bits: TurboQuant, see `memory.formats.turbo`.

New tokens are encoded when they are stored, and attention reads all tokens from their stored form, including those of
the step: so neither the division of a prompt into chunks matters, nor whether the cache was saved and loaded in
between. Nothing is kept unencoded. `state`, and so copies and prompt-cache files, have the encoded arrays: bytes and
float16 norms.

    keys, values   [rows, heads, capacity, width] for each plane of the codec; the first `offset` columns are in use
    few tokens     on CPU, with `install`: attended over as they are stored, tile by tile (`memory.formats.attention`)
    else           one layer is decoded for its attention, in the rotated basis; queries are rotated instead
    no `install`   one layer is decoded and rotated back, when the model's attention reads it

The cache owns its arrays, and writes happen in place. When they are full, larger ones are allocated and the used part
is moved, one layer's encoded bytes at a time. The intervals between moves grow, so that in total about 16 times the
stored bytes are moved, however long the cache gets. A `deepcopy` costs nothing; the first write to either copy moves
one layer's encoded bytes.
"""

import copy
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache as StockKVCache
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from ..errors import SettingError
from ..memory.attention.chunk import causal
from ..memory.attention.tiles import attend
from ..memory.formats import Codec, KVFormat, parse
from ..memory.hook import Attends, Mask, stock_attention
from .slabs import KV, whole_steps

BITS = (4, 3, 2)
# Up to this many tokens per step, attention reads the stored form: the scores are smaller than a decoded layer.
FEW_TOKENS = 8
# New arrays have room for one part of so many of what there is, so that they are not made too often.
ROOM = 16
# Added to scores of what a query does not see.
UNSEEN = -1e30

Planes = list[mx.array]


class Codecs(NamedTuple):
    keys: Codec
    values: Codec

    @property
    def name(self) -> str:
        """Stored in files: other bytes have another name."""
        return f"{self.keys.name} {self.values.name}"


class TurboQuantKVCache(_BaseCache, Attends):  # type: ignore[misc]
    """Used like mlx-lm's QuantizedKVCache. There is no `merge`: mlx-lm then serves requests one by one."""

    step = 256

    # mlx-lm takes caches with an attribute `bits` for its own quantized ones.
    def __init__(self, bits: int = 4) -> None:
        self._format = _format(bits)
        self.keys: Planes | None = None
        self.values: Planes | None = None
        self.offset = 0
        self._dtype = ""
        self._fetched: KV | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KV:
        # Handles to what is stored would make writes copy it.
        self._fetched = None
        if self.keys is None:
            self._dtype = str(keys.dtype).removeprefix("mlx.core.")
        codecs = _codecs(self._format, keys.shape[3], values.shape[3], self.dtype)
        end = self.offset + keys.shape[2]
        self.keys = self._with_room(self.keys, codecs.keys, keys)
        self.values = self._with_room(self.values, codecs.values, values)
        new = (*codecs.keys.encode(keys), *codecs.values.encode(values))
        for plane, columns in zip((*self.keys, *self.values), new, strict=True):
            # Some layers store keys alone; there is nothing to write then.
            if columns.size:
                plane[..., self.offset : end, :] = columns
        self.offset = end
        return self.keys_and_values()

    def _with_room(self, planes: Planes | None, codec: Codec, new: mx.array) -> Planes:
        rows, heads, count, _ = new.shape
        if planes is not None and self.offset + count <= planes[0].shape[2]:
            return planes
        wanted = self.offset + max(count, self.offset // ROOM)
        capacity = whole_steps(wanted, self.step)
        made = [mx.zeros((rows, heads, capacity, plane.width), plane.dtype) for plane in codec.planes]
        if planes is not None and self.offset:
            for old, plane in zip(planes, made, strict=True):
                plane[..., : self.offset, :] = old[..., : self.offset, :]
        return made

    def keys_and_values(self) -> KV:
        """What is stored, in the model's own form: decoded when it is read."""
        if self._fetched is None:
            codecs = self.codecs
            keys, values = self._decoded()
            self._fetched = codecs.keys.unrotate(keys), codecs.values.unrotate(values)
        return self._fetched

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array | None:
        if not self._is_fetched(keys, values):
            return None
        few = queries.shape[2] <= FEW_TOKENS and mx.default_device() == mx.cpu
        # Masks of each head are for the models that make them.
        if few and (not isinstance(mask, mx.array) or mask.ndim == 2):
            return self._attend_encoded(queries, scale, mask, sinks)
        codecs = self.codecs
        rotated = codecs.keys.rotate(queries)
        out = stock_attention(rotated, *self._decoded(), None, scale=scale, mask=mask, sinks=sinks)
        return codecs.values.unrotate(out)

    def _attend_encoded(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """All heads of all rows at once; queries that share a KV head are [rows * heads, shared * tokens, dim]."""
        codecs, (keys, values) = self.codecs, self._used()
        rows, query_heads, tokens, dim = queries.shape
        heads = rows * keys[0].shape[1]
        shared = rows * query_heads // heads
        bias = _bias(mask, tokens, self.offset)
        if bias is not None:
            bias = mx.tile(bias, (shared, 1))
        if sinks is not None:
            sinks = mx.repeat(mx.tile(sinks, rows).reshape(heads, shared, 1), tokens, axis=1)
        out = attend(
            queries.reshape(heads, shared * tokens, dim),
            codecs.keys,
            [plane.flatten(0, 1) for plane in keys],
            codecs.values,
            [plane.flatten(0, 1) for plane in values],
            scale,
            bias,
            sinks,
        )
        return out.astype(queries.dtype).reshape(rows, query_heads, tokens, -1)

    def _decoded(self) -> KV:
        """What is stored, in the rotated basis; lazy."""
        codecs, (keys, values) = self.codecs, self._used()
        return codecs.keys.decode(keys, self.dtype), codecs.values.decode(values, self.dtype)

    def _used(self) -> tuple[Planes, Planes]:
        """The columns in use."""
        assert self.keys is not None and self.values is not None, "an empty cache has no keys and values"
        used = [[plane[..., : self.offset, :] for plane in planes] for planes in (self.keys, self.values)]
        return used[0], used[1]

    @property
    def dtype(self) -> mx.Dtype:
        """Of the keys and values that it was given."""
        dtype: mx.Dtype = getattr(mx, self._dtype)
        return dtype

    @property
    def codecs(self) -> Codecs:
        assert self.keys is not None and self.values is not None, "an empty cache has no codecs"
        key_dim, value_dim = (_dim(planes, self.turbo_bits) for planes in (self.keys, self.values))
        return _codecs(self._format, key_dim, value_dim, self.dtype)

    @property
    def turbo_bits(self) -> int:
        return int(self._format.key.removeprefix("tq"))

    @property
    def state(self) -> Any:
        """Without columns that are not in use; a file has to say what its bytes mean."""
        self._fetched = None
        if self.keys is None:
            return None, None, 0, self.turbo_bits, "", ""
        return *self._used(), self.offset, self.turbo_bits, self.codecs.name, self._dtype

    @state.setter
    def state(self, state: Any) -> None:
        keys, values, offset, bits, name, dtype = state
        TurboQuantKVCache.__init__(self, bits)
        if keys is not None:
            self.keys, self.values = list(keys), list(values)
            self.offset, self._dtype = offset, dtype
            if self.codecs.name != name:
                raise SettingError(
                    f"the cache was stored as {name}, which this version of OneKV does not read (it stores "
                    f"{self.codecs.name}); compute the prompt again"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> "TurboQuantKVCache":
        other = TurboQuantKVCache(self.turbo_bits)
        other.__dict__.update(self.__dict__)
        other._fetched = None
        other.keys, other.values = copy.deepcopy(self.keys), copy.deepcopy(self.values)
        return other

    def __copy__(self) -> "TurboQuantKVCache":
        return self.__deepcopy__({})

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        self._fetched = None
        n = max(0, min(self.offset, n))
        self.offset -= n
        return n

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.keys is None

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return create_attention_mask(*args, offset=self.offset, **kwargs)

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in (*(self.keys or ()), *(self.values or ())))


def to_turbo(prompt_cache: list[Any], bits: int = 4) -> None:
    """Put a TurboQuantKVCache in the place of every KVCache in `prompt_cache`, with what it holds.

    One layer after the other, so that no more than one is there twice. Windows, states and lists stay what they are.
    """
    for i, cache in enumerate(prompt_cache):
        if isinstance(cache, StockKVCache):
            turbo = TurboQuantKVCache(bits)
            if cache.offset:
                turbo.update_and_fetch(*cache.keys_and_values())
                mx.eval(turbo.state)
            prompt_cache[i] = turbo


def _format(bits: int) -> KVFormat:
    if bits not in BITS:
        raise SettingError(f"bits is {bits}; TurboQuantKVCache stores {', '.join(map(str, BITS))} bits")
    return parse(f"tq{bits}")


def _codecs(form: KVFormat, key_dim: int, value_dim: int, dtype: mx.Dtype) -> Codecs:
    return Codecs(form.keys(key_dim, dtype), form.values(value_dim, dtype))


def _dim(planes: Planes, bits: int) -> int:
    return planes[0].shape[3] * 8 // bits


def _bias(mask: Mask, tokens: int, length: int) -> mx.array | None:
    """What is added to the scores of `tokens` queries, [tokens, length]."""
    if isinstance(mask, str):
        mask = causal(tokens, length) if tokens > 1 else None
    if mask is None:
        return None
    bias = mx.where(mask, 0.0, UNSEEN) if mask.dtype == mx.bool_ else mask.astype(mx.float32)
    return mx.broadcast_to(bias, (tokens, length))
