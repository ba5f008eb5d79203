"""The one thread that changes the folder: it stores, evicts, removes and keeps the order of use.

Tasks are done in the order they came. Parts that follow each other in the queue are written together: their rows in one
transaction, their files one after the other, their rows again in one; each buffer is free as soon as its file is made.
Uses (`touch`) are merged by node and written at most once a second, and before anything is evicted or waited for. When
the tier has failed the thread goes on, so that nobody waits for ever, and discards.

Without threads (`Place.threads`) the same is done by `step`, on the thread that calls it, one job at a time.
"""

import errno
import os
from collections import deque
from collections.abc import Sequence
from threading import Event, Thread

from .index import BATCH, LATEST, WRITES, DiskIndex
from .rows import Name, NewRow, Row, Use
from .shared import Shared
from .store import Store
from .tasks import Barrier, Clear, Drop, Job, Place, Remove, Task, Write

# Seconds that uses may wait to be written: a kill loses them.
TOUCH_DELAY = 1.0
# Free bytes that are left to the disk, so that the index can always be written.
SPARE = 4 * 1024 * 1024


class Writer:
    def __init__(self, place: Place, shared: Shared, clock: int) -> None:
        self.place, self.shared = place, shared
        # What has not been stored yet; the lock of `shared` guards these.
        self.pending: dict[tuple[bytes, int], Write] = {}
        self.clearing = 0
        self._tasks: deque[Task] = deque()
        self._touched: dict[bytes, Use] = {}
        self._due = 0.0
        self._clock = clock
        self._stopping = False
        self._thread: Thread | None = None
        self._store: Store | None = None

    # Called by other threads.

    def write(self, row: Row, buffer: memoryview) -> None:
        with self.shared.lock:
            task = Write(row, buffer, self._use())
            self.pending[task.part] = task
            self.shared.counts.queued_bytes += row.size
            self._add(task)

    def remove(self, row: Row) -> None:
        """`row` says what was found damaged; another part of that name is left alone."""
        with self.shared.lock:
            self.shared.damaged.add((row.name.key, row.name.part))
            self._add(Remove(row))

    def drop(self, parts: list[tuple[bytes, int]]) -> None:
        with self.shared.lock:
            self.shared.damaged.update(parts)
            self._add(Drop(parts))

    def clear(self) -> None:
        with self.shared.lock:
            for task in [task for task in self._tasks if isinstance(task, Write)]:
                self._tasks.remove(task)
                self._give_back(task)
            self.pending.clear()
            self.clearing += 1
            self._add(Clear())

    def touch(self, keys: Sequence[bytes], parts: Sequence[int]) -> None:
        with self.shared.lock:
            if not self._touched:
                self._due = self.shared.clock.monotonic() + TOUCH_DELAY
            for key in keys:
                use = self._touched[key] = self._use()
                for part in parts:
                    if task := self.pending.get((key, part)):
                        task.use = use
            self._start()
            self.shared.work.notify()

    def flush(self) -> None:
        barrier = Barrier(Event())
        with self.shared.lock:
            if self._stopping or (self.place.threads and self._thread is None):
                return
            self._add(barrier)
        if not self.place.threads:
            while not barrier.reached.is_set():
                self.step()
        barrier.reached.wait()

    def stop(self) -> None:
        """Do what there is to do and end."""
        with self.shared.lock:
            self._stopping = True
            self.shared.work.notify()
        if self._thread is not None:
            self._thread.join()
        elif not self.place.threads:
            self._run()

    def _add(self, task: Task) -> None:
        self._tasks.append(task)
        self._start()
        self.shared.work.notify()

    def _start(self) -> None:
        if self._thread is None and self.place.threads:
            self._thread = Thread(target=self._run, name="onekv-disk-writer", daemon=True)
            self._thread.start()

    def _use(self) -> Use:
        self._clock += 1
        return Use(self._clock, self.shared.clock.now())

    def _give_back(self, task: Write) -> None:
        """The buffer is free, if it was not before."""
        if task.buffer is not None:
            self.shared.counts.queued_bytes -= task.row.size
            self.shared.staging.give(task.buffer)
            self.shared.room.notify_all()
            task.buffer = None

    # The thread, or the caller's if there are none.

    def _run(self) -> None:
        try:
            while self.step(wait=True):
                pass
        finally:
            self.close_index()

    def step(self, wait: bool = False) -> bool:
        """Do the next job; False if there is none, with `wait` only if there will be none."""
        job = self._next(wait)
        if job is None:
            return False
        try:
            self._do(job)
        finally:
            self._end(job)
        return True

    def close_index(self) -> None:
        if self._store is not None:
            self._store.index.close()
            self._store = None

    def _next(self, wait: bool) -> Job | None:
        """What to do next; None when there is nothing, and with `wait` will be nothing. Due uses come with the rest."""
        while True:
            with self.shared.lock:
                if self._tasks:
                    return self._take()
                delay = self._due - self.shared.clock.monotonic() if self._touched else None
                if not self._stopping and (delay is None or delay > 0):
                    if not wait:
                        return None
                    self.shared.work.wait(delay)
                    continue
                if not self._touched:
                    return None
            # A barrier without a waiter: uses are written by `_do`.
            return Barrier(Event())

    def _take(self) -> Job:
        """The next task; if it is a part to be stored, those that follow it, too."""
        task = self._tasks.popleft()
        if not isinstance(task, Write):
            return task
        writes = [task]
        while len(writes) < WRITES and self._tasks and isinstance(following := self._tasks[0], Write):
            writes.append(following)
            self._tasks.popleft()
        return writes

    def _do(self, job: Job) -> None:
        try:
            if self.shared.failed is None:
                if self._store is None:
                    self._store = Store(self.place.folder, DiskIndex(self.place.folder.index))
                self._perform(self._store, job)
                return
        except OSError as error:
            self._refused(error)
        except Exception as error:  # noqa: BLE001
            # Whatever it is, the tier is out of use and says so; nobody may wait for ever for a thread that is gone.
            self.shared.fail(error)
        with self.shared.lock:
            self._touched.clear()

    def _perform(self, store: Store, job: Job) -> None:
        if isinstance(job, list):
            self._write(store, job)
        elif isinstance(job, Remove):
            self._remove(store, job.row)
        elif isinstance(job, Drop):
            self._drop(store, job.parts)
        elif isinstance(job, Clear):
            self._clear(store)
        else:
            self._write_touches(store)

    def _end(self, job: Job) -> None:
        with self.shared.lock:
            if isinstance(job, list):
                self.shared.counts.discarded += sum(not task.stored for task in job)
                for task in job:
                    if self.pending.get(task.part) is task:
                        del self.pending[task.part]
                    self._give_back(task)
            elif isinstance(job, Remove):
                self.shared.damaged.discard((job.row.name.key, job.row.name.part))
            elif isinstance(job, Drop):
                self.shared.damaged.difference_update(job.parts)
            elif isinstance(job, Clear):
                self.clearing -= 1
            else:
                job.reached.set()

    def _write(self, store: Store, tasks: list[Write]) -> None:
        there = store.index.rows(self.place.model, [task.part for task in tasks])
        for task, row in zip(tasks, there, strict=True):
            task.stored = row is not None
        tasks = [task for task in tasks if not task.stored]
        if not tasks:
            return
        problem: OSError | None = None
        may = False
        try:
            may = self._may_write(store, tasks)
        except OSError as error:
            problem = error
        if may:
            self._put(store, tasks)
            return
        if len(tasks) > 1:
            # There is no room for all of them, but perhaps for some.
            for task in tasks:
                self._write(store, [task])
            return
        if problem is not None:
            self._refused(problem)
        elif store.overhead() + (size := tasks[0].row.size) > self.place.limit:
            self.shared.once("limit", f"A block of {size} bytes does not fit the --disk-limit {self.place.limit}.")

    def _put(self, store: Store, tasks: list[Write]) -> None:
        full = 4 * self.place.block_tokens
        with self.shared.lock:
            new = [NewRow(task.row, len(task.row.address.tokens) < full, task.use) for task in tasks]

        def made(number: int) -> None:
            with self.shared.lock:
                self._give_back(tasks[number])

        data = [task.buffer for task in tasks if task.buffer is not None]
        errors, left = store.put(new, data, self.shared.clock.today(), made)
        stored = [each.row for each, error in zip(new, errors, strict=True) if error is None]
        for task, error in zip(tasks, errors, strict=True):
            task.stored = error is None
        with self.shared.lock:
            counts = self.shared.counts
            counts.files += sum(row.size for row in stored)
            counts.blocks += sum(row.name.part >= 0 for row in stored)
            counts.writes += len(stored)
            counts.written_bytes += sum(row.size for row in stored)
        if left:
            with self.shared.lock:
                # At most that, should even looking be refused.
                counts.files += sum(each.row.size for each in new) - sum(row.size for row in stored)
            try:
                self._recount()
            except OSError as error:
                errors.append(error)
        for problem in errors:
            if problem is not None:
                self._refused(problem)

    def _may_write(self, store: Store, tasks: list[Write]) -> bool:
        """Whether there is room, made by evicting what was not used for longest, and budget. OSError: disk full."""
        size = sum(task.row.size for task in tasks)
        budget, today = self.place.budget, self.shared.clock.today()
        if budget is not None and store.index.written(today) + size > budget:
            self.shared.once(
                ("budget", today), f"The disk cache {self.place.folder.root} has no write budget left today."
            )
            return False
        self._write_touches(store)
        # Of several, none may take the place of what was used after it; one alone always gets a place.
        with self.shared.lock:
            before = min(task.use.clock for task in tasks) if len(tasks) > 1 else LATEST
        if not self.make_room(store, size, before):
            return False
        if store.folder.free() < size + SPARE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True

    def make_room(self, store: Store, size: int, before: int = LATEST) -> bool:
        """Evict until `size` bytes more are within the limit; False if that takes parts that are to stay.

        To stay are parts that are being read, or were used since `before`.
        """
        limit = self.place.limit
        while (excess := self.shared.counts.files + (overhead := store.overhead()) + size - limit) > 0:
            if size and overhead + size > limit:
                return False
            victims = self._victims(store, excess, before)
            if not victims:
                if self._remove_orphans(store):
                    continue
                return False
            self._remove_parts(store, victims)
            with self.shared.lock:
                self.shared.counts.evicted += len(victims)
        return True

    def _victims(self, store: Store, excess: int, before: int) -> list[tuple[Name, int]]:
        with self.shared.lock:
            expected = set(self.shared.expected)
        victims: list[tuple[Name, int]] = []
        for name, size in store.index.oldest(BATCH + len(expected), before):
            if excess <= 0 or len(victims) == BATCH:
                break
            if name.model != self.place.model or (name.key, name.part) not in expected:
                victims.append((name, size))
                excess -= size
        return victims

    def _remove_parts(self, store: Store, parts: Sequence[tuple[Name, int]]) -> None:
        try:
            removed = store.remove([name for name, _ in parts])
        except OSError:
            # Some are gone and some are not.
            self._recount()
            raise
        if removed != sum(size for _, size in parts):
            # Files or rows were changed by somebody else: what was counted for them is not known.
            self._recount()
            return
        with self.shared.lock:
            self.shared.counts.files -= removed
            self.shared.counts.blocks -= sum(name.part >= 0 for name, _ in parts)

    def _remove_orphans(self, store: Store) -> bool:
        """Whether something was found that takes room and that no row knows, so that it would never be evicted."""
        with self.shared.lock:
            # Rather a block less than all files looked at again and again, while parts are only waiting to be read.
            if self.shared.expected:
                return False
        files, _, _ = store.remove_orphans()
        self._recount()
        return files > 0

    def _recount(self) -> None:
        """Believe the folder, not the index."""
        blocks, size = self.place.folder.used()
        with self.shared.lock:
            self.shared.counts.files, self.shared.counts.blocks = size, blocks

    def _remove(self, store: Store, row: Row) -> None:
        if store.index.row(row.name) != row:
            return
        try:
            self._remove_parts(store, [(row.name, row.size)])
        except OSError as error:
            self._refused(error)

    def _drop(self, store: Store, parts: list[tuple[bytes, int]]) -> None:
        rows = store.index.rows(self.place.model, parts)
        try:
            self._remove_parts(store, [(row.name, row.size) for row in rows if row is not None])
        except OSError as error:
            self._refused(error)

    def _clear(self, store: Store) -> None:
        try:
            self._remove_parts(store, store.index.of_model(self.place.model))
        except OSError as error:
            self._refused(error)

    def _write_touches(self, store: Store) -> None:
        with self.shared.lock:
            touched, self._touched = self._touched, {}
        store.index.touch(self.place.model, list(touched.items()))

    def _refused(self, error: OSError) -> None:
        """The disk refuses, perhaps for a while."""
        root = self.place.folder.root
        if not self.place.folder.there():
            self.shared.fail(error)
            return
        self.shared.once(
            ("write", error.errno),
            f"The disk cache {root} cannot be written ({error.strerror}): blocks that do not fit RAM are lost.",
        )
