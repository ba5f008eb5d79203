"""The thread of a tier that changes the folder: it runs tasks in FIFO order (`tasks`), each when it has the folder's
turn (`OpenFolder`).

Consecutive parts in the queue are written together; each buffer is freed as soon as its file is written. Uses (`touch`)
are merged by node and written at most once a second, and before anything is evicted or waited for. After the tier has
failed, the thread keeps running, so that nobody waits forever, and discards.

Without threads (`Setup.threads`) the same is done by `step`, on the thread that calls it, one task at a time.
"""

from collections import deque
from collections.abc import Sequence
from threading import Thread

from .index import DiskIndex
from .limited import LimitedStore
from .rows import Row, Use
from .shared import NewPart, Setup, Shared
from .store import Store
from .tasks import Clear, Drop, Remove, Settle, Task, Write

# Seconds that uses may wait to be written: a kill loses them.
TOUCH_DELAY = 1.0


class Writer:
    def __init__(self, setup: Setup, shared: Shared) -> None:
        self.setup, self.shared = setup, shared
        # The lock of `shared` guards these.
        self._tasks: deque[Task] = deque()
        self._due = 0.0
        self._stopping = False
        self._thread: Thread | None = None
        # The thread's own.
        self._store: LimitedStore | None = None

    # Called by other threads.

    @property
    def running(self) -> bool:
        """Whether it has its thread, which starts with the first task."""
        with self.shared.lock:
            self._wake()
            return self._thread is not None

    def write(self, row: Row, buffer: memoryview) -> None:
        with self.shared.lock:
            part = NewPart(row, buffer, self._use())
            self.shared.pending[part.part] = part
            if not (self._tasks and self._tasks[-1].join(part)):
                self._tasks.append(Write([part]))
            self._wake()

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
            self._tasks = deque(task for task in self._tasks if not task.drop(self.shared))
            self.shared.pending.clear()
            self.shared.clearing += 1
            self._add(Clear())

    def touch(self, keys: Sequence[bytes], parts: Sequence[int]) -> None:
        with self.shared.lock:
            if not self.shared.touched:
                self._due = self.shared.clock.monotonic() + TOUCH_DELAY
            for key in keys:
                use = self.shared.touched[key] = self._use()
                for part in parts:
                    if waiting := self.shared.pending.get((key, part)):
                        waiting.use = use
            self._wake()

    def flush(self) -> None:
        settle = Settle()
        with self.shared.lock:
            if self._stopping or (self.setup.threads and self._thread is None):
                return
            self._add(settle)
            if self.setup.threads and self._thread is None:
                # The system starts none just now: what is queued is stored later, or by `stop`.
                return
        if not self.setup.threads:
            while not settle.reached.is_set():
                self.step()
        settle.reached.wait()

    def stop(self) -> None:
        """Do what there is to do and end."""
        with self.shared.lock:
            self._stopping = True
            self.shared.work.notify()
        if self._thread is not None:
            self._thread.join()
        else:
            self._run()

    def _add(self, task: Task) -> None:
        self._tasks.append(task)
        self._wake()

    def _wake(self) -> None:
        if self._thread is None and self.setup.threads:
            thread = Thread(target=self._run, name="onekv-disk-writer", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The process may have no more threads: the next task tries again.
                return
            self._thread = thread
        self.shared.work.notify()

    def _use(self) -> Use:
        return self.setup.opened.use(self.shared.clock.now())

    # The thread, or the caller's if there are none.

    def _run(self) -> None:
        try:
            while self.step(wait=True):
                pass
        finally:
            self.close_index()

    def step(self, wait: bool = False) -> bool:
        """Do the next task; False if there is none, with `wait` only if there will be none."""
        task = self._next(wait)
        if task is None:
            return False
        try:
            self._do(task)
        finally:
            with self.shared.lock:
                task.end(self.shared)
        return True

    def close_index(self) -> None:
        if self._store is not None:
            self._store.index.close()
            self._store = None

    def _next(self, wait: bool) -> Task | None:
        """What to do next; None when there is nothing, and with `wait` will be nothing. Due uses come with the rest."""
        while True:
            with self.shared.lock:
                if self._tasks:
                    return self._tasks.popleft()
                delay = self._due - self.shared.clock.monotonic() if self.shared.touched else None
                if not self._stopping and (delay is None or delay > 0):
                    if not wait:
                        return None
                    self.shared.work.wait(delay)
                    continue
                return Settle() if self.shared.touched else None

    def _do(self, task: Task) -> None:
        try:
            if self.shared.failed is None:
                if self._store is None:
                    store = Store(self.setup.folder, DiskIndex(self.setup.folder.index))
                    self._store = LimitedStore(store, self.setup, self.shared)
                with self.setup.opened.turn:
                    task.run(self._store)
                return
        except OSError as error:
            self.shared.refused(error)
        except Exception as error:  # noqa: BLE001
            # Whatever the error is, the tier is disabled and reports it: nothing may wait forever for an ended thread.
            self.shared.fail(error)
        with self.shared.lock:
            self.shared.touched.clear()
