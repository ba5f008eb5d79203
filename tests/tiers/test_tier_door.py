"""The door for a tier: one in a dict, of which nothing else knows, in place of the disk."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from architectures import build
from onekv.config import Settings
from onekv.engine import Engine, Request
from onekv.engine.contents import read_block
from onekv.engine.view import look
from onekv.memory.figures import LOADING
from onekv.memory.plan import Plan, make_plan
from onekv.memory.pool.blocks import block_tensors, state_tensors
from onekv.tiers.base import STATES, Address, Entry, Target, TierStats

BLOCK = 16


class DictTier:
    """At most `limit` bytes; what was not used for longest goes first."""

    def __init__(self, plan: Plan, limit: int) -> None:
        kinds = {group: block_tensors(each, plan.block_size) for group, each in enumerate(plan.layout.groups)}
        kinds[STATES] = state_tensors(plan.layout)
        self.sizes = {part: sum(tensor.nbytes for tensor in tensors) for part, tensors in kinds.items()}
        self.limit, self.full = limit, 4 * plan.block_size
        # The oldest first.
        self.nodes: dict[bytes, Address] = {}
        self.parts: dict[tuple[bytes, int], bytes] = {}
        self.expected: Counter[tuple[bytes, int]] = Counter()
        self.counts: Counter[str] = Counter()
        self.closed = False

    def _bytes(self) -> int:
        return sum(map(len, self.parts.values()))

    def _entry(self, address: Address) -> Entry:
        return Entry(address, frozenset(part for key, part in self.parts if key == address.key))

    def find(self, keys: Sequence[bytes], seconds: float = 0.0) -> dict[bytes, Entry] | None:
        return {key: self._entry(self.nodes[key]) for key in keys if key in self.nodes}

    def tails(self, parent: bytes, seconds: float = 0.0) -> list[Entry] | None:
        nodes = [node for node in self.nodes.values() if node.parent == parent and len(node.tokens) < self.full]
        return [self._entry(node) for node in nodes]

    def has(self, key: bytes, part: int) -> bool:
        return (key, part) in self.parts

    def recent(self, count: int) -> list[Address]:
        return list(reversed(self.nodes.values()))[:count]

    def offer(self, address: Address, part: int, fill: Callable[[memoryview], None], wait: bool = False) -> bool:
        if (address.key, part) in self.parts:
            return True
        expected = {key for key, _ in self.expected}
        for key in [key for key in self.nodes if key not in expected]:
            if self._bytes() + self.sizes[part] <= self.limit:
                break
            self.counts["evicted"] += len(self._entry(self.nodes[key]).parts)
            self.drop([key])
        if self._bytes() + self.sizes[part] > self.limit:
            self.counts["discarded"] += 1
            return False
        fill(memoryview(data := bytearray(self.sizes[part])))
        self.parts[address.key, part] = bytes(data)
        self.nodes[address.key] = address
        self.counts.update(writes=1, written_bytes=len(data))
        return True

    def expect(self, parts: Sequence[tuple[bytes, int]]) -> None:
        self.expected.update(parts)

    def unexpect(self, parts: Sequence[tuple[bytes, int]]) -> None:
        self.expected -= Counter(parts)

    def ready(self, parts: Sequence[tuple[bytes, int]], seconds: float = 0.0) -> Sequence[tuple[bytes, int]]:
        return parts

    def read(self, targets: Sequence[Target], seconds: float = math.inf) -> list[bool | None]:
        self.unexpect([(target.key, target.part) for target in targets])
        return [self._read(target) for target in targets]

    def _read(self, target: Target) -> bool:
        data = self.parts.get((target.key, target.part))
        if data is None:
            return False
        if isinstance(target.into, bytearray):
            target.into[:] = data
        else:
            target.into(memoryview(data))
        self.counts.update(hits=1, promoted_bytes=len(data))
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self.nodes:
                self.nodes[key] = self.nodes.pop(key)

    def wants(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return []

    def computed(self, tokens: int, seconds: float) -> None:
        self.counts["computed"] += tokens

    def drop(self, keys: Sequence[bytes], wrong: bool = False) -> None:
        self.nodes = {key: node for key, node in self.nodes.items() if key not in keys}
        self.parts = {(key, part): data for (key, part), data in self.parts.items() if key not in keys}

    def clear(self) -> None:
        self.drop(list(self.nodes))

    def flush(self) -> None:
        """All is stored at once."""

    def stats(self) -> TierStats:
        names = ("hits", "promoted_bytes", "writes", "written_bytes", "evicted", "discarded", "corrupt", "queued_bytes")
        counts = {name: self.counts[name] for name in names}
        return TierStats(
            "dict", len(self.parts), self._bytes(), self.limit, promoted_seconds=0.0, failed=None, **counts
        )

    def close(self) -> None:
        self.closed = True


class LateTier(DictTier):
    """Knows only when it is asked for the third time, as one that has to ask another machine."""

    def __init__(self, plan: Plan, limit: int) -> None:
        super().__init__(plan, limit)
        self.asked: Counter[tuple[bytes, ...]] = Counter()

    def _late(self, *question: bytes) -> bool:
        self.asked[question] += 1
        return self.asked[question] <= 2

    def find(self, keys: Sequence[bytes], seconds: float = 0.0) -> dict[bytes, Entry] | None:
        return None if self._late(*keys) else super().find(keys)

    def tails(self, parent: bytes, seconds: float = 0.0) -> list[Entry] | None:
        return None if self._late(parent) else super().tails(parent)


def engine_with(model, limit: int, kind: type[DictTier] = DictTier, count: int = 1, batch: int = 1):
    """An engine whose pool holds hardly more than one of the conversations below, with `count` tiers behind it."""
    probe = make_plan(model, Settings(kv_memory="8MB", block_size=BLOCK, max_batch=1, prefill_chunk=48), None)
    size = probe.layout.groups[0].token_bytes * BLOCK * 16 * len(probe.layout.groups)
    settings = Settings(
        kv_memory=size + 12 * probe.layout.sequence_bytes, block_size=BLOCK, max_batch=batch, prefill_chunk=48
    )
    plan = make_plan(model, settings, None)
    tiers = [kind(plan, limit) for _ in range(count)]
    return Engine(model, plan, set(), settings, tiers), *tiers


def ask(engine: Engine, prompt: list[int], count: int = 4) -> Request:
    request = Request(prompt, count)
    engine.submit(request)
    while not engine.idle:
        engine.step()
    engine.check_integrity()
    return request


def stock_tokens(model, prompt: list[int], count: int = 4) -> list[int]:
    """What mlx-lm's own caches give."""
    caches, tokens = make_prompt_cache(model), prompt
    answer: list[int] = []
    while len(answer) < count:
        answer.append(int(mx.argmax(model(mx.array([tokens]), cache=caches)[0, -1])))
        tokens = answer[-1:]
    return answer


def prompt_of(seed: int, length: int = 150) -> list[int]:
    return mx.random.randint(1, 90, (length,), key=mx.random.key(seed)).tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_evicted_blocks_come_back_from_a_tier_that_is_a_dict(name):
    """Full attention, windows, and recurrent states beside it."""
    model = build(name)
    engine, tier = engine_with(model, 2**24)
    chats = [prompt_of(seed) for seed in range(5)]
    for turn in range(2):
        for number, chat in enumerate(chats):
            request = ask(engine, chat)
            assert request.tokens == stock_tokens(model, chat), (turn, number)
            # Evicted, and not computed again: whole blocks at least.
            assert request.cached_tokens >= turn * (150 // BLOCK * BLOCK), (turn, number)
            chats[number] = chat + request.tokens + prompt_of(10 * turn + number, 9)
    stats = tier.stats()
    assert engine.prefix.stats().evicted_blocks > 20 and stats.hits > 20 and stats.promoted_bytes
    assert not stats.discarded and not tier.expected
    engine.close()
    assert tier.closed


def test_a_tier_that_is_too_small_loses_blocks_and_no_tokens():
    model = build("llama")
    engine, tier = engine_with(model, 2**24)
    tier.limit = 12 * tier.sizes[0]
    for prompt in [prompt_of(1), prompt_of(2), prompt_of(3), prompt_of(2), prompt_of(1)[:100]] * 2:
        assert ask(engine, prompt).tokens == stock_tokens(model, prompt)
        assert tier.stats().bytes <= tier.limit
    assert tier.stats().evicted and tier.stats().hits
    engine.close()


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_request_looks_while_a_tier_has_no_answer_and_the_others_go_on(name):
    model = build(name)
    engine, _ = engine_with(model, 2**24, LateTier, batch=2)
    answered = [ask(engine, prompt_of(seed, 80)) for seed in range(4)]
    talker = Request(prompt_of(9, 20), 40)
    engine.submit(talker)
    while len(talker.tokens) < 3:
        engine.step()
    again = Request([*answered[0].all_tokens, *prompt_of(11, 9)], 4)
    engine.submit(again)
    states, before = [], len(talker.tokens)
    while not again.finished:
        engine.step()
        states.append(again.state)
    while not engine.idle:
        engine.step()
    assert states[:2] == ["looking", "looking"]
    assert len(talker.tokens) > before + 3
    assert again.cached_tokens >= 80 // BLOCK * BLOCK
    assert again.tokens == stock_tokens(model, again.prompt)
    assert talker.tokens == stock_tokens(model, talker.prompt, 40)
    engine.check_integrity()
    engine.close()


class SlowTier(DictTier):
    """Has nothing ready until it is told to."""

    slow = False

    def ready(self, parts: Sequence[tuple[bytes, int]], seconds: float = 0.0) -> Sequence[tuple[bytes, int]]:
        return [] if self.slow else parts


def test_blocks_on_their_way_from_a_tier_are_seen():
    engine, tier = engine_with(build("llama"), 2**24, SlowTier)
    first = ask(engine, prompt_of(1))
    for seed in range(2, 5):
        ask(engine, prompt_of(seed))
    assert LOADING not in look(engine, blocks=True).blocks[0]
    tier.slow = True
    again = Request([*first.all_tokens, *prompt_of(11, 9)], 4)
    engine.submit(again)
    while again.state != "loading":
        engine.step()
    (states,) = look(engine, blocks=True).blocks
    on_their_way = {block for block, state in enumerate(states) if state == LOADING}
    assert on_their_way == {block for _, block in engine.prefix.being_read()} and len(on_their_way) > 4
    tier.slow = False
    while not engine.idle:
        engine.step()
    assert LOADING not in look(engine, blocks=True).blocks[0] and again.cached_tokens > 100
    # What came back is still there, and the view of a block says so.
    (node, *_) = (node for node in engine.prefix.index.nodes.values() if tier.has(node.key, 0))
    with pytest.raises(StopIteration) as ended:
        next(read_block(engine, 0, node.blocks[0]))
    assert ended.value.value.tiers == ("dict",) and ended.value.value.cached
    engine.close()


def test_a_request_that_is_looking_can_be_cancelled():
    model = build("llama")
    engine, _ = engine_with(model, 2**24, LateTier)
    request = Request(prompt_of(1, 80), 4)
    engine.submit(request)
    engine.step()
    assert request.state == "looking"
    engine.cancel([request])
    assert request.finish_reason == "cancelled" and engine.idle
    engine.check_integrity()


def test_what_the_first_tier_has_no_room_for_goes_to_the_second_and_is_read_from_both():
    model = build("llama")
    engine, first, second = engine_with(model, 2**24, count=2)
    chats = [prompt_of(seed) for seed in range(5)]
    for chat in chats[:3]:
        ask(engine, chat)
    # The first is full from here on: it does not take what it does not have.
    first.offer = lambda address, part, fill, wait=False: (address.key, part) in first.parts
    for chat in chats[3:]:
        ask(engine, chat)
    for chat in chats:
        request = ask(engine, [*chat, 5, 6])
        assert request.tokens == stock_tokens(model, [*chat, 5, 6])
        assert request.cached_tokens >= 150 // BLOCK * BLOCK
    assert first.stats().hits and second.stats().hits
    assert first.parts.keys().isdisjoint(second.parts)
    engine.prefix.clear()
    assert not first.parts and not second.parts
    engine.close()
    assert first.closed and second.closed


class UnwillingTier(SlowTier):
    """Breaks the promise of `unexpect` as often as it is told to."""

    unwilling = 0

    def unexpect(self, parts: Sequence[tuple[bytes, int]]) -> None:
        if self.unwilling:
            self.unwilling -= 1
            raise ValueError("unwilling")
        super().unexpect(parts)


def test_a_tier_that_cannot_be_told_that_a_request_has_ended_is_told_again(caplog):
    engine, tier = engine_with(build("llama"), 2**24, UnwillingTier)
    first = ask(engine, prompt_of(1))
    for seed in range(2, 5):
        ask(engine, prompt_of(seed))
    tier.slow = True
    again = Request([*first.all_tokens, *prompt_of(11, 9)], 4)
    engine.submit(again)
    while again.state != "loading":
        engine.step()
    tier.unwilling = 2
    engine.cancel([again])
    assert again.finish_reason == "cancelled" and engine.idle
    engine.check_integrity()
    assert tier.expected.total()
    # The second refusal comes before the next request's parts are expected, the end of it before they are read.
    tier.slow = False
    assert ask(engine, again.prompt).cached_tokens > 100
    assert not tier.expected.total() and not tier.unwilling
    assert caplog.text.count("could not be notified") == 1
    engine.check_integrity()
    engine.close()


class BrokenTier(DictTier):
    def drop(self, keys: Sequence[bytes], wrong: bool = False) -> None:
        raise ValueError("broken")


def test_a_tier_that_cannot_drop_what_may_be_wrong_ends_the_engine_and_leaves_the_pool_sound():
    """It could serve what it still has."""
    engine, _ = engine_with(build("llama"), 2**24, BrokenTier)
    request = Request(prompt_of(1), 20)
    engine.submit(request)
    while len(request.tokens) < 3:
        engine.step()
    with pytest.raises(ValueError, match="broken"):
        engine.end(request, "error")
    engine.check_integrity()
    assert all(pool.free == pool.blocks for pool in engine.memory.pools)
    assert not any(mx.any(array).item() for pool in engine.memory.pools for array in pool.arrays())
    engine.close()
