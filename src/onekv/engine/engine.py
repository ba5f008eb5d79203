"""Requests in, tokens out, one step at a time.

Each `step` stores at most one chunk of the oldest prompt that is not stored yet, then decodes one token of every
running request: decoding never waits for more than one chunk, and a prompt gets a chunk after every `decode_steps`
tokens. Requests are admitted first come, first served, when their worst case (prompt and max_tokens, less what is
cached) fits; none overtakes another. All tokens of a prompt but the last are prefilled; the last one is the first input
of decoding, so logits are only ever computed for tokens that are sampled from.

    waiting -> loading (if the colder tier has some of its prompt) -> prefilling -> running -> finished
       ^_________/ what it waited for could not be read

While one request is loading the next are admitted and computed, and the system reads ahead; blocks are read into the
pool between steps, for about `LOAD_SECONDS` at a time.

Whatever a step does, it does on behalf of some requests (`_on_behalf_of`). If that raises, those requests end with an
error, what they computed is forgotten, and the step goes on with the others. `step` itself raises only if that is not
possible: then the engine must not be used any more.

Decoding runs one step ahead: the graph of step t + 1 is built from the tokens of step t while the device still works on
step t, and is started as soon as that has ended; only then are the tokens of step t read. It is not started earlier:
MLX would find the pool still read by step t and would copy it to write step t + 1 (measured on an H200: 4 GiB in every
step). The step in the air (`_flight`) is read before anything else touches the pool. Where the memory is `eager`, step
t + 1 is computed as its graph is built, so step t must have ended before.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..errors import MemoryBudgetError, OneKVError, PromptError, RequestFailedError, TooLongError
from ..memory.kv import KVMemory
from ..memory.plan import Plan, chunk_tokens
from ..memory.pool import OutOfBlocks
from ..memory.sequence import Sequence
from ..memory.table import blocks_needed
from ..prefix.cache import PrefixCache
from ..tiers.base import Tier
from ..units import format_size
from .request import FinishReason, Request, State
from .sampling import Drawn, sample
from .selftest import set_direct, why_one_by_one

log = logging.getLogger("onekv.engine")

# How long a step reads blocks from the colder tier into the pool: some at least.
LOAD_SECONDS = 0.1


@dataclass
class Flight:
    """A decode step that was started: a token for each request, not read yet."""

    requests: list[Request]
    drawn: Drawn


class Engine:
    def __init__(
        self,
        model: Module,
        plan: Plan,
        stop_tokens: set[int],
        prefix_cache: bool = True,
        decode_steps: int = 1,
        tier: Tier | None = None,
        write_through: bool = False,
        report: Callable[[int, int], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Allocates the pool of `plan`; a request ends at any of `stop_tokens`.

        The engine closes `tier`; `report` then hears of bytes stored and in all. `now` tells the time in seconds.
        """
        self.model, self.plan, self.stop_tokens = model, plan, stop_tokens
        self.memory = KVMemory(plan.layout, plan.blocks, plan.block_size, plan.prefill_chunk)
        self.prefix: PrefixCache | None = None
        if prefix_cache:
            name = fingerprint(model, plan)
            self.prefix = PrefixCache(self.memory, name, plan.snapshot_bytes, tier, write_through, now)
        self.tier, self._report, self.now = tier, report, now
        self.waiting: deque[Request] = deque()
        self.loading: list[Request] = []
        # The oldest first; it gets the next chunk.
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.decode_steps = decode_steps
        # Tokens decoded since the last chunk of a prompt.
        self._since_chunk = 0
        # Counts what may make room; and who found none, with the count then: it is not tried in every step.
        self._changes = 0
        self._refused: tuple[Request, int] | None = None
        # Who got a token or ended in this step, in that order.
        self._changed: dict[Request, None] = {}
        self._flight: Flight | None = None
        set_direct(model, self.memory)
        # Why rows are decoded one by one, if they are.
        self.one_by_one = why_one_by_one(model, self.memory) if plan.max_batch > 1 else None

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.loading or self.prefilling or self.running)

    def submit(self, request: Request) -> None:
        """Queue a request; raises if it can never be served."""
        self.validate(request)
        request.stop_at(self.stop_tokens)
        request.state = "waiting"
        self.waiting.append(request)

    def validate(self, request: Request) -> None:
        if not request.prompt:
            raise PromptError("the prompt is empty; it must have at least one token")
        if request.max_tokens < 1:
            raise PromptError(f"max_tokens is {request.max_tokens}; it must be at least 1")
        vocabulary = self.plan.layout.vocabulary
        for token in request.prompt:
            if not 0 <= token < vocabulary:
                raise PromptError(f"token id {token} is out of range: the model knows ids 0 to {vocabulary - 1}")
        for pool in self.memory.pools:
            needed = blocks_needed(pool.group.rule, pool.block_size, request.max_length, self.plan.prefill_chunk)
            if needed > pool.blocks:
                raise TooLongError(
                    f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}: "
                    f"{request.max_length} tokens to keep, but the KV pool holds {self.plan.longest}; shorten the "
                    f"prompt, lower max_tokens, or raise --kv-memory (now {format_size(self.plan.budget)})"
                )

    def step(self) -> list[Request]:
        """Do a bounded piece of work; returns the requests that got a token or ended in it, each once."""
        self._changed = {}
        if self._may_admit():
            with self._on_behalf_of([self.waiting[0]]):
                self._admit(self.waiting[0])
        if self.loading:
            self._land()
            with self._on_behalf_of(self.loading):
                self._load()
        if self.prefilling and (not self.running or self._since_chunk >= self.decode_steps):
            self._land()
            with self._on_behalf_of(self.prefilling[:1]):
                self._prefill(self.prefilling[0])
            self._since_chunk = 0
        if self.running:
            self._decode()
            self._since_chunk += 1
        return list(self._changed)

    @contextmanager
    def _on_behalf_of(self, requests: Several[Request]) -> Iterator[None]:
        """If what is done inside raises, `requests` end with an error, and nobody else does."""
        try:
            yield
        except Exception as error:
            log.exception("a step failed; the requests it was for (%d) end with an error", len(requests))
            for request in list(requests):
                if not request.finished:
                    request.error = RequestFailedError.internal(error)
                    self._finish(request, "error")
            self._settle()

    def end(self, request: Request, reason: FinishReason, error: OneKVError | None = None) -> None:
        """End one request now, for `reason`; all it holds is released."""
        if not request.finished:
            request.error = error
            self._finish(request, reason)
            self._settle()

    def cancel(self, requests: list[Request]) -> None:
        """End those of `requests` that have not ended, and release all they hold."""
        for request in requests:
            if not request.finished:
                self._finish(request, "cancelled")
        self._settle()

    def _settle(self) -> None:
        """After requests were ended from outside."""
        if self._flight is not None and not any(request in self.running for request in self._flight.requests):
            self._flight = None
        # What was built and not computed would keep its inputs alive.
        mx.eval(self.memory.arrays())

    def close(self) -> None:
        """End all requests; what is cached goes to the colder tier, if there is one, and is forgotten here."""
        self.cancel([*self.waiting, *self.loading, *self.prefilling, *self.running])
        try:
            for done, total in self.prefix.store_all() if self.prefix is not None else ():
                if self._report is not None:
                    self._report(done, total)
        finally:
            if self.prefix is not None:
                self.prefix.forget()
            if self.tier is not None:
                self.tier.close()

    # Prefill

    def _may_admit(self) -> bool:
        """Whether it is worth trying to start with the oldest waiting request."""
        if self.prefilling or not self.waiting or len(self.loading) + len(self.running) >= self.plan.max_batch:
            return False
        return self._refused != (self.waiting[0], self._changes)

    def _admit(self, request: Request) -> None:
        """Start with a request, if its worst case fits now."""
        self._refused = (request, self._changes)
        try:
            if self.prefix is not None:
                request.sequence = self.prefix.open(request.prompt, request.max_length, request.salt)
            else:
                request.sequence = self.memory.open(request.max_length)
        except OutOfBlocks:
            # Others hold the blocks and will give them back; alone it fits, unless the rest is pinned.
            if self.prefix is not None and not (self.loading or self.running):
                request.error = self.prefix.refusal()
                self._finish(request, "error")
            return
        if request.sequence is None:
            return
        request.started = self.now()
        if self.prefix is not None and self.prefix.loading(request.sequence):
            self._move(request, "loading")
        else:
            self._begin(request, request.sequence)

    def _begin(self, request: Request, sequence: Sequence) -> None:
        """All that is cached of its prompt is in the pool: the rest can be computed."""
        request.cached_tokens = sequence.length
        self._move(request, "prefilling")

    def _move(self, request: Request, state: State) -> None:
        """The one place where a request changes its state."""
        places = {"loading": self.loading, "prefilling": self.prefilling, "running": self.running}
        if request.state == "waiting":
            self.waiting.remove(request)
        elif request.state in places:
            places[request.state].remove(request)
        request.state = state
        if state == "waiting":
            # It was admitted before, so it is the oldest.
            self.waiting.appendleft(request)
        elif state in places:
            places[state].append(request)
            self.prefilling.sort(key=lambda request: request.created)
        # Loading, prefilling and ending may all make room.
        self._changes += 1

    def _load(self) -> None:
        """Read blocks from the colder tier into the pool."""
        assert self.prefix is not None
        by_sequence = {request.sequence: request for request in self.loading}
        for sequence, loaded in self.prefix.load(LOAD_SECONDS):
            request = by_sequence[sequence]
            if loaded:
                self._begin(request, sequence)
            else:
                # Again, without what could not be read.
                request.sequence = None
                self.memory.close(sequence)
                self._move(request, "waiting")

    def _prefill(self, request: Request) -> None:
        sequence = request.sequence
        assert sequence is not None
        start, last = sequence.length, len(request.prompt) - 1
        if start < last:
            stops = self.prefix.stops(sequence, request.prompt, self.stop_tokens) if self.prefix is not None else []
            count = min(chunk_tokens(self.plan.layout, start, self.plan.prefill_chunk), min([*stops, last]) - start)
            self._store(sequence, request.prompt[start : start + count])
            if self.prefix is not None:
                self.prefix.publish(sequence, request.prompt)
                if sequence.length in stops:
                    self.prefix.snapshot(sequence)
        if sequence.length == last:
            sequence.prefilled()
            self._move(request, "running")

    def _store(self, sequence: Sequence, tokens: list[int]) -> None:
        """Compute and store what `tokens` are after those of `sequence`."""
        with self.memory.step([sequence], len(tokens)) as caches:
            self.model(mx.array(tokens)[None], cache=caches)
        mx.eval(self.memory.arrays())

    # Decode

    def _decode(self) -> None:
        flight = self._flight
        if flight is not None and not self._continues(flight):
            self._land()
            flight = None
        if not self.running:
            return
        with self._on_behalf_of(self.running):
            self._flight = self._start(flight)
            if flight is not None:
                self._read(flight)

    def _continues(self, flight: Flight) -> bool:
        """Whether all rows of the step in the air, and no others, surely get one more token."""
        full = any(len(request.tokens) + 1 >= request.max_tokens for request in flight.requests)
        return flight.requests == self.running and not full and not any(r.looks_back for r in self.running)

    def _start(self, flight: Flight | None) -> Flight:
        requests = list(self.running)
        ahead = 0 if flight is None else 1
        inputs = mx.array([r.next_input for r in requests]) if flight is None else flight.drawn.tokens
        if flight is not None and self.memory.eager:
            mx.eval(flight.drawn.arrays())
        drawn = self._draw(requests, inputs, [len(r.tokens) + ahead for r in requests])
        if flight is not None:
            mx.eval(flight.drawn.arrays())
        mx.async_eval(drawn.arrays(), self.memory.arrays())
        return Flight(requests, drawn)

    def _draw(self, requests: list[Request], inputs: mx.array, chosen: list[int]) -> Drawn:
        """The next token of each request after `inputs`; so many were chosen before."""
        return sample(self._forward(requests, inputs), requests, chosen)

    def _forward(self, requests: list[Request], inputs: mx.array) -> mx.array:
        """Logits [rows, vocabulary] after one more token of each request."""
        if len(requests) > 1 and self.one_by_one is not None:
            rows = []
            for index, request in enumerate(requests):
                rows.append(self._forward([request], inputs[index : index + 1]))
                # The next row writes the pool: nothing may still be about to read it.
                mx.eval(rows[-1], self.memory.arrays())
            return mx.concatenate(rows)
        sequences = [request.sequence for request in requests if request.sequence is not None]
        with self.memory.step(sequences, 1) as caches:
            logits: mx.array = self.model(inputs[:, None], cache=caches)
        return logits[:, -1]

    def _land(self) -> None:
        """Read the step in the air, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None:
            with self._on_behalf_of(flight.requests):
                self._read(flight)

    def _read(self, flight: Flight) -> None:
        tokens: list[int] = flight.drawn.tokens.tolist()  # type: ignore[assignment]
        sound: list[bool] = flight.drawn.sound.tolist()  # type: ignore[assignment]
        now = self.now()
        for row, (request, token) in enumerate(zip(flight.requests, tokens, strict=True)):
            # A request that ended while this step was in the air has one token too many.
            if request.finished:
                continue
            self._changed[request] = None
            with self._on_behalf_of([request]):
                if not sound[row]:
                    request.error = request.error or RequestFailedError(
                        "the model's output for this request is not a number (NaN)"
                    )
                    self._finish(request, "error")
                    continue
                if not request.tokens:
                    request.first = now
                request.tokens.append(token)
                if request.sampling.logprobs is not None:
                    request.logprobs.append(flight.drawn.logprobs(row, request.sampling.logprobs))
                self._follow(request, token)

    def _follow(self, request: Request, token: int) -> None:
        """A request has one more token: tell its constraint, publish what it filled, end it if that was the last."""
        if request.constraint is not None:
            try:
                request.constraint.advance(token)
            except OneKVError as error:
                request.error = error
                self._finish(request, "error")
                return
        if self.prefix is not None and request.sequence is not None and self.prefix.due(request.sequence):
            self.prefix.publish(request.sequence, request.all_tokens)
        if token in request.stop_tokens:
            self._finish(request, "stop")
        elif len(request.tokens) >= request.max_tokens:
            self._finish(request, "length")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.ended = self.now()
        self._changed[request] = None
        self._move(request, "finished")
        sequence, request.sequence = request.sequence, None
        if sequence is None:
            return
        try:
            self._release(request, sequence)
        except Exception as error:
            log.exception("what a request computed could not be kept; it ends with an error")
            request.finish_reason, request.error = "error", RequestFailedError.internal(error)
            self._discard(sequence)

    def _release(self, request: Request, sequence: Sequence) -> None:
        """Give back what a request that ended held; what it computed stays cached, unless it failed."""
        if request.finish_reason == "error":
            self._discard(sequence)
            return
        if self.prefix is not None and self.prefix.loading(sequence):
            self.prefix.abandon(sequence)
        elif self.prefix is not None:
            self.prefix.finish(sequence, request.all_tokens)
            if request.pin and request.finish_reason != "cancelled":
                self._pin(request)
        self.memory.close(sequence)

    def _discard(self, sequence: Sequence) -> None:
        """Close a sequence that failed and forget all it computed: that may be what is wrong."""
        if self._flight is not None:
            mx.eval(self._flight.drawn.arrays())
        blocks = [table.held for table in sequence.tables]
        node = self.prefix.abandon(sequence) if self.prefix is not None else None
        self.memory.close(sequence)
        if self.prefix is not None and node is not None:
            self.prefix.discard(node)
        # Slots that are not read count with weight 0, and 0 times NaN is NaN: the next holder must not find any.
        for pool, held in zip(self.memory.pools, blocks, strict=True):
            pool.erase(held)
        mx.eval(self.memory.arrays())

    def _pin(self, request: Request) -> None:
        assert self.prefix is not None
        try:
            self.prefix.pin(request.prompt, request.salt)
        except MemoryBudgetError as error:
            request.error = error

    def check_integrity(self) -> None:
        """Raises IntegrityError if any block is lost, held twice or miscounted."""
        if self.prefix is not None:
            self.prefix.check_integrity()
            self.memory.check_integrity([self.prefix.cached_blocks(g) for g in range(len(self.memory.pools))])
        else:
            self.memory.check_integrity()


def fingerprint(model: Module, plan: Plan) -> str:
    """Names what cached blocks depend on besides their tokens."""
    return f"{type(model).__module__} {plan.stored_as}"
