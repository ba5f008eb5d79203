"""Opening a conversation of which some is in RAM and some in the colder tier: what is held, read and left alone."""

from pathlib import Path

import mlx.core as mx
import pytest

from onekv.memory.kv import KVMemory
from onekv.memory.layout import Layout
from onekv.prefix.cache import PrefixCache
from onekv.prefix.lease import Lease
from onekv.tiers.disk import DiskTier
from onekv.tiers.image import images_of
from test_prefix_random import BLOCK, CHUNK, make_layout


class Cached:
    """A prefix cache over pools of `blocks`, with a disk behind it. What is computed is of no matter here."""

    def __init__(self, layout: Layout, blocks: tuple[int, ...], folder: Path) -> None:
        self.tier = DiskTier(folder, "test", "test", images_of(layout, BLOCK), BLOCK, 2**25, 2**20)
        self.memory = KVMemory(layout, blocks, BLOCK, CHUNK)
        self.cache = PrefixCache(self.memory, "test", 10 * 4, [self.tier])
        # Those that have not finished.
        self.leases: list[Lease] = []

    def compute(self, tokens: list[int], snapshots: bool = True) -> None:
        """Open, compute and finish a conversation."""
        lease = self.cache.open(tokens, len(tokens))
        self.leases.append(lease)
        self.load(lease)
        sequence = lease.sequence
        while sequence.length < len(tokens):
            count = min(BLOCK - sequence.length % BLOCK, len(tokens) - sequence.length)
            lease.grow(count)
            sequence.length += count
            if self.memory.layout.states:
                sequence.states = [[mx.array([[float(sequence.length)]])]]
            lease.publish(tokens)
            if snapshots:
                lease.snapshot()
        lease.finish(tokens)
        self.leases.remove(lease)

    def load(self, lease: Lease) -> None:
        while lease.loading is not None:
            self.cache.load([lease], 10.0)

    def check(self) -> None:
        self.cache.check_integrity()

    def close(self) -> None:
        self.tier.close()


@pytest.mark.parametrize("order", [[6, None], [None, 6]])
def test_making_room_for_what_is_read_does_not_evict_what_is_shared(order, tmp_path):
    """The first block is in RAM and outside of the window: its place there is needed, the block itself too."""
    layout = make_layout(order, recurrent=False)
    tokens = list(range(1, 12))
    first = Cached(layout, (8, 8), tmp_path)
    first.compute(tokens)
    list(first.cache.store_all())
    first.close()

    cached = Cached(layout, tuple(3 if window else 8 for window in order), tmp_path)
    cached.compute(tokens[:BLOCK])
    cached.compute([9] * BLOCK)
    held = cached.cache.open([77] * BLOCK, BLOCK)
    held.grow(BLOCK)
    lease = cached.cache.open([*tokens, 99], 12)
    assert lease.loading is not None
    cached.check()
    cached.load(lease)
    assert lease.sequence.length == 11
    assert min(lease.sequence.tables[order.index(None)].blocks) >= 0
    cached.check()
    for each in (lease, held):
        each.release()
    cached.check()
    cached.close()


@pytest.mark.parametrize("windows", [[None], []])
def test_the_end_of_a_conversation_is_found_beside_one_that_shares_more(windows, tmp_path):
    """A sibling that has more tokens in common has no snapshot there: the end that has one is what counts."""
    layout = make_layout(windows, recurrent=True)
    cached = Cached(layout, (20,) * len(windows), tmp_path)
    cached.compute([1, 2, 3, 4, 5, 6])
    # Pinned, so that it is not taken over by the one that goes on from it.
    cached.cache.pin([1, 2, 3, 4, 5, 6])
    cached.compute([1, 2, 3, 4, 5, 6, 7, 8])
    list(cached.cache.store_all())
    cached.tier.flush()
    prompt = [1, 2, 3, 4, 5, 6, 7, 9]
    lease = cached.cache.open(prompt, len(prompt))
    assert lease.loading is None
    assert lease.sequence.length == 6
    assert lease.sequence.states[0][0].item() == 6
    lease.release()
    cached.check()
    cached.close()


def test_what_fails_while_a_sequence_is_opened_leaves_nothing_held(tmp_path):
    """Blocks that were shared, promised or taken before the failure are given back."""
    layout = make_layout([None, 6], recurrent=False)
    cached = Cached(layout, (4, 4), tmp_path)
    cached.compute(list(range(1, 12)))

    def fails(*_, **__):
        raise OSError("the tier is out of order")

    cached.tier.offer = fails
    with pytest.raises(OSError, match="out of order"):
        cached.compute([50 + i for i in range(12)])
    for lease in cached.leases:
        lease.release()
    assert not any(pool.held for pool in cached.memory.pools)
    cached.check()
    assert all(pool.reserved == 0 for pool in cached.memory.pools)
    cached.close()


def test_what_a_lease_takes_back_is_free_again_and_what_it_published_stays(tmp_path):
    layout = make_layout([None, 6], recurrent=False)
    cached = Cached(layout, (8, 8), tmp_path)
    lease = cached.cache.open(list(range(1, 12)), 20)
    lease.grow(2 * BLOCK)
    lease.sequence.length = 2 * BLOCK
    lease.publish(list(range(1, 12)))
    held = [pool.held for pool in cached.memory.pools]
    lease.grow(BLOCK + 1)
    lease.sequence.length += BLOCK + 1
    assert [pool.held for pool in cached.memory.pools] > held
    lease.truncate(2 * BLOCK)
    assert [pool.held for pool in cached.memory.pools] == held and lease.sequence.length == 2 * BLOCK
    cached.check()
    with pytest.raises(AssertionError, match="published"):
        lease.truncate(2 * BLOCK - 1)
    lease.release()
    cached.check()
    cached.close()
