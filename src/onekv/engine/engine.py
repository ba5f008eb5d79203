"""Requests in, tokens out, one step at a time.

Each `step` stores at most one chunk of the oldest prompt that is not stored yet, then decodes one token of every
running request: decoding never waits for more than one chunk, and a prompt gets a chunk after every `decode_steps`
tokens. Requests are admitted first come, first served, when their worst case (prompt and max_tokens, less what is
cached) fits; none overtakes another. All tokens of a prompt but the last are prefilled; the last one is the first input
of decoding, so logits are only ever computed for tokens that are sampled from.

    Scheduler (scheduler.py)    whose turn it is: requests and their states
    PrefixCache (../prefix)     what a request can start from; the lease that holds its memory
    Runner (runner.py)          steps on the device

While one request is loading the next are admitted and computed, and the system reads ahead; blocks are read into the
pool between steps, for about `LOAD_SECONDS` at a time.

Whatever a step does, it does on behalf of some requests (`_on_behalf_of`). If that raises, those requests end with an
error, what they computed is forgotten, and the step goes on with the others. `step` itself raises only if that is not
possible: then the engine must not be used any more.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mlx.nn.layers.base import Module

from ..config import Settings
from ..errors import MemoryBudgetError, OneKVError, PromptError, RequestFailedError, TooLongError
from ..memory.kv import KVMemory
from ..memory.plan import Plan
from ..memory.plan.workspace import chunk_tokens
from ..memory.pool import OutOfBlocks
from ..memory.pool.table import blocks_needed
from ..prefix.cache import PrefixCache
from ..prefix.find import NotKnownYet
from ..prefix.lease import BeingRead, Lease
from ..tiers.base import Tier
from ..units import format_size
from .request import FinishReason, Request
from .runner import Row, Runner
from .scheduler import Scheduler

log = logging.getLogger("onekv.engine")

# How long a step reads blocks from colder tiers into the pool: some at least.
LOAD_SECONDS = 0.1
# How long a step waits for a tier to say what it has, where there is nothing else to do.
LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Progress:
    """What a step did: who got tokens or ended, each once, in that order; and who of them ended with an error."""

    changed: list[Request]

    @property
    def failed(self) -> list[Request]:
        return [request for request in self.changed if request.finish_reason == "error"]


class Engine:
    def __init__(
        self,
        model: Module,
        plan: Plan,
        stop_tokens: set[int],
        settings: Settings | None = None,
        tiers: Sequence[Tier] = (),
        report: Callable[[int, int], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
        make_runner: Callable[[Module, KVMemory, int], Runner] = Runner,
    ) -> None:
        """Allocates the pool of `plan`; a request ends at any of `stop_tokens`.

        The engine closes `tiers`; `report` then hears of bytes stored and in all. `now` tells the time in seconds.
        """
        settings = settings or Settings()
        self.plan, self.stop_tokens, self.now = plan, stop_tokens, now
        self.memory = KVMemory(plan.layout, plan.blocks, plan.block_size, plan.prefill_chunk)
        self.prefix = PrefixCache(
            self.memory,
            fingerprint(model, plan),
            plan.snapshot_bytes,
            tiers,
            settings.disk_policy == "write_through",
            now,
            settings.prefix_cache,
        )
        self.scheduler = Scheduler(plan.max_batch, settings.decode_steps)
        self.runner = make_runner(model, self.memory, plan.max_batch)
        self._report = report
        # Who got a token or ended in this step, in that order.
        self._changed: dict[Request, None] = {}

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def submit(self, request: Request) -> None:
        """Queue a request; raises if it can never be served."""
        self.validate(request)
        request.stop_at(self.stop_tokens)
        self.scheduler.add(request)

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

    def step(self) -> Progress:
        """Do a bounded piece of work."""
        self._changed = {}
        scheduler = self.scheduler
        if (oldest := scheduler.to_admit()) is not None:
            with self._on_behalf_of([oldest]):
                self._admit(oldest)
        if scheduler.loading:
            self._land()
            with self._on_behalf_of(scheduler.loading):
                self._load()
        if scheduler.to_prefill() is not None:
            self._land()
            # Another one may be the oldest now, or none.
            if (request := scheduler.to_prefill()) is not None:
                with self._on_behalf_of([request]):
                    self._prefill(request)
                scheduler.chunk_stored()
        if scheduler.running:
            self._decode()
            scheduler.tokens_decoded()
        return Progress(list(self._changed))

    @contextmanager
    def _on_behalf_of(self, requests: Sequence[Request]) -> Iterator[None]:
        """If what is done inside raises, `requests` end with an error, and nobody else does."""
        try:
            yield
        except Exception as error:
            log.exception("a step failed; the requests it was for (%d) end with an error", len(requests))
            for request in list(requests):
                if not request.finished:
                    request.error = RequestFailedError.internal(error)
                    self._finish(request, "error")
            self.runner.settle()

    def end(self, request: Request, reason: FinishReason, error: OneKVError | None = None) -> None:
        """End one request now, for `reason`; all it holds is released."""
        if not request.finished:
            request.error = error
            self._finish(request, reason)
            self.runner.settle()

    def cancel(self, requests: Sequence[Request]) -> None:
        """End those of `requests` that have not ended, and release all they hold."""
        for request in requests:
            if not request.finished:
                self._finish(request, "cancelled")
        self.runner.settle()

    def close(self) -> None:
        """End all requests; what is cached goes to the colder tiers, if there are any, and is forgotten here."""
        self.cancel(list(self.scheduler))
        try:
            for done, total in self.prefix.store_all():
                if self._report is not None:
                    self._report(done, total)
        finally:
            self.prefix.forget()
            for tier in self.prefix.tiers:
                tier.close()

    # Until it runs

    def _admit(self, request: Request) -> None:
        """Start with a request, if its worst case fits now."""
        scheduler = self.scheduler
        wait = 0.0 if scheduler.in_work else LOOK_SECONDS
        try:
            lease = self.prefix.open(request.prompt, request.max_length, request.salt, wait)
        except NotKnownYet:
            if request.state != "looking":
                scheduler.move(request, "looking")
            return
        except BeingRead:
            scheduler.refused(request)
            return
        except OutOfBlocks:
            scheduler.refused(request)
            # Others hold the blocks and will give them back; alone it fits, unless the rest is pinned.
            if self.prefix.enabled and not (scheduler.loading or scheduler.running):
                request.error = self.prefix.refusal()
                self._finish(request, "error")
            return
        request.lease, request.started = lease, self.now()
        if lease.loading is not None:
            scheduler.move(request, "loading")
        else:
            self._begin(request, lease)

    def _begin(self, request: Request, lease: Lease) -> None:
        """All that is cached of its prompt is in the pool: the rest can be computed."""
        request.cached_tokens = lease.sequence.length
        self.scheduler.move(request, "prefilling")

    def _load(self) -> None:
        """Read blocks from colder tiers into the pool."""
        leases = {request.lease: request for request in self.scheduler.loading if request.lease is not None}
        for lease, loaded in self.prefix.load(list(leases), LOAD_SECONDS):
            request = leases[lease]
            if loaded:
                self._begin(request, lease)
            else:
                # Again, without what could not be read.
                request.lease = None
                self.scheduler.move(request, "waiting")

    def _prefill(self, request: Request) -> None:
        lease = request.lease
        assert lease is not None
        sequence, last = lease.sequence, len(request.prompt) - 1
        start = sequence.length
        if start < last:
            stops = lease.stops(request.prompt, self.stop_tokens)
            count = min(chunk_tokens(self.plan.layout, start, self.plan.prefill_chunk), min([*stops, last]) - start)
            lease.grow(count)
            self.runner.store(sequence, request.prompt[start : start + count])
            lease.publish(request.prompt)
            if sequence.length in stops:
                lease.snapshot()
        if sequence.length == last:
            sequence.prefilled()
            self.scheduler.move(request, "running")

    # Decode

    def _decode(self) -> None:
        running = self.scheduler.running
        if self.runner.flight is not None and not self._continues(self.runner.flight.requests):
            self._land()
        for request in list(running):
            assert request.lease is not None
            with self._on_behalf_of([request]):
                request.lease.grow(1)
        if self.runner.flight is not None and self.runner.flight.requests != running:
            # Room could not be made for one of them.
            self._land()
        if running:
            with self._on_behalf_of(running):
                self._read(self.runner.decode(list(running)))

    def _continues(self, requests: list[Request]) -> bool:
        """Whether all rows of the step in the air, and no others, surely get one more token."""
        full = any(len(request.tokens) + 1 >= request.max_tokens for request in requests)
        return requests == self.scheduler.running and not full

    def _land(self) -> None:
        """Read the step in the air, if there is one."""
        flight = self.runner.flight
        if flight is not None:
            with self._on_behalf_of(flight.requests):
                self._read(self.runner.land())

    def _read(self, rows: list[Row]) -> None:
        now = self.now()
        for row in rows:
            request = row.request
            # A request that ended while this step was in the air has one token too many.
            if request.finished:
                continue
            self._changed[request] = None
            with self._on_behalf_of([request]):
                if not row.sound:
                    request.error = request.error or RequestFailedError(
                        "the model's output for this request is not a number (NaN)"
                    )
                    self._finish(request, "error")
                    continue
                if not request.tokens:
                    request.first = now
                for index, token in enumerate(row.tokens):
                    request.tokens.append(token)
                    request.logprobs += row.logprobs[index : index + 1]
                    self._follow(request, token)
                    if request.finished:
                        break

    def _follow(self, request: Request, token: int) -> None:
        """A request has one more token: tell its constraint, publish what it filled, end it if that was the last."""
        if request.constraint is not None:
            try:
                request.constraint.advance(token)
            except OneKVError as error:
                request.error = error
                self._finish(request, "error")
                return
        if request.lease is not None and request.lease.due:
            request.lease.publish(request.all_tokens)
        if token in request.stop_tokens:
            self._finish(request, "stop")
        elif len(request.tokens) >= request.max_tokens:
            self._finish(request, "length")

    # Ending

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.ended = self.now()
        self._changed[request] = None
        self.scheduler.move(request, "finished")
        lease, request.lease = request.lease, None
        if lease is None:
            return
        if reason == "error":
            self._discard(lease)
            return
        try:
            lease.finish(request.all_tokens)
            if request.pin and reason != "cancelled":
                self._pin(request)
        except Exception as error:
            log.exception("what a request computed could not be kept; it ends with an error")
            request.finish_reason, request.error = "error", RequestFailedError.internal(error)
            self._discard(lease)

    def _discard(self, lease: Lease) -> None:
        """A request failed: what it computed may be what is wrong."""
        self.runner.wait()
        lease.discard()

    def _pin(self, request: Request) -> None:
        try:
            self.prefix.pin(request.prompt, request.salt)
        except MemoryBudgetError as error:
            request.error = error

    def check_integrity(self) -> None:
        """Raises IntegrityError if any block is lost, held twice or miscounted."""
        self.prefix.check_integrity()


def fingerprint(model: Module, plan: Plan) -> str:
    """Names what cached blocks depend on besides their tokens."""
    return f"{type(model).__module__} {plan.stored_as}"
