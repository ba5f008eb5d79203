"""Requests in, tokens out, one step at a time.

Each `step` stores at most one chunk of one prompt, or small chunks of several in one pass (chunks.py), then decodes one
token of every running request, or several that were guessed. So decoding never waits for more than one chunk, and
prompts get a chunk after every `decode_steps` tokens; scheduler.py decides whose, and that none starves. Requests are
admitted first come, first served, once their worst case (prompt and max_tokens, less what is cached) fits, even while
others prefill. All tokens of a prompt but the last are prefilled; the last one is the first input of decoding, so
logits are only computed for tokens that are sampled from, and for prompts whose own log probabilities are requested
(`Request.scored`).

    Scheduler (scheduler.py)    whose turn it is: requests and their states
    PrefixCache (../prefix)     what a request can start from; the lease that holds its memory
    Runner (runner.py)          steps on the device
    Speculation (speculation/)  what may come next, so that a step yields several tokens; None if that is off

While one request is loading, the next ones are admitted and computed, and tiers prefetch; blocks are read into the pool
between steps, for about `LOAD_SECONDS` at a time, as are copies that tiers want (`PrefixCache.share`).

Everything a step does is on behalf of some requests (`_on_behalf_of`). If it raises, those requests end with an error,
what they computed is dropped, and the step continues with the others. `step` itself raises only if that is not
possible: then the engine must no longer be used.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mlx.nn.layers.base import Module

from ..config import Settings
from ..errors import MemoryBudgetError, OneKVError, RequestFailedError
from ..memory.kv import KVMemory
from ..memory.layout import Layout
from ..memory.plan import Plan
from ..memory.pool import OutOfBlocks
from ..prefix.cache import PrefixCache
from ..prefix.find import NotKnownYet
from ..prefix.lease import BeingRead, Lease
from ..tiers.base import Tier
from .chunks import Chunk, pass_of, store
from .limits import check_request
from .making import make_speculation
from .request import FinishReason, Progress, Request, RequestState
from .runner import Runner
from .scheduler import Scheduler
from .speculation.control import Proposals, Proposer, Speculation
from .speculation.verify import Row

log = logging.getLogger("onekv.engine")

# How long a step reads blocks from colder tiers into the pool, at least a few; and copies to them, at least one.
LOAD_SECONDS, SHARE_SECONDS = 0.1, 0.001
# How long a step waits for a tier's lookup if there is nothing else to do.
LOOK_SECONDS = 0.02


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
        make_memory: Callable[[Layout, tuple[int, ...], int, int, bool], KVMemory] = KVMemory,
        proposer: Proposer | None = None,
    ) -> None:
        """Allocates the pool of `plan`; a request ends at any of `stop_tokens`.

        The engine closes `tiers`, reporting bytes stored so far and in total to `report`. `now` is the clock, in
        seconds. `make_memory` takes the arguments of `KVMemory`. Without a `proposer`, the settings choose one.
        """
        settings = settings or Settings()
        self.plan, self.stop_tokens, self.now = plan, stop_tokens, now
        self._report = report or (lambda done, total: None)
        kernels = settings.kernels != "off"
        self.memory = make_memory(plan.layout, plan.blocks, plan.block_size, plan.prefill_chunk, kernels)
        name, through = f"{type(model).__module__} {plan.stored_as}", settings.disk_policy == "write_through"
        self.prefix = PrefixCache(
            self.memory, name, plan.snapshot_bytes, tiers, through, now, enabled=settings.prefix_cache
        )
        self.scheduler = Scheduler(plan.max_batch, settings.decode_steps, settings.prefix_cache)
        self.runner = make_runner(model, self.memory, plan.max_batch)
        # None if it is off or the model does not support it; then the reason.
        self.speculation, self.unspeculated = make_speculation(settings, plan, self.runner, self.prefix, proposer)
        self.divergence: float | None = None  # From plain KV, in nats, if it was measured (`divergence.check`).
        self.stored: tuple[int, int] | None = None  # What `report` heard last; any thread may read it.
        # The state of the requests being worked for, and their number; any thread may read it.
        self.at_work: tuple[RequestState, int] = ("waiting", 0)
        # Requests that got a token or ended in this step, in that order.
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
        check_request(request, self.plan, self.memory.pools)

    def step(self) -> Progress:
        """Do a bounded piece of work."""
        self._changed = {}
        scheduler = self.scheduler
        while (request := scheduler.to_admit()) is not None:
            with self._on_behalf_of([request]):
                self._admit(request)
            if request.state == "looking":
                break
        if scheduler.loading:
            with self._on_behalf_of(scheduler.loading):
                self._load()
        if scheduler.to_prefill() is not None:
            self._land()
            # Another one may be next now, or none.
            if (request := scheduler.to_prefill()) is not None:
                chunks: list[Chunk] = []
                others = scheduler.after(request) if self.runner.together else []
                with self._on_behalf_of([request]):
                    chunks = pass_of([request, *others], self.plan, self.stop_tokens)
                self._prefill(chunks)
                scheduler.chunk_stored(request, *(chunk.request for chunk in chunks))
        if scheduler.running:
            self._decode()
            scheduler.tokens_decoded()
        with self._on_behalf_of([]):
            self.prefix.share(SHARE_SECONDS)
        return Progress(list(self._changed))

    @contextmanager
    def _on_behalf_of(self, requests: Sequence[Request]) -> Iterator[None]:
        """If the body raises, `requests` end with an error, and no others."""
        self.at_work = (requests[0].state if requests else "waiting", len(requests))
        try:
            yield
        except Exception as error:
            log.exception("a step failed; its requests (%d) end with an error", len(requests))
            for request in list(requests):
                if not request.finished:
                    request.error = RequestFailedError.internal(error)
                    self._finish(request, "error")
            self.runner.settle()

    def end(self, request: Request, reason: FinishReason, error: OneKVError | None = None) -> None:
        """End one request now, for `reason`; everything it holds is released."""
        if not request.finished:
            request.error = error
            self._finish(request, reason)
            self.runner.settle()

    def cancel(self, requests: Sequence[Request]) -> None:
        """End those of `requests` that have not ended, and release everything they hold."""
        for request in requests:
            if not request.finished:
                self._finish(request, "cancelled")
        self.runner.settle()

    def close(self) -> None:
        """End all requests; the cache is written to the colder tiers, if there are any, and dropped here."""
        self.cancel(list(self.scheduler))
        try:
            for stored in self.prefix.store_all():
                self.stored = stored
                self._report(*stored)
        finally:
            self.prefix.close()
            self.memory.close_all()

    # Until it runs

    def _admit(self, request: Request) -> None:
        """Start a request, if its worst case fits now."""
        scheduler = self.scheduler
        wait = 0.0 if scheduler.in_work else LOOK_SECONDS
        try:
            lease = self.prefix.open(request.prompt, request.max_length, request.salt, wait, request.scored)
        except NotKnownYet:
            if request.state != "looking":
                scheduler.move(request, "looking")
            return
        except BeingRead:
            scheduler.refused(request)
            return
        except OutOfBlocks:
            scheduler.refused(request)
            # Others hold the blocks and will release them; alone it fits, unless the rest is pinned.
            if self.prefix.enabled and not scheduler.in_work:
                request.error = self.prefix.refusal()
                self._finish(request, "error")
            return
        request.lease, request.started = lease, self.now()
        if lease.loading is not None:
            scheduler.move(request, "loading")
        else:
            self._begin(request, lease)

    def _begin(self, request: Request, lease: Lease) -> None:
        """Everything cached of its prompt is in the pool: the rest can be computed."""
        request.cached_tokens, request.branch, request.missed = lease.sequence.length, lease.branch, lease.missed
        self.scheduler.move(request, "prefilling")

    def _load(self) -> None:
        """Read what has arrived from colder tiers into the pool."""
        if not self.prefix.loadable(0.0 if self.scheduler.computing else LOOK_SECONDS):
            return
        self._land()
        leases = {request.lease: request for request in self.scheduler.loading if request.lease is not None}
        for lease, loaded in self.prefix.load(list(leases), LOAD_SECONDS):
            request = leases[lease]
            if loaded:
                self._begin(request, lease)
            else:
                # Again, without what could not be read.
                request.lease = None
                self.scheduler.move(request, "waiting")

    def _prefill(self, chunks: list[Chunk]) -> None:
        rows = [chunk for chunk in chunks if chunk.tokens]
        for row in rows:
            with self._on_behalf_of([row.request]):
                row.lease.grow(len(row.tokens))
        if rows := [row for row in rows if not row.request.finished]:
            with self._on_behalf_of([row.request for row in rows]):
                store(self.runner, rows, self.now, self.prefix.computed)
        for chunk in chunks:
            if not chunk.request.finished:
                with self._on_behalf_of([chunk.request]):
                    self._stored(chunk)

    def _stored(self, chunk: Chunk) -> None:
        """Publish the blocks that a chunk filled; its request may now be running."""
        if chunk.tokens:
            chunk.lease.publish(chunk.request.prompt)
        if chunk.stop:
            chunk.lease.snapshot()
        if chunk.last:
            chunk.lease.sequence.prefilled(1 + self.speculation.most if self.speculation is not None else 1)
            self.scheduler.move(chunk.request, "running")

    # Decode

    def _decode(self) -> None:
        begin, running = self.now(), self.scheduler.running
        if self.speculation is not None and (proposals := self._propose(self.speculation)) is not None:
            self._verify(self.speculation, list(running), proposals, begin)
            return
        decoded = list(running)
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
        if self.speculation is not None:
            self.speculation.plain(decoded, self.now() - begin)

    def _propose(self, speculation: Speculation) -> Proposals | None:
        """What to verify for the running requests; None: nothing."""
        running = self.scheduler.running
        if self.runner.flight is not None:
            # The tokens of the step in flight are not known yet: is there a proposal after those before it?
            if speculation.propose(running) is None:
                return None
            self._land()
        return speculation.propose(running) if running else None

    def _verify(self, speculation: Speculation, running: list[Request], proposed: Proposals, begin: float) -> None:
        """A step with the last token of each request and the proposals that follow it."""
        wanted = dict(zip(running, zip(*proposed, strict=True), strict=True))
        for request, (tokens, drafts) in wanted.items():
            assert request.lease is not None
            with self._on_behalf_of([request]):
                request.lease.grow(1 + len(tokens) + drafts)
        requests = list(self.scheduler.running)
        proposals = [wanted[request][0] for request in requests]
        if requests:
            with self._on_behalf_of(requests):
                if drafted := any(proposed.drafts):
                    proposals = self.runner.draft(requests, [wanted[request][1] for request in requests])
                verification = self.runner.verify(requests, proposals)
                for rows in verification.waves():
                    self._read(rows)
                speculation.verified(requests, proposals, drafted, verification.accepted, self.now() - begin)

    def _continues(self, requests: list[Request]) -> bool:
        """Whether all rows of the step in flight, and no others, surely get one more token."""
        full = any(len(request.tokens) + 1 >= request.max_tokens for request in requests)
        return requests == self.scheduler.running and not full

    def _land(self) -> None:
        """Read the step in flight, if there is one."""
        if (flight := self.runner.flight) is not None:
            with self._on_behalf_of(flight.requests):
                self._read(self.runner.land())

    def _read(self, rows: list[Row]) -> None:
        now = self.now()
        for row in rows:
            request = row.request
            # A request that ended while this step was in flight has one token too many.
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
                if row.back and request.lease is not None:
                    # Before anything is published: KV stored after these tokens belongs to wrong guesses.
                    request.lease.truncate(request.stored - row.back)
                if row.doubtful and self.speculation is not None:
                    self.speculation.doubt(request)
                if not request.tokens and row.tokens:
                    request.first = now
                for index, token in enumerate(row.tokens):
                    request.tokens.append(token)
                    request.logprobs += row.logprobs[index : index + 1]
                    self._follow(request, token)
                    if request.finished:
                        break
                if row.last and request.lease is not None and request.lease.due:
                    request.lease.publish(request.all_tokens)

    def _follow(self, request: Request, token: int) -> None:
        """A request has one more token: advance its constraint, and end it if that was the last."""
        if request.constraint is not None:
            try:
                request.constraint.advance(token)
            except OneKVError as error:
                request.error = error
                self._finish(request, "error")
                return
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
        if self.speculation is not None:
            kept = self.prefix.enabled and reason != "error" and request.lease is not None
            self.speculation.ended(request, kept)
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
            log.exception("the KV of a request could not be cached; it ends with an error")
            request.finish_reason, request.error = "error", RequestFailedError.internal(error)
            self._discard(lease)

    def _discard(self, lease: Lease) -> None:
        """A request failed: what it computed may be wrong, so it is dropped."""
        self.runner.wait()
        lease.discard()

    def _pin(self, request: Request) -> None:
        try:
            self.prefix.pin(request.prompt, request.salt)
        except MemoryBudgetError as error:
            request.error = error

    def clear_cache(self) -> None:
        """Drop what is cached and neither in use nor pinned, in the colder tiers, too."""
        self.prefix.clear()
        if self.speculation is not None:
            self.speculation.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError if any block is lost, held twice or miscounted."""
        self.prefix.check_integrity()
