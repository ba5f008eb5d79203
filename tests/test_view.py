"""Looking at the engine from other threads: an immutable picture, without waiting for a step."""

import dataclasses
import threading
import time

import pytest

from onekv.engine.view import View
from test_prefix import tokens
from test_thread import Collected, Running


def wait_for(thread, wanted, nodes: bool = False) -> View:
    """Look until the picture is as wanted."""
    for _ in range(600):
        view = thread.look(nodes)
        if wanted(view):
            return view
        time.sleep(0.05)
    raise AssertionError(f"the picture never was as wanted: {view}")


def test_who_looks_does_not_wait_for_a_step():
    """The model is stopped in the midst of a step: the picture from before it is there, and stays."""
    inside, go_on = threading.Event(), threading.Event()
    with Running(max_batch=2) as running:
        model = running.engine.runner.model

        def stops(inputs, cache):
            if inputs.shape[1] > 20:
                inside.set()
                assert go_on.wait(60)
            return model(inputs, cache=cache)

        running.thread.call(lambda engine: setattr(engine.runner, "model", stops)).result(60)
        talker = Collected(tokens(9, 1), 4000)
        running.start(talker)
        view = wait_for(running.thread, lambda view: view.requests and view.requests[0].generated_tokens > 3)
        (request,) = view.requests
        assert (request.state, request.prompt_tokens, request.max_tokens) == ("running", 9, 4000)
        assert request.stored_tokens >= 9 and request.age > 0
        assert view.stats.running == 1 and view.stats.pools[0].held > 0
        late = Collected(tokens(30, 2), 4)
        running.start(late)
        assert inside.wait(60)
        before = running.thread.look()
        assert running.thread.look() is before
        assert before.requests[0].generated_tokens >= request.generated_tokens
        # What was given out does not change.
        assert view.requests == (request,)
        with pytest.raises(dataclasses.FrozenInstanceError):
            view.stats.waiting = 7
        go_on.set()
        running.thread.cancel([talker.job])
        late.result()
        done = wait_for(running.thread, lambda view: not view.requests)
        assert done.stats.running == 0 and done.stats.pools[0].held == 0


def test_the_prefix_tree_is_in_the_picture_for_who_wants_it():
    with Running() as running:
        job = Collected(tokens(40, 1), 4)
        running.start(job)
        job.result()
        assert running.thread.look().nodes is None
        view = wait_for(running.thread, lambda view: view.nodes is not None and not view.requests, nodes=True)
        nodes = {node.key: node for node in view.nodes}
        assert nodes.keys() == running.engine.prefix.index.nodes.keys()
        assert max(node.end for node in view.nodes) == 43
        for node in view.nodes:
            assert node.start == (0 if node.parent is None else nodes[node.parent].end)
            assert all(node.held) and not node.pins and not node.leases and not node.snapshot
        running.thread.call(lambda engine: engine.prefix.clear()).result(60)
        assert wait_for(running.thread, lambda view: view.nodes == (), nodes=True).stats.prefix.nodes == 0


def test_an_idle_engine_is_looked_at_anew_while_somebody_watches():
    with Running() as running:
        first = running.thread.look()
        later = wait_for(running.thread, lambda view: view.time > first.time)
        assert wait_for(running.thread, lambda view: view.time > later.time).requests == ()
