"""What a simulation has reached, as a table, including what could have been reached and was not, with a 0."""

from collections import Counter

from ..engine import Engine
from ..tiers.base import Tier
from .faults import ASKED_SITES, DISK_SITES, ENGINE_SITES, REMOTE_SITES

STATES = ("waiting", "looking", "loading", "prefilling", "running")
TRANSITIONS = (
    *("new -> waiting", "new -> looking", "new -> loading", "new -> prefilling", "new -> running"),
    *("waiting -> looking", "waiting -> loading", "waiting -> prefilling", "waiting -> running"),
    *("looking -> loading", "looking -> prefilling", "looking -> running"),
    *("loading -> waiting", "loading -> prefilling", "loading -> running", "prefilling -> running"),
    *(f"{state} -> {end}" for state in STATES for end in ("cancelled", "error")),
    *("running -> stop", "running -> length"),
)
DISK_FIGURES = ("writes", "hits", "evicted", "discarded", "corrupt")
STORE_FIGURES = ("writes", "hits", "discarded", "corrupt", "forged", "pauses", "late")
TOPICS = {
    "requests: one state to the next, as seen after each step": TRANSITIONS,
    "prompts": ("pass of one prompt", "pass of several prompts"),
    "prefix cache": (
        *("reused: nothing", "reused: some", "reused: all", "called: copy", "blocks evicted"),
        *("miss: never seen", "miss: evicted", "miss: other salt", "miss: no snapshot at that length"),
        "miss: could not be read from a colder tier",
    ),
    "disk": (
        *(f"disk: {name}" for name in DISK_FIGURES),
        *("disk: set aside", "file damaged", "row damaged", "noise in the index", "late answers"),
    ),
    "store that servers share": (
        *(f"store: {name}" for name in STORE_FIGURES),
        "value damaged",
    ),
    "process": ("start", "restart", "kill", "refused: too many", "call refused"),
    "faults that struck": (*ENGINE_SITES, *ASKED_SITES, "upkeep", *DISK_SITES, *REMOTE_SITES),
}


def figures(engine: Engine, told: Counter[str], disk: Tier | None, remote: Tier | None) -> Counter[str]:
    """What the parts of a server have counted since they were made."""
    stats, counts = engine.prefix.stats(), Counter[str]()
    if engine.speculation is not None:
        guessed = engine.speculation.stats()
        counts["guessed tokens"] = guessed.proposed
        counts["guessed right"] = guessed.accepted
        counts["guessed right and in doubt"] = guessed.doubtful
    counts["hits"] = stats.hits
    counts["blocks evicted"] = stats.evicted_blocks
    counts.update({f"told: {kind}": count for kind, count in told.items()})
    counts.update({f"miss: {reason}": count for reason, count in stats.misses.items()})
    if disk is not None:
        tier = disk.stats()
        counts.update({f"disk: {name}": getattr(tier, name) for name in DISK_FIGURES})
        counts["disk: set aside"] = int(tier.failed is not None)
    if remote is not None:
        tier = remote.stats()
        counts.update({f"store: {name}": getattr(tier, name) for name in STORE_FIGURES})
    return counts


def table(counts: Counter[str]) -> str:
    """Two columns of names and counts per topic; what no topic lists comes last."""
    lines = []
    known = {name for names in TOPICS.values() for name in names}
    others = tuple(sorted(set(counts) - known))
    for topic, names in {**TOPICS, "other": others}.items():
        cells = [f"{name:<36}{counts[name]:>12,}" for name in names]
        if cells:
            lines += ["", topic, *("  " + "   ".join(cells[i : i + 2]) for i in range(0, len(cells), 2))]
    return "\n".join(lines)
