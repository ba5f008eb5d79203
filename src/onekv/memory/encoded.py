"""Layers whose keys and values are stored encoded: attention over them, without a plain copy of more than one layer.

New tokens are encoded as they are written, keys without their centre if there is one (`formats.centre`), and all that
is attended over is read back from the pool, the tokens of the step included: so the result does not depend on how a
prompt is cut, or on what of it was cached.

    decode    the blocks of all rows are attended over as they are: by a kernel, which also encodes the new token, on
              CUDA (`attention.cuda`) and on CPU (`attention.numba`); without it, on CPU tile by tile
              (`attention.tiles`); else they are decoded as for a prompt
    prompt    this layer's keys and values are decoded, in the rotated basis; queries are rotated, outputs unrotated
    else      a model with an attention of its own gets them as it would have stored them
"""

import mlx.core as mx

from .attention.cuda import encoded as cuda_encoded
from .attention.hook import Mask, stock_attention
from .attention.numba import encoded as cpu_encoded
from .attention.paged import chunk_attention
from .attention.tiles import attend
from .formats.centre import Centre
from .layers import ChunkedLayer, PagedLayer, StepHolder, gather, write
from .layout import KVLayer
from .pool import LayerArrays


class EncodedLayer(PagedLayer):
    def __init__(self, holder: StepHolder, group: int, arrays: LayerArrays, block_size: int, stored: KVLayer) -> None:
        super().__init__(holder, group, arrays, block_size, stored)
        self.eager = cpu_encoded.supported(stored, block_size)
        self._kernels = self.eager or cuda_encoded.supported(stored, block_size)

    def _write(self) -> None:
        if self._unwritten is not None:
            arrays, (keys, values) = self._arrays, self._unwritten
            if (centre := self._stored.centre) is not None:
                keys = keys - centre.rows(self._step.offset, len(keys), keys.shape[2])
            parts = (*self._stored.keys.encode(keys), *self._stored.values.encode(values))
            for index, part in enumerate(parts):
                arrays.all[index] = write(self._step, arrays.all[index], part)
            self._unwritten = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._fetched, self.attended = None, False
        self._unwritten = (keys, values)
        if self.direct and self._step.count == 1:
            if not self._kernels:
                self._write()
            self._fetched = self._stand_ins()
        else:
            self._write()
            self._fetched = self._plain()
        return self._fetched

    def _plain(self) -> tuple[mx.array, mx.array]:
        """What the step reads, as the model would have stored it; lazy."""
        stored = self._stored
        keys, values = self._decoded()
        return stored.keys.unrotate(keys), stored.values.unrotate(values)

    def _decoded(self) -> tuple[mx.array, mx.array]:
        """What the step reads, in the rotated basis; lazy."""
        stored, arrays = self._stored, self._arrays
        keys = stored.keys.decode([self._read(part) for part in arrays.keys], stored.dtype)
        if stored.centre is not None:
            keys = keys + stored.keys.rotate(self._centres(stored.centre)).astype(stored.dtype)
        return keys, stored.values.decode([self._read(part) for part in arrays.values], stored.dtype)

    def _centres(self, centre: Centre) -> mx.array:
        """What was taken off the keys that the step reads, [rows, heads, tokens, dim]; lazy."""
        step, (heads, dim) = self._step, centre.mean.shape
        if step.run is not None:
            return centre.rows(step.first, 1, step.run[1] - step.run[0])
        rows, blocks = step.grid.base.shape
        turned = centre.rows(step.grid.base.reshape(-1), rows * blocks, step.block_size)
        turned = turned.reshape(rows, blocks, heads, step.block_size, dim).swapaxes(1, 2)
        turned = turned.reshape(rows, heads, -1, dim)
        return turned[:, :, step.cut] if rows == 1 else turned

    def _centre_scores(self, queries: mx.array, scale: float) -> mx.array | None:
        """What centres add to the scores of one query token per row, over all slots: [rows, query heads, slots]."""
        centre, step = self._stored.centre, self._step
        if centre is None:
            return None
        rows, query_heads, _, dim = queries.shape
        heads = self._stored.heads
        grouped = queries.astype(mx.float32).reshape(rows, heads, query_heads // heads, dim)
        factors = centre.factors(grouped * scale).reshape(rows, query_heads, dim)
        return factors @ self._holder.turns.table(step, centre.rope, dim).swapaxes(1, 2)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
    ) -> mx.array | None:
        step = self._step
        if not self._is_fetched(keys, values):
            return None
        reach = step.reach(mask) if self._kernels and step.count == 1 and step.owns(mask) else None
        if reach is not None and step.rule.chunk is None and self._few(queries):
            self.attended = True
            return self._attend_by_kernel(queries, reach, scale, sinks)
        self._write()
        if step.count > 1 or step.rule.chunk is not None or not step.owns(mask):
            if step.count == 1 and self.direct:
                # The model chose by itself what to read: give it all that is stored.
                return stock_attention(queries, *self._plain(), None, scale=scale, mask=mask, sinks=sinks)
            return self._attend_decoded(queries, scale, mask, sinks) if step.owns(mask) else None
        self.attended = True
        if self._gpu:
            return self._attend_slots(queries, scale, mask, sinks)
        return self._attend_encoded(queries, scale, mask, sinks)

    def _few(self, queries: mx.array) -> bool:
        """Whether a kernel can take so many queries for each KV head."""
        return self.eager or queries.shape[1] <= cuda_encoded.most_queries(self._stored) * self._stored.heads

    def _attend_by_kernel(
        self, queries: mx.array, reach: tuple[int, int], scale: float, sinks: mx.array | None
    ) -> mx.array:
        """One query token per row; the new token is stored too."""
        step, stored, arrays, turns = self._step, self._stored, self._arrays, None
        new, self._unwritten = self._unwritten, None
        rope = stored.centre.rope if stored.centre is not None else None
        if self.eager:
            if rope is not None:
                turns = self._holder.turns.table(step, rope, stored.k_dim)
            return cpu_encoded.encoded_decode(
                queries, arrays, stored, new, step.grid, step.lengths, reach, scale, sinks, turns
            )
        if rope is not None:
            turns = self._holder.turns.starts(rope, stored.k_dim, max(step.lengths) + 1)
        return cuda_encoded.encoded_decode(
            queries, arrays, stored, new, step.grid, step.positions, reach, scale, sinks, turns
        )

    def _attend_decoded(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        stored = self._stored
        keys, values = self._decoded()
        rotated = stored.keys.rotate(queries)
        if not self._gpu and sinks is None and rotated.dtype == keys.dtype == mx.float32:
            out = chunk_attention(rotated, keys, values, scale, mask)
        else:
            out = stock_attention(rotated, keys, values, None, scale=scale, mask=mask, sinks=sinks)
        return stored.values.unrotate(out)

    def _attend_slots(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """One query token per row, over all slots of their blocks, decoded."""
        step, stored, arrays = self._step, self._stored, self._arrays
        keys = stored.keys.decode([gather(step, part, cut=False) for part in arrays.keys], stored.dtype)
        values = stored.values.decode([gather(step, part, cut=False) for part in arrays.values], stored.dtype)
        bias = step.row_bias(mask)[:, None, None]
        if (added := self._centre_scores(queries, scale)) is not None:
            bias = bias + added[:, :, None]
        bias = bias.astype(stored.dtype)
        rotated = stored.keys.rotate(queries)
        out = stock_attention(rotated, keys, values, None, scale=scale, mask=bias, sinks=sinks)
        return stored.values.unrotate(out)

    def _attend_encoded(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """One query token per row: all rows' heads at once, [rows * heads, G, dim]."""
        step, arrays, stored = self._step, self._arrays, self._stored
        rows, query_heads = queries.shape[:2]
        heads = stored.heads
        grouped = queries.reshape(rows * heads, query_heads // heads, -1)
        bias = self._centre_scores(queries, scale)
        if bias is not None:
            bias = bias.reshape(rows * heads, -1, bias.shape[2])
        if step.run is not None and mask is None:
            start, end = step.run
            keys, values = ([part[:, start:end] for part in parts] for parts in (arrays.keys, arrays.values))
            if bias is not None:
                skipped = step.first - step.grid.start
                bias = bias[..., skipped : skipped + end - start]
        else:
            keys, values = ([self._slots(part) for part in parts] for parts in (arrays.keys, arrays.values))
            unseen = mx.repeat(step.row_bias(mask), heads, axis=0)[:, None]
            bias = unseen if bias is None else bias + unseen
        if sinks is not None:
            sinks = mx.tile(sinks.reshape(heads, -1, 1), (rows, 1, 1))
        out = attend(grouped, stored.keys, keys, stored.values, values, scale, bias, sinks)
        return out.astype(queries.dtype).reshape(rows, query_heads, 1, -1)

    def _slots(self, array: mx.array) -> mx.array:
        """All slots of the step's blocks, still encoded: [rows * heads, slots, width]."""
        return gather(self._step, array, cut=False).reshape(-1, self._step.grid.slots, array.shape[2])


class ChunkedEncodedLayer(EncodedLayer, ChunkedLayer):
    """The same for llama4's layers of chunked attention."""
