"""KV events: a router with an index of its own, made of what it reads, has what the engine has whenever it is idle."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from router import Block, Router

from architectures import VOCAB, build
from onekv.llm import LLM
from onekv.prefix.events import Cleared, Event, Removed, Stored, Unsent
from onekv.server.events import publisher as publishing
from onekv.server.events.publisher import Publisher

PAGE = Path(__file__).parents[2] / "docs" / "events.md"


@pytest.fixture
def publisher(sockets: str) -> Iterator[Callable[..., Publisher]]:
    """Makes publishers, which are closed at the test's end."""
    made: list[Publisher] = []

    def make(buffer: int = 10_000, with_tokens: bool = True) -> Publisher:
        name = f"{sockets}/{len(made)}"
        made.append(Publisher(f"{name}.live", "kv@here@tiny", f"{name}.replay", buffer, with_tokens))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert "onekv-events" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def router() -> Iterator[Callable[..., Router]]:
    made: list[Router] = []

    def make(publisher: Publisher, **options: Any) -> Router:
        made.append(Router(publisher.endpoint, publisher.replay_endpoint, **options))
        made[-1].catch_up()
        join(publisher, made[-1])
        return made[-1]

    yield make
    for each in made:
        each.close()


def join(stream: Publisher, reader: Router) -> None:
    """Until a subscriber is connected ZeroMQ drops what is sent, and nobody can tell when it is."""
    there = False
    while not reader.read(0.02) or there:
        tell(stream, removed(0) if there else stored(0))
        there = not there
    while reader.read(0.02):
        pass
    reader.gaps.clear()
    reader.events.clear()


def number(key: bytes) -> int:
    return int.from_bytes(key[8:], "big")


def cached_blocks(llm: LLM) -> dict[int, Block]:
    """The whole blocks of the engine's own index, found from its roots on."""
    index = llm.engine.prefix.index
    found: dict[int, Block] = {}
    open_nodes = [(root, None) for root in index.roots.values()]
    while open_nodes:
        node, before = open_nodes.pop()
        key = None if node.parent is None else number(node.key)
        open_nodes += [(child, key) for child in node.children.values()]
        if key is not None and index.full(node):
            found[key] = (before, tuple(np.frombuffer(node.tokens, np.int32).tolist()))
    return found


def tiny(publisher: Publisher, name: str = "llama", **settings: Any) -> LLM:
    mx.random.seed(1)
    llm = LLM(
        model=build(name), kv_memory="256KiB", block_size=4, max_batch=3, prefill_chunk=32, progress=False, **settings
    )
    llm.engine.prefix.listen(publisher.unsent.add)
    return llm


def some_traffic(llm: LLM, chance: random.Random, talks: list[list[int]]) -> str:
    """One thing that users do; what it was."""
    what = chance.choices(("new", "go on", "fork", "several", "pin", "clear"), (4, 5, 4, 2, 1, 0.6))[0]
    fresh = [[chance.randrange(VOCAB) for _ in range(chance.randint(3, 40))] for _ in range(3)]
    salt = chance.choice(("", "", "other"))
    if what == "clear":
        llm.clear_cache()
        return what
    prompts = fresh if what == "several" else fresh[:1]
    if what in ("go on", "fork") and talks:
        talk = chance.choice(talks)
        prompts = [(talk if what == "go on" else talk[: chance.randint(1, len(talk))]) + fresh[0][:12]]
    options = {"temperature": 0, "salt": salt, "pin": what == "pin"}
    answers = llm.generate(prompts, max_tokens=chance.randint(1, 9), **options)
    if what == "pin":
        llm.clear_cache()
        llm.unpin(prompts[0], salt)
    talks += [prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]
    talks[:] = [talk for talk in talks[-12:] if len(talk) < 100]
    return what


@pytest.mark.parametrize(("name", "seed"), [("llama", 1), ("gemma3_text", 2), ("qwen3_next", 3)])
def test_a_router_has_what_the_engine_has(publisher, router, tmp_path, name, seed):
    """Small pools, forks, salts, pins, clearing; and restarts, after which blocks come back from disk."""
    stream, chance, talks = publisher(), random.Random(seed), []
    early = router(stream)
    disk = {"disk_cache": str(tmp_path / "kv"), "disk_limit": "64MiB"}
    done: list[str] = []
    for _ in range(2):
        with tiny(stream, name, **disk) as llm:
            for _ in range(20):
                done.append(some_traffic(llm, chance, talks))
                early.settle(cached_blocks(llm))
            evicted = llm.stats().prefix.evicted_blocks
            late = router(stream)
            late.catch_up()
            late.settle(cached_blocks(llm))
        early.settle({})
        assert evicted
    assert {"new", "go on", "fork", "several"} <= set(done)
    assert {event[0] for event in early.events} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert early.topics == {"kv@here@tiny"}


@pytest.mark.parametrize(("name", "seed"), [("llama", 4), ("gemma3_text", 5), ("qwen3_next", 6)])
def test_at_every_point_a_recorded_stream_is_what_the_index_was(publisher, router, monkeypatch, name, seed):
    """While requests run, too: each message takes its reader to a state that the index had, in order."""
    # So that a message has what several steps have done, and ends in the midst of one.
    monkeypatch.setattr(publishing, "TOGETHER_S", 0.05)
    stream, chance, talks = publisher(), random.Random(seed), []
    reader = router(stream)
    reader.history.clear()
    with tiny(stream, name) as llm:
        states = [cached_blocks(llm)]

        def noted(event: Event) -> None:
            wait = chance.random() < 0.15
            stream.unsent.add(event)
            states.append(cached_blocks(llm))
            # Until that is sent, if it has not undone what was to be sent.
            while wait and (stream.unsent._since or stream.unsent._cleared):
                time.sleep(0.01)

        llm.engine.prefix.listen(noted)
        for _ in range(30):
            some_traffic(llm, chance, talks)
        llm.engine.prefix.index.listener = None
        # All of it, as it was recorded.
        while reader.blocks != states[-1]:
            reader.catch_up()
    at = 0
    for had in reader.history:
        at = states.index(had, at)
    assert len(reader.history) > 20 and at == len(states) - 1


def test_a_restored_block_is_told_again(publisher, router, tmp_path):
    stream = publisher()
    reader = router(stream)
    prompt = list(range(1, 41))
    for expected in (0, 36):
        with tiny(stream, disk_cache=str(tmp_path / "kv"), disk_limit="64MiB") as llm:
            assert llm.generate(prompt, max_tokens=1, temperature=0).cached_tokens == expected
            there = cached_blocks(llm)
            reader.settle(there)
            assert [tokens for _, tokens in there.values()].count((1, 2, 3, 4)) == 1


def test_a_first_block_has_no_parent_and_salts_have_blocks_of_their_own(publisher, router):
    stream = publisher()
    reader = router(stream)
    with tiny(stream) as llm:
        for salt in ("", "secret"):
            llm.generate(list(range(1, 10)), max_tokens=1, temperature=0, salt=salt)
        reader.settle(cached_blocks(llm))
        firsts = [block for block, (parent, _) in reader.blocks.items() if parent is None]
        roots = {number(root.key) for root in llm.engine.prefix.index.roots.values()}
    assert len(firsts) == 2
    told = {value for event in reader.events for field in event[1:3] for value in np.atleast_1d(field)}
    assert not roots & told, "a root's key is made of the salt alone"


def test_without_tokens(publisher, router):
    stream = publisher(with_tokens=False)
    reader = router(stream)
    with tiny(stream) as llm:
        llm.generate(list(range(1, 30)), max_tokens=4, temperature=0)
        reader.settle({key: (parent, ()) for key, (parent, _) in cached_blocks(llm).items()})
    assert all(event[3] == [] and event[4] == 4 for event in reader.events if event[0] == "BlockStored")


# What a subscriber misses


def stored(name: int, parent: int | None = None) -> Stored:
    key = name.to_bytes(16, "big")
    return Stored(key, None if parent is None else parent.to_bytes(16, "big"), np.full(4, name, np.int32).tobytes())


# The tokens of a block that takes 6 kB in a message.
LARGE = np.full(2000, 50_000, np.int32).tobytes()


def removed(name: int) -> Removed:
    return Removed(name.to_bytes(16, "big"))


def tell(stream: Publisher, *events: Any) -> None:
    """In a message of their own."""
    before = stream.stats().batches
    for event in events:
        stream.unsent.add(event)
    deadline = time.monotonic() + 30
    while stream.stats().batches == before:
        assert time.monotonic() < deadline


def blocks_of(*names: int) -> dict[int, Block]:
    return {name: (None, (name,) * 4) for name in names}


def test_a_gap_is_replayed(publisher, router):
    stream = publisher()
    reader = router(stream)
    tell(stream, stored(1))
    reader.settle(blocks_of(1))
    reader._live.disconnect(reader.live)
    for name in (2, 3):
        tell(stream, stored(name))
    tell(stream, removed(2))
    reader._live.connect(reader.live)
    before = stream.stats()
    join(stream, reader)
    reader.settle(blocks_of(1, 3))
    # The one other is the first, before there was anything.
    assert stream.stats().replays == before.replays + 1 and stream.stats().snapshots == before.snapshots == 1
    # Nothing is missing: only the end comes.
    assert reader.catch_up() == 0


def test_who_missed_more_than_is_kept_gets_all_there_is(publisher, router):
    stream = publisher(buffer=3)
    for name in range(1, 9):
        tell(stream, stored(name))
    tell(stream, removed(8), stored(9, parent=1))
    reader = Router(stream.endpoint, stream.replay_endpoint)
    assert reader.catch_up() == 1 and stream.stats().snapshots == 1
    assert reader.events[0] == ["AllBlocksCleared"]
    there = {**blocks_of(*range(1, 8)), 9: (1, (9,) * 4)}
    assert reader.blocks == there
    # What is sent from then on follows; who comes from another process has nothing that counts.
    tell(stream, removed(9))
    late = Router(stream.endpoint, stream.replay_endpoint)
    late.last = reader.last + 1000
    assert late.catch_up() == 1 and late.blocks == blocks_of(*range(1, 8))
    late.close()
    assert reader.catch_up() == 1
    assert reader.blocks == blocks_of(*range(1, 8))
    reader.close()


def test_a_subscriber_that_is_too_slow_sees_it_and_loses_nothing(publisher, router, monkeypatch):
    monkeypatch.setattr(publishing, "WAITING_MESSAGES", 5)
    stream = publisher()
    reader = router(stream, waiting=5)
    tell(stream, stored(1))
    reader.settle(blocks_of(1))
    # Sockets buffer, too: 5 MB in all fill that.
    names = range(100, 140)
    for name in names:
        tell(stream, *(Stored(bytes([name, at]) * 8, None, LARGE) for at in range(20)))
    tell(stream, *(Removed(bytes([name, at]) * 8) for name in names for at in range(20)))
    while reader.read(0.2):
        pass
    tell(stream, stored(5))
    reader.settle(blocks_of(1, 5))
    assert reader.gaps


def test_requests_that_are_none_do_no_harm(publisher, router):
    stream = publisher()
    reader = router(stream)
    for parts in ([b"x"], [b"", b"short"], [b"", b"", b"\0" * 8], [b"x", b"\0" * 8]):
        reader._replay.send_multipart(parts)
    tell(stream, stored(1))
    reader.catch_up()
    assert reader.blocks == blocks_of(1)


def test_what_nobody_took_is_bounded_and_true():
    """Whoever takes seldom gets the difference: not more than there was and is."""
    chance, unsent = random.Random(5), Unsent()
    there: dict[int, int | None] = {}
    copy: dict[int, int | None] = {}
    waiting = 0
    # A block's name stands for all before it, so it always follows the same one.
    parents = {name: name // 3 or None for name in range(1, 60)}
    for _ in range(3000):
        leaves = [name for name in there if name not in there.values()]
        if leaves and chance.random() < 0.48:
            gone = chance.choice(leaves)
            del there[gone]
            unsent.add(removed(gone))
        elif (name := chance.randrange(1, 60)) not in there and parents[name] in (None, *there):
            there[name] = parents[name]
            unsent.add(stored(name, there[name]))
        if chance.random() < 0.01:
            for name in sorted(there, key=lambda name: -list(there).index(name)):
                unsent.add(removed(name))
            there.clear()
            unsent.add(Cleared())
        if chance.random() < 0.02:
            taken = unsent.take()
            waiting = max(waiting, len(taken))
            for event in taken:
                if isinstance(event, Cleared):
                    copy.clear()
                elif isinstance(event, Stored):
                    parent = None if event.parent is None else number(event.parent)
                    assert number(event.key) not in copy and (parent is None or parent in copy)
                    copy[number(event.key)] = parent
                else:
                    assert number(event.key) not in copy.values()
                    del copy[number(event.key)]
            assert copy == there
    assert unsent.undone and waiting <= 2 * 60 + 1
