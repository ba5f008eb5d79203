"""Rotating caches against mlx-lm's own: the same columns, masks and counts, in a ring that is allocated once."""

import copy
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as stock

from onekv.mlx_lm.rotating import RotatingKVCache
from onekv.mlx_lm.rotating_batch import BatchRotatingKVCache

HEADS, KEY, VALUE = 2, 4, 3


def kv(rows: int, tokens: int) -> tuple[mx.array, mx.array]:
    return mx.random.normal((rows, HEADS, tokens, KEY)), mx.random.normal((rows, HEADS, tokens, VALUE))


def same(a: Any, b: Any) -> bool:
    return bool(mx.array_equal(a, b)) if isinstance(a, mx.array) else a == b


def step(pair: tuple[Any, Any], rows: int, tokens: int, window: int | None = None) -> None:
    """One update of both caches: masks, what is returned and counts are the same."""
    masks = [cache.make_mask(tokens, window_size=window) for cache in pair]
    assert same(*masks)
    new = kv(rows, tokens)
    returned = [cache.update_and_fetch(*new) for cache in pair]
    for mine, theirs in zip(*returned, strict=True):
        assert same(mine, theirs)
    for mine, theirs in zip(pair[0].keys_and_values(), returned[0], strict=True):
        assert same(mine, theirs)
    assert same(pair[0].offset, pair[1].offset)
    assert pair[0].size() == pair[1].size()
    assert pair[0].is_trimmable() == pair[1].is_trimmable()
    ring = pair[0].keys
    assert ring.shape == (rows, HEADS, pair[0].max_size, KEY)


@pytest.mark.parametrize("seed", range(30))
def test_a_single_cache_does_what_mlx_lms_does(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice([5, 8, 16, 33])
    keep = chance.choice([0, 0, 2, 4])
    pair = (RotatingKVCache(size, keep), stock.RotatingKVCache(size, keep))
    for _ in range(30):
        step(pair, 1, chance.choice([1, 1, 1, 2, 3, 7, 20, 50]), chance.choice([None, None, size, size - 2]))
        if chance.random() < 0.3 and pair[0].is_trimmable():
            trimmed = chance.randrange(0, 5)
            assert pair[0].trim(trimmed) == pair[1].trim(trimmed)
        if chance.random() < 0.2:
            pair = (RotatingKVCache.from_state(pair[1].state), stock.RotatingKVCache.from_state(pair[0].state))
            pair = (pair[0], pair[1])
        if chance.random() < 0.1:
            pair = copy.deepcopy(pair)


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_does_what_mlx_lms_does(seed: int) -> None:
    """Rows merge, are padded on the right, join, leave and are taken out."""
    chance = random.Random(seed)
    size = chance.choice([6, 16, 33])

    def singles(count: int) -> list[tuple[Any, Any]]:
        made = [(RotatingKVCache(size), stock.RotatingKVCache(size)) for _ in range(count)]
        for pair in made:
            for tokens in chance.choices([1, 2, 5, 30], k=chance.randrange(0, 6)):
                step(pair, 1, tokens)
        return made

    def merged(count: int) -> tuple[Any, Any]:
        mine, theirs = zip(*singles(count), strict=True)
        return BatchRotatingKVCache.merge(list(mine)), stock.BatchRotatingKVCache.merge(list(theirs))

    rows = chance.randrange(1, 4)
    pair = merged(rows)
    for _ in range(14):
        action = chance.choice(["one", "one", "chunk", "padded", "join", "leave", "take"])
        if action == "one":
            step_rows(pair, rows, 1)
        elif action == "chunk":
            step_rows(pair, rows, chance.choice([2, 4, 9, 40]))
        elif action == "padded":
            padded(pair, [chance.randrange(1, 20) for _ in range(rows)], chance.choice([50, 7]))
        elif action == "join":
            other = merged(more := chance.randrange(1, 3))
            if pair[0].keys is None or other[0].keys is None:
                continue
            for cache, joining in zip(pair, other, strict=True):
                cache.extend(joining)
            rows += more
        elif action == "leave" and rows > 1:
            kept = sorted(chance.sample(range(rows), chance.randrange(1, rows + 1)))
            for cache in pair:
                cache.filter(kept)
            rows = len(kept)
        elif action == "take" and pair[0].keys is not None:
            row = chance.randrange(rows)
            taken = [cache.extract(row) for cache in pair]
            assert taken[0].offset == taken[1].offset
            if taken[1].keys.shape[2] >= min(size, taken[1].offset):
                for mine, theirs in zip(taken[0].keys_and_values(), taken[1].keys_and_values(), strict=True):
                    count = min(size, theirs.shape[2])
                    assert same(mine[..., -count:, :], theirs[..., -count:, :])


def step_rows(pair: tuple[Any, Any], rows: int, tokens: int) -> None:
    """Like `step` for a batch: columns that are padding may hold anything."""
    masks = [cache.make_mask(tokens) for cache in pair]
    assert same(*masks)
    new = kv(rows, tokens)
    returned = [cache.update_and_fetch(*new) for cache in pair]
    seen = mx.any(masks[0], axis=-2)[..., None]
    for mine, theirs in zip(*returned, strict=True):
        assert same(mx.where(seen, mine, 0), mx.where(seen, theirs, 0))
    assert same(pair[0].offset, pair[1].offset)
    assert pair[0].keys.shape == (rows, HEADS, pair[0].max_size, KEY)


def padded(pair: tuple[Any, Any], lengths: list[int], chunk: int) -> None:
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    if max(padding):
        for cache in pair:
            cache.prepare(lengths=lengths, right_padding=padding)
    for start in range(0, longest, chunk):
        count = min(chunk, longest - start)
        if count == 1:
            # mlx-lm refuses single tokens while rows are padded.
            count = 2
        valid = mx.array([length - start for length in lengths])[:, None, None]
        masks = [cache.make_mask(count) & (mx.arange(count)[None, :, None] < valid)[:, None] for cache in pair]
        new = kv(len(lengths), count)
        returned = [cache.update_and_fetch(*new) for cache in pair]
        assert same(*masks)
        seen = mx.any(masks[0], axis=-2)[..., None]
        for mine, theirs in zip(*returned, strict=True):
            assert same(mx.where(seen, mine, 0), mx.where(seen, theirs, 0))
    if max(padding):
        for cache in pair:
            cache.finalize()
    assert same(pair[0].offset, pair[1].offset)


@pytest.mark.parametrize("tokens", [[3], [20], [3, 1, 1], [12, 1, 1, 1], [5, 30, 1, 4]])
def test_files_go_both_ways(tmp_path: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = RotatingKVCache(12, 2), stock.RotatingKVCache(12, 2)
    for count in tokens:
        step((mine, theirs), 1, count)
    stock.save_prompt_cache(str(tmp_path / "stock.safetensors"), [theirs])
    stock.save_prompt_cache(str(tmp_path / "mine.safetensors"), [mine])
    (theirs,) = stock.load_prompt_cache(str(tmp_path / "mine.safetensors"))
    assert type(theirs) is stock.RotatingKVCache
    with monkeypatch.context() as patched:
        patched.setattr(stock, "RotatingKVCache", RotatingKVCache)
        (mine,) = stock.load_prompt_cache(str(tmp_path / "stock.safetensors"))
    assert type(mine) is RotatingKVCache
    for count in (1, 1, 5, 1, 20, 1):
        step((mine, theirs), 1, count)


def test_a_small_file_for_a_large_ring(tmp_path: Path) -> None:
    cache = RotatingKVCache(10_000)
    cache.update_and_fetch(*kv(1, 10))
    stock.save_prompt_cache(str(tmp_path / "file"), [cache])
    assert (tmp_path / "file.safetensors").stat().st_size < 10_000


def address(array: mx.array) -> int:
    return int(np.array(array, copy=False).__array_interface__["data"][0])


@pytest.mark.parametrize("rows", [1, 3])
def test_the_first_update_allocates_and_no_later_one_does(rows: int) -> None:
    """Tokens and chunks up to the maximum, and tokens past it: memory is a flat line, the ring stays where it is."""
    size, heads, dim = 2048, 4, 64
    cache: Any = RotatingKVCache(size) if rows == 1 else BatchRotatingKVCache(size, [0] * rows)
    new = [mx.random.normal((rows, heads, count, dim)) for count in (1, 100)]
    mx.eval(new)
    ring = 2 * rows * heads * size * dim * 4
    before = mx.get_active_memory()
    cache.update_and_fetch(new[1], new[1])
    mx.eval(cache.state)
    place = address(cache.keys)
    assert mx.get_active_memory() - before == pytest.approx(ring, rel=0.01)
    mx.reset_peak_memory()
    level = mx.get_active_memory()
    for count in [100] * 18 + [1] * 300:
        cache.update_and_fetch(*[new[count == 100]] * 2)
        mx.eval(cache.state)
    assert mx.get_peak_memory() - level < 0.01 * ring
    assert address(cache.keys) == place
    assert cache.keys.shape == (rows, heads, size, dim)


def test_a_chunk_past_the_maximum_costs_one_layer_at_a_time() -> None:
    size, layers = 1024, 8
    caches = [RotatingKVCache(size) for _ in range(layers)]
    new = mx.random.normal((1, 4, 128, 64))
    for _ in range(9):
        for cache in caches:
            cache.update_and_fetch(new, new)
        mx.eval([cache.state for cache in caches])
    held = sum(cache.nbytes for cache in caches)
    level = mx.get_active_memory()
    mx.reset_peak_memory()
    hidden = new
    for cache in caches:
        mask = cache.make_mask(128)
        k, v = cache.update_and_fetch(hidden, hidden)
        hidden = mx.fast.scaled_dot_product_attention(hidden, k, v, scale=1.0, mask=mask)
        del k, v
        # A layer of a real model has work enough that the one before it is done.
        mx.eval(hidden, cache.state)
    assert mx.get_active_memory() - level < 0.02 * held
    # Scores of the chunk are 0.14 of it.
    assert mx.get_peak_memory() - level < 0.6 * held


def test_quantization_is_refused_as_by_mlx_lm() -> None:
    with pytest.raises(NotImplementedError):
        RotatingKVCache(8).to_quantized()


def test_caches_of_different_sizes_do_not_merge() -> None:
    with pytest.raises(ValueError, match="same maximum size"):
        RotatingKVCache.merge([RotatingKVCache(8), RotatingKVCache(9)])
