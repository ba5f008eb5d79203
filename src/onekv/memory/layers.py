"""What mlx-lm's models see: objects with the protocol of its caches, backed by the pool.

There is one such object per layer for the whole life of the model. None of them holds tokens: the current `Step` says
which sequences a call is for, `LayerKV` where the layer's KV is and how it is written and read, and the layer's
backends compute attention over it. They define no `__len__`, because mlx-lm treats an empty cache as no cache.
"""

from collections import deque

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .attention import Backend, Call, LayerKV
from .attention.layer import Pair
from .attention.turns import Turns
from .hook import Attends, Mask, stock_attention
from .step import GroupStep, Step

# Layers of a prompt's chunk, if it has the planned size, that may be in flight when the next one is started.
AHEAD = 1


class StepHolder:
    """Where all layers of one model find the current step, and what they share."""

    def __init__(self, pace: "Pace | None" = None) -> None:
        self.step: Step | None = None
        # Whether operations of MLX write the pool in the current or last step.
        self.writes = False
        self.turns = Turns()
        self.pace = pace


class Pace:
    """Lets the host be only a few layers ahead of a GPU while a prompt is stored.

    MLX allocates the outputs of an operation when it is started, and frees its inputs when the device has finished it.
    Starting all layers at once allocates the activations of all of them: 9.8 GiB for 2,048 tokens of an 8B model, where
    2.1 GiB are planned. Here a layer is started when the next one is built, and those before it are waited for, which
    takes 2.0 GiB and is faster, as the device does not wait for the whole graph. A layer with fewer tokens than a chunk
    counts as a part of one.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk, self._tokens = chunk, 0
        self._started: deque[mx.array] = deque()

    def layer(self, tokens: int, new: mx.array, stored: list[mx.array]) -> None:
        """A layer is built up to its attention; it computed `new` and has `stored` it."""
        self._tokens += tokens
        if self._tokens < self._chunk:
            return
        self._tokens = 0
        mx.async_eval(new, stored)
        self._started.append(new)
        if len(self._started) > AHEAD:
            mx.eval(self._started.popleft())

    def end(self) -> None:
        self._tokens = 0
        self._started.clear()


class PagedLayer(Attends):
    """Keys and values of one layer, full or windowed attention.

    Where a backend stores the new token itself, in a decode step it is kept (`_unwritten`) until then. The pool's
    arrays are then changed without MLX knowing: what reads them later is started later, because it depends on this
    step's tokens.

    A decode step attends over the pool, so what `update_and_fetch` returns is used only as a sign of where it came
    from. Once that is proven for the model (`direct`), a stand-in is returned: an array of the right shape that is all
    NaN, so that a use of it could not go unnoticed.
    """

    def __init__(self, holder: StepHolder, group: int, kv: LayerKV, backends: tuple[Backend, ...]) -> None:
        self._holder, self._group, self.kv, self._backends = holder, group, kv, backends
        self._fetched: Pair | None = None
        self._unwritten: Pair | None = None
        self.direct = False
        # Whether the last step attended over the pool; None: it did not call this layer.
        self.attended: bool | None = None
        self.eager = any(backend.eager for backend in backends)
        self.stores = any(backend.stores for backend in backends)
        # Whether no other backend precedes OneKV's own.
        self.stock = all(type(backend).__module__.startswith(__package__) for backend in backends)

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

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Pair:
        step = self._step
        self._fetched, self.attended = None, False
        self._unwritten = (keys, values)
        stand_in = self.direct and step.count == 1
        stores = step.recorder or any(backend.stores_in(step) for backend in self._backends)
        if not (stand_in and stores):
            self._write()
        if stand_in:
            self._fetched = self._stand_ins()
        elif self.kv.layer.plain and step.fresh:
            # What is stored is what came, and all there is.
            self._fetched = (keys, values)
        else:
            self._fetched = self.kv.read_plain(step)
        if step.count > 1 and self._holder.pace is not None:
            self._holder.pace.layer(len(step.counts) * step.count, keys, self.kv.arrays.all)
        return self._fetched

    def _stand_ins(self) -> Pair:
        layer, step = self.kv.layer, self._step
        keys = step.stand_in(layer.heads, layer.k_dim, layer.dtype)
        return keys, step.stand_in(layer.heads, layer.v_dim, layer.dtype)

    def _write(self) -> None:
        """Store the new tokens, unless that is done."""
        if self._unwritten is not None:
            self._holder.writes = True
            self.kv.write(self._step, *self._unwritten)
            self._unwritten = None

    def keys_and_values(self) -> Pair:
        """What the last update gave, read again if it was dropped; models that share KV between layers ask for it."""
        if self._fetched is None:
            self._fetched = self.kv.read_plain(self._step)
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

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
    ) -> mx.array | None:
        step, fetched = self._step, self._fetched
        if fetched is None or keys is not fetched[0] or values is not fetched[1]:
            return None
        if not step.owns(mask):
            return self._by_stock(queries, scale, mask, sinks)
        call = Call(step, queries, scale, mask, sinks)
        if step.count > 1 or step.rule.chunk is not None:
            read = self._backends[0].chunk(call, fetched)
            # May be a copy, already evaluated: kept until the step ends, the copies of all layers would exist at once.
            self._fetched = None
            return read
        if step.recorder is not None:
            new, self._unwritten = self._unwritten, None
            return step.recorder(self, call, new)
        for backend in self._backends:
            if not backend.stores_in(step):
                self._write()
            out = backend.decode(call, self._unwritten)
            if out is not None:
                self._unwritten, self.attended = None, True
                return out
        return None

    def _by_stock(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array | None:
        """The model chose by itself what to read: it gets all that is stored, if that is not what it was given."""
        if not (self.direct and self._step.count == 1):
            return None
        self._write()
        keys, values = self.kv.read_plain(self._step)
        return stock_attention(queries, keys, values, None, scale=scale, mask=mask, sinks=sinks)

    def release(self) -> None:
        """Drop what was fetched, so that nothing but the pool refers to its arrays."""
        self._fetched = self._unwritten = None

    def finish(self) -> None:
        """The model has run: what it did not attend over is stored all the same."""
        self._write()

    @property
    def state(self) -> Pair:
        arrays = self.kv.arrays
        return arrays.k, arrays.v


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
