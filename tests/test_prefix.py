"""The prefix cache: what is shared, moved, copied, evicted and counted."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest

from architectures import build
from onekv.engine import Request
from onekv.errors import MemoryBudgetError
from onekv.memory.layout import Rule
from onekv.prefix import index as prefix_index
from onekv.prefix.index import Index, as_bytes
from onekv.prefix.restore import Piece, restore_point
from test_prefix_exact import BLOCK, make_engine, run, tokens

FULL, WINDOW = Rule(), Rule(window=20)


@pytest.fixture(autouse=True)
def _plain_kernels():
    mx.disable_compile()
    yield
    mx.enable_compile()


def pieces(*held: tuple[bool, ...], tail: int = 0) -> list[Piece]:
    made = [Piece(16 * i, 16 * (i + 1), has) for i, has in enumerate(held)]
    return [*made, Piece(16 * len(held), 16 * len(held) + tail, (True,) * len(held[0]))] if tail else made


def test_full_attention_restores_all_that_matched():
    assert restore_point(pieces((True,), (True,), tail=5), [FULL], recurrent=False) == 37


def test_nothing_matched_restores_nothing():
    assert restore_point([], [FULL, WINDOW], recurrent=True) == 0


def test_a_window_restores_where_its_last_tokens_are_held():
    gone, both = (True, False), (True, True)
    # A query at 64 reads 45 to 63; one at 69 reads from 50.
    assert restore_point(pieces(gone, gone, both, both), [FULL, WINDOW], recurrent=False) == 64
    assert restore_point(pieces(gone, gone, both, both, tail=5), [FULL, WINDOW], recurrent=False) == 69
    # Without tokens 48 to 63 the next candidate is 48, which reads from 29.
    assert restore_point(pieces(both, both, both, gone), [FULL, WINDOW], recurrent=False) == 48
    assert restore_point(pieces(both, gone, both, gone), [FULL, WINDOW], recurrent=False) == 16
    assert restore_point(pieces(gone, gone, gone, gone), [FULL, WINDOW], recurrent=False) == 0


def test_kept_first_tokens_must_be_held():
    ring = Rule(window=20, keep=4)
    assert restore_point(pieces((True,), (False,), (True,), (True,)), [ring], recurrent=False) == 64
    assert restore_point(pieces((False,), (False,), (True,), (True,)), [ring], recurrent=False) == 0


def test_recurrent_layers_restore_only_at_a_snapshot():
    parts = [Piece(0, 16, (True,), True), Piece(16, 32, (True,)), Piece(32, 37, (True,))]
    assert restore_point(parts, [FULL], recurrent=True) == 16


def test_index_finds_the_longest_beginning():
    index = Index("model", 4)
    first = index.add(index.root(""), as_bytes([1, 2, 3, 4]), [7])
    second = index.add(first, as_bytes([5, 6, 7, 8]), [8])
    index.add(first, as_bytes([5, 6, 9]), [9])
    match = index.match(as_bytes([1, 2, 3, 4, 5, 6, 7, 8, 9]), "", 9)
    assert (match.nodes, match.tail, match.length) == ([first, second], None, 8)
    match = index.match(as_bytes([1, 2, 3, 4, 5, 6, 9, 9]), "", 8)
    assert (match.nodes, match.length, match.tail.blocks) == ([first], 7, [9])
    match = index.match(as_bytes([1, 2, 3, 4, 5, 6, 7, 8]), "", 7)
    assert (match.nodes, match.tail, match.length) == ([first], second, 7)
    assert index.match(as_bytes([1, 2, 3, 4]), "other", 4).length == 0


def test_index_looks_at_few_of_many_siblings(monkeypatch):
    """Thousands of conversations that part at one place: the nearest are compared, not all."""
    index = Index("model", 64)
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 3, (5000, 64)).tolist()
    for row in rows:
        index.add(index.root(""), as_bytes(row), [0])
    compared = []
    common = prefix_index.common
    monkeypatch.setattr(prefix_index, "common", lambda a, b: compared.append(a) or common(a, b))
    for wanted in generator.integers(0, 3, (20, 64)).tolist():
        compared.clear()
        match = index.match(as_bytes(wanted), "", 63)
        assert match.common == max(next(i for i in range(64) if row[i] != wanted[i]) for row in rows)
        assert len(compared) <= 2


def test_a_hash_alone_is_no_hit():
    index = Index("model", 4)
    node = index.add(index.root(""), as_bytes([1, 2, 3, 4]), [7])
    node.tokens = as_bytes([4, 3, 2, 1])
    assert index.match(as_bytes([1, 2, 3, 4]), "", 4).nodes == []


def test_a_continued_conversation_stays_one_entry():
    """Its partial block is taken over, not copied, and afterwards the longer conversation is cached, once."""
    engine = make_engine(build("llama"))
    first = run(engine, [tokens(37, 1)])[0]
    pool = engine.memory.pools[0]
    before = pool.idle
    assert before == -(-42 // BLOCK)
    tail = next(node for node in engine.prefix.index.nodes.values() if node.end == 42).blocks[0]
    request = Request([*first.all_tokens, *tokens(8, 2)], 4)
    engine.submit(request)
    engine.step()
    assert request.cached_tokens == 42
    assert request.sequence.tables[0].blocks[2] == tail
    while not engine.idle:
        engine.step()
    stored = len(request.all_tokens) - 1
    assert pool.idle == -(-stored // BLOCK)
    assert sorted(node.end for node in engine.prefix.index.nodes.values()) == [16, 32, 48, stored]


def test_eight_requests_hold_one_prefix():
    model = build("llama")
    prefix = tokens(800, 3)
    prompts = [prefix + tokens(5 + i, 10 + i) for i in range(8)]
    cold = [r.tokens for r in run(make_engine(model, prefix_cache=False, max_batch=8), prompts)]
    engine = make_engine(model, max_batch=8)
    requests = [Request(prompt, 6) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, engine.memory.pools[0].held)
    assert [r.tokens for r in requests] == cold
    assert [r.cached_tokens for r in requests] == [0] + [800] * 7
    # 50 blocks of prefix, and at most two of its own for each.
    assert most <= 800 // BLOCK + 8 * 2
    assert engine.memory.pools[0].peak_held >= most
    engine.check_integrity()


def test_equal_answers_computed_at_once_are_kept_once():
    engine = make_engine(build("llama"))
    prompt = tokens(10, 4)
    requests = run(engine, [prompt, prompt, prompt], count=60)
    assert requests[0].tokens == requests[1].tokens == requests[2].tokens
    assert engine.memory.pools[0].idle == -(-(10 + 59) // BLOCK)


@pytest.mark.parametrize(
    ("name", "memory"), [("llama", "400KB"), ("gemma3_text", "400KB"), ("qwen3_next", "400KB"), ("mamba2", "2MB")]
)
def test_least_recently_used_goes_first_and_the_budget_holds(name, memory):
    engine = make_engine(build(name), kv_memory=memory, max_batch=2, prefill_chunk=32)
    cold = make_engine(build(name), prefix_cache=False, kv_memory=memory, max_batch=2, prefill_chunk=32)
    often = tokens(60, 0)
    expected = run(cold, [often])[0].tokens
    run(engine, [often])
    for seed in range(1, 60):
        run(engine, [tokens(50 + seed % 7, seed)])
        request = run(engine, [often])[0]
        assert request.tokens == expected
        assert request.cached_tokens >= 60 - 1 - BLOCK
    stats = engine.prefix.stats()
    assert stats.evicted_blocks > 0 or not engine.memory.pools
    assert stats.snapshot_bytes <= engine.plan.snapshot_bytes
    old = run(engine, [tokens(50 + 1, 1)])[0]
    assert old.cached_tokens < 50 - BLOCK


def test_salts_do_not_share():
    engine = make_engine(build("llama"))
    prompt = tokens(50, 1)
    run(engine, [prompt], salt="a")
    assert run(engine, [prompt], salt="b")[0].cached_tokens == 0
    assert run(engine, [prompt], salt="b")[0].cached_tokens == 49
    assert engine.prefix.stats().misses == {"never seen": 1, "other salt": 1}


def test_misses_have_their_reason():
    engine = make_engine(build("llama"), kv_memory="100KB", max_batch=1, prefill_chunk=32)
    prompt = tokens(40, 1)
    run(engine, [prompt])
    for seed in range(2, 30):
        run(engine, [tokens(40, seed)])
    run(engine, [prompt])
    misses = engine.prefix.stats().misses
    assert misses["never seen"] == 29
    assert misses["evicted"] == 1


def test_pinned_prompts_stay_and_say_so_when_nothing_else_fits():
    engine = make_engine(build("llama"), kv_memory="100KB", max_batch=1, prefill_chunk=32)
    pinned = tokens(70, 1)
    run(engine, [pinned], pin=True)
    for seed in range(2, 20):
        run(engine, [tokens(40, seed)])
    assert run(engine, [pinned])[0].cached_tokens == 69
    room = engine.memory.pools[0].blocks * BLOCK
    refused = run(engine, [tokens(room - 40, 30)])[0]
    assert refused.finish_reason == "error"
    assert isinstance(refused.error, MemoryBudgetError)
    assert "pinned" in str(refused.error)
    engine.prefix.unpin(pinned)
    assert run(engine, [tokens(room - 40, 30)])[0].finish_reason == "length"


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_cancelled_request_leaves_what_it_computed(name, steps):
    model = build(name)
    engine = make_engine(model)
    prompt = tokens(150, 1)
    request = Request(prompt, 5)
    engine.submit(request)
    for _ in range(steps):
        engine.step()
    engine.cancel([request])
    engine.check_integrity()
    second = run(engine, [prompt])[0]
    # Chunks of 48 tokens, three blocks each.
    assert second.cached_tokens == 48 * steps
    assert second.tokens == run(make_engine(model, prefix_cache=False), [prompt], count=6)[0].tokens


def test_a_prefix_is_computed_once_and_taken_over_when_its_request_is_cancelled():
    model = build("llama")
    engine = make_engine(model)
    prefix = tokens(200, 1)
    first, second = Request([*prefix, 1], 4), Request([*prefix, 2, 3], 4)
    engine.submit(first)
    engine.submit(second)
    engine.step()
    engine.step()
    # Two chunks of 48 tokens: six blocks of 16 are there, and the second request has waited for them.
    assert second.lease is None
    engine.cancel([first])
    while not engine.idle:
        engine.step()
    assert second.cached_tokens == 96
    assert second.tokens == run(make_engine(model, prefix_cache=False), [second.prompt], count=4)[0].tokens
    engine.check_integrity()


def test_a_branch_that_joins_a_running_batch_does_not_move_the_pool():
    """One block is copied for it while the others' step is still in the air."""
    engine = make_engine(build("llama"))
    base = tokens(60, 1)
    run(engine, [base])
    buffers = [np.array(a.k, copy=False).ctypes.data for a in engine.memory.pools[0].layers]
    other = Request(tokens(30, 2), 20)
    engine.submit(other)
    for _ in range(5):
        engine.step()
    branch = Request([*base[:40], *tokens(9, 3)], 4)
    engine.submit(branch)
    while not engine.idle:
        engine.step()
    assert branch.cached_tokens == 40
    assert [np.array(a.k, copy=False).ctypes.data for a in engine.memory.pools[0].layers] == buffers


@pytest.mark.parametrize("name", ["qwen3_next", "llama"])
def test_an_interrupted_step_is_made_again(name, monkeypatch):
    """Some layers have their new state, others not: neither the running sequences nor the cache may keep that."""
    model = build(name)
    prompts = [tokens(30, 1), tokens(45, 2)]
    expected = [r.tokens for r in run(make_engine(model, prefix_cache=False), prompts, count=12)]
    engine = make_engine(model)
    # By operations of MLX, as qwen3_next is.
    engine.runner.compiled, engine.runner.eager = None, False
    requests = [Request(prompt, 12) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    layer = engine.memory._layers[-1]
    update = layer.update_and_fetch

    interruptions = []

    def interrupted(keys, values):
        interruptions.append(1)
        raise KeyboardInterrupt

    for step in range(200):
        if engine.idle:
            break
        monkeypatch.setattr(layer, "update_and_fetch", interrupted if step % 3 == 1 else update)
        with contextlib.suppress(KeyboardInterrupt):
            engine.step()
        engine.check_integrity()
    monkeypatch.setattr(layer, "update_and_fetch", update)
    assert len(interruptions) > 3
    assert [request.tokens for request in requests] == expected
    assert [r.tokens for r in run(engine, prompts, count=12)] == expected


def test_clear_forgets_everything():
    engine = make_engine(build("gemma3_text"))
    run(engine, [tokens(90, 1), tokens(90, 2)])
    engine.prefix.clear()
    assert engine.prefix.index.nodes == {}
    assert all(pool.free == pool.blocks for pool in engine.memory.pools)
    engine.check_integrity()


def test_a_snapshot_is_a_reference_and_dies_with_its_node():
    engine = make_engine(build("qwen3_next"))
    run(engine, [tokens(40, 1)])
    held = engine.memory.state_bytes
    assert engine.prefix.stats().snapshot_bytes > 0
    active = mx.get_active_memory()
    engine.prefix.clear()
    assert engine.prefix.stats().snapshot_bytes == 0
    assert mx.get_active_memory() < active
    assert engine.memory.state_bytes <= held


def test_a_hit_allocates_no_kv():
    """The prefix cache's promise, in bytes: a hit that ends inside a block costs that one block for a moment."""
    engine = make_engine(build("llama"))
    prompt = tokens(1000, 1)
    run(engine, [prompt])
    buffers = [np.array(a.k, copy=False).ctypes.data for a in engine.memory.pools[0].layers]
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    lease = engine.prefix.open([*prompt, *tokens(9, 2)], 1100)
    assert lease.sequence.length >= 1000
    # A block and the small arrays of indices; the pool is 60 times that.
    assert mx.get_peak_memory() - active < 2 * engine.memory.pools[0].block_bytes
    lease.finish(prompt)
    assert [np.array(a.k, copy=False).ctypes.data for a in engine.memory.pools[0].layers] == buffers
    engine.check_integrity()


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_messages_end_with_a_snapshot(name):
    """Conversations that have the first message in common start there, the first time already."""
    end = 5
    model = build(name)

    def message(length, seed):
        return [*(token if token != end else 6 for token in tokens(length - 1, seed)), end]

    first, question, answer, other = (message(n, seed) for seed, n in enumerate((40, 30, 35, 50)))

    def cached(prompt, engine):
        engine.stop_tokens = {end}
        return run(engine, [prompt], 2)[0].cached_tokens

    engine = make_engine(model)
    assert cached([*first, *question, *answer, *other], engine) == 0
    assert cached([*first, *other], engine) == 32
    # Another last message: all of the three before it, but for the part of a block.
    assert cached([*first, *question, *answer, *message(20, 9)], engine) == 96
    assert engine.prefix.stats().peak_snapshot_bytes >= engine.prefix.stats().snapshot_bytes > 0


def test_a_pin_is_taken_back_from_what_was_pinned():
    """More of the prompt is cached by the time it is unpinned; what was pinned is free again, and no more than that."""
    engine = make_engine(build("llama"))
    base = tokens(20, 1)
    run(engine, [base], count=1)
    longer = base + tokens(3, 2)
    engine.prefix.pin(longer)
    run(engine, [longer], count=1)
    engine.prefix.unpin(longer)
    engine.prefix.unpin(longer)
    engine.prefix.clear()
    assert not engine.prefix.index.nodes
    assert engine.memory.pools[0].free == engine.memory.pools[0].blocks
    engine.check_integrity()
