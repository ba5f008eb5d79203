"""Settings of a server with several models: the budget for all of them, and how long each stays loaded."""

import math
import re
from dataclasses import dataclass
from typing import Any

from ...config import SettingsBase, refuse, setting, size

PINNED, LRU = "pinned", "lru"
_UNITS = {"s": 1, "m": 60, "h": 3600}


def keep(value: Any, where: str) -> str:
    """pinned, lru, or a time."""
    text = str(value).strip().lower()
    if text not in (PINNED, LRU) and not re.fullmatch(r"0*[1-9][0-9]*[smh]", text):
        refuse(value, where, "pinned, lru, or a time such as 90s, 10m or 2h")
    return text


def idle_seconds(keep: str) -> float:
    """How long a model may idle before it is unloaded."""
    return math.inf if keep in (PINNED, LRU) else int(keep[:-1]) * _UNITS[keep[-1]]


@dataclass(frozen=True)
class BudgetSettings(SettingsBase):
    memory: str | int | None = setting(
        None,
        size(shares=True),
        "memory budget for all loaded models together: weights, KV, workspace and margin; models are swapped to stay "
        "within it",
        metavar="SIZE",
        otherwise="free memory at startup",
    )
    keep: str = setting(
        LRU,
        keep,
        "pinned never unloads a model, lru does when another one needs the memory, and a time such as 10m also when it "
        "has been idle that long",
        metavar="HOW",
    )
