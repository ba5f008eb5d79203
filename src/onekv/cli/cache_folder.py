"""The actions of `onekv cache`: inspect the folder of a disk cache, verify it, clear it.

`ls` and `stats` read only the index and work while a server uses the folder. `check` (`onekv cache verify`) and
`empty` (`onekv cache clear`) need exclusive access; if another process uses the folder, the error names it.
"""

import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..config import AUTO
from ..errors import SettingError
from ..interrupts import uninterrupted
from ..tables import table
from ..tiers.folder import INDEX_FILES, Folder, file_size, is_ours
from ..tiers.maintain import IndexUnreadable, ModelUse, Report, clear, models, verify, written
from ..tiers.opening import default_folder
from ..units import format_seconds, format_size
from .options import confirmed

# Digits of a model's hash that are shown; `clear --model` takes any number of them.
DIGITS = 8
STRAY = 5


def find(name: str) -> Path:
    """The folder that is meant. It must be a disk cache: nothing is made here."""
    folder = default_folder() if name == AUTO else Path(name).expanduser().absolute()
    if not folder.exists():
        raise SettingError(f"there is no disk cache at {folder}; set its folder with --disk-cache")
    if not is_ours(folder):
        raise SettingError(f"{folder} is not a OneKV disk cache; set its folder with --disk-cache")
    return folder


# Looking


def ls(folder: Path, as_json: bool) -> None:
    uses = models(folder)
    if as_json:
        print(json.dumps([_model(use) for use in uses], indent=2))
        return
    if not uses:
        print(f"the disk cache {folder} is empty")
        return
    print(f"{folder}\n\n{_table(uses)}")


def _model(use: ModelUse) -> dict[str, Any]:
    return {name: value for name, value in asdict(use).items() if name != "id"}


def _table(uses: list[ModelUse]) -> str:
    now = time.time()
    rows = [
        [
            use.name,
            use.hash[:DIGITS],
            f"{use.blocks:,}",
            format_size(use.bytes),
            ago(now, use.created),
            ago(now, use.used),
        ]
        for use in uses
    ]
    return table(rows, ["model", "id", "blocks", "size", "oldest", "last used"])


@dataclass(frozen=True)
class FolderStats:
    """Of all models. Times are seconds since 1970, None if there is nothing."""

    folder: str
    models: int
    blocks: int
    files: int
    bytes: int
    index_bytes: int
    free_bytes: int
    written_today_bytes: int
    oldest: float | None
    last_used: float | None


def stats(folder: Path, as_json: bool) -> None:
    uses = models(folder)
    found = FolderStats(
        folder=str(folder),
        models=len(uses),
        blocks=sum(use.blocks for use in uses),
        files=sum(use.parts for use in uses),
        bytes=sum(use.bytes for use in uses),
        index_bytes=sum(file_size(folder / name) for name in INDEX_FILES),
        free_bytes=shutil.disk_usage(folder).free,
        written_today_bytes=written(folder, datetime.now(UTC).date().isoformat()),
        oldest=min((use.created for use in uses if use.created is not None), default=None),
        last_used=max((use.used for use in uses if use.used is not None), default=None),
    )
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    now = time.time()
    rows = [
        ["models", f"{found.models:,}"],
        ["blocks", f"{found.blocks:,}"],
        ["files", f"{found.files:,}"],
        ["size of the files", format_size(found.bytes)],
        ["size of the index", format_size(found.index_bytes)],
        ["free disk space", format_size(found.free_bytes)],
        ["written today (UTC)", format_size(found.written_today_bytes)],
        ["oldest", ago(now, found.oldest)],
        ["last used", ago(now, found.last_used)],
    ]
    print(f"{folder}\n\n{table(rows, ['disk cache', ''])}")


def ago(now: float, then: float | None) -> str:
    """How long ago."""
    if then is None:
        return "-"
    return "now" if now - then < 1 else f"{format_seconds(now - then)} ago"


# Checking and emptying


def check(folder: Path) -> int:
    """1 if anything was damaged or left over."""
    with tqdm(desc="checking", unit=" files", file=sys.stderr, disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        report = verify(folder, progress)
    print(f"{folder}: {report.checked:,} files ({format_size(report.bytes)}) read; {_findings(report)}")
    for path in report.stray[:STRAY]:
        print(f"not a OneKV file, left in place: {path}")
    if len(report.stray) > STRAY:
        print(f"and {len(report.stray) - STRAY:,} more")
    return 0 if report.sound else 1


def _findings(report: Report) -> str:
    if report.sound:
        return "no problems found"
    counts = {"corrupt": report.corrupt, "missing": report.missing, "orphaned": report.orphans}
    found = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    return f"{found}; {format_size(report.removed_bytes)} removed, to be recomputed when needed"


def empty(folder: Path, name: str | None, sure: bool) -> int | None:
    """All of it, or what belongs to the model called `name`. Asks a person who is not `sure`; 1 if the answer is no."""
    if name is not None and not name.strip():
        raise SettingError("--model is empty; use a name or an id listed by `onekv cache ls`")
    if not sure and sys.stdin.isatty() and not _confirmed(folder, name):
        print("nothing was removed")
        return 1
    with uninterrupted():
        files, size = clear(folder, name)
        print(f"{files:,} files ({format_size(size)}) removed from {folder}")
    return None


def _confirmed(folder: Path, name: str | None) -> bool:
    """Whether a person says yes, having seen what will be removed."""
    # If the folder is in use there is nothing to ask.
    Folder(folder).release()
    try:
        uses = models(folder)
    except IndexUnreadable as error:
        print(error)
        uses = []
    chosen = [use for use in uses if name is None or use.name == name or use.hash.startswith(name)]
    if name is not None and not chosen:
        # `clear` says what is wrong.
        return True
    if chosen:
        print(_table(chosen))
    return confirmed(f"remove this from {folder}?")
