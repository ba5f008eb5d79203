"""LRUPromptCache against mlx-lm's own: the same choices, without copies."""

import copy
import gc
import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock

from onekv.memory.hook import attention
from onekv.mlx_lm import BatchKVCache, BatchRotatingKVCache, KVCache, LRUPromptCache, RotatingKVCache
from onekv.mlx_lm.slabs import SLABS

MODEL = ("model", None, None)


class Plain:
    """A cache class of somebody else's; `value` says what it holds, 1 byte each."""

    def __init__(self, value: Any, trimmable: bool = True) -> None:
        self.value = list(value)
        self._trimmable = trimmable

    @property
    def offset(self) -> int:
        return len(self.value)

    @property
    def nbytes(self) -> int:
        return len(self.value)

    def is_trimmable(self) -> bool:
        return self._trimmable

    def trim(self, n: int) -> int:
        self.value = self.value[: len(self.value) - n]
        return n


def kv(tokens: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((1, 2, tokens, 8), key=mx.random.key(seed))
    return keys, keys + 1


def filled(kind: Any, tokens: int, *options: int) -> Any:
    cache = kind(*options)
    cache.update_and_fetch(*kv(tokens))
    mx.eval(cache.state)
    return cache


@pytest.mark.parametrize("seed", range(25))
def test_the_same_choices_as_mlx_lm(seed: int) -> None:
    """Random inserts, trims and queries over few tokens. Each fetch is given back at once, so nothing stays lent."""
    chance = random.Random(seed)
    pair = (LRUPromptCache(6, 60), stock.LRUPromptCache(6, 60))
    for _ in range(120):
        tokens = [chance.randrange(3) for _ in range(chance.randrange(1, 9))]
        model = chance.choice(["a", "b"])
        action = chance.random()
        if action < 0.5:
            trimmable = chance.random() < 0.7
            kind = chance.choice(["assistant", "user", "system"])
            for cache in pair:
                cache.insert_cache(model, list(tokens), [Plain(tokens, trimmable)], cache_type=kind)
        elif action < 0.55:
            limit = chance.randrange(1, 6)
            for cache in pair:
                cache.trim_to(n_sequences=limit)
        elif action < 0.6:
            limit = chance.randrange(5, 40)
            for cache in pair:
                cache.trim_to(n_bytes=limit)
        else:
            # mlx-lm does not refresh on fetch and never changes an entry: compare with a copy of ours.
            mine, rest = copy.deepcopy(pair[0]).fetch_nearest_cache(model, tokens)
            theirs, expected = pair[1].fetch_nearest_cache(model, tokens)
            assert rest == expected
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine[0].value == theirs[0].value == tokens[: len(tokens) - len(rest)]
        assert len(pair[0]) == len(pair[1])
        assert pair[0].nbytes == pair[1].nbytes
        assert pair[0].stats_by_type() == pair[1].stats_by_type()


def test_an_exact_hit_is_what_mlx_lm_gives_unless_a_token_must_be_left() -> None:
    index = LRUPromptCache()
    index.insert_cache(MODEL, [1, 2, 3], [Plain([1, 2, 3])])
    found, rest = index.fetch_nearest_cache(MODEL, [1, 2, 3])
    assert found is not None
    assert rest == []
    del found
    index.leave_one = True
    found, rest = index.fetch_nearest_cache(MODEL, [1, 2, 3])
    assert found is not None
    assert (found[0].value, rest) == ([1, 2], [3])
    untrimmable = LRUPromptCache()
    untrimmable.leave_one = True
    untrimmable.insert_cache(MODEL, [1, 2], [Plain([1, 2], False)])
    untrimmable.insert_cache(MODEL, [1, 2, 3], [Plain([1, 2, 3], False)])
    found, rest = untrimmable.fetch_nearest_cache(MODEL, [1, 2, 3])
    assert found is not None
    assert (found[0].value, rest) == ([1, 2], [3])


@pytest.mark.parametrize("make", [lambda n: filled(stock.KVCache, n), lambda n: filled(RotatingKVCache, n, 500)])
def test_a_conversation_is_lent_and_comes_back_under_its_longer_key(make: Any) -> None:
    index = LRUPromptCache()
    index.insert_cache(MODEL, list(range(100)), [make(100)])
    found, rest = index.fetch_nearest_cache(MODEL, list(range(105)))
    assert found is not None
    assert rest == list(range(100, 105))
    assert (len(index), index.stats()["lent"]) == (1, 1)
    found[0].update_and_fetch(*kv(5))
    index.insert_cache(MODEL, list(range(105)), found)
    assert (len(index), index.stats()["lent"]) == (1, 0)
    assert index.nbytes == found[0].nbytes
    del found
    again, rest = index.fetch_nearest_cache(MODEL, list(range(106)))
    assert again is not None
    assert (again[0].offset, rest) == (105, [105])
    assert index.stats()["copies"] == 0


def test_a_request_that_dies_gives_back_what_it_borrowed() -> None:
    index = LRUPromptCache()
    index.insert_cache(MODEL, list(range(100)), [filled(stock.KVCache, 100)])
    found, _ = index.fetch_nearest_cache(MODEL, list(range(105)))
    assert found is not None
    found[0].update_and_fetch(*kv(5))
    del found
    gc.collect()
    assert index.stats()["lent"] == 0
    found, rest = index.fetch_nearest_cache(MODEL, list(range(105)))
    assert found is not None
    assert (found[0].offset, len(rest)) == (100, 5)
    assert index.stats()["copies"] == 0


def test_what_cannot_be_restored_is_dropped() -> None:
    index = LRUPromptCache()
    index.insert_cache(MODEL, list(range(10)), [filled(RotatingKVCache, 10, 12)])
    found, _ = index.fetch_nearest_cache(MODEL, list(range(20)))
    assert found is not None
    found[0].update_and_fetch(*kv(10))
    del found
    assert index.fetch_nearest_cache(MODEL, list(range(20)))[0] is None
    assert (len(index), index.nbytes) == (0, 0)


def test_a_second_borrower_gets_a_copy_of_the_entry_as_it_was() -> None:
    index = LRUPromptCache()
    entry = filled(stock.KVCache, 100)
    before = mx.array(entry.keys[..., :100, :])
    index.insert_cache(MODEL, list(range(100)), [entry])
    first, _ = index.fetch_nearest_cache(MODEL, list(range(105)))
    assert first is not None
    first[0].update_and_fetch(*kv(5, 1))
    second, rest = index.fetch_nearest_cache(MODEL, [*range(100), 7, 7])
    assert second is not None
    assert (second[0].offset, rest) == (100, [7, 7])
    assert index.stats()["copies"] == 1
    second[0].update_and_fetch(*kv(2, 2))
    assert mx.array_equal(second[0].keys[..., :100, :], before)
    assert mx.array_equal(first[0].keys[..., 100:105, :], kv(5, 1)[0])


def test_a_second_borrower_of_what_cannot_be_trimmed_misses_with_a_reason() -> None:
    index = LRUPromptCache()
    index.insert_cache(MODEL, list(range(20)), [filled(RotatingKVCache, 20, 12)])
    first, _ = index.fetch_nearest_cache(MODEL, list(range(25)))
    assert first is not None
    first[0].update_and_fetch(*kv(5))
    assert index.fetch_nearest_cache(MODEL, list(range(25))) == (None, list(range(25)))
    assert index.stats()["misses"] == {"lent to another request": 1}


def test_caches_in_slabs_are_shared_by_any_number_of_requests() -> None:
    index = LRUPromptCache()
    index.insert_cache(MODEL, list(range(100)), [filled(KVCache, 100)])
    size = index.nbytes
    borrowed = [index.fetch_nearest_cache(MODEL, [*range(100), n])[0] for n in range(3)]
    for n, found in enumerate(borrowed):
        assert found is not None
        found[0].update_and_fetch(*kv(1, n))
    for n, found in enumerate(borrowed):
        assert found is not None
        assert mx.array_equal(found[0].keys[..., :100, :], kv(100)[0])
        assert mx.array_equal(found[0].keys[..., 100:, :], kv(1, n)[0])
    assert (index.nbytes, index.stats()["lent"], index.stats()["copies"]) == (size, 0, 0)


def test_a_diverged_conversation_is_another_entry_and_shares_bytes() -> None:
    index = LRUPromptCache()
    index.insert_cache(MODEL, list(range(100)), [filled(KVCache, 100)])
    size = index.nbytes
    found, rest = index.fetch_nearest_cache(MODEL, [*range(60), 1, 1])
    assert found is not None
    assert (found[0].offset, rest) == (60, [1, 1])
    found[0].update_and_fetch(*kv(2))
    index.insert_cache(MODEL, [*range(60), 1, 1], found)
    assert len(index) == 2
    assert index.nbytes < 2.1 * size
    assert index.fetch_nearest_cache(MODEL, list(range(101)))[1] == [100]


def test_a_fetch_makes_an_entry_young() -> None:
    index = LRUPromptCache(max_size=2)
    for first in (1, 2):
        index.insert_cache(MODEL, [first, 5], [Plain([first, 5])])
    index.fetch_nearest_cache(MODEL, [1, 5, 6])
    index.insert_cache(MODEL, [3, 5], [Plain([3, 5])])
    assert index.fetch_nearest_cache(MODEL, [1, 5, 6])[0] is not None
    assert index.fetch_nearest_cache(MODEL, [2, 5, 6])[0] is None


def test_limits_hold_after_every_call() -> None:
    index = LRUPromptCache(max_size=3, max_bytes=50)
    for n in range(20):
        index.insert_cache(MODEL, [n] * 20, [Plain([n] * 20)])
        assert len(index) <= 3
        assert index.nbytes <= 50
    index.insert_cache(MODEL, [99] * 60, [Plain([99] * 60)])
    assert index.nbytes <= 50


def test_what_a_borrower_adds_counts() -> None:
    index = LRUPromptCache(max_bytes=50)
    index.insert_cache(MODEL, [1] * 20, [Plain([1] * 20)])
    index.insert_cache(MODEL, [2] * 20, [Plain([2] * 20)])
    found, _ = index.fetch_nearest_cache(MODEL, [2] * 20)
    assert found is not None
    found[0].value += [2] * 15
    assert index.nbytes == 55
    index.fetch_nearest_cache(MODEL, [2] * 21)
    assert index.nbytes <= 50


def test_fetch_and_first_token_cost_nothing() -> None:
    """Exact, longer and shorter matches; mlx-lm takes 1.0 of the entry."""
    shape = (1, 8, 6300, 64)
    for kind in (KVCache, stock.KVCache):
        for tokens, key in ((6301, 6300), (6000, 6300), (6300, 6300)):
            index = LRUPromptCache()
            caches = [kind() for _ in range(2)]
            for cache in caches:
                cache.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
            mx.eval([cache.state for cache in caches])
            index.insert_cache(MODEL, list(range(key)), caches)
            del caches, cache
            gc.collect()
            level = mx.get_active_memory()
            mx.reset_peak_memory()
            found, _ = index.fetch_nearest_cache(MODEL, list(range(tokens)))
            assert found is not None
            token = mx.ones((1, 8, 1, 64))
            for cache in found:
                keys, values = cache.update_and_fetch(token, token)
                mx.eval(attention(token, keys, values, cache, 1.0, None))
                del keys, values
            mx.eval([cache.state for cache in found])
            # At most a new slab for 256 tokens (0.04), where another entry reads on.
            assert mx.get_peak_memory() - level < 0.06 * index.nbytes
            del found, cache


def test_rows_of_a_batch_do_not_keep_the_batch() -> None:
    shape = (4, 8, 1000, 64)
    batch: Any
    for make in (lambda: BatchRotatingKVCache(1000, [0] * 4), lambda: BatchKVCache([0] * 4)):
        batch = make()
        batch.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
        mx.eval(batch.state)
        row = batch.nbytes // 4
        level = mx.get_active_memory() - batch.nbytes
        index = LRUPromptCache()
        index.insert_cache(MODEL, list(range(1000)), [batch.extract(0)])
        del batch
        assert mx.get_active_memory() - level < 1.3 * row


def test_states_of_a_batch_do_not_keep_the_batch() -> None:
    batch = stock.ArraysCache(1)
    batch[0] = mx.random.normal((8, 100_000))
    mx.eval(batch[0])
    level = mx.get_active_memory() - batch.nbytes
    index = LRUPromptCache()
    index.insert_cache(MODEL, [1, 2], [batch.extract(3)])
    del batch
    assert mx.get_active_memory() - level < 500_000


def test_long_entries_are_found() -> None:
    index = LRUPromptCache()
    tokens = list(range(50_000))
    for n in range(8):
        index.insert_cache(MODEL, [*range(10), n, *tokens], [Plain([])])
    found, rest = index.fetch_nearest_cache(MODEL, [*range(10), 99])
    assert found is not None
    assert rest == [99]


def test_a_short_entry_does_not_keep_a_long_ones_memory() -> None:
    """The system prompt of a conversation that is gone."""
    index = LRUPromptCache()
    conversation = filled(KVCache, 2000)
    beginning = copy.deepcopy(conversation)
    beginning.trim(1990)
    index.insert_cache(MODEL, list(range(10)), [beginning], cache_type="system")
    del beginning, conversation
    size = index.nbytes
    index.max_bytes = size // 2
    index.insert_cache(MODEL, [7, 7], [Plain([7, 7])])
    assert len(index) == 2
    assert index.nbytes < size // 20
    found, _ = index.fetch_nearest_cache(MODEL, list(range(11)))
    assert found is not None
    assert mx.array_equal(found[0].keys, kv(2000)[0][..., :10, :])


def test_full_memory_takes_old_prompts_back() -> None:
    index = LRUPromptCache()
    before = SLABS._limit
    try:
        SLABS.set_limit(SLABS.used + 3 * 256 * 2 * 2 * 8 * 4)
        for n in range(10):
            index.insert_cache(MODEL, [n, 1], [filled(KVCache, 2)])
        assert 1 <= len(index) <= 3
    finally:
        SLABS._limit = before
