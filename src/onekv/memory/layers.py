"""What mlx-lm's models see: objects with the protocol of its caches, backed by the pool.

There is one such object per layer for the whole life of the model. None of them holds tokens: which sequences a call
is about comes from the current `Step`. They define no `__len__`: mlx-lm would take an empty one for no cache at all.
"""

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .attention import paged_decode
from .hook import Attends, Mask
from .pool import LayerArrays
from .step import GroupStep, Step


class StepHolder:
    """Where all layers of one model find the current step."""

    def __init__(self) -> None:
        self.step: Step | None = None


class PagedLayer(Attends):
    """Keys and values of one layer, full or windowed attention."""

    def __init__(self, holder: StepHolder, group: int, arrays: LayerArrays) -> None:
        self._holder, self._group, self._arrays = holder, group, arrays
        # What update_and_fetch gave last; a gather here is lazy and costs nothing unless the model uses it.
        self._fetched: tuple[mx.array, mx.array] | None = None
        device = mx.default_device() == mx.gpu
        self._paged = device or arrays.k.dtype == mx.float32
        self._copies_one_query = device

    @property
    def _step(self) -> GroupStep:
        step = self._holder.step
        assert step is not None, "a layer was used outside of a step"
        return step.groups[self._group]

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

    @property
    def offset(self) -> int | mx.array:
        return self._step.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        return self._step.make_mask(window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        step, arrays = self._step, self._arrays
        self._fetched = None
        write(step, arrays, keys, values)
        if len(step.tables) == 1 and step.lengths[0] == 0:
            self._fetched = (keys, values)
        else:
            self._fetched = (self._read(step, arrays.k), self._read(step, arrays.v))
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last update gave; models that share one layer's KV with later layers ask for it."""
        assert self._fetched is not None, "keys_and_values before an update"
        return self._fetched

    def _read(self, step: GroupStep, array: mx.array) -> mx.array:
        # On CUDA, MLX's attention goes wrong for one query over a view that starts inside its buffer.
        if step.run is not None and not (self._copies_one_query and step.count == 1):
            return array[None, :, step.run[0] : step.run[1]]
        return gather(step, array)

    def attend(
        self, queries: mx.array, keys: mx.array, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array | None:
        """Attention over the pool for one query per row; None where the stock attention must do it."""
        step = self._step
        if self._fetched is None or keys is not self._fetched[0]:
            return None
        if step.count > 1 or not self._paged or step.rule.chunk is not None or not step.owns(mask):
            return None
        bias = step.bias(mask, mx.float32)
        return paged_decode(queries, self._arrays, step.pairs, bias, scale, sinks)

    def release(self) -> None:
        """Drop what was fetched, so that nothing but the pool refers to its arrays."""
        self._fetched = None

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

    def release(self) -> None:
        """States are replaced, never written in place: nothing to drop."""


def write(step: GroupStep, arrays: LayerArrays, keys: mx.array, values: mx.array) -> None:
    """Store new keys and values [rows, heads, tokens, dim] where the step says, in place."""
    for pool, new in ((arrays.k, keys), (arrays.v, values)):
        # Some layers store keys alone; MLX cannot write or gather rows of nothing.
        if pool.shape[-1] == 0:
            continue
        new = new.astype(pool.dtype)
        if len(step.tables) == 1:
            for slot, token, n in step.spans:
                pool[:, slot : slot + n] = new[0, :, token : token + n]
        else:
            pool[:, step.rows] = new[:, :, 0].swapaxes(0, 1)


def gather(step: GroupStep, array: mx.array) -> mx.array:
    """What the step reads of one pool array, copied: [rows, heads, tokens, dim]."""
    heads, slots, dim = array.shape
    ids, _ = step.block_ids
    shape = (ids.shape[0], heads, ids.shape[1] * step.block_size, dim)
    if dim == 0:
        rows = mx.zeros(shape, array.dtype)
    else:
        blocks = slots // step.block_size
        head = mx.arange(heads, dtype=mx.uint32)[None, :, None]
        flat = array.reshape(heads * blocks, step.block_size * dim)
        rows = flat[head * blocks + ids[:, None, :]].reshape(shape)
    return rows[:, :, step.cut] if len(step.tables) == 1 else rows
