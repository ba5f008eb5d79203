"""The texts of `onekv bench quality`: prose, code and JSON. Nothing is downloaded.

prose   "Alice's Adventures in Wonderland", shipped with the package (data/README.md)
code    modules of Python's standard library, as installed: the text depends on the version of Python
json    records generated from a seed: keys and shape can be predicted, numbers and names only where they repeat
"""

import importlib.util
import json
import random
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import SettingError

# Much code, few tables and docstrings.
MODULES = ("heapq", "textwrap", "dataclasses", "json.decoder", "tempfile", "queue", "argparse")
SEED = 20261118
RECORDS = 200
NAMES = ("Ada", "Boris", "Chen", "Dina", "Emeka", "Fatima", "Goran", "Hana", "Ivan", "Jun", "Kaya", "Lena")
CITIES = ("Lagos", "Lima", "Oslo", "Osaka", "Perth", "Prague", "Quito", "Riga")
STATES = ("open", "paid", "shipped", "returned")
GOODS = ("lamp", "kettle", "desk", "bicycle", "tent", "radio", "clock")


def prose() -> str:
    return files(__package__).joinpath("data/alice.txt").read_text(encoding="utf-8")


def code() -> str:
    return "\n\n".join(_source(name) for name in MODULES)


def _source(name: str) -> str:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise SettingError(f"--text code needs the source of Python's own modules, and {name} has none here")
    return Path(found.origin).read_text(encoding="utf-8")


def records() -> str:
    chance = random.Random(SEED)
    return json.dumps([_record(number, chance) for number in range(RECORDS)], indent=1)


def _record(number: int, chance: random.Random) -> dict[str, Any]:
    # random() alone gives the same numbers in every version of Python.
    def below(count: int) -> int:
        return int(chance.random() * count)

    def one(words: tuple[str, ...]) -> str:
        return words[below(len(words))]

    name, city = one(NAMES), one(CITIES)
    items = [{"sku": f"{one(GOODS)}-{below(90) + 10}", "count": below(5) + 1} for _ in range(below(3) + 1)]
    return {
        "id": 4000 + number,
        "customer": {"name": name, "email": f"{name.lower()}@{city.lower()}.example", "city": city},
        "state": one(STATES),
        "items": items,
        "total": round(below(50_000) / 100, 2),
        "express": chance.random() < 0.25,
        "note": None if chance.random() < 0.7 else f"deliver to {one(NAMES)} in {city}",
    }


TEXTS: dict[str, Callable[[], str]] = {"prose": prose, "code": code, "json": records}
