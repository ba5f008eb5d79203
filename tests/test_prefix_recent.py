"""After a restart: the tokens that the disk holds are known under the salt they were stored with, and proposed."""

from dataclasses import replace

import pytest

from onekv.engine.request import Request
from onekv.engine.speculation.log import Match
from onekv.engine.speculation.lookup import Lookup
from onekv.memory.kv import KVMemory
from onekv.prefix.cache import PrefixCache
from onekv.prefix.index import Index, address_of, as_bytes
from onekv.prefix.recent import Recent
from onekv.tiers.disk import DiskTier
from onekv.tiers.image import images_of
from test_prefix_random import BLOCK, CHUNK, make_layout

LAYOUT = make_layout([None, 6], recurrent=False)
CHAT = list(range(100, 119))


@pytest.fixture
def cache(tmp_path):
    """A cache over what the disk has; `cache()` again is a restart, which stores everything before."""
    opened: list[tuple[PrefixCache, DiskTier]] = []

    def close() -> None:
        for cache, tier in opened:
            list(cache.store_all())
            tier.close()
        opened.clear()

    def start(enabled: bool = True) -> PrefixCache:
        close()
        tier = DiskTier(tmp_path, "test", "test", images_of(LAYOUT, BLOCK), BLOCK, 2**25, 2**20)
        memory = KVMemory(LAYOUT, (60, 60), BLOCK, CHUNK)
        opened.append((PrefixCache(memory, "test", 0, [tier], enabled=enabled), tier))
        return opened[0][0]

    yield start
    close()


def compute(cache: PrefixCache, tokens: list[int], salt: str = "") -> None:
    lease = cache.open(tokens, len(tokens), salt)
    while lease.sequence.length < len(tokens):
        count = min(BLOCK - lease.sequence.length % BLOCK, len(tokens) - lease.sequence.length)
        lease.grow(count)
        lease.sequence.length += count
        lease.publish(tokens)
    lease.finish(tokens)


def taken(recent: Recent, salt: str) -> list[list[int]]:
    return [run.tolist() for run in recent.take(salt)]


def test_what_was_stored_is_known_after_a_restart_under_its_salt_alone(cache):
    first = cache()
    assert taken(first.recent(100), "") == []
    compute(first, CHAT)
    compute(first, [token + 100 for token in CHAT], "other")
    recent = cache().recent(100)
    assert taken(recent, "another") == []
    assert taken(recent, "other") == [[token + 100 for token in CHAT]]
    assert taken(recent, "") == [CHAT]
    # Once.
    assert taken(recent, "") == []


def test_a_proposal_comes_from_what_the_disk_holds(cache):
    compute(cache(), CHAT)
    recent, lookup = cache().recent(100), Lookup()
    for run in recent.take(""):
        lookup.learn_tokens("", run)
    assert lookup.propose(Request([1, *CHAT[5:9]], 8), 3) == Match(4, CHAT[9:12])
    assert lookup.propose(Request([1, *CHAT[5:9]], 8, salt="other"), 3) is None


def test_what_conversations_have_in_common_is_told_once(cache):
    first = cache()
    compute(first, CHAT)
    compute(first, [*CHAT[:10], 7, 8, 9])
    runs = taken(cache().recent(100), "")
    # The second branches off in the third block, and has the one before it to go on from; it was used last.
    assert runs == [CHAT, [*CHAT[4:10], 7, 8, 9]]


def test_those_used_last_are_told_within_the_bound(cache):
    first = cache()
    for number in range(5):
        compute(first, [1000 * number + token for token in range(12)])
    recent = cache().recent(24)
    assert taken(recent, "") == [[1000 * number + token for token in range(12)] for number in (3, 4)]


def test_nodes_whose_beginning_or_key_is_not_right_are_nobodys():
    index = Index("test", BLOCK)
    node, nodes = index.root(""), []
    for start in range(0, 12, BLOCK):
        node = index.add(node, as_bytes(CHAT[start : start + BLOCK]), [])
        nodes.append(address_of(node))
    assert taken(Recent(index, nodes), "") == [CHAT[:12]]
    # Of nobody, and not kept for anybody.
    assert Recent(index, nodes[1:])._runs == {}
    wrong = replace(nodes[2], tokens=as_bytes([1, 2, 3, 4]))
    assert taken(Recent(index, [*nodes[:2], wrong]), "") == [CHAT[:8]]
    # Claimed to be a beginning.
    assert taken(Recent(index, [replace(nodes[1], start=0)]), "") == []
    assert taken(Recent(index, [replace(nodes[0], parent=index.root("other").key)]), "other") == []


def test_nothing_is_told_where_the_cache_is_off(cache):
    compute(cache(), CHAT)
    assert taken(cache(enabled=False).recent(100), "") == []
    assert taken(cache().recent(100), "") == [CHAT]
