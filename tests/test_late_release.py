"""Writes stay in place where MLX lets go of what it has read late, as it does on Metal and CUDA.

There `mx.eval` returns when the GPU signals that it is done. References to what was read are dropped by another thread,
some time later, and a write that is evaluated before that copies the whole array; `mx.synchronize` waits for this. On
CPU, references are dropped before the signal, so here each evaluation of a pool array leaves one more reference to it,
which the next `mx.synchronize` drops.
"""

import copy
import io

import mlx.core as mx
import numpy as np
import pytest

from architectures import build
from onekv.engine import Engine, Request
from onekv.engine.divergence import measure
from onekv.engine.runner import Runner
from onekv.memory.kv import KVMemory
from onekv.models.draft import WithDraft
from stock import engine_of
from test_draft import DRAFTS, llama
from test_memory import random_prompt


class LateRelease:
    """Of the pool of `memory`, from the moment that it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory: KVMemory | None = None
        self.before: list[int] = []
        self.held: list[mx.array] = []
        self._eval, self._async_eval, self._synchronize = mx.eval, mx.async_eval, mx.synchronize
        monkeypatch.setattr(mx, "eval", lambda *arrays: self._evaluate(self._eval, arrays))
        monkeypatch.setattr(mx, "async_eval", lambda *arrays: self._evaluate(self._async_eval, arrays))
        monkeypatch.setattr(mx, "synchronize", self._release)

    def watch(self, model, memory: KVMemory, max_batch: int) -> Runner:
        """Makes the runner, which tries the model on `memory` at once."""
        self.memory = memory
        self.before = self._addresses()
        return Runner(model, memory, max_batch)

    def _evaluate(self, evaluate, arrays) -> None:
        used = [array for array in self.memory.arrays() if pending(array)] if self.memory is not None else []
        evaluate(*arrays)
        self.held += [copy.copy(array) for array in used if not pending(array)]

    def _release(self, *stream) -> None:
        self._synchronize(*stream)
        self.held.clear()

    def _addresses(self) -> list[int]:
        assert self.memory is not None
        self._eval(self.memory.arrays())
        return [np.array(array, copy=False).ctypes.data for array in self.memory.arrays()]

    @property
    def in_place(self) -> bool:
        return self._addresses() == self.before


def pending(array: mx.array) -> bool:
    """Whether something is left to compute for it."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return "->" in graph.getvalue()


@pytest.fixture
def late(monkeypatch):
    return LateRelease(monkeypatch)


def make(late, model, **settings) -> Engine:
    options = {"kv_memory": "4MB", "block_size": 16, "max_batch": 3, "prefill_chunk": 32, "kernels": "off"}
    engine = engine_of(build(model) if isinstance(model, str) else model, late.watch, **(options | settings))
    assert late.in_place
    return engine


def run(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()


# Full attention, windows, recurrent states beside full attention, experts, and rows that are decoded one by one.
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mixtral", "gemma2"])
def test_prompts_and_steps(late, name):
    engine = make(late, name)
    prompts = [random_prompt(70 + 10 * i, i) for i in range(4)]
    run(engine, *(Request(prompt, 12) for prompt in prompts))
    assert late.in_place
    # Hits: of all of a prompt, and of a part of a block, which is copied.
    run(engine, Request(prompts[0], 12), Request([*prompts[1][:43], 5, 6, 7], 12))
    assert late.in_place
    engine.close()


def test_encoded_kv(late):
    engine = make(late, "llama", kv_format="tq4")
    run(engine, *(Request(random_prompt(70, i), 12) for i in range(3)))
    assert late.in_place
    engine.close()


def test_guesses(late):
    engine = make(late, "llama", speculate="lookup")
    prompt = random_prompt(20) * 5
    run(engine, Request(prompt, 40), Request(prompt[3:], 40))
    assert engine.speculation is not None and engine.speculation.stats().proposed > 0
    assert late.in_place
    engine.close()


def test_guesses_of_a_draft_model(late):
    engine = make(late, WithDraft(llama(11, 2), llama(12, 1)), **DRAFTS)
    engine.now = lambda: 0.0
    run(engine, *(Request(random_prompt(70, i), 12) for i in range(3)))
    assert engine.speculation is not None and engine.speculation.stats().proposed > 0
    assert late.in_place
    engine.close()


def test_who_ends_early(late):
    """Cancelled, failed in a decode step, and failed in a prompt, while others run."""
    engine = make(late, "llama")
    requests = [Request(random_prompt(50 + i, i), 60) for i in range(3)]
    for request in requests:
        engine.submit(request)
    while len(requests[2].tokens) < 3:
        engine.step()
    engine.cancel(requests[:1])
    engine.step()
    engine.end(requests[1], "error")
    run(engine, Request(random_prompt(40, 7), 5))
    assert late.in_place
    assert np.isfinite([np.array(array).sum() for array in engine.memory.arrays()]).all()
    engine.close()


def test_log_probabilities_of_a_prompt(late):
    engine = make(late, "llama")
    run(engine, Request(random_prompt(70), 4, scored=2), Request(random_prompt(80, 1), 4))
    assert late.in_place
    engine.close()


def test_the_divergence_of_a_format(late):
    engine = make(late, "llama", kv_format="tq4")
    measure(engine, random_prompt(100))
    run(engine, Request(random_prompt(70), 4))
    assert late.in_place
    engine.close()


def test_a_reference_that_is_held_is_noticed(late):
    engine = make(late, "llama")
    held = [copy.copy(array) for array in engine.memory.arrays()]
    run(engine, Request(random_prompt(70), 4))
    assert not late.in_place
    assert held
    engine.close()
