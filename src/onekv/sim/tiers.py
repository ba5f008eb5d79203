"""The tiers of a simulated server: the real ones, without threads, on files and a store with injected faults."""

from pathlib import Path

from ..tiers.base import STATES
from ..tiers.disk import DiskTier
from ..tiers.image import images_of
from ..tiers.remote.common import Setup
from ..tiers.remote.seal import SEAL, Sealer
from ..tiers.remote.tier import RemoteTier
from ..tiers.store import LOG, SMALL
from .config import Config
from .faults import Faults, SimClock, SimFiles
from .model import Violation
from .store import SimStore


class Limited(SimFiles):
    """Verifies that the folder never takes more than `limit`: that of the last start at which it could be used."""

    def __init__(self, folder: Path, limit: int | None, faults: Faults, clock: SimClock) -> None:
        super().__init__(faults, clock)
        self._folder, self.limit = folder, limit
        self._writes = 0

    def write(self, handle: int, data: memoryview) -> int:
        count = super().write(handle, data)
        self._writes += 1
        if self._writes % 16 == 0:
            self.check()
        return count

    def check(self) -> None:
        """Checks the size of all files, and of parts together with what the index may need before the next check."""
        limit = self.limit
        sizes = {file: file.stat().st_size for file in self._folder.rglob("*") if file.is_file()}
        parts = sum(size for file, size in sizes.items() if file.parent.parent.parent == self._folder)
        if limit is not None and max(sum(sizes.values()), parts + LOG + SMALL) > limit:
            raise Violation(f"the folder takes {sum(sizes.values())} bytes, {parts} of them in parts, of {limit}")


def open_disk(config: Config, folder: Path, files: Limited, clock: SimClock) -> DiskTier | None:
    if config.disk_limit is None:
        return None
    images = images_of(config.layout, config.block_size)
    tier = DiskTier(
        folder,
        f"model {config.model} {config.plan.stored_as}",
        "sim",
        images,
        config.block_size,
        config.disk_limit,
        config.staging * max(image.size for image in images.values()),
        config.write_budget,
        files=files,
        clock=clock,
        threads=False,
    )
    if tier.failed is None:
        files.limit = config.disk_limit
    return tier


def open_remote(config: Config, store: SimStore, clock: SimClock) -> RemoteTier | None:
    if config.remote is None:
        return None
    images = images_of(config.layout, config.block_size)
    reads: dict[int, int | None] = {
        part: None if group.rule.span is None else -(-group.rule.span // config.block_size) + 2
        for part, group in enumerate(config.layout.groups)
    }
    setup = Setup(
        store,
        "a store",
        Sealer(f"{config.model:032}", "a secret", config.block_size),
        images,
        config.block_size,
        reads | {STATES: 1},
        None,
        config.remote,
        clock,
        threads=False,
    )
    room = config.staging * (max(image.size for image in images.values()) + SEAL)
    return RemoteTier(setup, room, room, 1e9)


def memory_folder() -> str | None:
    """Where files take no disk, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
