"""One simulated server: an engine on a folder, its clients, and what must hold after every step.

The world owns everything outside of the process: the folder, the clock, and the clients with their conversations. The
engine, its thread's state and the tier are the process; `die` and `restart` replace them.

Invariants, checked after every turn of the engine's thread unless noted otherwise:

    - every count of pools, tables, index and snapshots is right (`check_integrity`)
    - what the model reads is what was stored for those tokens (`HashModel`)
    - nothing is reused that was not computed under the same salt
    - the pool's arrays have not moved, and every cached block contains what it should (from time to time)
    - a copy of the prefix index that is built only from its events equals the index (`copies.py`)
    - the folder never exceeds its limit (after every change to a file)
    - a request that ended got the tokens of a model without a cache, and exactly one end; one that failed had a fault
    - when all have ended, nothing is held; no client waits forever
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mlx.nn.layers.base import Module

from ..engine import Engine, EngineThread, Request
from ..engine.runner import Runner
from ..errors import OneKVError, OverloadedError, SettingError
from ..memory.kv import KVMemory
from ..memory.pool.sequence import Sequence
from ..tiers.disk import DiskTier
from .audit import check_contents
from .client import Client
from .config import Config
from .copies import Copies
from .coverage import figures
from .faults import TIER_CALLS, Faults, Injected, Kill, SimClock
from .guesses import Guesses
from .model import HashModel, HostRunner, Known, Violation, pool_views
from .neighbour import Neighbour
from .store import SimStore
from .tiers import Limited, memory_folder, open_disk, open_remote
from .truth import STOP, Hashes, Truth, chain

Result = TypeVar("Result")

# Turns without any change after which a request counts as stuck.
PATIENCE = 400


class World:
    def __init__(self, config: Config, folder: str | None = None) -> None:
        """Its own folder is made in `folder`, or else in memory."""
        self.config = config
        self.clock, self.faults = SimClock(), Faults()
        self.store = SimStore(self.faults, self.clock)
        self.folder = Path(tempfile.mkdtemp(prefix="onekv-sim-", dir=folder or memory_folder()))
        self.counts: Counter[str] = Counter()
        self.turns = 0
        self.clients: list[Client] = []
        # Per open sequence: its request, the prefix hashes of its tokens, and how many of them are known.
        self._hashes: dict[Sequence, Known] = {}
        # Prefix hashes of all that was ever computed, by salt, and conversations that can continue.
        self.seen: dict[str, set[int]] = {}
        self.talks: list[tuple[str, list[int]]] = []
        # What was asked to be pinned; unpinning what is not is no mistake.
        self.pins: list[tuple[list[int], str]] = []
        self._states: dict[Request, str] = {}
        # The requests that the engine works for, the innermost last.
        self._working: list[Several[Request]] = []
        self.files = Limited(self.folder / "kv", self.config.disk_limit, self.faults, self.clock)
        self.neighbour = Neighbour(self.folder / "kv", self.files, self.clock, self.counts)
        self._start()

    # The process

    def _start(self) -> None:
        config = self.config
        self.truth = Truth(config.layout, config.model)
        self.model = HashModel(self.truth)
        self.tier, self.remote = self._open_disk(), open_remote(config, self.store, self.clock)
        self.thread = EngineThread(self._build, config.max_waiting, config.max_wait, now=self.clock.monotonic)
        try:
            self.engine = self.thread.open()
        except Kill:
            self.counts["killed at start"] += 1
            self._kill_tiers()
            self._start()
            return
        self._addresses = self._pool_addresses()
        self.pins.clear()
        self.counts["start"] += 1

    def _build(self) -> Engine:
        config = self.config
        engine = Engine(
            self.model,
            config.plan,
            {STOP},
            config.settings,
            [tier for tier in (self.tier, self.remote) if tier is not None],
            now=self.clock.monotonic,
            make_runner=self._make_runner,
            proposer=Guesses(self.truth, config.guesses, self.faults),
        )
        self.model.expected, self.model.before = self._expected, self._before
        self.copies = Copies(engine.prefix)
        self._set_traps(engine)
        return engine

    def _make_runner(self, model: Module, memory: KVMemory, max_batch: int) -> Runner:
        # The model is tried before the engine has all its parts.
        self.model.memory = memory
        return (Runner if self.config.device else HostRunner)(model, memory, max_batch, self.config.together)

    def _set_traps(self, engine: Engine) -> None:
        """Let faults strike where the engine calls what may raise, and see whom it works for then."""
        self._working = []
        works_for = engine._on_behalf_of

        @contextmanager
        def seen(requests: Several[Request]) -> Iterator[None]:
            self._working.append(requests)
            try:
                with works_for(requests):
                    yield
            finally:
                self._working.pop()

        engine._on_behalf_of = seen  # type: ignore[method-assign]
        for pool in engine.memory.pools:
            pool.copy = self._trap("copy", pool.copy)  # type: ignore[method-assign]
        memory = engine.memory
        memory.states_of = self._trap("states", memory.states_of)  # type: ignore[method-assign]
        for tier in engine.prefix.tiers:
            for name, site in TIER_CALLS.items():
                setattr(tier, name, self._trap(site, getattr(tier, name)))
            for name in ("find", "tails"):
                setattr(tier, name, self._late(getattr(tier, name)))

    def _trap(self, site: str, function: Callable[..., Result]) -> Callable[..., Result]:
        def trapped(*arguments: Any, **options: Any) -> Result:
            if self.faults.strikes(site):
                self._blame_current()
                raise Injected(f"{function.__name__} failed")
            self.counts[f"called: {function.__name__}"] += 1
            return function(*arguments, **options)

        return trapped

    def _late(self, function: Callable[..., Result]) -> Callable[..., Result | None]:
        """A tier that has to ask elsewhere does not always know at once."""

        def answered(*arguments: Any, **options: Any) -> Result | None:
            if self.config.late_answers and self.turns % self.config.late_answers == 0:
                self.counts["late answers"] += 1
                return None
            return function(*arguments, **options)

        return answered

    def _blame_current(self) -> None:
        """Whom the engine works for, and who is ending just now."""
        ending = [client.request for client in self.clients if client.request.finished]
        self._blame(*(self._working[-1] if self._working else ()), *ending)

    def _open_disk(self) -> DiskTier | None:
        opening = partial(open_disk, self.config, self.folder / "kv", self.files, self.clock)
        try:
            return opening()
        except (Kill, SettingError) as error:
            self.counts[f"could not be opened: {type(error).__name__}"] += 1
            if not self.faults.armed:
                raise Violation(f"the disk cache cannot be opened: {error}") from error
        # A user would see that and try again.
        self.faults.disarm()
        try:
            return opening()
        except SettingError as error:
            raise Violation(f"the disk cache cannot be opened again: {error}") from error

    def work(self, tasks: int = 1) -> None:
        """Let the tiers do what their threads would."""
        for tier in (self.tier, self.remote):
            if tier is not None:
                tier.work(tasks)

    def die(self) -> None:
        """The process is killed: clients whose requests had not ended get nothing more."""
        self.counts["kill"] += 1
        self._kill_tiers()
        self._leave()
        self._start()

    def restart(self, config: Config) -> None:
        """The server is stopped and started again, perhaps with other settings."""
        self.counts["restart"] += 1
        self.thread.close(self.engine)
        if config.disk_limit is None:
            self.neighbour.close()
        self._leave()
        self.config = config
        self._start()

    def _kill_tiers(self) -> None:
        self.neighbour.kill()
        if self.tier is not None:
            self.tier.kill()

    def _leave(self) -> None:
        self._count_figures()
        self._note_tokens()
        for client in self.clients:
            client.forget()
        for each in (self.clients, self._hashes, self._states):
            each.clear()

    # What clients do

    def submit(self, client: Client) -> None:
        client.request.arrived(self.clock.seconds)
        self.seen.setdefault(client.request.salt, set()).update(chain(self.truth.start, client.request.prompt))
        try:
            self.thread.submit([client.job])
        except OverloadedError:
            self.counts["refused: too many"] += 1
            return
        self.clients.append(client)
        if client.request.pin:
            self.pins.append((client.request.prompt, client.request.salt))

    def call(self, function: Callable[[Engine], Any]) -> None:
        """Have something done between two steps; only what a user can cause may be raised."""
        future = self.thread.call(function)
        self.turn()
        try:
            future.result(0)
        except (OneKVError, Injected):
            self.counts["call refused"] += 1

    # Turns

    def turn(self) -> bool:
        """One turn of the engine's thread, if it has something to do; everything is checked after it."""
        if self.engine.idle and self.thread.quiet:
            return False
        self.turns += 1
        self.clock.seconds += 0.001
        self.thread.turn(self.engine, wait=False)
        self._follow_requests()
        self.engine.check_integrity()
        self.copies.check(late=self.turns % 7 == 0)
        if self.turns % 61 == 0:
            self.audit()
        self.clients = [client for client in self.clients if not self._ended(client)]
        return True

    def _follow_requests(self) -> None:
        """Note what became of each request, and how much it reuses; a token at least must be left to compute."""
        for request in self.engine.scheduler:
            before = self._states.get(request, "new")
            if before == request.state:
                continue
            self.counts[f"{before} -> {request.state}"] += 1
            self._states[request] = request.state
            if request.state in ("prefilling", "running") and before in ("new", "waiting", "looking", "loading"):
                self._check_reuse(request)

    def _check_reuse(self, request: Request) -> None:
        cached = request.cached_tokens
        if cached >= len(request.prompt):
            raise Violation(f"{cached} of {len(request.prompt)} tokens are cached: none is left to compute")
        kind = "nothing" if not cached else "all" if cached == len(request.prompt) - 1 else "some"
        self.counts[f"reused: {kind}"] += 1

    def _ended(self, client: Client) -> bool:
        if not client.ended:
            return False
        request = client.request
        before = self._states.pop(request, "new")
        self.counts[f"{before} -> {request.finish_reason}"] += 1
        try:
            client.check(self.truth)
        except AssertionError as error:
            raise Violation(str(error)) from error
        self._note_tokens(client)
        self.talks = [*self.talks[-30:], (request.salt, request.all_tokens)]
        return True

    def _note_tokens(self, *clients: Client) -> None:
        """Their tokens were computed, or may have been, under their salt."""
        for client in clients or self.clients:
            self.seen[client.request.salt].update(chain(self.truth.start, client.request.all_tokens))

    def audit(self) -> None:
        """What is too slow to check in every turn."""
        self._note_tokens()
        if self._pool_addresses() != self._addresses:
            raise Violation("an array of the pool was copied")
        check_contents(self.engine, self.truth, self.seen)

    def drain(self) -> None:
        """Nothing more goes wrong; all that was requested comes to its end, and nothing is held."""
        self.faults.disarm()
        everyone, still = self.engine.scheduler, 0

        def progress() -> tuple[object, ...]:
            lengths = tuple((r.state, len(r.tokens), r.sequence.length if r.lease else 0) for r in everyone)
            return lengths, self.tier.stats().hits if self.tier is not None else 0

        while not (self.engine.idle and self.thread.quiet):
            before = progress()
            self.clock.seconds += 0.01
            self.turn()
            if self.remote is not None and self.turns % 2:
                self.remote.work()
            still = still + 1 if progress() == before else 0
            if still > PATIENCE:
                raise Violation(f"requests make no progress: {[request.state for request in self._states]}")
        for client in self.clients:
            raise Violation(f"a client got no end: {client.request.state}, {client.request.finish_reason}")
        if self.thread.open_jobs:
            raise Violation(f"{self.thread.open_jobs} jobs count as open, and there is none")
        self.audit()
        for pool in self.engine.memory.pools:
            if pool.held or pool.reserved:
                raise Violation(f"{pool.group.rule}: {pool.held} blocks held, {pool.reserved} reserved by nobody")

    def close(self) -> None:
        """All ends well: what was cached is stored, and nothing is left in the pool."""
        self.drain()
        for tokens, salt in self.pins:
            self.engine.prefix.unpin(tokens, salt)
        self.neighbour.close()
        self.thread.close(self.engine)
        self.copies.check_ended()
        for pool in self.engine.memory.pools:
            if pool.free != pool.blocks:
                raise Violation(f"{pool.group.rule}: {pool.blocks - pool.free} blocks are left when all is closed")
        self._count_figures()

    def dispose(self) -> None:
        """However it ended, nothing is left of it."""
        self._kill_tiers()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Helpers

    def _expected(self, sequence: Sequence) -> Hashes | None:
        """The prefix hashes of the tokens that a sequence has stored."""
        if sequence not in self._hashes:
            owner = self._owners().get(sequence)
            if owner is None:
                return None
            self._hashes = {each: known for each, known in self._hashes.items() if not known.request.finished}
            self._hashes[sequence] = Known(owner, self.truth.start)
        hashes = self._hashes[sequence].hashes()
        if len(hashes) < sequence.length:
            raise Violation(f"a sequence has {sequence.length} tokens stored, its request {len(hashes)}")
        return hashes

    def _before(self, sequences: list[Sequence]) -> list[int]:
        """Faults of the model."""
        owners, running = self._owners(), self.engine.scheduler.running
        requests = [owners[sequence] for sequence in sequences if sequence in owners]
        if requests and requests[0].state == "prefilling":
            self.counts["pass of one prompt" if len(requests) == 1 else "pass of several prompts"] += 1
        if self.faults.strikes("model"):
            # Decoding is one step for all that run, even where rows are computed one by one.
            self._blame(*(running if requests and requests[0].state == "running" else requests))
            raise Injected("the model failed")
        if len(requests) == len(sequences) and requests[0].state == "running" and self.faults.strikes("nan"):
            victim = self.turns % len(requests)
            self._blame(requests[victim])
            return [victim]
        return []

    def _owners(self) -> dict[Sequence, Request]:
        """Whose sequences may be in a step."""
        scheduler = self.engine.scheduler
        return {request.sequence: request for request in (*scheduler.prefilling, *scheduler.running)}

    def _blame(self, *requests: Request) -> None:
        """They may end with an error."""
        for client in self.clients:
            if client.request in requests:
                client.blamed = True

    def _pool_addresses(self) -> list[int]:
        return [view.ctypes.data for pool in self.engine.memory.pools for view in pool_views(pool)]

    def _count_figures(self) -> None:
        """What the parts have counted since they were made."""
        self.faults.paused = True
        self.counts += figures(self.engine, self.copies.told, self.tier, self.remote)
        self.faults.paused = False
