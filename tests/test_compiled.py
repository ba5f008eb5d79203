"""Compiled decode steps. On a CPU no kernel stores new tokens by itself, so one that only reads stands in for it here,
and what a step leaves unstored is stored by another one.
"""

import mlx.core as mx
import numpy as np
import pytest

from architectures import build
from onekv import loops
from onekv.engine.selftest import compile_decode, forward, set_direct
from onekv.memory import attention
from onekv.memory.attention import Backend
from onekv.memory.compiled import CompiledDecode, rounded_rows
from onekv.memory.pairs import Grid, make_grid
from onekv.memory.traced import Untraceable
from onekv.memory.work import Kernel
from stock import check_writes_in_place, make_memory, small_llama, stock_logits

BLOCK = 16


class Reader(Backend):
    """Attends over the pool and the new tokens, which it does not store; asks for all that a kernel asks for."""

    stores = True

    @classmethod
    def supports(cls, layer, block_size, device):
        return layer.plain

    def decode(self, call, new):
        step, arrays = call.step, self.kv.arrays
        window, keep = step.reach(call.mask)
        work = step.grid.work(Kernel(self.kv.layer.heads, 4, 20, 20, 2))
        ids, base = step.grid.ids, step.grid.base
        rows, heads, dim = len(call.queries), self.kv.layer.heads, self.kv.layer.k_dim
        position = base[..., None] + mx.arange(step.block_size)
        # Without the new token, unless that is stored.
        query = step.positions[:, None, None] + (0 if new is not None else 1)
        seen = (position < query) & ((position > step.positions[:, None, None] - window) | (position < keep))
        # The work must be there; nothing here depends on its numbers.
        seen = seen & (work.table[0] > 0)
        q = call.queries.reshape(rows, heads, -1, dim) * call.scale
        blocks = [array.reshape(heads, -1, step.block_size, array.shape[-1])[:, ids] for array in arrays.all]
        k, v = (array.reshape(heads, rows, -1, array.shape[-1]).swapaxes(0, 1) for array in blocks)
        scores = q @ k.swapaxes(-1, -2) + mx.where(seen.reshape(rows, 1, 1, -1), 0, -mx.inf)
        if new is None:
            own = mx.full((rows, heads, q.shape[2], 1), -mx.inf)
            new = (k[:, :, :1], v[:, :, :1])
        else:
            own = (q * new[0]).sum(axis=-1, keepdims=True)
        weights = mx.softmax(mx.concatenate([scores, own], axis=-1), axis=-1)
        out = weights[..., :-1] @ v + weights[..., -1:] * new[1]
        return out.reshape(rows, -1, 1, v.shape[-1])


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.setattr(attention, "backends", [Reader, *attention.backends])


def llama():
    return small_llama(7, num_hidden_layers=3, intermediate_size=64, num_key_value_heads=2, head_dim=32)


def store_by_mlx(model, memory, sequences, tokens):
    """Take the last step back and make it again with the layers' other backends."""
    for sequence in sequences:
        memory.truncate(sequence, sequence.length - 1)
    kept = [layer._backends for layer in memory._layers]
    for layer in memory._layers:
        layer._backends, layer.stores = layer._backends[1:], False
    forward(model, memory, sequences, tokens, [1] * len(sequences))
    mx.eval(memory.arrays())
    for layer, backends in zip(memory._layers, kept, strict=True):
        layer._backends, layer.stores = backends, True


def run(model, memory, lengths, steps):
    """Logits [rows, steps, vocabulary] of compiled decode steps after random prompts; and all tokens."""
    set_direct(model, memory)
    compiled, why = compile_decode(model, memory, None)
    assert why is None
    rng = np.random.default_rng(1)
    tokens = [rng.integers(1, 100, length + steps).tolist() for length in lengths]
    sequences = [memory.open(len(row)) for row in tokens]
    for sequence, row, length in zip(sequences, tokens, lengths, strict=True):
        for start in range(0, length, memory.chunk):
            with memory.step([sequence], min(memory.chunk, length - start)) as caches:
                model(mx.array([row[start : min(length, start + memory.chunk)]]), cache=caches)
            mx.eval(memory.arrays())
        sequence.prefilled()
    found = []
    for step in range(steps):
        now = mx.array([row[length + step] for row, length in zip(tokens, lengths, strict=True)])
        found.append(compiled(sequences, now, [1] * len(sequences)))
        mx.eval(found[-1])
        assert not memory.writes
        store_by_mlx(model, memory, sequences, now)
    for sequence in sequences:
        memory.close(sequence)
    memory.check_integrity()
    return mx.stack(found, axis=1), tokens, compiled


@pytest.mark.parametrize("lengths", [(40,), (5, 90, 33, 61)])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "olmo2"])
def test_compiled_steps_give_what_the_model_gives(reader, name, lengths):
    model = llama() if name == "llama" else build(name)
    steps = 20
    logits, tokens, compiled = run(model, make_memory(model), lengths, steps)
    for row, length in enumerate(lengths):
        expected = stock_logits(model, tokens[row], length, 48)[length:]
        assert mx.abs(logits[row] - expected).max() < 1e-4
    # 20 tokens fill at most two more blocks: few shapes.
    assert len(compiled._functions) <= 4


def test_positions_come_from_the_step_before(reader, monkeypatch):
    """The host writes them once; they are the same where a sequence was rolled back, or padding is among the rows."""
    given = []
    find = CompiledDecode._positions

    def watched(self, lengths, padding):
        following = self._following
        positions = find(self, lengths, padding)
        assert positions.tolist() == [*lengths, *[-1] * padding]
        given.append(following is not None and positions is following[1])
        return positions

    monkeypatch.setattr(CompiledDecode, "_positions", watched)
    model = llama()
    _, tokens, compiled = run(model, make_memory(model), (5, 33, 12), 6)
    # The first step is tried when the model is loaded, with another number of rows.
    assert given[-6:] == [False, *[True] * 5]
    memory = compiled._memory
    sequence = memory.open(20)
    for step, back in enumerate((0, 0, 1, 0)):
        memory.truncate(sequence, sequence.length - back)
        mx.eval(compiled([sequence], mx.array([tokens[0][step]]), [1]))
    assert given[-4:] == [False, True, False, True]
    memory.close(sequence)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_grid_is_made_from_the_one_before(name):
    """Tables that grow, shrink and change places: as if it were made anew."""
    memory = make_memory(llama() if name == "llama" else build(name), blocks=200)
    draw = np.random.default_rng(2)
    sequences = [memory.open(300) for _ in range(5)]
    tables = [sequence.tables[0] for sequence in sequences]
    lengths = [0] * 5
    grid = None
    for _ in range(200):
        for row, table in enumerate(tables):
            more = min(280 - lengths[row], int(draw.integers(1, 9)))
            table.advance(lengths[row], more)
            lengths[row] += more
        if draw.random() < 0.1 and memory.pools[0].group.rule.span is None:
            row = int(draw.integers(5))
            lengths[row] = int(draw.integers(1, lengths[row] + 1))
            tables[row].truncate(lengths[row])
        if draw.random() < 0.1:
            order = draw.permutation(5)
            sequences, tables, lengths = ([some[i] for i in order] for some in (sequences, tables, lengths))
        at = [length - 1 for length in lengths]
        grid, anew = make_grid(tables, at, grid), Grid.of(tables, at)
        for one, other in zip(grid.rows, anew.rows, strict=True):
            assert np.array_equal(one, other) and one.dtype == other.dtype
        assert grid.key == anew.key
    for sequence in sequences:
        memory.close(sequence)


def test_rows_are_padded_to_few_numbers():
    assert [rounded_rows(rows) for rows in (1, 2, 3, 5, 8, 9, 17, 32, 33, 64, 65)] == [
        *(1, 2, 4, 8, 8, 12, 24, 32, 40, 64, 96)
    ]


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_rows_of_padding_are_nobodys(reader, monkeypatch, name):
    """Five sequences are eight rows; what is in the other three changes nothing, and is not given back."""
    model, lengths = llama() if name == "llama" else build(name), (5, 90, 33, 12, 70)
    logits, tokens, compiled = run(model, make_memory(model), lengths, 4)
    for row, length in enumerate(lengths):
        expected = stock_logits(model, tokens[row], length, 48)[length:]
        assert mx.abs(logits[row] - expected).max() < 1e-4
    assert len(logits) == 5 and {shapes[0].blocks[0] for _, shapes in compiled._functions} == {1, 8}
    pad = mx.pad
    monkeypatch.setattr(mx, "pad", lambda array, width, constant_values=17: pad(array, width, constant_values=17))
    assert mx.array_equal(run(model, make_memory(model), lengths, 4)[0], logits)


def test_requests_that_come_and_go_need_no_new_functions(reader):
    model = llama()
    memory = make_memory(model)
    for count in (5, 6, 7, 8):
        compiled = run(model, memory, (20,) * count, 1)[2]
        assert len(compiled._functions) == 2


def test_nothing_but_the_pool_holds_its_arrays(reader):
    """A write after compiled steps happens in place."""
    model = llama()
    memory = make_memory(model, blocks=2000)
    run(model, memory, (40,), 3)
    check_writes_in_place(model, memory)


def test_what_cannot_be_compiled_says_why(reader, monkeypatch):
    model = llama()
    memory = make_memory(model)
    set_direct(model, memory)
    stock = type(model).__call__

    def asks_for_a_number(self, tokens, cache):
        if int(mx.array(cache[0].offset).max()) < 0:
            raise AssertionError
        return stock(self, tokens, cache)

    monkeypatch.setattr(type(model), "__call__", asks_for_a_number)
    compiled, why = compile_decode(model, memory, None)
    assert compiled is None and "cannot be compiled" in why
    assert compile_decode(model, memory, "a reason")[1] == "a reason"
    memory.check_integrity()


def test_writes_of_mlx_are_not_compiled(monkeypatch):
    model = llama()
    memory = make_memory(model)
    set_direct(model, memory)
    monkeypatch.setattr(loops, "why_not", lambda: "no numba here")
    no_kernel = "attention does not run in a kernel that stores new tokens itself"
    assert compile_decode(model, memory, None) == (None, "no numba here" if memory.on_cpu else no_kernel)
    sequence = memory.open(10)
    with pytest.raises(Untraceable, match="stored by an MLX operation"):
        CompiledDecode(model, memory)([sequence], mx.array([1]), [1])
    memory.close(sequence)
    memory.check_integrity()
