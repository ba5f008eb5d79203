"""KVCache and BatchKVCache against mlx-lm's own, for every public method; and that no KV moves."""

import copy
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock

from onekv.memory.hook import attention, stock_attention
from onekv.mlx_lm import BatchKVCache, KVCache, PoolFullError, installed
from onekv.mlx_lm.slabs import SLABS
from rise import Rise

HEADS, KEY, VALUE = 2, 8, 4


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences of some tokens are in many slabs."""
    monkeypatch.setattr(KVCache, "step", 4)
    monkeypatch.setattr(BatchKVCache, "step", 4)


def kv(rows: int, tokens: int) -> tuple[mx.array, mx.array]:
    return mx.random.normal((rows, HEADS, tokens, KEY)), mx.random.normal((rows, HEADS, tokens, VALUE))


def same(a: Any, b: Any) -> bool:
    return bool(mx.array_equal(a, b)) if isinstance(a, mx.array) else a == b


def step(pair: tuple[Any, Any], rows: int, tokens: int, window: int | None = None) -> None:
    """One update of both: masks, what is returned, attention over it and counts are the same."""
    masks = [cache.make_mask(tokens, return_array=False, window_size=window) for cache in pair]
    assert same(*masks)
    new, queries = kv(rows, tokens), mx.random.normal((rows, 3 * HEADS, tokens, KEY))
    sinks = random.Random(tokens).choice([None, mx.ones(3 * HEADS)])
    returned = [cache.update_and_fetch(*new) for cache in pair]
    seen = mx.array(True)
    if isinstance(masks[0], mx.array) and masks[0].ndim == 4:
        # Padding may be anything.
        seen = mx.any(masks[0], axis=-2)[..., None]
    for mine, theirs in zip(*returned, strict=True):
        assert same(mx.where(seen, mine, 0), mx.where(seen, theirs, 0))
    out = attention(queries, *returned[0], pair[0], 0.3, masks[0], sinks)
    expected = stock_attention(queries, *returned[1], pair[1], scale=0.3, mask=masks[1], sinks=sinks)
    real = mx.array(True)
    if isinstance(masks[0], mx.array) and masks[0].ndim == 4:
        real = mx.any(masks[0], axis=-1)[..., None]
    assert mx.allclose(mx.where(real, out, 0), mx.where(real, expected, 0), atol=1e-5)
    assert same(pair[0].offset, pair[1].offset)
    assert pair[0].size() == pair[1].size()
    assert pair[0].empty() == pair[1].empty()
    assert pair[0].is_trimmable()


@pytest.mark.parametrize("seed", range(20))
def test_a_single_cache_does_what_mlx_lms_does(seed: int) -> None:
    chance = random.Random(seed)
    rows = chance.choice([1, 1, 2])
    pairs = [(KVCache(), stock.KVCache())]
    for _ in range(40):
        at = chance.randrange(len(pairs))
        step(pairs[at], rows, chance.choice([1, 1, 1, 2, 5, 20]), chance.choice([None, None, 6]))
        mine, theirs = pairs[at]
        action = chance.random()
        if action < 0.3:
            count = chance.randrange(0, 9)
            assert mine.trim(count) == theirs.trim(count)
        elif action < 0.5:
            # mlx-lm writes over the columns a copy shares only because MLX copies them first.
            pairs.append((copy.deepcopy(mine), copy.deepcopy(theirs)))
        elif action < 0.6:
            pairs[at] = (KVCache.from_state(theirs.state), stock.KVCache.from_state(tuple(mine.state)))
        elif action < 0.65:
            expected = [mx.array(array[..., : theirs.offset, :]) for array in (theirs.keys, theirs.values)]
            assert same(mine.keys, expected[0])
            assert same(mine.values, expected[1])


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_does_what_mlx_lms_does(seed: int) -> None:
    chance = random.Random(seed)

    def merged(count: int) -> tuple[Any, Any]:
        made = [(KVCache(), stock.KVCache()) for _ in range(count)]
        for pair in made:
            for tokens in chance.choices([1, 2, 7], k=chance.randrange(0, 5)):
                step(pair, 1, tokens)
        mine, theirs = zip(*made, strict=True)
        return KVCache.merge(list(mine)), stock.KVCache.merge(list(theirs))

    rows = chance.randrange(1, 4)
    pair: tuple[Any, Any] = merged(rows)
    others = []
    for _ in range(16):
        action = chance.choice(["one", "one", "chunk", "padded", "join", "leave", "take", "copy", "trim", "state"])
        if action == "one":
            step(pair, rows, 1)
        elif action == "chunk":
            step(pair, rows, chance.choice([2, 5, 11]))
        elif action == "padded":
            padded(pair, [chance.randrange(1, 12) for _ in range(rows)], chance.choice([50, 4]), chance.random() < 0.5)
        elif action == "join":
            other = merged(more := chance.randrange(1, 3))
            for cache, joining in zip(pair, other, strict=True):
                cache.extend(joining)
            rows += more
        elif action == "leave":
            kept = sorted(chance.sample(range(rows), chance.randrange(1, rows + 1)))
            for cache in pair:
                cache.filter(kept if chance.random() < 0.5 else mx.array(kept))
            rows = len(kept)
        elif action == "take" and not pair[1].empty():
            row = chance.randrange(rows)
            taken = (pair[0].extract(row), pair[1].extract(row))
            if taken[1].offset:
                step(taken, 1, 3)
        elif action == "copy":
            others.append((rows, copy.deepcopy(pair[0]), copy.deepcopy(pair[1])))
        elif action == "trim":
            # mlx-lm's index goes below 0 when a row is left with nothing.
            count = min(chance.randrange(0, 4), max(0, min(pair[1].offset.tolist())))
            assert pair[0].trim(count) == pair[1].trim(count)
        elif action == "state":
            theirs = stock.BatchKVCache.from_state(tuple(pair[0].state))
            # mlx-lm forgets to set it.
            theirs._right_padding = None
            pair = (BatchKVCache.from_state(pair[1].state), theirs)
        assert same(pair[0].offset, pair[1].offset)
        assert same(pair[0].left_padding, pair[1].left_padding)
    for count, mine, theirs in others:
        step((mine, theirs), count, 2)


def padded(pair: tuple[Any, Any], lengths: list[int], chunk: int, say_lengths: bool) -> None:
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    for cache in pair:
        cache.prepare(lengths=lengths if say_lengths else None, right_padding=padding)
    for start in range(0, longest, chunk):
        new = kv(len(lengths), min(chunk, longest - start))
        for cache in pair:
            cache.update_and_fetch(*new)
    for cache in pair:
        cache.finalize()
    assert same(pair[0].offset, pair[1].offset)


def test_left_padding_as_mlx_lm_takes_it() -> None:
    pair = (BatchKVCache([1, 3, 0]), stock.BatchKVCache([1, 3, 0]))
    for tokens in (2, 4, 1, 1, 6):
        step(pair, 3, tokens)
    pair = (BatchKVCache([0, 0]), stock.BatchKVCache([0, 0]))
    for cache in pair:
        cache.prepare(left_padding=[2, 0])
    step(pair, 2, 5)
    with pytest.raises(ValueError, match="Left padding"):
        pair[0].prepare(left_padding=[1, 1])


def test_other_caches_merge_too() -> None:
    full, empty = stock.RotatingKVCache(4), stock.RotatingKVCache(4)
    full.update_and_fetch(*kv(1, 4))
    assert KVCache.merge((empty, full)).keys.shape == (2, HEADS, 4, KEY)


@pytest.mark.parametrize("tokens", [[3], [3, 9, 1], [5, 5, 5, 5]])
def test_files_go_both_ways(tmp_path: Path, tokens: list[int]) -> None:
    mine, theirs = KVCache(), stock.KVCache()
    for count in tokens:
        step((mine, theirs), 1, count)
    stock.save_prompt_cache(str(tmp_path / "mine.safetensors"), [mine], {"by": "onekv"})
    stock.save_prompt_cache(str(tmp_path / "stock.safetensors"), [theirs, stock.CacheList(theirs, theirs)])
    (theirs,), metadata = stock.load_prompt_cache(str(tmp_path / "mine.safetensors"), return_metadata=True)
    assert type(theirs) is stock.KVCache
    assert metadata == {"by": "onekv"}
    with installed():
        mine, several = stock.load_prompt_cache(str(tmp_path / "stock.safetensors"))
    assert type(mine) is KVCache
    assert type(several[1]) is KVCache
    for count in (1, 4, 1):
        step((mine, theirs), 1, count)


def test_assigned_keys_tie_evaluation_and_change_nothing() -> None:
    cache = KVCache()
    new = kv(1, 6)
    cache.update_and_fetch(*new)
    cache.keys = mx.depends(cache.keys, mx.zeros(3))
    cache.values = mx.zeros_like(cache.values)
    assert same(cache.keys, new[0])
    other = KVCache()
    other.keys, other.values = new
    other.offset = 4
    assert same(other.keys, new[0][..., :4, :])


def test_layers_without_values() -> None:
    cache = KVCache()
    for _ in range(3):
        keys, values = cache.update_and_fetch(mx.ones((1, 1, 3, 8)), mx.zeros((1, 1, 3, 0)))
    assert keys.shape == (1, 1, 9, 8)
    assert values.shape == (1, 1, 9, 0)


def test_quantized_from_here() -> None:
    mine, theirs = KVCache(), stock.KVCache()
    new = mx.random.normal((1, 2, 11, 64))
    for cache in (mine, theirs):
        cache.update_and_fetch(new, new)
    quantized = [cache.to_quantized(group_size=64, bits=8) for cache in (mine, theirs)]
    more = mx.random.normal((1, 2, 3, 64))
    for ours, others in zip(*(cache.update_and_fetch(more, more) for cache in quantized), strict=True):
        assert all(same(a, b) for a, b in zip(ours, others, strict=True))


# Memory

SHAPE = (1, 8, 4000, 64)
ENTRY = 2 * 8 * 4000 * 64 * 4


def entry() -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros(SHAPE), mx.zeros(SHAPE))
    mx.eval(cache.state)
    return cache


def decode(cache: Any, rows: int = 1) -> None:
    """One token through the attention that models call."""
    token = mx.ones((rows, 8, 1, 64))
    keys, values = cache.update_and_fetch(token, token)
    mask = cache.make_mask(1, return_array=False, window_size=None) if rows > 1 else None
    mask = None if mask is None else mask[..., 1:]
    mx.eval(attention(token, keys, values, cache, 1.0, mask))
    del keys, values
    mx.eval(cache.state)


def test_copies_rows_and_lengths_move_no_kv() -> None:
    caches = [entry() for _ in range(3)]
    with Rise(ENTRY) as rise:
        copies = copy.deepcopy(caches)
        for cache in copies:
            cache.trim(10)
        batch = KVCache.merge(copies)
        batch.extend(copy.deepcopy(batch))
        batch.filter([0, 2, 5])
        one = batch.extract(1)
        mx.eval(batch.offset, one.offset)
    assert rise.peak < 0.001


def test_growth_moves_no_kv() -> None:
    cache = entry()
    with Rise(ENTRY) as rise:
        for _ in range(300):
            decode(cache)
    assert rise.peak < 0.2
    with Rise(ENTRY) as rise:
        decode(cache)
    assert rise.peak < 0.05


def test_joining_a_batch_moves_no_kv() -> None:
    batch = KVCache.merge([entry() for _ in range(3)])
    decode(batch, 3)
    with Rise(ENTRY) as steady:
        decode(batch, 3)
    joining = KVCache.merge([entry()])
    decode(joining, 1)
    with Rise(ENTRY) as rise:
        batch.extend(joining)
        del joining
        decode(batch, 4)
    # A step's own scores, of one more row, are no part of joining; how many of them live at a time is MLX's affair. The
    # keys of the row that joins, copied, would be 0.5.
    assert rise.peak - steady.peak * 4 / 3 < 0.1


def test_the_state_of_a_sequence_in_several_slabs_is_evaluated_where_it_is() -> None:
    cache = entry()
    with Rise(ENTRY) as rise:
        fork = copy.deepcopy(cache)
        cache.update_and_fetch(mx.ones((1, 8, 3, 64)), mx.ones((1, 8, 3, 64)))
        fork.update_and_fetch(mx.ones((1, 8, 3, 64)), mx.ones((1, 8, 3, 64)))
        mx.eval([cache.state, fork.state])
        assert len(fork.state) == 3
    assert rise.peak < 0.1


def test_slabs_are_counted_and_given_back() -> None:
    before = SLABS.used
    cache = entry()
    assert SLABS.used - before == pytest.approx(ENTRY, rel=0.01)
    fork = copy.deepcopy(cache)
    assert SLABS.used - before == pytest.approx(ENTRY, rel=0.01)
    del cache
    assert SLABS.used - before == pytest.approx(ENTRY, rel=0.01)
    del fork
    assert SLABS.used == before


def test_full_memory_says_so_and_goes_on() -> None:
    limit = SLABS._limit
    try:
        SLABS.set_limit(SLABS.used + 100_000)
        with pytest.raises(PoolFullError, match=r"more are needed, .* are in use; raise kv_memory"):
            entry()
        cache = KVCache()
        cache.update_and_fetch(mx.zeros((1, 2, 3, 8)), mx.zeros((1, 2, 3, 8)))
        assert cache.offset == 3
    finally:
        SLABS._limit = limit
