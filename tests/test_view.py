"""Looking at the engine from other threads: an immutable picture, without waiting for a step."""

import dataclasses
import threading
import time

import pytest

from onekv.engine import contents
from onekv.engine.view import View
from onekv.prefix.index import as_tokens
from test_prefix import tokens
from test_thread import Collected, Running


def wait_for(thread, wanted) -> View:
    """Look until the picture is as wanted."""
    for _ in range(600):
        view = thread.look()
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


def test_the_prefix_tree_is_read_in_slices(monkeypatch):
    """What is evicted between two of them is left out; the tree of an engine that runs has all of its nodes."""
    monkeypatch.setattr(contents, "COPIED", 1)
    with Running() as running:
        job = Collected(tokens(40, 1), 4)
        running.start(job)
        job.result()

        def read(engine):
            slices, index = contents.read_tree(engine), engine.prefix.index
            assert len(list(slices)) == len(index.nodes) > 2
            slices = contents.read_tree(engine)
            next(slices)
            gone = len(index.nodes) - 1
            engine.prefix.forget()
            with pytest.raises(StopIteration) as ended:
                for _ in range(gone + 1):
                    next(slices)
            return ended.value.value

        before = running.thread.call(lambda engine: dict(engine.prefix.index.nodes)).result(60)
        tree = running.thread.call(read).result(60)
        (node,) = tree.nodes
        known = before[node.key]
        assert (node.start, node.end, node.tokens) == (known.start, known.end, known.tokens)
        assert tree.salts[node.parent] == "" and not node.pins and not node.leases and node.used_at <= tree.time
        assert not tree.pinned and tree.seconds > 0


def test_a_block_in_use_has_the_tokens_of_its_request():
    with Running(max_batch=2) as running:
        prompt = tokens(40, 1)
        talker = Collected(prompt, 4000)
        running.start(talker)
        wait_for(running.thread, lambda view: view.requests and view.requests[0].generated_tokens > 3)

        def read(engine):
            (request,) = engine.scheduler.running
            size, found = engine.plan.block_size, {}
            for place, block in enumerate(request.sequence.tables[0].blocks):
                slices = contents.read_block(engine, 0, block)
                with pytest.raises(StopIteration) as ended:
                    next(slices)
                found[place * size] = ended.value.value
            return id(request), request.all_tokens, request.stored, found

        number, known, stored, found = running.thread.call(read).result(60)
        assert all(block.requests == (number,) and block.start == start for start, block in found.items())
        said = [token for block in found.values() for token in as_tokens(block.tokens)]
        assert said == known[:stored] and said[: len(prompt)] == prompt
        # Full blocks can be found by others already, and others cannot.
        size = sorted(found)[1]
        assert [block.cached for block in found.values()] == [start + size <= stored for start in found]
        running.thread.cancel([talker.job])
        talker.result()


def test_an_idle_engine_is_looked_at_anew_while_somebody_watches():
    with Running() as running:
        first = running.thread.look()
        later = wait_for(running.thread, lambda view: view.time > first.time)
        assert wait_for(running.thread, lambda view: view.time > later.time).requests == ()
