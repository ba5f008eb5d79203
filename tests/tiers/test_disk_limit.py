"""The disk tier keeps within its limits, of bytes, of its queue and of a day, and what it evicts is the oldest."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from disk_parts import (
    MB,
    address,
    files,
    image,
    offer,
    open_tier,
    store,
)

from onekv.tiers.base import STATES
from onekv.tiers.files import Clock
from onekv.tiers.opened import RECENT

SIZE = image().size


def test_order_of_use_survives_a_restart(root):
    limit = 2 * MB + 6 * SIZE
    tier = open_tier(root, limit)
    nodes = store(tier, 6)
    tier.touch([nodes[0].key, nodes[3].key])
    tier.close()
    tier = open_tier(root, limit)
    tier.touch([nodes[1].key])
    more = store(tier, 20, first=100)
    evicted = tier.stats().evicted
    assert evicted
    there = tier.find([where.key for where in nodes + more])
    order = [nodes[2], nodes[4], nodes[5], nodes[0], nodes[3], nodes[1], *more]
    assert [where.key in there for where in order] == [False] * evicted + [True] * (26 - evicted)
    assert len(files(root)) == 26 - evicted
    tier.close()


def test_parents_outlive_children_that_were_touched_before_them(root):
    tier = open_tier(root, 3 * MB)
    # As many as fit.
    while not tier.stats().evicted:
        store(tier, 1, first=tier.stats().writes)
    nodes = [address(number) for number in range(1, tier.stats().writes)]
    assert len(tier.find([where.key for where in nodes])) == len(nodes) > 5
    tier.touch([where.key for where in reversed(nodes)])
    store(tier, 3, first=100)
    there = tier.find([where.key for where in nodes])
    assert [where.key in there for where in nodes] == [True] * (len(nodes) - 3) + [False] * 3
    tier.close()


class LaterClock(Clock):
    """The system's, and some seconds more."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def now(self) -> float:
        return super().now() + self._seconds


def test_models_that_are_not_used_any_more_are_evicted_too(root):
    tier = open_tier(root, 3 * MB)
    store(tier, 10)
    tier.close()
    later = LaterClock(RECENT + 60)
    tier = open_tier(root, 3 * MB, fingerprint="another", clock=later)
    store(tier, 60, first=100)
    tier.close()
    tier = open_tier(root, 3 * MB, clock=later)
    assert tier.find([address(number).key for number in range(10)]) == {}
    assert tier.stats().blocks == len(files(root))
    tier.close()


def used_bytes(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def test_limit_holds_at_every_instant(root):
    limit = 4 * MB
    tier = open_tier(root, limit)
    most, running = [0], [True]

    def look() -> None:
        while running[0]:
            most[0] = max(most[0], used_bytes(root))

    watcher = threading.Thread(target=look)
    watcher.start()
    for number in range(400):
        offer(tier, address(number), 0 if number % 3 else STATES)
        if number % 7 == 0:
            tier.touch([address(i).key for i in range(max(0, number - 60), number)])
    tier.close()
    running[0] = False
    watcher.join()
    assert limit // 2 < most[0] <= limit
    assert tier.stats().evicted > 100 and tier.stats().discarded == 0
    assert tier.stats().bytes == used_bytes(root)


def test_a_lower_limit_holds_from_the_start(root):
    tier = open_tier(root, 20 * MB)
    nodes = store(tier, 100)
    tier.close()
    tier = open_tier(root, 3 * MB)
    assert used_bytes(root) <= 3 * MB
    there = tier.find([where.key for where in nodes])
    assert there and nodes[-1].key in there and nodes[0].key not in there
    tier.close()


def test_a_part_larger_than_the_limit_evicts_nothing(root):
    tier = open_tier(root, 4 * MB, images={0: image(), 1: image(5 * MB)})
    store(tier, 5)
    assert offer(tier, address(50), 1)
    tier.flush()
    stats = tier.stats()
    assert (stats.discarded, stats.evicted, stats.blocks) == (1, 0, 5)
    tier.close()


def test_full_queue_discards_at_once_and_counts(root):
    tier = open_tier(root, staging=4 * SIZE)
    answers = []

    def fill(view: memoryview) -> None:
        # While a buffer is being filled nothing of it can be written: offers from within see a full queue.
        number = len(answers)
        if number < 5:
            answers.append(None)
            answers[number] = tier.offer(address(number), 0, fill)

    # One that waited for a buffer would do so for ever.
    assert tier.offer(address(99), 0, fill)
    assert answers == [True, True, True, False, None] or answers.count(False) == 1
    assert tier.stats().discarded == 1
    tier.flush()
    assert tier.stats().writes == 4
    tier.close()


def test_buffers_stay_within_staging_and_are_reused(root):
    tier = open_tier(root, staging=3 * SIZE)
    staging = tier._shared.staging
    for number in range(100):
        assert offer(tier, address(number), STATES if number % 5 == 0 else 0)
        assert staging.total <= 3 * SIZE
        assert tier.stats().queued_bytes <= 3 * SIZE
    tier.flush()
    assert tier.stats().queued_bytes == 0 and tier.stats().writes == 100
    assert not offer(open_tier(root.parent / "small", staging=SIZE - 1), address(0))
    tier.close()


def test_an_error_of_fill_passes_on_and_the_buffer_is_free_again(root):
    tier = open_tier(root, staging=SIZE)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            tier.offer(address(0), 0, lambda view: 1 // 0)
    assert not tier.has(address(0).key, 0)
    assert offer(tier, address(0), wait=False)
    tier.close()


def test_write_budget_of_a_day_holds_over_restarts(root, caplog):
    for _ in range(2):
        tier = open_tier(root, write_budget=5 * SIZE)
        for number in range(10):
            offer(tier, address(number))
        tier.close()
    assert tier.stats().discarded == 5 and tier.stats().writes == 0
    assert len(files(root)) == 5
    assert len([record for record in caplog.records if "budget" in record.message]) == 2, "once per tier"
