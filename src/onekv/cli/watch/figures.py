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
LEVELS = "▁▂▃▄▅▆▇█"
# Eighths of a cell, so that a bar of little is there.
EIGHTHS = " ▏▎▍▌▋▊▉"

REQUESTS = ["#", "state", "prompt", "cached", "generated", "tokens/s", "age"]
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

    def add(self, snapshot: Snapshot) -> None:
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


def tiers(snapshot: Snapshot) -> list[str]:
    """Each tier in a line. Models share what a tier has, and each counts what it moves."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for model in snapshot["models"]:
        for tier in model["tiers"]:
            rows.setdefault(tier["name"], []).append(tier)
    return [_tier(name, each) for name, each in rows.items()] or ["none"]


def _tier(name: str, rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    failed = next((row["failed"] for row in rows if row["failed"]), None)
    if failed is not None:
        return f"{name}: disabled: {failed}"
    read, seconds, written = (
        sum(row[key] for row in rows) for key in ("promoted_bytes", "promoted_seconds", "written_bytes")
    )
    rate = f" at {format_size(read / seconds)}/s" if seconds > 0 else ""
    queued = sum(row["queued_bytes"] for row in rows)
    waiting = f", {format_size(queued)} queued" if queued else ""
    # A tier without a limit of its own does not know what it has.
    held = f" {format_size(first['bytes'])} of {format_size(first['limit'])};" if first["limit"] else ":"
    return f"{name}{held} read {format_size(read)}{rate}; written {format_size(written)}{waiting}"


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
    return [
        str(request["id"]),
        state,
        f"{prompt:,}",
        f"{cached:,} {cached / max(1, prompt):.0%}",
        f"{request['generated_tokens']:,}/{request['max_tokens']:,}",
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
