"""The disk cache: the state of its folder, the speed of its disk, and a round trip of a conversation.

The user's folder is only read. Test data goes to a temporary folder on the same disk.
"""

import errno
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path

from ..config import AUTO, Settings
from ..tiers.files import NEW, READ, Files, write_file
from ..tiers.folder import holder, is_ours
from ..tiers.maintain import IndexUnreadable, inspect, verify
from ..tiers.opening import default_folder
from ..units import format_size
from .base import Case, Check, Notes, switch
from .engines import chat_model, generate, make_engine, random_prompt

# Size of the file that speed is measured with; free space below which a disk cache is of little use.
SPEED_BYTES, LEAST_FREE = 64 * 2**20, 2 * 2**30
# Time limit for checking the user's cache files.
INSPECT_S = 10.0
PROMPT, ANSWER = 300, 8
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run(case: Case, notes: Notes) -> None:
    settings = case.settings
    if settings.hot_only or not settings.prefix_cache:
        notes.skip("--hot-only is on" if settings.hot_only else "--prefix-cache is off")
        return
    chosen = settings.disk_cache or AUTO
    folder = default_folder() if chosen == AUTO else Path(chosen).expanduser().absolute()
    _used(folder, notes)
    place = _existing(folder)
    free = case.files.free(place)
    notes.figure("free space", free, "B")
    elsewhere = f"{switch('disk_cache', 'DIR')} on another disk, or {switch('hot_only', 'on')}"
    if free < LEAST_FREE:
        notes.warn(f"only {format_size(free)} is free on the disk cache's disk", elsewhere)
    try:
        with tempfile.TemporaryDirectory(prefix="onekv-doctor-", dir=place) as temporary:
            _speed(Path(temporary), case.files, notes)
            _round_trip(Path(temporary), case, notes)
    except OSError as error:
        reason = "the disk is full" if error.errno in _NO_SPACE else str(error.strerror)
        notes.fail(f"the disk cache's folder cannot be written: {reason}", elsewhere)


def _existing(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    while not folder.is_dir():
        folder = folder.parent
    return folder


# The user's own folder


def _used(folder: Path, notes: Notes) -> None:
    """Whether the folder is in use, and whether its files are intact."""
    if not folder.is_dir() or not is_ours(folder):
        if folder.is_dir() and any(folder.iterdir()):
            notes.fail(f"{folder} is not empty and not a OneKV disk cache", switch("disk_cache", "DIR"))
        else:
            notes.ok("there is no disk cache yet")
        return
    pid = holder(folder)
    if pid is not None:
        elsewhere = switch("disk_cache", "DIR")
        if pid.isdecimal() and not _alive(int(pid)):
            notes.fail(
                f"the disk cache is locked, but process {pid}, which took the lock, no longer runs: the lock is stale. "
                "A child process still holds the file open, or the folder is on a network drive",
                f"stop whatever holds {folder}/lock open (fuser, lsof), or {elsewhere}",
            )
        else:
            notes.warn(f"the disk cache is in use by process {pid}; another process runs without it", elsewhere)
        return
    try:
        report, parts = inspect(folder, INSPECT_S)
    except IndexUnreadable as error:
        notes.fail(str(error), _repair(folder))
        return
    notes.figure("files in the disk cache", parts)
    notes.figure("files checked", report.checked)
    if report.corrupt or report.missing:
        notes.fail(
            f"{report.corrupt} damaged, {report.missing} missing files in the disk cache ({report.checked} checked), "
            "which are never served, only recomputed",
            _repair(folder),
        )


def _repair(folder: Path) -> str:
    own = "" if folder == default_folder() else f" --disk-cache {folder}"
    return f"onekv cache verify{own}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It runs, as another user.
        pass
    return True


# The disk


def _speed(folder: Path, files: Files, notes: Notes) -> None:
    """Write a file and wait until it is on disk, then read it, bypassing the page cache where the system allows it."""
    data = memoryview(os.urandom(2**20) * (SPEED_BYTES // 2**20))
    file = folder / "speed"
    begin = time.perf_counter()
    handle = files.open(file, NEW)
    write_file(files, handle, data)
    _synced(file)
    notes.figure("disk write", SPEED_BYTES / (time.perf_counter() - begin), "B/s")
    into = memoryview(bytearray(2**22))
    handle = files.open(file, READ)
    try:
        dropped = hasattr(os, "posix_fadvise")
        if dropped:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        begin, count = time.perf_counter(), 0
        while read := files.read(handle, [into]):
            count += read
        seconds = time.perf_counter() - begin
    finally:
        files.close(handle)
        files.unlink(file)
    notes.figure("disk read" if dropped else "disk read (page cache)", count / seconds, "B/s")


def _synced(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Round trip


def _round_trip(temporary: Path, case: Case, notes: Notes) -> None:
    """Write a conversation, verify the files, restore it in another engine, and check that damage is noticed."""
    folder = temporary / "kv"
    settings = Settings(
        kernels=case.settings.kernels,
        kv_memory="8MB",
        max_batch=1,
        speculate="off",
        disk_cache=str(folder),
        disk_limit="64MB",
    )
    problems, first = [], Answer(settings, case.files)
    if first.lost:
        problems.append(
            f"{first.lost} blocks of a conversation could not be written: the disk is full or rejects writes"
        )
    report = verify(folder, files=case.files)
    if not report.sound:
        problems.append(
            f"{report.corrupt + report.missing} of {report.checked} files were corrupt right after they were written"
        )
    second = Answer(settings, case.files)
    if not second.cached:
        problems.append("a conversation that was written to disk was not found there")
    if second.tokens != first.tokens:
        problems.append("a conversation restored from disk continued differently")
    if report.checked and not _finds_damage(folder, case.files):
        problems.append("a damaged cache file went unnoticed")
    notes.figure("restored from disk", second.cached, "tokens")
    for problem in problems:
        notes.fail(problem, switch("hot_only", "on"))
    if not problems:
        notes.ok(f"{second.cached} of {PROMPT} tokens restored from disk, with the same answer")


class Answer:
    """A greedy answer from a fresh engine, which is then closed, so that its blocks go to disk."""

    def __init__(self, settings: Settings, files: Files) -> None:
        with closing(make_engine(chat_model(), settings, files)) as engine:
            request = generate(engine, random_prompt(PROMPT), ANSWER)
            (tier,) = engine.prefix.tiers
        self.tokens, self.cached = request.tokens, request.cached_tokens
        # Blocks that could not be written.
        self.lost = tier.stats().discarded


def _finds_damage(folder: Path, files: Files) -> bool:
    file = next(folder.rglob("*.safetensors"))
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    return verify(folder, files=files).corrupt == 1


CHECK = Check("disk", "the disk cache's folder, its disk's speed, a conversation written and restored", run)
