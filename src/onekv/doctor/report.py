"""Results as text and as JSON. Both are safe to paste into a bug report (`scrub`)."""

import json
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..tables import table
from ..units import format_size
from .base import Figure, Result, Status
from .model import SHARE
from .scrub import Scrubber, variables

INDENT = "  "


def verdict(results: Sequence[Result], left: int = 0) -> str:
    """`exact, flat; decode 0.90 of what memory allows; 1 warning`; with checks `left`, it was interrupted."""
    said = []
    for result in results:
        words = result.check.failed if result.status is Status.FAILED else result.check.passed
        if words and result.status is not Status.SKIPPED:
            said.append(words)
    failed = sum(result.status is Status.FAILED for result in results)
    parts = [", ".join(said)] if said else [] if failed or left else ["passed"]
    shares = [f.value for result in results for f in result.figures if f.name == SHARE and isinstance(f.value, float)]
    parts += [f"decode {share:.2f} of what memory allows" for share in shares]
    warnings = sum(finding.status is Status.WARNING for result in results for finding in result.findings)
    skipped = sum(result.status is Status.SKIPPED for result in results)
    if failed:
        parts.append(_counted(failed, "check failed", "checks failed"))
    parts.append(_counted(warnings, "warning", "warnings") if warnings else "no warnings")
    if skipped:
        parts.append(f"{skipped} skipped")
    if left:
        parts.append(f"interrupted: {_counted(left, 'check has', 'checks have')} not ended")
    return "; ".join(parts)


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def exit_status(results: Sequence[Result]) -> int:
    return int(any(result.status is Status.FAILED for result in results))


def as_text(results: Sequence[Result], left: int = 0) -> str:
    """A table of checks, their findings and figures, and the verdict."""
    rows = [[result.check.name, result.status.value, f"{result.seconds:.1f} s"] for result in results]
    parts = [f"onekv doctor {__version__}", table(rows, ["check", "status", "took"])]
    parts += [_details(result) for result in results]
    if found := variables():
        parts.append("\n".join(["variables", *(f"{INDENT}{name}={value}" for name, value in found.items())]))
    parts.append(f"verdict: {verdict(results, left)}")
    return Scrubber()("\n\n".join(parts))


def _details(result: Result) -> str:
    lines = [f"{result.check.name}: {result.check.shows}"]
    for finding in result.findings:
        mark = "" if finding.status is Status.OK else f"{finding.status.value.upper()}: "
        lines.append(f"{INDENT}{mark}{finding.text}")
        if finding.remedy is not None:
            lines.append(f"{INDENT * 2}to avoid it: {finding.remedy}")
    width = max((len(figure.name) for figure in result.figures), default=0)
    lines += [f"{INDENT}{figure.name.ljust(width)}  {shown(figure)}" for figure in result.figures]
    return "\n".join(lines)


def shown(figure: Figure) -> str:
    """`1.50 GiB`, `37.2 tokens/s`, `2.4e-06 (at most 5.0e-05)`."""
    text = _value(figure.value, figure.unit)
    return text if figure.limit is None else f"{text} (at most {_value(figure.limit, figure.unit)})"


def _value(value: float | int | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    if unit in ("B", "B/s"):
        return format_size(value) + unit[1:]
    if unit == "relative":
        return f"{value:.1e}"
    number = f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return number if unit in ("", "share") else f"{number} {unit}"


def as_json(results: Sequence[Result], left: int = 0) -> str:
    """The same as JSON; sizes are in bytes, times in seconds."""
    found: dict[str, Any] = {
        "onekv": __version__,
        "verdict": verdict(results, left),
        "failed": bool(exit_status(results)),
        "variables": variables(),
        "checks": [
            {
                "name": result.check.name,
                "shows": result.check.shows,
                "status": result.status.value,
                "seconds": round(result.seconds, 3),
                "findings": [
                    {"status": finding.status.value, "text": finding.text, "remedy": finding.remedy}
                    for finding in result.findings
                ],
                "figures": [
                    {"name": figure.name, "value": _plain(figure.value), "unit": figure.unit, "limit": figure.limit}
                    for figure in result.figures
                ],
            }
            for result in results
        ],
    }
    scrub = Scrubber()

    def scrubbed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: scrubbed(each) for key, each in value.items()}
        if isinstance(value, list):
            return [scrubbed(each) for each in value]
        return scrub(value) if isinstance(value, str) else value

    return json.dumps(scrubbed(found), indent=2, allow_nan=False)


def _plain(value: float | int | str) -> float | int | str:
    """JSON has neither infinity nor NaN."""
    return value if isinstance(value, str) or abs(value) < float("inf") else str(value)
