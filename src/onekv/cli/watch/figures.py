"""Figures of a snapshot as a person reads them. A `Snapshot` is what /admin/live sends."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...units import format_seconds, format_size

Snapshot = dict[str, Any]
# A key that stays with what the row is about, and the cells.
Rows = list[tuple[str, list[str]]]

# Seconds of the past that a line can show, one figure each.
PAST = 600
# Seconds over which the rates of tiers are averaged.
RATE_S = 3
LEVELS = "▁▂▃▄▅▆▇█"
# Eighths of a cell, so that a bar of little is there.
EIGHTHS = " ▏▎▍▌▋▊▉"

REQUESTS = ["#", "state", "prompt", "cached", "generated", "accepted", "tokens/s", "age"]
# Columns of words; those of numbers end at the right.
WORDS = ("state", "model", "keep")
MODELS = ["model", "state", "keep", "weights", "KV", "running", "waiting"]


@dataclass(frozen=True)
class Bar:
    """A part of memory, as a share of the longest bar that there could be."""

    name: str
    size: int
    share: float
    note: str = ""

    def line(self, width: int) -> str:
        figure = f"{format_size(self.size):>10}"
        text = f"{self.name:<10}{filled(self.share, max(8, width - 36))} {figure}  {self.note}"
        return text.rstrip()[:width]


def filled(share: float, width: int) -> str:
    """A bar of `width` cells; a share of 0 is empty, and any other has at least an eighth of a cell."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    eighths = max(eighths, 1) if share > 0 else 0
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (EIGHTHS[rest] if rest else "")).ljust(width, "·")


def line_of(values: Sequence[float], top: float, width: int) -> str:
    """The last `width` of `values` as one row of characters, from 0 to `top`; what is 0 is a blank."""
    scale = (len(LEVELS) - 1) / top if top > 0 else 0.0
    cells = (" " if not value else LEVELS[min(len(LEVELS) - 1, round(value * scale))] for value in values[-width:])
    return "".join(cells).rjust(width)


class Past:
    """The figures of the last minutes, by the second."""

    def __init__(self) -> None:
        self.in_use: deque[float] = deque(maxlen=PAST)
        self.speed: deque[float] = deque(maxlen=PAST)
        # Bytes read from and written to each tier so far.
        self._moved: deque[dict[str, tuple[int, int]]] = deque(maxlen=RATE_S + 1)

    def rates(self, tier: str) -> tuple[float, float]:
        """Bytes per second that are read from and written to it now. An unloaded model takes its counts along."""
        known = [each[tier] for each in self._moved if tier in each]
        seconds = max(1, len(known) - 1)
        read, written = (max(0, known[-1][n] - known[0][n]) / seconds if known else 0.0 for n in (0, 1))
        return read, written

    def add(self, snapshot: Snapshot) -> None:
        self._moved.append({name: moved(rows) for name, rows in _tiers(snapshot).items()})
        self.in_use.append(snapshot["memory"]["held"])
        self.speed.append(speed(snapshot))


def pool_bytes(snapshot: Snapshot) -> int:
    memory = snapshot["memory"]
    return int(sum(memory[owner] for owner in ("held", "cached", "pinned", "free")))


def speed(snapshot: Snapshot) -> float:
    """Tokens per second that all requests together generate."""
    return sum(request["tokens_per_second"] or 0.0 for model in snapshot["models"] for request in model["requests"])


def memory_title(snapshot: Snapshot) -> str:
    memory = snapshot["memory"]
    return f"{format_size(memory['counted'])} of the {format_size(memory['budget'])} budget are planned"


def bars(snapshot: Snapshot) -> list[Bar]:
    memory = snapshot["memory"]
    longest = max(memory["budget"], memory["footprint"] or 0, 1)
    pinned, others = memory["pinned"], memory["states"] + memory["snapshots"]
    named = [
        ("weights", memory["weights"], ""),
        ("KV in use", memory["held"], ""),
        ("KV cached", memory["cached"] + pinned, f"{format_size(pinned)} pinned" if pinned else ""),
        ("KV free", memory["free"], ""),
        ("states", others, "and snapshots"),
        ("process", memory["footprint"] or 0, f"{(memory['footprint'] or 0) / max(1, memory['budget']):.0%} of budget"),
    ]
    return [Bar(name, size, size / longest, note) for name, size, note in named if size or name != "states"]


def reuse(snapshot: Snapshot) -> list[str]:
    """Hits, and misses by reason, of all models together."""
    found = [model["prefix"] for model in snapshot["models"] if model["prefix"] is not None]
    if not found:
        return ["no prefix cache"]
    hits, tokens = (sum(each[name] for each in found) for name in ("hits", "tokens_reused"))
    evicted = sum(each["evicted_blocks"] for each in found)
    misses: Counter[str] = Counter()
    for each in found:
        misses.update(each["misses"])
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in misses.most_common()) or "none"
    return [f"hits {hits:,} ({tokens:,} tokens), {evicted:,} blocks evicted", f"misses: {reasons}"]


def tiers(snapshot: Snapshot, past: Past) -> list[str]:
    """Each tier in a line. Models share what a tier has, and each counts what it moves."""
    return [_tier(name, rows, past) for name, rows in _tiers(snapshot).items()] or ["none"]


def moved(rows: list[dict[str, Any]]) -> tuple[int, int]:
    read, written = (sum(row[key] for row in rows) for key in ("promoted_bytes", "written_bytes"))
    return read, written


def _tiers(snapshot: Snapshot) -> dict[str, list[dict[str, Any]]]:
    """By name, the rows of all models."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for model in snapshot["models"]:
        for tier in model["tiers"]:
            rows.setdefault(tier["name"], []).append(tier)
    return rows


def _tier(name: str, rows: list[dict[str, Any]], past: Past) -> str:
    first = rows[0]
    failed = next((row["failed"] for row in rows if row["failed"]), None)
    if failed is not None:
        return f"{name}: disabled: {failed}"
    read, written = (
        f"{format_size(size)} ({format_size(rate)}/s)" if rate else format_size(size)
        for size, rate in zip(moved(rows), past.rates(name), strict=True)
    )
    queued = sum(row["queued_bytes"] for row in rows)
    waiting = f", {format_size(queued)} queued" if queued else ""
    # A tier without a limit does not know its contents.
    held = f" {format_size(first['bytes'])} of {format_size(first['limit'])};" if first["limit"] else ":"
    return f"{name}{held} read {read}; written {written}{waiting}"


def several(snapshot: Snapshot) -> bool:
    return len(snapshot["models"]) > 1


def request_rows(snapshot: Snapshot) -> Rows:
    return [
        (f"{model['name']} {request['id']}", [*_request(request), *([model["name"]] if several(snapshot) else [])])
        for model in snapshot["models"]
        for request in model["requests"]
    ]


def _request(request: dict[str, Any]) -> list[str]:
    prompt, cached, stored = (request[f"{name}_tokens"] for name in ("prompt", "cached", "stored"))
    state = request["state"]
    if not request["generated_tokens"] and cached < stored < prompt:
        state = f"{state} {stored / prompt:.0%}"
    rate = request["tokens_per_second"]
    proposed, accepted = request["proposed_tokens"], request["accepted_tokens"]
    return [
        str(request["id"]),
        state,
        f"{prompt:,}",
        f"{cached:,} {cached / max(1, prompt):.0%}",
        f"{request['generated_tokens']:,}/{request['max_tokens']:,}",
        f"{accepted:,}/{proposed:,}" if proposed else "-",
        "-" if rate is None else f"{rate:.1f}",
        format_seconds(request["age_s"]),
    ]


def model_rows(snapshot: Snapshot) -> Rows:
    queued = Counter(place["model"] for place in snapshot["queue"])
    return [(model["name"], _model(model, queued[model["name"]])) for model in snapshot["models"]]


def _model(model: dict[str, Any], queued: int) -> list[str]:
    waiting = sum(request["state"] == "waiting" for request in model["requests"])
    size = model["bytes"]
    return [
        model["name"],
        model["state"],
        model["keep"],
        format_size(size["weights"]),
        format_size(size["kv"]),
        str(len(model["requests"]) - waiting),
        str(waiting + queued),
    ]


def of_model(snapshot: Snapshot, name: str) -> dict[str, Any] | None:
    found: Iterable[dict[str, Any]] = snapshot["models"]
    return next((model for model in found if model["name"] == name), None)
