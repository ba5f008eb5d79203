"""Buffers within a budget, whatever tier uses them."""

import threading

from onekv.tiers.staging import Staging


def test_all_buffers_together_stay_within_the_limit():
    staging = Staging(100)
    small = [staging.take(20) for _ in range(5)]
    assert all(buffer is not None for buffer in small) and staging.take(20) is None
    assert (staging.total, staging.taken) == (100, 100)
    for buffer in small[:3]:
        staging.give(buffer)
    # Two that are free give way to one of another size.
    large = staging.take(40)
    assert large is not None and len(large) == 40
    assert (staging.total, staging.taken) == (100, 80)
    assert staging.take(40) is None and staging.total <= 100


def test_a_buffer_is_used_again():
    staging = Staging(100)
    first = staging.take(60)
    first[:] = bytes(range(60))
    staging.give(first)
    assert bytes(staging.take(60)) == bytes(range(60)) and staging.total == 60


def test_what_can_never_fit_is_refused_even_if_it_may_wait():
    assert Staging(100).take(101, wait=True) is None


def test_who_waits_gets_what_is_given_back_and_nothing_once_it_is_closed():
    staging = Staging(100)
    held = staging.take(100)
    got: list[memoryview | None] = []

    def wait() -> None:
        got.append(staging.take(100, wait=True))

    for end in (lambda: staging.give(held), staging.close):
        thread = threading.Thread(target=wait)
        thread.start()
        while not staging._room._waiters:  # type: ignore[attr-defined]
            pass
        end()
        thread.join(10)
        assert not thread.is_alive()
    assert got[0] is not None and got[1] is None
    staging.give(got[0])
    assert staging.taken == 0 and staging.take(10) is None
