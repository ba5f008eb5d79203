"""The soak of `onekv bench soak`, briefly, on a server of its own: everything is as it was before."""

from onekv.bench.soak import soak


def test_soak() -> None:
    report = soak(requests=120, clients=16, seed=3)
    assert report.wrong == []
    outcomes = report.outcomes
    assert outcomes["200"] > 80
    assert outcomes["closed"] > 0
    assert sum(outcomes[status] for status in ("400", "401", "404", "413")) > 0
    assert report.tokens > 0
    assert report.hit_rate > 0
    assert report.evicted_blocks > 0
