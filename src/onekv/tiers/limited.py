"""Keeps the folder within its limit: changes files and rows, and the tier's counts with them.

For whoever has the folder's turn (`OpenFolder`): the writer's thread, or the opening of a tier. `Store` determines the
order in which files and rows change; this module how much may be stored, what is evicted, and what is counted.
"""

import errno
import os
from collections.abc import Sequence

from .index import BATCH, LATEST, DiskIndex
from .rows import IndexDamaged, Name, NewRow
from .shared import NewPart, Setup, Shared
from .store import Store

# Free bytes that are left to the disk, so that the index can always be written.
SPARE = 4 * 1024 * 1024


class LimitedStore:
    def __init__(self, store: Store, setup: Setup, shared: Shared) -> None:
        self._store, self.setup, self.shared = store, setup, shared

    @property
    def index(self) -> DiskIndex:
        return self._store.index

    def overhead(self) -> int:
        """The bytes that all but the parts take, or may take before the next look."""
        return self._store.overhead()

    def may_write(self, parts: Sequence[NewPart]) -> bool:
        """Whether there is room, evicting the least recently used if necessary, and budget. OSError: disk full."""
        size = sum(part.row.size for part in parts)
        budget, today = self.setup.budget, self.shared.clock.today()
        if budget is not None and self.index.written(today) + size > budget:
            self.shared.once(
                ("budget", today), f"The disk cache {self.setup.folder.root} has no write budget left today."
            )
            return False
        self.write_uses()
        # Of several, none may take the place of what was used after it; one alone always gets a place.
        with self.shared.lock:
            before = min(part.use.clock for part in parts) if len(parts) > 1 else LATEST
        if not self.make_room(size, before):
            return False
        if self.setup.folder.free() < size + SPARE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True

    def put(self, parts: Sequence[NewPart]) -> None:
        """Store parts for which there is room; those that could not be are not `stored`."""
        shared, full = self.shared, 4 * self.setup.block_tokens
        with shared.lock:
            new = [NewRow(part.row, len(part.row.address.tokens) < full, part.use) for part in parts]

        def made(number: int) -> None:
            with shared.lock:
                shared.give_back(parts[number])

        data = [part.buffer for part in parts if part.buffer is not None]
        errors, left = self._store.put(new, data, shared.clock.today(), made)
        for part, error in zip(parts, errors, strict=True):
            part.stored = error is None
        stored = [part.row for part in parts if part.stored]
        size = sum(row.size for row in stored)
        opened = self.setup.opened
        opened.files += size
        opened.blocks += sum(row.name.part >= 0 for row in stored)
        opened.sizes[self.setup.model] += size
        opened.used_at[self.setup.model] = shared.clock.now()
        with shared.lock:
            shared.counts.writes += len(stored)
            shared.counts.written_bytes += size
        if left:
            # At most that, should even looking be refused.
            opened.files += sum(part.row.size for part in parts if not part.stored)
            try:
                self._recount()
            except OSError as error:
                errors.append(error)
        for problem in errors:
            if problem is not None:
                shared.refused(problem)

    def make_room(self, size: int, before: int = LATEST) -> bool:
        """Evict until `size` more bytes fit within the limit; False if that would take parts that must stay.

        Parts that are being read, or were used since `before`, must stay. Raises IndexDamaged if the index keeps what
        was removed.
        """
        opened = self.setup.opened
        limit = opened.limit
        removed: set[Name] = set()
        while (excess := opened.files + (overhead := self.overhead()) + size - limit) > 0:
            if size and overhead + size > limit:
                return False
            protected = opened.protected(limit - overhead, self.shared.clock.now())
            victims = self._victims(excess, before, protected) or self._victims(excess, before, [])
            if not victims:
                if self._remove_orphans():
                    continue
                return False
            names = {name for name, _ in victims}
            if names & removed:
                raise IndexDamaged("rows that were removed are still there")
            removed |= names
            self._remove(victims)
            with self.shared.lock:
                self.shared.counts.evicted += len(victims)
        return True

    def _victims(self, excess: int, before: int, protected: Sequence[int]) -> list[tuple[Name, int]]:
        expected = self.setup.opened.expected()
        victims: list[tuple[Name, int]] = []
        for name, size in self.index.oldest(BATCH + len(expected), before, protected):
            if excess <= 0 or len(victims) == BATCH:
                break
            if name not in expected:
                victims.append((name, size))
                excess -= size
        return victims

    def remove_if_allowed(self, parts: Sequence[tuple[Name, int]]) -> None:
        """Remove parts of these sizes. If the disk refuses, what is left stays."""
        try:
            self._remove(parts)
        except OSError as error:
            self.shared.refused(error)

    def _remove(self, parts: Sequence[tuple[Name, int]]) -> None:
        try:
            removed = self._store.remove([name for name, _ in parts])
        except OSError:
            # Some are gone and some are not.
            self._recount()
            raise
        if removed != sum(size for _, size in parts):
            # Files or rows were changed from outside: their counts are no longer known.
            self._recount()
            return
        opened = self.setup.opened
        opened.files -= removed
        opened.blocks -= sum(name.part >= 0 for name, _ in parts)
        for name, size in parts:
            opened.sizes[name.model] -= size

    def _remove_orphans(self) -> bool:
        """Whether something was found that takes room and that no row knows, so that it would never be evicted."""
        # Rather a block less than all files looked at again and again, while parts are only waiting to be read.
        if self.setup.opened.expected():
            return False
        files, _, _ = self._store.remove_orphans()
        self._recount()
        return files > 0

    def _recount(self) -> None:
        """Believe the folder, not the index."""
        opened = self.setup.opened
        opened.blocks, opened.files = opened.folder.used()
        opened.count_models(self.index)

    def write_uses(self) -> None:
        with self.shared.lock:
            touched, self.shared.touched = self.shared.touched, {}
        self.index.touch(self.setup.model, list(touched.items()))
        if touched:
            self.setup.opened.used_at[self.setup.model] = self.shared.clock.now()
