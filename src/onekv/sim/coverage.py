"""What a simulation has reached, as a table. What could be reached and was not is in it, too, with a 0."""

from collections import Counter

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
TOPICS = {
    "requests: one state to the next, as seen after each step": TRANSITIONS,
    "prompts": ("pass of one prompt", "pass of several prompts"),
    "prefix cache": (
        *("reused: nothing", "reused: some", "reused: all", "called: copy", "blocks evicted"),
        *("miss: never seen", "miss: evicted", "miss: other salt", "miss: no snapshot at that length"),
        "miss: could not be read from a colder tier",
    ),
    "disk": (
        *("disk: writes", "disk: hits", "disk: evicted", "disk: discarded", "disk: corrupt", "disk: set aside"),
        *("file damaged", "row damaged", "noise in the index", "late answers"),
    ),
    "store that servers share": (
        *("store: writes", "store: hits", "store: discarded", "store: corrupt", "store: forged"),
        *("store: pauses", "store: late", "value damaged"),
    ),
    "process": ("start", "restart", "kill", "refused: too many", "call refused"),
    "faults that struck": (*ENGINE_SITES, *ASKED_SITES, *DISK_SITES, *REMOTE_SITES),
}


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
