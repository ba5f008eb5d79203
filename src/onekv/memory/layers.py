"""What mlx-lm's models see: objects with the protocol of its caches, backed by the pool.

There is one such object per layer for the whole life of the model. None of them holds tokens: which sequences a call
is about comes from the current `Step`. They define no `__len__`: mlx-lm would take an empty one for no cache at all.
"""

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .attention.cuda.plain import cuda_decode, supported
from .attention.hook import Attends, Mask, stock_attention
from .attention.paged import chunk_attention, paged_decode, run_decode
from .attention.pairs import Grid
from .attention.turns import Turns
from .layout import KVLayer
from .pool import LayerArrays
from .step import GroupStep, Step


class StepHolder:
    """Where all layers of one model find the current step, and what they share."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.turns = Turns()


class PagedLayer(Attends):
    """Keys and values of one layer, full or windowed attention.

    Where CUDA kernels attend, they also write the new token, so in a decode step it is kept (`_unwritten`) until then.
    The pool's arrays are then changed without MLX knowing: what reads them later is started later, because it depends
    on this step's tokens.

    A decode step attends over the pool, so what `update_and_fetch` returns is used only as a sign of where it came
    from. Once that is proven for the model (`direct`), a stand-in is returned: an array of the right shape that is all
    NaN, so that a use of it could not go unnoticed.
    """

    def __init__(self, holder: StepHolder, group: int, arrays: LayerArrays, block_size: int, stored: KVLayer) -> None:
        self._holder, self._group, self._arrays, self._stored = holder, group, arrays, stored
        self._fetched: tuple[mx.array, mx.array] | None = None
        self._unwritten: tuple[mx.array, mx.array] | None = None
        self.direct = False
        # Whether the last decode step attended over the pool.
        self.attended = False
        # Whether decode steps compute this layer while the model is called, not when the step is evaluated.
        self.eager = False
        self._gpu = mx.default_device() == mx.gpu
        self._kernels = stored.format.plain and supported(arrays, block_size)
        # On CPU, gather_mm takes float32 alone.
        self._paged = self._gpu or arrays.k.dtype == mx.float32

    @property
    def _step(self) -> GroupStep:
        step = self._holder.step
        assert step is not None, "a layer was used outside of a step"
        return step.groups[self._group]

    @property
    def offset(self) -> int | mx.array:
        return self._step.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        return self._step.make_mask(window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        step, arrays = self._step, self._arrays
        self._fetched, self.attended = None, False
        self._unwritten = (keys, values)
        if not (self.direct and self._kernels and step.count == 1):
            self._write()
        if self.direct and step.count == 1:
            self._fetched = self._stand_ins()
        elif len(step.tables) == 1 and step.lengths[0] == 0:
            self._fetched = (keys, values)
        else:
            self._fetched = (self._read(arrays.k), self._read(arrays.v))
        return self._fetched

    def _stand_ins(self) -> tuple[mx.array, mx.array]:
        stored = self._stored
        shapes = (stored.heads, stored.k_dim), (stored.heads, stored.v_dim)
        return self._step.stand_in(*shapes[0], stored.dtype), self._step.stand_in(*shapes[1], stored.dtype)

    def _write(self) -> None:
        """Store the new tokens, unless that is done."""
        if self._unwritten is not None:
            arrays, (keys, values) = self._arrays, self._unwritten
            arrays.k = write(self._step, arrays.k, keys)
            arrays.v = write(self._step, arrays.v, values)
            self._unwritten = None

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last update gave; models that share one layer's KV with later layers ask for it."""
        assert self._fetched is not None, "keys_and_values before an update"
        return self._fetched

    @property
    def keys(self) -> mx.array:
        return self.keys_and_values()[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        """Some models assign to tie one array's evaluation to another's; here every step evaluates all arrays."""

    @property
    def values(self) -> mx.array:
        return self.keys_and_values()[1]

    @values.setter
    def values(self, value: mx.array) -> None:
        """See `keys`."""

    def _read(self, array: mx.array) -> mx.array:
        """What the step reads of `array`, [rows, heads, tokens, dim]: a view where possible, else a lazy gather."""
        step = self._step
        # On CUDA, MLX's attention goes wrong for one query over a view that starts inside its buffer.
        if step.run is None or (self._gpu and step.count == 1):
            return gather(step, array)
        return array[None, :, step.run[0] : step.run[1]]

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
    ) -> mx.array | None:
        step, arrays = self._step, self._arrays
        if not self._is_fetched(keys, values):
            return None
        if step.count > 1:
            ours = not self._gpu and step.owns(mask) and sinks is None and queries.dtype == keys.dtype == mx.float32
            return chunk_attention(queries, keys, values, scale, mask) if ours else None
        if not self._paged or step.rule.chunk is not None:
            return None
        reach = step.reach(mask) if self._kernels and step.owns(mask) else None
        if reach is not None and queries.shape[1] <= 16 * arrays.k.shape[0]:
            self.attended = True
            new, self._unwritten = self._unwritten, None
            return cuda_decode(queries, arrays, new, step.grid, step.positions, reach, scale, sinks)
        self._write()
        if not step.owns(mask):
            # The model chose by itself what to read: give it all that is stored.
            k, v = self._read(arrays.k), self._read(arrays.v)
            return stock_attention(queries, k, v, None, scale=scale, mask=mask, sinks=sinks)
        self.attended = True
        if step.run is not None and mask is None and sinks is None:
            start, end = step.run
            k, v = arrays.k[:, start:end], arrays.v[:, start:end]
            if self._gpu and (start == 0 or mx.metal.is_available()):
                return stock_attention(queries, k[None], v[None], None, scale=scale, mask=None)
            return run_decode(queries, k, v, scale)
        bias = step.bias(mask, arrays.k.dtype if isinstance(step.pairs, Grid) else mx.float32)
        return paged_decode(queries, arrays, step.pairs, bias, scale, sinks)

    def release(self) -> None:
        """Drop what was fetched, so that nothing but the pool refers to its arrays."""
        self._fetched = self._unwritten = None

    def finish(self) -> None:
        """The model has run: what it did not attend over is stored all the same."""
        self._write()

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        return self._arrays.k, self._arrays.v


class ChunkedLayer(PagedLayer):
    """llama4's layers of chunked attention: the model asks where the kept tokens start and makes its own mask."""

    def maybe_trim_front(self) -> None:
        """Blocks that fell out of the chunk are forgotten when the step is made."""

    @property
    def start_position(self) -> int:
        return self._step.first


class StateCache(ArraysCache):  # type: ignore[misc]
    """A recurrent layer's state for the sequences of the current batch, row by row. mlx-lm asks for the type."""

    def finish(self) -> None:
        """States are replaced, never written in place: nothing to store."""

    def release(self) -> None:
        """Nothing to drop either."""


def write(step: GroupStep, pool: mx.array, new: mx.array) -> mx.array:
    """`pool` with `new` keys or values [rows, heads, tokens, dim] where the step says; in place once evaluated."""
    # Some layers store keys alone; MLX cannot write or gather rows of nothing.
    if pool.shape[-1] == 0:
        return pool
    new = new.astype(pool.dtype)
    if len(step.tables) > 1:
        return mx.put_along_axis(pool, step.rows, new[:, :, 0].swapaxes(0, 1), axis=1)
    for slot, token, n in step.spans:
        pool[:, slot : slot + n] = new[0, :, token : token + n]
    return pool


def gather(step: GroupStep, array: mx.array, cut: bool = True) -> mx.array:
    """What the step reads of one pool array, copied: [rows, heads, tokens, dim]; without `cut`, whole blocks."""
    heads, slots, dim = array.shape
    ids = step.grid.ids
    shape = (ids.shape[0], heads, ids.shape[1] * step.block_size, dim)
    if dim == 0:
        rows = mx.zeros(shape, array.dtype)
    else:
        blocks = slots // step.block_size
        head = mx.arange(heads, dtype=mx.uint32)[None, :, None]
        flat = array.reshape(heads * blocks, step.block_size * dim)
        rows = flat[head * blocks + ids[:, None, :]].reshape(shape)
    return rows[:, :, step.cut] if cut and len(step.tables) == 1 else rows
