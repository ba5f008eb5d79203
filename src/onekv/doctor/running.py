"""Runs checks one after another. A check that raises has failed; the others still run."""

import gc
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import OneKVError
from .base import Case, Check, Notes, Result

_PACKAGE = Path(__file__).parents[1]


def run_checks(case: Case, checks: Sequence[Check]) -> Iterator[Result]:
    for number, check in enumerate(checks, 1):
        case.say(f"[{number}/{len(checks)}] {check.name}: {check.shows}")
        begin, notes = case.clock.monotonic(), Notes()
        try:
            check.run(case, notes)
        except OneKVError as error:
            # Its message names the flag that helps.
            notes.fail(str(error), None)
        except Exception as error:  # noqa: BLE001  (reported as this check's failure)
            notes.fail(f"{type(error).__name__}: {error}{_place(error)}", None)
        # Models and pools of this check must not count in the next one's figures.
        gc.collect()
        seconds = case.clock.monotonic() - begin
        case.say(f"      {notes.status} ({seconds:.1f} s)")
        yield Result(check, notes.status, seconds, tuple(notes.figures), tuple(notes.findings))


def _place(error: Exception) -> str:
    """The innermost frame inside OneKV."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _PACKAGE in Path(frame.filename).parents]
    if not frames:
        return ""
    return f" ({Path(frames[-1].filename).relative_to(_PACKAGE.parent)}, line {frames[-1].lineno})"
