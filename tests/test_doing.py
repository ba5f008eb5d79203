"""What the engine's thread says it is doing, read while it does it; what counts as stuck; and a stop that gives up."""

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from onekv import loops
from onekv.engine import End
from onekv.engine.doing import Doing
from onekv.errors import StuckError
from test_prefix_exact import tokens
from test_thread import Collected, Running


class Gate:
    """Whoever passes waits until it is opened; `reached` tells when somebody waits."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        self.reached.set()
        assert self.open.wait(60)

    def before(self, function: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
        """`function`, whose calls pass here `when` it is so of what they are given."""

        def gated(*given: Any) -> Any:
            if when(*given):
                self()
            return function(*given)

        return gated


@pytest.mark.parametrize(
    ("name", "when", "said"),
    [
        ("store", lambda sequence, tokens: True, "prefilling for 1 request"),
        ("decode", lambda requests: len(requests) == 2, "decoding for 2 requests"),
    ],
)
def test_a_step_says_what_it_does_and_for_how_many(name: str, when: Callable[..., bool], said: str) -> None:
    with Running() as running:
        assert (str(running.thread.doing), running.thread.stuck(0)) == ("idle", False)
        gate, runner = Gate(), running.engine.runner
        setattr(runner, name, gate.before(getattr(runner, name), when))
        jobs = [Collected(tokens(9, 1), 9), Collected(tokens(9, 2), 9)]
        running.start(*jobs)
        assert gate.reached.wait(60)
        doing = running.thread.doing
        assert (str(doing), doing.what, doing.requests) == (said, "step", int(said.split()[-2]))
        assert running.thread.stuck(0) and not running.thread.stuck(3600)
        assert running.thread.doing.since == doing.since and running.thread.age() > 0
        gate.open.set()
        assert all(isinstance(job.result(), End) for job in jobs)
        while running.thread.doing.what != "idle":
            time.sleep(0.001)


def test_an_order_may_be_stuck_and_closing_is_not() -> None:
    running, order, closing = Running(), Gate(), Gate()
    running.thread.call(order)
    assert order.reached.wait(60)
    assert running.thread.doing.what == "order" and running.thread.stuck(0)
    order.open.set()
    running.engine.close = closing.before(running.engine.close, lambda: True)  # type: ignore[method-assign]
    stopping = threading.Thread(target=running.thread.stop, args=(0, 0))
    stopping.start()
    assert closing.reached.wait(60)
    assert (str(running.thread.doing), running.thread.stuck(0)) == ("storing the cache", False)
    # However short the limit is, what is cached is stored.
    stopping.join(0.5)
    assert stopping.is_alive()
    closing.open.set()
    stopping.join(60)
    assert running.thread.doing.what == "ended"


def test_stop_does_not_wait_for_a_thread_that_is_stuck() -> None:
    running, gate = Running(), Gate()
    running.engine.runner.store = gate.before(running.engine.runner.store, lambda *_: True)  # type: ignore[method-assign]
    job = Collected(tokens(9, 1), 9)
    running.start(job)
    assert gate.reached.wait(60)
    with pytest.raises(StuckError, match=r"prefilling for 1 request for \d+\.\d s, more than 0\.01 s \(--step-limit\)"):
        running.thread.stop(0, 0.01)
    # It was only slow: then it ends all the same.
    gate.open.set()
    assert isinstance(job.result(), End)
    while running.thread.doing.what != "ended":
        time.sleep(0.001)


def test_what_takes_its_time_is_not_stuck() -> None:
    assert not any(Doing(what, 0.0).stuck(1e6, 1.0) for what in ("loading", "idle", "closing", "ended"))
    assert all(Doing(what, 0.0).stuck(1e6, 1.0) for what in ("step", "order"))


def test_compiling_does_not_count(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(loops.compiled, "at", -math.inf)
    seen: list[float] = []
    monkeypatch.setattr(logging.getLogger("onekv"), "filters", [lambda record: seen.append(loops.compiled.at) or True])
    # Not one that is kept on disk: the next run would not compile it.
    loop = numba.njit(lambda number: number + 1)
    step = Doing("step", time.perf_counter())
    assert loops.call(loop, "compiled now", 3) == 4
    assert seen == [math.inf] and "compiled now" in caplog.text
    ended = loops.compiled.at
    assert step.since < ended <= time.perf_counter()
    assert step.age(ended + 2.0) == pytest.approx(2.0) and step.stuck(ended + 2.0, 1.0)
    # While it is compiled.
    loops.compiled.at = math.inf
    assert not step.stuck(1e9, 1.0)
