"""Writes the tables of settings into README.md and the pages here, from the settings' definitions: `make docs`.

A table stands between a line `<!-- settings: written by make docs -->` and a line `<!-- end of settings -->`; one in
each file of `TABLES`.
"""

import re
from pathlib import Path

from onekv.config import Setting, Settings, flag
from onekv.server.settings import ServerSettings

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- settings: written by make docs -->\n", "<!-- end of settings -->\n"
TABLES = {
    "README.md": Settings.defined(),
    "docs/disk.md": [each for each in Settings.defined() if each.name.startswith(("disk_", "hot_"))],
    "docs/server.md": ServerSettings.defined(),
}


def table(settings: list[Setting]) -> str:
    rows = [
        f"| `{flag(each.name)} {each.metavar}` | {each.help} | {each.default_text} |".replace("on|off", r"on\|off")
        for each in settings
    ]
    # Flags, and names with an underscore.
    rows = [re.sub(r"(?<![`\w-])(--[a-z][a-z-]+|[a-z]+_[a-z_]+|ONEKV_[A-Z_]+)(?!`)\b", r"`\1`", row) for row in rows]
    return "\n".join(["| Flag | What it says | Default |", "|---|---|---|", *rows]) + "\n"


def generated(name: str) -> str:
    """What the file `name` should be: as it is, with its table anew."""
    before, begin, rest = (ROOT / name).read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{name} has no place for its table: it needs the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return before + begin + "\n" + table(TABLES[name]) + "\n" + end + after


if __name__ == "__main__":
    for name in TABLES:
        (ROOT / name).write_text(generated(name))
