"""Whether answers with speculation are those without it, over the models that allow it.

    python tests/speculation_exactness.py [--tokens 100000] [--seed 0] [--name llama ...]

For each model and proposer there is a small pool that evicts, a disk cache, and requests that come while others run:
new prompts, repetitions, continuations and forks of what was answered before, greedy and sampled. Some are cancelled,
and now and then everything is closed and starts again from disk. Every token is compared with that of the same request
alone, uncached and without speculation. All of it follows from the seed, but for how many steps a disk takes.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import onekv  # noqa: F401  (before MLX, which links its matrix products when it is loaded)
from architectures import ARCHITECTURES, VOCAB, build
from onekv.engine import Engine, Request, Sampling
from onekv.engine.speculation.control import SpeculationStats
from onekv.errors import UnsupportedLayerError
from onekv.models.draft import WithDraft
from proposers import Adversary, Oracle, speculate
from stock import engine_of

# "draft" is a small llama: it guesses what a llama answers, and little of what others do.
PROPOSERS = ("lookup", "random", "oracle", "draft")
DRAFTS = {"speculate": "draft", "draft_model": "given as an object"}
SETTINGS: dict[str, Any] = {"block_size": 8, "prefill_chunk": 48, "draft_tokens": 7}
# Of the pool, in sequences of the longest request.
ROOM = 3
LONGEST, MOST = 150, 30
RULES: list[dict[str, Any]] = [
    {},
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 12},
    {"temperature": 1.0, "min_p": 0.05},
    {"repetition_penalty": 1.2},
    {"temperature": 0.8, "presence_penalty": 0.5, "logit_bias": {7: 1.5}},
]


@dataclass
class Found:
    """What one model and proposer came to."""

    compared: int = 0
    different: int = 0
    requests: int = 0
    cancelled: int = 0
    restarts: int = 0
    evicted: int = 0
    reused: int = 0
    proposed: int = 0
    accepted: int = 0
    doubtful: int = 0

    def count(self, stats: SpeculationStats) -> None:
        self.proposed += stats.proposed
        self.accepted += stats.accepted
        self.doubtful += stats.doubtful


class World:
    def __init__(self, model: Any, how: str, seed: int, folder: str) -> None:
        self._how, self._folder = how, folder
        self._model = WithDraft(model, build("llama")) if how == "draft" else model
        self._drafts = DRAFTS if how == "draft" else {}
        self._random = np.random.default_rng([seed, PROPOSERS.index(how)])
        self._plain = engine_of(model, speculate="off", kv_memory="2MB", max_batch=1, prefix_cache=False, **SETTINGS)
        blocks = ROOM * -(-(LONGEST + MOST) // 8)
        probe = engine_of(self._model, kv_memory="8MB", max_batch=1, **self._drafts, **SETTINGS)
        self._memory = sum(pool.block_bytes for pool in probe.memory.pools) * blocks
        self.found = Found()
        self._answers: list[tuple[Request, list[int]]] = []
        # All that was said, from which later prompts go on.
        self._said: list[list[int]] = []
        self._asked: list[Request] = []
        self._engine = self._open()

    def _open(self) -> Engine:
        disk = {"disk_cache": self._folder, "disk_limit": "64MB", "disk_policy": "write_through"}
        engine = engine_of(self._model, kv_memory=self._memory, max_batch=3, **self._drafts, **disk, **SETTINGS)
        seed = int(self._random.integers(2**31))
        proposers = {"lookup": None, "random": Adversary(VOCAB, seed), "oracle": Oracle(0.75, VOCAB, seed)}
        # By lookup at its own pace every other time.
        return speculate(engine, proposers.get(self._how), self._how != "lookup" or seed % 2 == 0)

    def _close(self) -> None:
        self._engine.cancel(list(self._engine.scheduler))
        self._compare()
        assert self._engine.speculation is not None
        self.found.count(self._engine.speculation.stats())
        stats = self._engine.prefix.stats()
        self.found.evicted += stats.evicted_blocks
        self.found.reused += stats.tokens_reused
        self._engine.check_integrity()
        self._engine.close()

    def play(self, tokens: int) -> Found:
        while self.found.compared < tokens:
            if len(list(self._engine.scheduler)) < 5 and self._random.random() < 0.3:
                self._submit()
            self._engine.step()
            self._engine.check_integrity()
            running = self._engine.scheduler.running
            if running and self._random.random() < 0.01:
                self._engine.cancel([running[int(self._random.integers(len(running)))]])
            self._compare()
            if self._random.random() < 0.003:
                self._close()
                self.found.restarts += 1
                self._engine = self._open()
        self._close()
        return self.found

    def _submit(self) -> None:
        sampling = Sampling(**RULES[self._random.integers(len(RULES))], seed=int(self._random.integers(2**31)))
        request = Request(self._prompt(), int(self._random.integers(1, MOST + 1)), sampling)
        if self._asked and self._random.random() < 0.25:
            # The same again: there is something to look up.
            before = self._asked[int(self._random.integers(len(self._asked)))]
            request = Request(before.prompt, before.max_tokens, before.sampling)
        self._asked = [*self._asked[-20:], request]
        plain = Request(request.prompt, request.max_tokens, request.sampling)
        self._plain.submit(plain)
        while not self._plain.idle:
            self._plain.step()
        self._answers.append((request, plain.tokens))
        assert self._engine.speculation is not None
        if isinstance(self._engine.speculation.proposer, Oracle):
            self._engine.speculation.proposer.know(request, plain.tokens)
        self._engine.submit(request)

    def _prompt(self) -> list[int]:
        new = self._random.integers(1, VOCAB, int(self._random.integers(2, 70))).tolist()
        if not self._said or self._random.random() < 0.3:
            return new + new[: len(new) // 2]
        said = self._said[int(self._random.integers(len(self._said)))]
        if self._random.random() < 0.3:
            said = said[: int(self._random.integers(1, len(said) + 1))]
        return (said + new[: int(self._random.integers(0, len(new)))])[:LONGEST]

    def _compare(self) -> None:
        for request, answer in [pair for pair in self._answers if pair[0].finished]:
            assert request.error is None, request.error
            wanted = answer[: len(request.tokens)]
            pairs = zip(request.tokens, wanted, strict=True)
            self.found.different += sum(own != other for own, other in pairs)
            self.found.compared += len(request.tokens)
            self.found.requests += 1
            self.found.cancelled += request.finish_reason == "cancelled"
            self._said = [*self._said[-40:], request.prompt + answer]
        self._answers = [pair for pair in self._answers if not pair[0].finished]


def play(model: Any, how: str, tokens: int, seed: int) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        return World(model, how, seed, folder).play(tokens)


def why_not(model: Any) -> str | None:
    """Why the model is not speculated on, if it is not."""
    try:
        return engine_of(model, kv_memory="2MB", max_batch=2, **SETTINGS).runner.several.why_not
    except UnsupportedLayerError as error:
        return f"not served: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", action="append", choices=list(ARCHITECTURES))
    arguments = parser.parse_args()
    models = {name: build(name) for name in arguments.name or ARCHITECTURES}
    refused = {name: reason for name, model in models.items() if (reason := why_not(model)) is not None}
    allowed = [name for name in models if name not in refused]
    for name, reason in refused.items():
        print(f"{name:20} refused: {reason[:100]}")
    each = -(-arguments.tokens // (len(allowed) * len(PROPOSERS)))
    total = Found()
    for name in allowed:
        begin = time.perf_counter()
        for how in PROPOSERS:
            found = play(models[name], how, each, arguments.seed)
            print(
                f"{name:20} {how:7} {found.compared:6} tokens compared, {found.different} differ; "
                f"{found.requests} requests, {found.cancelled} cancelled, {found.restarts} restarts, "
                f"{found.evicted} blocks evicted, {found.reused} tokens reused; "
                f"{found.accepted} of {found.proposed} accepted, {found.doubtful} doubtful",
                flush=True,
            )
            total.compared += found.compared
            total.different += found.different
        print(f"{name:20} {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    print(f"{total.compared} tokens compared over {len(allowed)} models, {total.different} differ")
    return int(total.different > 0)


if __name__ == "__main__":
    sys.exit(main())
