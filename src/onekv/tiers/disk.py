"""The disk tier: parts as files of one folder, found by an index.

    engine's thread   queries the index (its own connection), fills and checksums buffers, reads parts
    writer            one thread; the only one of the tier that changes the folder (`writer`)
    readers           one thread reads parts beside the engine's, another asks the system to prefetch (`reader`)

Threads start when there is something for them to do. In RAM the tier takes `staging` bytes for queued writes, and one
part for each of the two threads that read. Tiers of several models may share one folder (`opened`): the limit covers
everything in it, at every instant. The index answers at once, so `find` and `tails` need no `seconds`. An error with a
file costs only the parts concerned; an error with the index, or a folder that is gone, disables the tier: then it has
nothing, accepts nothing, and reports why (`stats().failed`).

For a simulation, `DiskTier(threads=False, files=..., clock=...)` is the same tier, driven from outside (see `files`).
Nothing happens by itself then: the writer runs a task when `work` is called, and calls that have to wait for it
(`flush`, `offer(wait=True)`, `close`) run tasks meanwhile; the caller's thread reads parts, and nothing is prefetched.
The index is still a real SQLite file. `kill` leaves the folder as the death of the process would.
"""

import math
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import TypeVar

import xxhash

from ..errors import SettingError
from ..units import format_size
from .base import Address, Entry, Target, TierStats
from .files import CLOCK, FILES, Clock, Files
from .folder import INDEX_FILES, model_hash
from .image import Image
from .index import DiskIndex
from .limited import LimitedStore
from .reader import Load, Readers
from .rows import Name, Row, Status
from .shared import Setup, Shared
from .store import LEAST_LIMIT, Store, open_index
from .turns import TurnsFile
from .writer import Writer

Answer = TypeVar("Answer")


class DiskTier:
    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        name: str,
        images: dict[int, Image],
        block_tokens: int,
        limit: int,
        staging: int,
        write_budget: int | None = None,
        files: Files = FILES,
        clock: Clock = CLOCK,
        threads: bool = True,
    ) -> None:
        """`images` are the model's kinds of parts; `write_budget` is for bytes per day (UTC).

        The last three are for simulations. Without threads, an exception that is no `Exception` while the folder is
        opened leaves it as `kill` does.

        Raises SettingError, or FolderInUse.
        """
        if limit < LEAST_LIMIT:
            raise SettingError(
                f"--disk-limit is {format_size(limit)}; it must be at least {format_size(LEAST_LIMIT)}, "
                "which the disk cache's index may need"
            )
        self._images = dict(images)
        self._threads = threads
        self._hash = model_hash(fingerprint)
        self._shared = Shared(folder, self._hash, limit, staging, files, clock)
        self._opened = self._shared.opened
        self._folder = self._opened.folder
        self._closed = False
        self._asking = Lock()
        self._index: DiskIndex | None = None
        try:
            with self._opened.turn:

                def setup() -> Setup:
                    # The model has a number when the index is open.
                    return Setup(self._opened, self._shared.model, self._hash, block_tokens, write_budget, threads)

                self._open_twice(fingerprint, name, setup)
                self._model = self._shared.model
                self._writer = Writer(setup(), self._shared)
                self._readers = Readers(self._images, self._writer)
        except BaseException as error:
            if not threads and not isinstance(error, Exception):
                self.kill()
            if self._index is not None:
                self._index.close()
            self._opened.leave(self._hash)
            if not isinstance(error, (OSError, sqlite3.Error)):
                raise
            raise SettingError(
                f"the disk cache {folder} cannot be opened ({error}); choose another folder with --disk-cache"
            ) from error

    def _open_twice(self, fingerprint: str, name: str, setup: Callable[[], Setup]) -> None:
        if self._opened.failed is not None:
            return
        try:
            self._open(fingerprint, name, setup)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            # Damage that a first look at the index did not meet.
            if self._index is not None:
                self._index.close()
                self._index = None
            if self._opened.ready:
                # Other tiers use it.
                self._shared.fail(error)
            else:
                # Without it, all starts over.
                self._open(fingerprint, name, setup, str(error))

    def _open(self, fingerprint: str, name: str, setup: Callable[[], Setup], damage: str | None = None) -> None:
        opened, shared = self._opened, self._shared
        # Made in one thread and used by another, one at a time: see `_question`.
        if opened.ready:
            index, problem = DiskIndex(self._folder.index, any_thread=True), None
        else:
            index, problem = open_index(self._folder, True, damage)
        self._index = index
        if problem is not None:
            shared.counts.corrupt += 1
            shared.once("index", f"The disk cache {self._folder.root} was emptied: {problem}.")
        shared.model = index.model(self._hash, fingerprint, name, shared.clock.now())
        if not opened.ready:
            store = Store(self._folder, index)
            store.settle()
            opened.count(index)
            if not index.open_use():
                store.remove_orphans()
                opened.blocks, opened.files = self._folder.used()
        # The limit may be lower than it was.
        LimitedStore(Store(self._folder, index), setup(), shared).make_room(0)
        if shared.counts.evicted:
            index.shrink()
        opened.ready = True

    def find(self, keys: Sequence[bytes], seconds: float = 0.0) -> dict[bytes, Entry]:
        entries = self._ask(lambda index: list(index.find(self._model, keys)))
        return {entry.address.key: entry for entry in entries}

    def tails(self, parent: bytes, seconds: float = 0.0) -> list[Entry]:
        return self._ask(lambda index: index.tails(self._model, parent))

    def recent(self, count: int) -> list[Address]:
        # A node may have all kinds of parts.
        parts = count * len(self._images)
        nothing: list[Address] = []
        return self._question(lambda index: index.recent(self._model, parts), nothing)[:count]

    def has(self, key: bytes, part: int) -> bool:
        with self._shared.lock:
            if (key, part) in self._shared.pending:
                return self._shared.failed is None
            if (key, part) in self._shared.damaged:
                return False
        return self._question(lambda index: index.status(Name(self._model, key, part)) == Status.READY, False)

    def _question(self, question: Callable[[DiskIndex], Answer], nothing: Answer) -> Answer:
        """The index's answer; `nothing` if it has failed or is about to be emptied."""
        shared = self._shared
        with self._asking:
            if self._closed or self._index is None or shared.failed is not None or shared.clearing:
                return nothing
            try:
                return question(self._index)
            except sqlite3.Error as error:
                shared.fail(error)
                return nothing

    def _ask(self, question: Callable[[DiskIndex], list[tuple[Address, int]]]) -> list[Entry]:
        """The nodes among the answers, with those of their parts that can be read."""
        with self._shared.lock:
            damaged = set(self._shared.damaged)
        nothing: list[tuple[Address, int]] = []
        answers = self._question(question, nothing)
        nodes: dict[Address, set[int]] = {}
        for address, part in answers:
            if part in self._images and (address.key, part) not in damaged:
                nodes.setdefault(address, set()).add(part)
        return [Entry(address, frozenset(parts)) for address, parts in nodes.items()]

    def offer(self, address: Address, part: int, fill: Callable[[memoryview], None], wait: bool = False) -> bool:
        if self.has(address.key, part):
            return True
        image = self._images[part]
        buffer = self._take(image.size, wait)
        if buffer is None:
            self._shared.discard()
            return False
        try:
            fill(buffer[image.header_size :])
            buffer[: image.header_size] = image.header(self._hash, address)
            # Here, while the processor's cache has it.
            checksum = xxhash.xxh3_128_digest(buffer)
        except BaseException:
            self._shared.staging.give(buffer)
            raise
        self._writer.write(Row(Name(self._model, address.key, part), address, image.size, checksum), buffer)
        return True

    def _take(self, size: int, wait: bool) -> memoryview | None:
        staging = self._shared.staging
        if self._shared.failed is not None:
            return None
        if self._threads:
            # Nobody returns buffers while the system starts no thread.
            return staging.take(size, wait and self._writer.running)
        while (buffer := staging.take(size)) is None and wait and not staging.closed and size <= staging.limit:
            # All buffers are with the writer, which has no thread.
            self._writer.step()
        return buffer

    def expect(self, parts: Sequence[tuple[bytes, int]]) -> None:
        with self._shared.lock:
            self._shared.expected.update(parts)
        if not self._closed:
            self._readers.read_ahead(parts)

    def unexpect(self, parts: Sequence[tuple[bytes, int]]) -> None:
        with self._shared.lock:
            for part in parts:
                self._shared.expected[part] -= 1
                if not self._shared.expected[part]:
                    del self._shared.expected[part]

    def ready(self, parts: Sequence[tuple[bytes, int]], seconds: float = 0.0) -> Sequence[tuple[bytes, int]]:
        return parts

    def read(self, targets: Sequence[Target], seconds: float = math.inf) -> list[bool | None]:
        started = self._shared.clock.monotonic()
        parts = [(target.key, target.part) for target in targets]
        rows = self._rows(parts)
        tasks = [
            Load(row, target, self._images[target.part]) if row is not None else None
            for row, target in zip(rows, targets, strict=True)
        ]
        there = [task for task in tasks if task is not None]
        self._readers.read(there, started + seconds)
        self._damaged([task for task in there if task.problem is not None])
        answers = [task.answer if task is not None else False for task in tasks]
        self.unexpect([part for part, answer in zip(parts, answers, strict=True) if answer is not None])
        with self._shared.lock:
            counts = self._shared.counts
            counts.hits += answers.count(True)
            counts.promoted_bytes += sum(task.row.size for task in there if task.answer)
            counts.promoted_seconds += self._shared.clock.monotonic() - started
        return answers

    def _damaged(self, tasks: list[Load]) -> None:
        """Queue the removal of parts that cannot be used. One that was evicted or cleared meanwhile is not damaged."""
        if tasks:
            now = self._rows([(task.target.key, task.target.part) for task in tasks])
            for task, still in zip(tasks, now, strict=True):
                if still == task.row and task.problem is not None:
                    self._readers.damaged(task.row, task.problem)

    def _rows(self, parts: list[tuple[bytes, int]]) -> list[Row | None]:
        nothing: list[Row | None] = [None] * len(parts)
        # Asked for first: what is removed while the index answers is in one of the two.
        with self._shared.lock:
            damaged = set(self._shared.damaged)
        found = self._question(lambda index: index.rows(self._model, parts), nothing)
        return [None if part in damaged else row for part, row in zip(parts, found, strict=True)]

    def touch(self, keys: Sequence[bytes]) -> None:
        if keys and not self._closed and self._shared.failed is None:
            self._writer.touch(keys, list(self._images))

    def wants(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        # It takes what RAM has no room for.
        return []

    def computed(self, tokens: int, seconds: float) -> None:
        """Reading a disk beats computing."""

    def drop(self, keys: Sequence[bytes], wrong: bool = False) -> None:
        if keys and not self._closed:
            self._writer.drop([(key, part) for key in keys for part in self._images])

    @property
    def turns(self) -> TurnsFile:
        """For the turns of this model that a server remembers."""
        return TurnsFile(self._folder.turns(self._hash))

    def clear(self) -> None:
        if not self._closed:
            self._writer.clear()

    def flush(self) -> None:
        self._writer.flush()

    @property
    def failed(self) -> str | None:
        """Why it is disabled, if it is; `stats` has that, too, and looks at the disk."""
        return self._shared.failed

    def stats(self) -> TierStats:
        try:
            size = sum(self._folder.sizes().values())
        except OSError as error:
            size = 0
            # That it is disabled has been logged.
            if self._shared.failed is None:
                self._shared.once("sizes", f"The index of the disk cache {self._folder.root} has no size ({error}).")
        with self._shared.lock:
            counts = self._shared.counts
            return TierStats(
                name="disk",
                blocks=self._opened.blocks,
                bytes=self._opened.files + size,
                limit=self._opened.limit,
                hits=counts.hits,
                promoted_bytes=counts.promoted_bytes,
                promoted_seconds=counts.promoted_seconds,
                writes=counts.writes,
                written_bytes=counts.written_bytes,
                evicted=counts.evicted,
                discarded=counts.discarded,
                corrupt=counts.corrupt,
                queued_bytes=self._shared.staging.taken,
                failed=self._shared.failed,
            )

    def work(self, tasks: int = 1) -> bool:
        """Without threads: run the writer's next tasks here; False if there was nothing to do."""
        assert not self._threads, "the writer has a thread"
        done = 0
        while done < tasks and self._writer.step():
            done += 1
        return done > 0

    def kill(self) -> None:
        """Without threads: release the folder as the death of the process would, for a new tier to open it.

        What the index has not committed is gone, what it has is in its log, no file is touched, the lock is free.
        """
        # SQLite empties its log when the last connection is closed; the end of a process does not. Where other tiers
        # have the folder open, theirs come after this one's.
        last = self._opened.alone(self._hash)
        files = [self._folder.root / name for name in INDEX_FILES[:2]] if last else []
        left = {path: path.read_bytes() for path in files if path.is_file()}
        if (writer := getattr(self, "_writer", None)) is not None:
            writer.close_index()
        if self._index is not None:
            self._index.close()
            self._index = None
        for path in files:
            path.unlink(missing_ok=True)
        for path, content in left.items():
            path.touch(0o600)
            path.write_bytes(content)
        self._closed = True
        self._shared.staging.close()
        self._opened.leave(self._hash)

    def close(self) -> None:
        # Every step may be done twice: a close that was interrupted is finished by the next.
        self._closed = True
        self._shared.staging.close()
        self._readers.stop()
        self._writer.stop()
        with self._opened.turn:
            last = self._opened.alone(self._hash)
            with self._asking:
                if self._index is not None:
                    self._close_index(self._index, last)
                    self._index = None
            if last:
                self._opened.ready = False
                self._remove_damaged()
        self._opened.leave(self._hash)

    def _close_index(self, index: DiskIndex, last: bool) -> None:
        try:
            if last and self._shared.failed is None:
                index.close_use()
            index.close()
        except sqlite3.Error as error:
            self._shared.fail(error)

    def _remove_damaged(self) -> None:
        """A damaged index would end the next tier as well: without it, that one starts over."""
        if self._opened.index_damaged and self._folder.there():
            try:
                self._folder.remove_index()
            except OSError as error:
                self._shared.once("remove", f"The damaged index of {self._folder.root} cannot be removed ({error}).")
