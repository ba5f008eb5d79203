"""From settings to tiers; to a disk tier: where it is, how large it may be, and for which model."""

import logging
from collections.abc import Callable
from pathlib import Path

from mlx.nn.layers.base import Module

from ..config import AUTO, Settings
from ..errors import SettingError
from ..memory.plan import Plan
from ..models.identity import identity
from ..models.paths import cache_dir
from ..units import format_size, parse_size
from .base import Tier
from .disk import DiskTier
from .files import CLOCK, FILES, Clock, Files
from .folder import FolderInUse
from .image import images_of
from .maintain import IndexUnreadable, models
from .remote.opening import open_remote
from .turns import TurnsFile

log = logging.getLogger("onekv.disk")

# Default limit of the disk cache, in bytes and as a fraction of the free space.
MOST = 10 * 10**9
SHARE = 10


def default_folder() -> Path:
    return cache_dir() / "kv"


def open_tiers(
    settings: Settings, plan: Plan, model: Module, name: str, identify: Callable[[Module], str] = identity
) -> tuple[list[Tier], TurnsFile | None]:
    """All tiers in `settings`, the nearest first, and the file for a server's turns next to the disk cache.

    `identify` says which weights a model has.
    """
    there_are = settings.disk_cache is not None or settings.remote_tier is not None
    stored = stored_as(model, plan, identify) if there_are else ""
    disk = open_tier(settings, plan, stored, name)
    try:
        remote = open_remote(settings, plan, stored)
    except BaseException:
        if disk is not None:
            disk.close()
        raise
    return [tier for tier in (disk, remote) if tier is not None], disk.turns if disk is not None else None


def stored_as(model: Module, plan: Plan, identify: Callable[[Module], str] = identity) -> str:
    """The fingerprint under which all tiers store blocks of `model`, usable wherever it is equal. Reads all weights."""
    return f"{identify(model)} {plan.stored_as}"


def open_tier(
    settings: Settings,
    plan: Plan,
    stored: str,
    name: str,
    files: Files = FILES,
    clock: Clock = CLOCK,
    threads: bool = True,
    inner: str = "",
) -> DiskTier | None:
    """The disk cache for a model that is called `name`, with blocks `stored_as` that; None if `settings` say that there
    is none. With `inner`, a folder of that name in the one that they say. The three before: see `DiskTier`.

    OneKV's own folder is used by one process at a time: the second goes without a disk cache, and says so. A folder
    that was requested by name is not left out: then FolderInUse is raised.
    """
    if settings.disk_cache is None:
        _check_unused(settings)
        return None
    own = settings.disk_cache == AUTO
    folder = (default_folder() if own else Path(settings.disk_cache).expanduser().absolute()) / inner
    budget = settings.disk_write_budget
    try:
        return DiskTier(
            folder,
            stored,
            name,
            images_of(plan.layout, plan.block_size),
            plan.block_size,
            disk_limit(settings, folder, files),
            plan.queue,
            parse_size(budget, name="--disk-write-budget") if budget is not None else None,
            files,
            clock,
            threads,
        )
    except FolderInUse as error:
        if not own:
            raise
        log.warning("%s; continuing without a disk cache", error)
        return None


def _check_unused(settings: Settings) -> None:
    for name in ("disk_limit", "disk_policy", "disk_write_budget", "disk_queue"):
        if getattr(settings, name) is not None and not settings.hot_only:
            flag = name.replace("_", "-")
            raise SettingError(
                f"--{flag} is {getattr(settings, name)!r}, but there is no disk cache; set --disk-cache DIR"
            )


def disk_limit(settings: Settings, folder: Path, files: Files = FILES) -> int:
    """The most bytes `folder` may take. What it has now counts as free: it may be replaced."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = files.free(existing) + _used(folder)
    if settings.disk_limit is None:
        return min(MOST, free * SHARE // 100)
    limit = parse_size(settings.disk_limit, whole=free, name="--disk-limit")
    if limit > free:
        log.warning("--disk-limit is %s, but the disk has room for %s", format_size(limit), format_size(free))
    return limit


def _used(folder: Path) -> int:
    try:
        return sum(use.bytes for use in models(folder))
    except IndexUnreadable:
        # It is emptied when it is opened.
        return 0
