"""Blocks: reserved before they are taken, adjacent where possible, counted exactly."""

import mlx.core as mx
import pytest

from onekv.memory.layout import Group, KVLayer, Rule
from onekv.memory.pool import IntegrityError, OutOfBlocks, Pool
from onekv.memory.pool.table import FORGOTTEN, Table, blocks_needed

BLOCK = 16


def make_pool(blocks: int = 20, rule: Rule = Rule()) -> Pool:  # noqa: B008
    return Pool(Group(rule, (KVLayer("layer 0", 2, 8, 8, mx.float32),)), blocks, BLOCK)


def take(pool: Pool, count: int, after: int | None = None, room: int = 0) -> list[int]:
    pool.reserve(count)
    return pool.take(count, after, room)


def test_blocks_of_one_sequence_are_adjacent():
    pool = make_pool()
    first = take(pool, 3, room=10)
    assert first == [0, 1, 2]
    assert take(pool, 2, after=2) == [3, 4]


def test_new_run_goes_where_it_fits_best():
    pool = make_pool()
    blocks = take(pool, 20)
    pool.release(blocks[2:5])
    pool.release(blocks[8:18])
    assert take(pool, 1, room=3) == [2]
    assert take(pool, 1, room=8) == [8]


def test_fragments_are_used_when_no_run_is_left():
    pool = make_pool()
    blocks = take(pool, 20)
    pool.release(blocks[::2])
    assert sorted(take(pool, 10, room=10)) == blocks[::2]
    assert pool.free == 0


def test_reserved_blocks_are_not_given_to_others():
    pool = make_pool()
    pool.reserve(15)
    with pytest.raises(OutOfBlocks, match="6 blocks of full attention asked for, 5 are available"):
        pool.reserve(6)
    pool.unreserve(15)
    assert pool.available == 20


def test_shared_block_is_free_only_after_its_last_holder():
    pool = make_pool()
    blocks = take(pool, 2)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.free == 18
    pool.release(blocks)
    assert pool.free == 20


def test_releasing_twice_is_found():
    pool = make_pool()
    blocks = take(pool, 1)
    pool.release(blocks)
    with pytest.raises(IntegrityError, match="a free block was released"):
        pool.release(blocks)
    with pytest.raises(IntegrityError, match="a free block was shared"):
        pool.share(blocks)


def test_integrity_names_the_block_that_leaked():
    pool = make_pool()
    blocks = take(pool, 2)
    pool.check_integrity(blocks, [], pool.reserved)
    with pytest.raises(IntegrityError, match="block 1 has 1 references and 0 holders"):
        pool.check_integrity(blocks[:1], [], pool.reserved)


@pytest.mark.parametrize("rule", [Rule(window=40), Rule(window=33, keep=4), Rule(chunk=20), Rule()])
@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_a_table_never_needs_more_than_it_reserved(rule, chunk):
    """Grown in every way that was promised, it holds what its rule reads and stays within its reservation."""
    pool = make_pool(40, rule)
    length = 300
    table = Table(pool, length, chunk)
    promised = pool.reserved
    assert promised == blocks_needed(rule, BLOCK, length, chunk)
    position = 0
    while position < length:
        count = min(chunk, length - position)
        table.advance(position, count)
        position += count
        assert len(table.held) + table.reserved <= promised
        assert pool.reserved == table.reserved
        readable = [*range(rule.keep), *range(rule.first(position - count), position)]
        assert all(table.blocks[p // BLOCK] != FORGOTTEN for p in readable)
        pool.check_integrity(table.held, [], table.reserved)
    table.close()
    assert (pool.free, pool.reserved) == (40, 0)


def test_blocks_out_of_the_window_return_at_once():
    pool = make_pool(40, Rule(window=32))
    table = Table(pool, 400, chunk=100)
    table.advance(0, 100)
    table.prefilled()
    table.advance(100, 1)
    # Positions 69 to 100 are read: blocks 4 to 6.
    assert table.held == table.blocks[4:]
    assert pool.free == 40 - 3
    assert pool.available == 40 - blocks_needed(Rule(window=32), BLOCK, 400, 1)


def test_a_ring_keeps_its_whole_reservation():
    pool = make_pool(40, Rule(window=28, keep=4, ring=True))
    table = Table(pool, 400, chunk=16)
    promised = pool.reserved
    table.advance(0, 16)
    table.prefilled()
    for position in range(16, 200):
        table.advance(position, 1)
        assert pool.available == 40 - promised


def test_a_copy_waits_until_mlx_has_let_go_of_what_it_read(monkeypatch):
    """Its thread may still hold the pool when it has said that it is done, and the write would copy all of it."""
    pool = make_pool(8)
    pool.reserve(2)
    source, target = pool.take(2, None, 0)
    done = []
    evaluate, synchronize = mx.eval, mx.synchronize
    monkeypatch.setattr(mx, "eval", lambda *arrays: done.append("eval") or evaluate(*arrays))
    monkeypatch.setattr(mx, "synchronize", lambda: done.append("synchronize") or synchronize())
    pool.copy(source, target)
    assert done == ["synchronize", "eval", "synchronize", "eval", "synchronize"]
