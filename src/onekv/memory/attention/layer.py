"""The KV of one layer in the pool: written and read as the current step specifies.

Rows are stored by the layer's codecs, keys without their centre if there is one (`formats.centre`). Attention only uses
what is stored, including the tokens of the step: so the result does not depend on how a prompt is divided into chunks,
or on how much of it was cached.
"""

import mlx.core as mx

from ..device import Kind
from ..formats.centre import Centre
from ..layout import KVLayer
from ..pool import LayerArrays
from ..step import GroupStep
from .turns import Turns

Pair = tuple[mx.array, mx.array]


class LayerKV:
    """`arrays` are its own, here and nowhere else; `turns` are shared with the other layers of the model.

    Without `kernels`, only operations of MLX read and write it.
    """

    def __init__(self, layer: KVLayer, arrays: LayerArrays, turns: Turns, device: Kind, kernels: bool = True) -> None:
        self.layer, self.arrays, self.turns, self.device, self.kernels = layer, arrays, turns, device, kernels
        # Their codecs.
        self.keys, self.values = layer.keys, layer.values

    def write(self, step: GroupStep, keys: mx.array, values: mx.array) -> None:
        """Store the keys and values [rows, heads, tokens, dim] of the step's tokens."""
        if (centre := self.layer.centre) is not None:
            keys = keys - centre.rows(step.offset, len(keys), keys.shape[2])
        arrays = self.arrays.all
        for index, new in enumerate((*self.keys.encode(keys), *self.values.encode(values))):
            arrays[index] = write(step, arrays[index], new)

    def read(self, step: GroupStep) -> Pair:
        """What the step reads, in the basis of the codecs, [rows, heads, tokens, dim]; lazy."""
        dtype = self.layer.dtype
        keys = self.keys.decode([self._view(step, array) for array in self.arrays.keys], dtype)
        if (centre := self.layer.centre) is not None:
            keys = keys + self.keys.rotate(_centres(step, centre)).astype(dtype)
        return keys, self.values.decode([self._view(step, array) for array in self.arrays.values], dtype)

    def read_plain(self, step: GroupStep) -> Pair:
        """The same as the model would have stored it."""
        keys, values = self.read(step)
        return self.keys.unrotate(keys), self.values.unrotate(values)

    def _view(self, step: GroupStep, array: mx.array) -> mx.array:
        """What the step reads of one array, [rows, heads, tokens, width]: a view where possible, else a copy."""
        # On CUDA, MLX's attention goes wrong for one query over a view that starts inside its buffer.
        if step.run is None or (self.device != "cpu" and step.count == 1):
            return gather(step, array)
        return array[None, :, step.run[0] : step.run[1]]

    def centre_scores(self, step: GroupStep, queries: mx.array, scale: float) -> mx.array | None:
        """What centres add to the scores of one query token per row, over all slots: [rows, query heads, slots]."""
        centre = self.layer.centre
        if centre is None:
            return None
        rows, query_heads, _, dim = queries.shape
        heads = self.layer.heads
        grouped = queries.astype(mx.float32).reshape(rows, heads, query_heads // heads, dim)
        factors = centre.factors(grouped * scale).reshape(rows, query_heads, dim)
        return factors @ self.turns.table(step, centre.rope, dim).swapaxes(1, 2)


def _centres(step: GroupStep, centre: Centre) -> mx.array:
    """What was taken off the keys that the step reads, [rows, heads, tokens, dim]; lazy."""
    heads, dim = centre.mean.shape
    if step.run is not None:
        return centre.rows(step.first, 1, step.run[1] - step.run[0])
    rows, blocks = step.grid.base.shape
    turned = centre.rows(step.grid.base.reshape(-1), rows * blocks, step.block_size)
    turned = turned.reshape(rows, blocks, heads, step.block_size, dim).swapaxes(1, 2)
    turned = turned.reshape(rows, heads, -1, dim)
    return turned[:, :, step.cut] if step.alike else turned


def write(step: GroupStep, pool: mx.array, new: mx.array) -> mx.array:
    """`pool` with `new` rows [rows, heads, tokens, width] where the step says; in place once evaluated."""
    # Some layers store keys alone; MLX cannot write or gather rows of nothing.
    if pool.shape[-1] == 0:
        return pool
    new = new.astype(pool.dtype)
    if not step.alone:
        rows = new.swapaxes(0, 1).reshape(new.shape[1], -1, new.shape[3])
        if step.new_tokens is not None:
            rows = rows[:, step.new_tokens]
        return mx.put_along_axis(pool, step.new_slots, rows, axis=1)
    for slot, token, n in step.spans:
        pool[:, slot : slot + n] = new[0, :, token : token + n]
    return pool


def gather(step: GroupStep, array: mx.array, cut: bool = True) -> mx.array:
    """What the step reads of one pool array, copied: [rows, heads, tokens, width]; without `cut`, whole blocks."""
    heads, slots, width = array.shape
    ids = step.grid.ids
    shape = (ids.shape[0], heads, ids.shape[1] * step.block_size, width)
    if width == 0:
        rows = mx.zeros(shape, array.dtype)
    else:
        blocks = slots // step.block_size
        head = mx.arange(heads, dtype=mx.uint32)[None, :, None]
        flat = array.reshape(heads * blocks, step.block_size * width)
        rows = flat[head * blocks + ids[:, None, :]].reshape(shape)
    return rows[:, :, step.cut] if cut and step.alike else rows
