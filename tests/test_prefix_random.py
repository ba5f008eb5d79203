"""Random use of the prefix cache against a plain model of it.

No language model runs here: what would be computed for a token is a number made of all tokens up to it, written into
the real pool where the real table says. So a block that is shared wrongly, freed too early or restored at another
length shows as a wrong number. With a disk tier, blocks also go there and come back, over restarts, from files some of
which are damaged.
"""

import shutil
import tempfile
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from onekv.errors import MemoryBudgetError
from onekv.memory.kv import KVMemory
from onekv.memory.layout import Group, KVLayer, Layout, Rule, StateLayer
from onekv.memory.pool import OutOfBlocks
from onekv.memory.pool.table import FORGOTTEN
from onekv.prefix.cache import PrefixCache
from onekv.prefix.lease import BeingRead
from onekv.tiers.disk import DiskTier
from onekv.tiers.image import images_of

BLOCK, CHUNK, BLOCKS = 4, 6, 14
# Few different tokens: prompts often begin alike.
TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=18)
SALTS = st.sampled_from(["", "other"])


def number(tokens: list[int], salt: str) -> float:
    """Stands for the KV of the last token: depends on all before it."""
    return float(zlib.crc32(bytes(tokens) + salt.encode()) % 2**20)


def make_layout(windows: list[int | None], recurrent: bool) -> Layout:
    groups = tuple(Group(Rule(window=w), (KVLayer("layer", 1, 1, 1, mx.float32),)) for w in windows)
    states = (StateLayer("state", (((1,), mx.float32),)),) if recurrent else ()
    return Layout(groups, states, (), vocabulary=3, query_heads=1)


class Running:
    def __init__(self, lease, prompt, salt):
        self.lease, self.sequence, self.tokens, self.salt = lease, lease.sequence, list(prompt), salt


class Machine(RuleBasedStateMachine):
    layout: Layout
    tier: DiskTier | None = None

    def __init__(self):
        super().__init__()
        self.running: list[Running] = []
        self.make_cache()
        # Everything ever stored, and what was stored since the last time all was cleared.
        self.past: list[tuple[list[int], str]] = []
        self.kept: list[tuple[list[int], str]] = []
        self.pins: list[tuple[list[int], str]] = []

    def make_cache(self):
        self.memory = KVMemory(self.layout, (BLOCKS,) * len(self.layout.groups), BLOCK, CHUNK)
        self.cache = PrefixCache(self.memory, "test", snapshot_budget=10 * 4, tiers=[self.tier] if self.tier else [])

    # What the engine would do

    @rule(prompt=TOKENS, salt=SALTS, room=st.integers(1, 10))
    def submit(self, prompt, salt, room):
        self.start(prompt, salt, room)

    @precondition(lambda self: self.past)
    @rule(data=st.data(), more=TOKENS, room=st.integers(1, 6))
    def continue_or_branch(self, data, more, room):
        tokens, salt = data.draw(st.sampled_from(self.past))
        cut = data.draw(st.integers(0, len(tokens)))
        self.start(tokens[:cut] + more, salt, room)

    def start(self, prompt, salt, room):
        if len(prompt) + room > (BLOCKS - 2) * BLOCK:
            return
        evicted = self.cache.stats().evicted_blocks
        try:
            lease = self.cache.open(prompt, len(prompt) + room, salt)
        except (OutOfBlocks, BeingRead):
            return
        self.opened(lease, prompt, salt, evicted)

    def opened(self, lease, prompt, salt, evicted):
        sequence = lease.sequence
        known = max((common(prompt, tokens) for tokens, other in self.past if other == salt), default=0)
        assert sequence.length <= min(known, len(prompt) - 1)
        if not evicted and self.layout is LAYOUTS["full"]:
            # Every full block hits; the rest of a sequence only when it has ended and was not taken over.
            shared = max((common(prompt, tokens) for tokens, other in self.kept if other == salt), default=0)
            assert sequence.length >= self.least(shared, len(prompt) - 1)
        if self.layout.states and sequence.length:
            assert sequence.states[0][0].item() == number(prompt[: sequence.length], salt)
        self.running.append(Running(lease, prompt, salt))

    def least(self, shared, limit):
        return min(shared // BLOCK * BLOCK, limit)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, CHUNK), token=st.integers(1, 2))
    def compute(self, data, count, token):
        self.compute_next(data.draw(st.sampled_from(self.running)), count, token)

    def compute_next(self, run, count, token):
        sequence = run.sequence
        if sequence.length == len(run.tokens):
            run.tokens.append(token)
        room = min(len(run.tokens), sequence.max_length) - sequence.length
        if sequence.length >= len(run.tokens) - 1:
            count = 1
            sequence.prefilled()
        count = min(count, room)
        if count < 1:
            return
        run.lease.grow(count)
        self.write(run, count)
        sequence.length += count
        if self.layout.states:
            sequence.states = [[mx.array([[number(run.tokens[: sequence.length], run.salt)]])]]
        run.lease.publish(run.tokens)
        run.lease.snapshot()
        self.past.append((run.tokens[: sequence.length], run.salt))
        self.kept.append(self.past[-1])

    def write(self, run, count):
        for table in run.sequence.tables:
            arrays = table.pool.layers[0]
            for position in range(run.sequence.length, run.sequence.length + count):
                slot = table.blocks[position // BLOCK] * BLOCK + position % BLOCK
                arrays.k[:, slot : slot + 1] = mx.array(number(run.tokens[: position + 1], run.salt))
            mx.eval(arrays.k)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        """Finished or cancelled: to the cache it is the same."""
        run = data.draw(st.sampled_from(self.running))
        self.running.remove(run)
        run.lease.finish(run.tokens)

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def pin(self, data):
        tokens, salt = data.draw(st.sampled_from(self.past))
        try:
            self.cache.pin(tokens[:8], salt)
        except MemoryBudgetError:
            return
        self.pins.append((tokens[:8], salt))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        tokens, salt = data.draw(st.sampled_from(self.pins))
        self.pins.remove((tokens, salt))
        self.cache.unpin(tokens, salt)

    @rule()
    def clear(self):
        self.cache.clear()
        self.kept.clear()

    # What must hold after every step

    @invariant()
    def counts_agree(self):
        self.cache.check_integrity()

    @invariant()
    def every_running_sequence_reads_its_own_tokens(self):
        for run in self.running:
            for table in run.sequence.tables:
                stored = np.array(table.pool.layers[0].k)[0, :, 0]
                first = table.rule.first(run.sequence.length)
                for position in range(first, run.sequence.length):
                    block = table.blocks[position // BLOCK]
                    assert block != FORGOTTEN
                    expected = number(run.tokens[: position + 1], run.salt)
                    assert stored[block * BLOCK + position % BLOCK] == expected

    @invariant()
    def every_cached_block_holds_the_tokens_it_says(self):
        for salt, root in self.cache.index.roots.items():
            open_nodes = list(root.children.values())
            while open_nodes:
                node = open_nodes.pop()
                open_nodes += node.children.values()
                path = list(reversed(list(node.path())))
                tokens = np.frombuffer(b"".join(part.tokens for part in path), np.int32).tolist()
                snapshot = self.cache.snapshots.get(node.key)
                if snapshot is not None:
                    assert snapshot.states[0][0].item() == number(tokens, salt)
                for pool, block in zip(self.memory.pools, node.blocks, strict=True):
                    if block != FORGOTTEN:
                        stored = np.array(pool.layers[0].k)[0, block * BLOCK :, 0]
                        for i in range(node.end - node.start):
                            assert stored[i] == number(tokens[: node.start + i + 1], salt)

    def end_all(self):
        for run in self.running:
            run.lease.finish(run.tokens)
        self.running.clear()

    def teardown(self):
        self.end_all()
        for tokens, salt in self.pins:
            self.cache.unpin(tokens, salt)
        self.cache.clear()
        assert self.cache.index.nodes == {}
        assert all(pool.free == pool.blocks and pool.reserved == 0 for pool in self.memory.pools)


class DiskMachine(Machine):
    """The same with a disk behind it, where sequences may have to load first."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp())
        self.loading: dict[object, tuple[list[int], str, int]] = {}
        self.open_tier()
        super().__init__()

    def open_tier(self):
        self.tier = DiskTier(self.folder, "test", "test", images_of(self.layout, BLOCK), BLOCK, 2**25, 2**20)

    def least(self, shared, limit):
        # From disk a block comes whole or not at all.
        return min(shared, limit) // BLOCK * BLOCK

    def start(self, prompt, salt, room):
        # What is still on its way to the disk is not found: by chance, else.
        self.tier.flush()
        super().start(prompt, salt, room)

    def opened(self, lease, prompt, salt, evicted):
        if lease.loading is not None:
            self.loading[lease] = (prompt, salt, evicted)
        else:
            super().opened(lease, prompt, salt, evicted)

    @rule(data=st.data(), more=TOKENS, restart=st.sampled_from(["no", "killed", "closed"]))
    def talk(self, data, more, restart):
        """A whole turn, perhaps in a new process, of an old conversation or of a new one."""
        tokens, salt = data.draw(st.sampled_from(self.past)) if self.past else ([], "")
        if restart != "no":
            self.restart(restart == "killed")
        before = len(self.running) + len(self.loading)
        self.start([*tokens, *more], salt, 4)
        if len(self.running) + len(self.loading) == before:
            return
        if self.loading:
            self.collect()
        if len(self.running) > before:
            run = self.running.pop()
            while run.sequence.length < min(len(run.tokens) + 2, run.sequence.max_length):
                self.compute_next(run, CHUNK, 1)
            run.lease.finish(run.tokens)

    @precondition(lambda self: self.loading)
    @rule()
    def collect(self):
        for lease, loaded in self.cache.load(list(self.loading), 10.0):
            asked = self.loading.pop(lease)
            if loaded:
                super().opened(lease, *asked)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def cancel(self, data):
        lease = data.draw(st.sampled_from(list(self.loading)))
        del self.loading[lease]
        lease.release()

    @rule(kill=st.booleans())
    def restart(self, kill):
        """The process ends, with or without having stored what is cached, and another one goes on."""
        for lease in self.loading:
            lease.release()
        self.loading.clear()
        self.end_all()
        for tokens, salt in self.pins:
            self.cache.unpin(tokens, salt)
        self.pins.clear()
        if kill:
            self.kept.clear()
        else:
            assert all(done <= total for done, total in self.cache.store_all())
        self.tier.close()
        self.open_tier()
        self.make_cache()

    @rule(choice=st.integers(0, 10**6), place=st.floats(0, 0.999))
    def damage(self, choice, place):
        self.tier.flush()
        files = sorted(self.folder.glob("*/*/*.safetensors"))
        if files:
            file = files[choice % len(files)]
            content = bytearray(file.read_bytes())
            content[int(place * len(content))] ^= 1
            file.write_bytes(content)
            self.kept.clear()

    def teardown(self):
        for lease in self.loading:
            lease.release()
        super().teardown()
        assert self.tier.stats().failed is None
        self.tier.close()
        shutil.rmtree(self.folder)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


LAYOUTS = {
    "full": make_layout([None], recurrent=False),
    "window": make_layout([None, 6], recurrent=False),
    "window first": make_layout([6, None], recurrent=False),
    "window alone": make_layout([5], recurrent=False),
    "recurrent": make_layout([None], recurrent=True),
    "all kinds": make_layout([None, 6], recurrent=True),
    "all kinds, window first": make_layout([6, None], recurrent=True),
}


@pytest.mark.parametrize("base", [Machine, DiskMachine])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_random_use(kind, base):
    machine = type("Case", (base,), {"layout": LAYOUTS[kind]})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
