"""The disk tier names the nodes that were used last."""

import sqlite3

from disk_parts import address, offer, open_tier, store

from onekv.tiers.base import STATES
from onekv.tiers.folder import INDEX_FILES


def test_nodes_are_named_those_used_last_first_also_after_a_restart(root):
    tier = open_tier(root)
    assert tier.recent(10) == []
    nodes = store(tier, 6)
    assert tier.recent(10) == nodes[::-1]
    tier.touch([nodes[4].key, nodes[1].key])
    tier.close()
    tier = open_tier(root)
    assert tier.recent(4) == [nodes[1], nodes[4], nodes[5], nodes[3]]
    tier.close()
    assert tier.recent(4) == []


def test_a_node_of_several_parts_is_named_once(root):
    tier = open_tier(root)
    nodes = [address(number) for number in range(3)]
    for node in nodes:
        assert offer(tier, node) and offer(tier, node, STATES)
    tier.flush()
    assert tier.recent(10) == nodes[::-1]
    assert tier.recent(2) == nodes[:0:-1]
    tier.close()


def test_nodes_of_other_models_and_nodes_that_are_gone_are_not_named(root):
    other = open_tier(root, fingerprint="other")
    store(other, 3)
    other.close()
    tier = open_tier(root)
    nodes = store(tier, 3, first=10)
    tier.drop([nodes[2].key])
    tier.flush()
    assert tier.recent(10) == [nodes[1], nodes[0]]
    tier.clear()
    assert tier.recent(10) == []
    tier.close()


def test_an_index_that_cannot_be_read_names_nothing(root):
    tier = open_tier(root)
    store(tier, 3)
    with sqlite3.connect(root / INDEX_FILES[0]) as db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute("UPDATE parts SET tokens = x'010203'")
    assert tier.recent(10) == []
    assert tier.stats().failed is not None
    tier.close()
