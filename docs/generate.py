"""Writes the tables of settings into the pages here, from the settings' definitions: `make docs`.

A table stands between a line `<!-- settings: written by make docs -->` and a line `<!-- end of settings -->`; `TABLES`
says which, in the order in which they stand in the file.
"""

import re
from pathlib import Path

from onekv.config import Setting, Settings, flag
from onekv.server.model_settings import ModelSettings
from onekv.server.models.settings import BudgetSettings
from onekv.server.settings import ServerSettings

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- settings: written by make docs -->\n", "<!-- end of settings -->\n"
TABLES = {
    "docs/settings.md": [kind.defined() for kind in (Settings, ServerSettings, ModelSettings, BudgetSettings)],
    "docs/disk.md": [[each for each in Settings.defined() if each.name.startswith(("disk_", "hot_"))]],
    "docs/events.md": [[each for each in ServerSettings.defined() if each.name.startswith("kv_events")]],
    "docs/scale.md": [[each for each in Settings.defined() if each.name.startswith(("remote_", "tier_"))]],
}


def table(settings: list[Setting]) -> str:
    rows = [
        "| `{} {}` | {} | {} |".format(flag(each.name), each.metavar.replace("|", r"\|"), each.help, each.default_text)
        for each in settings
    ]
    # Flags, and names with an underscore.
    rows = [
        re.sub(r"(?<![`\w-])(--[a-z][a-z-]+|[a-z]+_[a-z_]+(?:\.json)?|ONEKV_[A-Z_]+)(?!`)\b", r"`\1`", row)
        for row in rows
    ]
    return "\n".join(["| Flag | What it says | Default |", "|---|---|---|", *rows]) + "\n"


def generated(name: str) -> str:
    """What the file `name` should be: as it is, with its tables anew."""
    before, *parts = (ROOT / name).read_text().split(BEGIN)
    if len(parts) != len(TABLES[name]) or not all(END in part for part in parts):
        raise SystemExit(f"{name} needs {len(TABLES[name])} places for tables, {BEGIN.strip()!r} to {END.strip()!r}")
    tables = zip(parts, TABLES[name], strict=True)
    return before + "".join(f"{BEGIN}\n{table(settings)}\n{END}{part.partition(END)[2]}" for part, settings in tables)


if __name__ == "__main__":
    for name in TABLES:
        (ROOT / name).write_text(generated(name))
